"""Each public name of jdag has its entry in docs/reference/."""

import inspect
import re
from importlib import import_module
from types import ModuleType

import pytest

import jdag
from tests import ROOT

REFERENCE = ROOT / "docs" / "reference"
_ENTRY = re.compile(r"^\.\. (?:auto|py:)(\w+):: ([\w.]+)", re.M)
_MEMBERS = re.compile(r"^\.\. automodule:: ([\w.]+)\n   :members: (.+)$", re.M)

# Modules with public names, under the names by which users import them.
PUBLIC = {
    "jdag": jdag,
    "jdag.strategies": jdag.strategies,
    **{
        name: import_module(name)
        for name in (
            *("jdag.errors", "jdag.parallel", "jdag.scenario", "jdag.schedules"),
            *("jdag.sim", "jdag.sim.presets", "jdag.sim.topologies", "jdag.testing"),
        )
    },
}


def entries() -> list[str]:
    """Return the names that have an entry, once for each entry."""
    names = []
    for page in sorted(REFERENCE.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        names += [name for _, name in _ENTRY.findall(text)]
        for module, members in _MEMBERS.findall(text):
            names += [f"{module}.{member}" for member in members.split(", ")]
    return names


def public_names(path: str, module: ModuleType) -> list[str]:
    """Return the names that a module offers, with those of errors under one name."""
    listed = getattr(module, "__all__", None)
    if listed is None:
        listed = [
            name
            for name, value in vars(module).items()
            if getattr(value, "__module__", None) == module.__name__
            and not name.startswith("_")
            and (path != "jdag.errors" or inspect.isclass(value))
        ]
    return [
        f"{path}.{name}"
        for name in listed
        if not inspect.ismodule(getattr(module, name))
        and f"{path}.{name}" != "jdag.JdagError"  # Documented in jdag.errors.
    ]


@pytest.mark.parametrize("path", PUBLIC)
def test_each_public_name_has_one_entry(path: str):
    found = entries()
    wrong = [n for n in public_names(path, PUBLIC[path]) if found.count(n) != 1]
    assert not wrong, f"no entry, or several, in docs/reference/: {', '.join(wrong)}"


def test_modules_have_names_and_each_entry_exists():
    names = [public_names(*item) for item in PUBLIC.items()]
    assert all(names) and sum(map(len, names)) > 100
    for name in entries():
        module, _, rest = name.partition(".")
        value: object = import_module(module)
        for part in rest.split("."):
            if inspect.ismodule(value) and not hasattr(value, part):
                value = import_module(f"{value.__name__}.{part}")
            else:
                value = getattr(value, part)


def test_each_error_has_its_meaning_and_its_cure():
    text = (REFERENCE / "errors.md").read_text(encoding="utf-8")
    sections = text.split(".. autoexception:: ")[1:]
    assert len(sections) == len(public_names("jdag.errors", PUBLIC["jdag.errors"]))
    for section in sections:
        words = ("**Meaning.**", "**Cure.**")
        assert all(word in section for word in words), section.partition("\n")[0]
        name = section.partition("\n")[0]
        assert f"{{py:exc}}`~{name}`" in text, f"{name} is not in the first table"


def test_each_page_is_in_the_index():
    docs = ROOT / "docs"
    index = (docs / "index.md").read_text(encoding="utf-8")
    pages = [*docs.glob("reference/*.md"), *docs.glob("tutorials/*.md")]
    assert len(pages) > 15
    for page in pages:
        assert page.relative_to(docs).with_suffix("").as_posix() in index, page


# Methods that jdag itself calls.
INTERNAL = {
    "Cluster": "assign context_entered context_left leave_all object_frame",
    "Context": "",
    "Optimizer": "check_state counted planned refused resumed",
    "Ref": "data described key located owner refusal",
    "Task": "called collect",
    "Hosted": "",
    "CompiledStep": "",
}


@pytest.mark.parametrize("name", INTERNAL)
def test_each_public_method_of_a_class_has_an_entry(name: str):
    page = "\n".join(p.read_text(encoding="utf-8") for p in REFERENCE.glob("*.md"))
    (options,) = re.findall(
        rf"autoclass:: jdag\.{name}(?:\(\))?\n   :members: ((?:.|\n      )+)", page
    )
    listed = options.replace("\n", " ").replace(",", " ").split()
    listed += re.findall(rf"automethod:: jdag\.{name}\.(\w+)", page)
    public = [
        method
        for method, value in vars(getattr(jdag, name)).items()
        if not method.startswith("_") and method not in INTERNAL[name].split()
        if inspect.isfunction(value) or isinstance(value, property)
    ]
    assert [method for method in public if method not in listed] == []
