"""How Sphinx reads jdag's docstrings: plain text with `code`, and private homes.

A docstring has `code` in single backticks and indented blocks of code after a colon.
Classes are defined in private modules (`jdag.context.refs.Ref`) and documented under
public names (`jdag.Ref`).
"""

import re
from importlib import import_module
from typing import Any

from docutils import nodes

import jdag

# Annotations name types of other libraries, and aliases and classes of jdag's own that
# users never touch. Names that documents refer to themselves are all checked.
FOREIGN = [
    ("py:(class|obj|data|exc)", r"(?!jdag(\.\w+)?\.[A-Z]\w*$).*"),
]
_CODE = re.compile(r"(?<![`:\w])`([^`]+)`(?!`)(\w?)")
_WHEN_CALLED = "Raises, when called:"
# Modules whose names are public, in the order in which a name is looked for.
PUBLIC = (
    "jdag.errors",
    "jdag",
    "jdag.sim",
    "jdag.schedules",
    "jdag.parallel",
    "jdag.scenario",
    "jdag.strategies",
    "jdag.sim.topologies",
    "jdag.sim.presets",
    "jdag.testing",
)


def _public_name(target: str) -> str | None:
    """Return the public name of a class that an annotation names by its home."""
    last = target.rpartition(".")[2]
    for path in PUBLIC:
        owner = jdag.strategies if path == "jdag.strategies" else import_module(path)
        if last in getattr(owner, "__all__", ()) or last in vars(owner):
            value = getattr(owner, last, None)
            if getattr(value, "__module__", "").startswith("jdag"):
                return f"{path}.{last}"
    return None


def _resolve(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Look up an unresolved reference of Python under its public name."""
    if node.get("refdomain") != "py":
        return None
    name = _public_name(node.get("reftarget", ""))
    if name is None or name == node["reftarget"]:
        return None
    python = env.get_domain("py")
    builder = app.builder
    for kind in ("class", "func", "exc", "obj"):
        found = python.resolve_xref(
            env, node["refdoc"], builder, kind, name, node, content
        )
        if found is not None:
            return found
    return nodes.inline("", "", content) if content else None


def _literal(match: re.Match[str]) -> str:
    code, following = match.groups()
    return f"``{code}``" + (f"\\ {following}" if following else "")


def _as_rst(
    app: Any, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Turn a docstring of jdag into reStructuredText, in place."""
    lines[:] = ["Raises:" if line == _WHEN_CALLED else line for line in lines]
    lines[:] = _CODE.sub(_literal, "\n".join(lines)).split("\n")
    for at, line in enumerate(lines[:-2]):
        follows = not lines[at + 1].strip() and lines[at + 2].startswith("    ")
        is_prose = line.strip() and not line.endswith("::")
        if follows and is_prose and line.rstrip().endswith((":", ".")):
            depth = len(line) - len(line.lstrip())
            if lines[at + 2].startswith(" " * (depth + 4)):
                lines[at] = line.rstrip().removesuffix(":") + (
                    "::" if line.rstrip().endswith(":") else " ::"
                )


def _undocumented(
    app: Any, what: str, name: str, obj: Any, skip: bool, options: Any
) -> bool | None:
    """Leave out members without a docstring."""
    return True if not getattr(obj, "__doc__", None) else None


def connect(app: Any) -> None:
    """Register the handlers, the first of them ahead of napoleon's."""
    app.connect("autodoc-process-docstring", _as_rst, priority=400)
    app.connect("autodoc-skip-member", _undocumented)
    app.connect("missing-reference", _resolve)
