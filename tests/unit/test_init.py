"""The public face: what it brings, and what it leaves until somebody asks."""

import subprocess
import sys
from pathlib import Path

import pytest

import jdag
from tests.tools.error_texts import fails_with

# What a worker does not need: optimizers, pages, tables, pictures, the command line.
LATER = (
    *("jinja2", "matplotlib", "optax", "safetensors", "rich", "typer"),
    *(
        "jdag.cli.commands",
        "jdag.training.optimizer",
        "jdag.report",
        "jdag.scenario",
    ),
)
WORKER = (
    "import sys, jdag, jdag.api.drivers, jdag.processes.launch.worker;"
    "print(*sys.modules)"
)


def test_a_worker_loads_nothing_that_it_does_not_need() -> None:
    command = [sys.executable, "-c", WORKER]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    loaded = run.stdout.split()
    assert "jdag.processes.node" in loaded
    assert [name for name in LATER if name in loaded] == []


def test_importing_the_package_imports_one_more_module_and_nothing_heavy() -> None:
    # Commands and workers install their signal handlers before JAX is imported.
    code = (
        "import sys, importlib; before = {*sys.modules}; import jdag;"
        "print(*sorted({*sys.modules} - before))"
    )
    command = [sys.executable, "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    assert run.stdout.split() == ["jdag", "jdag.gone"]


def test_a_name_that_has_gone_says_what_to_use_in_its_place() -> None:
    message = "jdag.programs was removed: .*Case is jdag.scenario.Case"
    for line in ("import jdag.programs.shapes", "from jdag import programs"):
        with pytest.raises(ImportError, match=message):
            exec(line)
    with pytest.raises(AttributeError, match=message):
        _ = jdag.programs
    with fails_with(ModuleNotFoundError, "package.unknown_module"):
        exec("import jdag.nothing")


def test_no_module_hides_a_public_function_of_its_name() -> None:
    modules = {path.stem for path in Path(jdag.__file__).parent.glob("*.py")}
    assert modules & set(jdag.__all__) == {"errors"}


def test_all_that_is_public_is_there_and_is_listed() -> None:
    for name in jdag.__all__:
        assert getattr(jdag, name) is not None, name
        assert name in dir(jdag), name
    space: dict[str, object] = {}
    exec("from jdag import *", space)
    assert [name for name in jdag.__all__ if name not in space] == []


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with fails_with(AttributeError, "package.unknown_attribute"):
        getattr(jdag, "Optimiser")  # noqa: B009
    with pytest.raises(ImportError):
        exec("from jdag import Optimiser", {})
