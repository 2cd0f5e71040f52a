"""The user's script as the `__main__` module of workers.

Programs, hooks and unjitted functions of the script have the name `__main__:name` in
every process. Before a worker first uses one of them, it runs the script as its own
`__main__`, with the condition of all guards (`if __name__ == "__main__":`) false. If
the module were named `__mp_main__`, as in multiprocessing, names and fingerprints would
differ.
"""

import ast
import sys
import traceback
from functools import cache
from pathlib import Path
from threading import Lock
from types import ModuleType
from typing import NamedTuple

from jdag.engine.functions import call_site
from jdag.errors import JdagError, named_text

MAIN = "__main__"
GUARD = 'if __name__ == "__main__":'
_CONDITIONS = ("__name__ == '__main__'", "'__main__' == __name__")
_MODULE = "an importable module, and name that module in allow=[...]"


class GuardedScript(NamedTuple):
    """The file, the package (or None) and `sys.argv` of a script with a guard."""

    path: str
    package: str | None
    argv: tuple[str, ...]


_lock = Lock()  # Held while the script is imported.
_expected: list[GuardedScript] = []  # The script that a worker will import, if any.


def expect(script: GuardedScript | None) -> None:
    """Set the script that this worker imports when it first uses `__main__`."""
    _expected[:] = [] if script is None else [script]


def main_script() -> GuardedScript | None:
    """Return the script of this process, or None if workers cannot import it."""
    path = _file()
    if path is None or not _has_guard(path):
        return None
    return GuardedScript(path, sys.modules[MAIN].__package__, tuple(sys.argv))


def import_script(path: str) -> ModuleType:
    """Import a script as the `__main__` of this process. Guarded code does not run.

    Raises:
        JdagError: the script has no guard, or cannot be imported.
    """
    if not _has_guard(path):
        raise JdagError(f"{path} has no `{GUARD}`")
    sys.path.insert(0, str(Path(path).resolve().parent))
    expect(GuardedScript(path, None, (path,)))
    return main_module()


def program_name() -> str:
    path = _file()
    return "" if path is None else Path(path).name


def main_module() -> ModuleType:
    """Return `__main__`. A worker imports its script first, or raises JdagError."""
    with _lock:
        if _expected:
            _import(_expected[0])
            _expected.clear()
        return sys.modules[MAIN]


def refuse_import(caller: str) -> None:
    if _expected and _lock.locked():
        raise JdagError(
            f"{caller} at {call_site()} runs when a worker imports the script: put the "
            f"call under `{GUARD}`"
        )


def refusal(name: str) -> str:
    """Return an error text for a function of `__main__`, with a reason and a remedy."""
    path = _file()
    if path is None:
        return (
            f"{name} is defined in a program without a file that other processes can "
            f"import (a notebook, python -c or the like): move it to {_MODULE}"
        )
    if _has_guard(path):
        return (
            f"{name} is defined in the main program, which the other process cannot "
            f"import: move it to {_MODULE}"
        )
    return (
        f"{name} is defined in the main program, {Path(path).name}; workers of "
        f"jdag.launch import this script only if it has a guard: put {_running(path)} "
        f"under `{GUARD}`, below the functions; or move the functions to {_MODULE}"
    )


def _file() -> str | None:
    path = getattr(sys.modules[MAIN], "__file__", None)
    return path if path is not None and Path(path).is_file() else None


def _unguarded(path: str) -> tuple[ast.Module, bool]:
    """Return a script's syntax tree with false guards, and whether it has a guard."""
    tree, has_guard = ast.parse(Path(path).read_bytes(), path), False
    for statement in tree.body:
        for node in ast.walk(statement.test) if isinstance(statement, ast.If) else ():
            if isinstance(node, ast.Compare) and ast.unparse(node) in _CONDITIONS:
                node.ops, has_guard = [ast.NotEq()], True
    return tree, has_guard


@cache
def _has_guard(path: str) -> bool:
    try:
        return _unguarded(path)[1]
    except (OSError, SyntaxError, ValueError):  # Not Python source.
        return False


def _running(path: str) -> str:
    """Describe the script's statement that runs now, for an error message."""
    frames = traceback.extract_stack()
    lines = [f.lineno for f in frames if (f.filename, f.name) == (path, "<module>")]
    for statement in _unguarded(path)[0].body if lines else ():
        if statement.lineno <= (lines[0] or 0) <= (statement.end_lineno or 0):
            return f"the code at {Path(path).name}:{statement.lineno}"
    return "the code that the script runs"


def _import(script: GuardedScript) -> None:
    former, module = sys.modules[MAIN], ModuleType(MAIN)
    module.__file__, module.__package__ = script.path, script.package
    sys.argv[:] = script.argv
    sys.modules[MAIN] = module
    try:
        code = compile(_unguarded(script.path)[0], script.path, "exec", 0, True)
        exec(code, vars(module))
    except (Exception, SystemExit) as error:  # A script may raise anything.
        sys.modules[MAIN] = former
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f":{each.lineno}" for each in frames if each.filename == script.path]
        line = "".join(lines[-1:])
        raise JdagError(
            f"cannot import the script {script.path}{line}: {named_text(error)}"
        ) from error
