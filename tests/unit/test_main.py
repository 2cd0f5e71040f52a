"""The command line by way of the package's name: what it imports, and when."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

# Runs the command, and at its end prints what has been imported, and how the garbage
# collector stands.
COMMAND = """
import atexit, gc, sys
from jdag.__main__ import main
def shown():
    sys.stderr.write(f"{gc.isenabled()} {gc.get_freeze_count() > 0}\\n")
    sys.stderr.write(" ".join(sys.modules))
atexit.register(shown)
main()
"""


def ended(folder: Path, *words: str) -> tuple[str, str, set[str]]:
    """Run a command: (stdout, the garbage collector's state, modules)."""
    command = [sys.executable, "-c", COMMAND, *words]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, cwd=folder
    )
    collector, modules = done.stderr.splitlines()[-2:]
    return done.stdout, collector, set(modules.split())


def test_python_m_jdag_is_the_command_line():
    command = [sys.executable, "-m", "jdag", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "worker" in done.stdout and "check" in done.stdout


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_import_neither_jax_nor_any_command(
    tmp_path: Path, option: str
):
    out, _, modules = ended(tmp_path, option)
    assert "jdag" in out
    heavy = {"jax", "numpy", "msgspec", "pydantic", "rich", "matplotlib"}
    assert not modules & heavy
    ours = {name for name in modules if name.startswith("jdag.cli")}
    assert ours == {"jdag.cli", "jdag.cli.commands", "jdag.cli.cli_errors"}


def test_a_run_imports_its_own_command_alone_and_the_collector_runs_after_that(
    tmp_path: Path,
):
    file = ROOT / "scenarios" / "chain.toml"
    out, collector, modules = ended(tmp_path, "run", str(file))
    assert "met outcome: finished" in out
    assert {"jax", "matplotlib", "jdag.cli.running"} <= modules
    unused = {"optax", "pyarrow", "ray", "hypothesis", "jdag.lab", "jdag.cli.hosting"}
    assert not modules & unused
    assert collector == "True True"
