"""The script that was started, as the workers that it launches import it.

Programs, hooks and unjitted functions of the script are `__main__:name` everywhere. A
worker that needs one runs the script first, as its own `__main__` with false guards.
Under the name `__mp_main__` of multiprocessing, names and fingerprints would differ.
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
_MODULE = "a module that can be imported, and name that in allow=[...]"


class GuardedScript(NamedTuple):
    """A script with a guard: its file, its package if it has one, its arguments."""

    path: str
    package: str | None
    argv: tuple[str, ...]


_lock = Lock()  # Held while the script is imported.
_expected: list[GuardedScript] = []  # What a worker imports when it is first needed.


def expect(script: GuardedScript | None) -> None:
    """Import this script, on a worker, when `__main__` is first needed."""
    _expected[:] = [] if script is None else [script]


def main_script() -> GuardedScript | None:
    """Return the script of this process; None if workers cannot import it."""
    path = _file()
    if path is None or not _has_guard(path):
        return None
    return GuardedScript(path, sys.modules[MAIN].__package__, tuple(sys.argv))


def import_script(path: str) -> ModuleType:
    """Import a script as the `__main__` of this process, with false guards.

    Raises:
        JdagError: it has none, or cannot be imported.
    """
    if not _has_guard(path):
        raise JdagError(f"{path} is no script that runs under `{GUARD}`")
    sys.path.insert(0, str(Path(path).resolve().parent))
    expect(GuardedScript(path, None, (path,)))
    return main_module()


def program_name() -> str:
    """Return the name of the file of what runs; "" if it has none."""
    path = _file()
    return "" if path is None else Path(path).name


def main_module() -> ModuleType:
    """Return `__main__`; a worker imports its script, or raises a JdagError."""
    with _lock:
        if _expected:
            _import(_expected[0])
            _expected.clear()
        return sys.modules[MAIN]


def refuse_import(what: str) -> None:
    """Raise JdagError if this is called by a script that a worker imports."""
    if _expected and _lock.locked():
        said = f"{what} at {call_site()} is reached when a worker imports the script"
        raise JdagError(f"{said}: put it under `{GUARD}`")


def refusal(name: str) -> str:
    """Return why a function of `__main__` is not available elsewhere, and a remedy."""
    path, said = _file(), f"{name} is of the program that was started itself"
    if path is None:
        why = "has no file that other processes can import (it is a notebook, python -c"
        return f"{said}, which {why} or the like): put it into {_MODULE}"
    if _has_guard(path):
        return f"{said}, which no other process has: put it into {_MODULE}"
    return (
        f"{said}, {Path(path).name}; workers of jdag.launch import it only if it has a "
        f"guard: put {_running(path)} under `{GUARD}`, and leave functions above it; "
        f"or put them into {_MODULE}"
    )


def _file() -> str | None:
    path = getattr(sys.modules[MAIN], "__file__", None)
    return path if path is not None and Path(path).is_file() else None


def _unguarded(path: str) -> tuple[ast.Module, bool]:
    """Return a script with false guards, and whether it has any."""
    tree, found = ast.parse(Path(path).read_bytes(), path), False
    for statement in tree.body:
        for node in ast.walk(statement.test) if isinstance(statement, ast.If) else ():
            if isinstance(node, ast.Compare) and ast.unparse(node) in _CONDITIONS:
                node.ops, found = [ast.NotEq()], True
    return tree, found


@cache
def _has_guard(path: str) -> bool:
    try:
        return _unguarded(path)[1]
    except (OSError, SyntaxError, ValueError):  # Not a text of Python.
        return False


def _running(path: str) -> str:
    """Name the statement of the script that runs now, if that is known."""
    frames = traceback.extract_stack()
    where = [f.lineno for f in frames if (f.filename, f.name) == (path, "<module>")]
    for statement in _unguarded(path)[0].body if where else ():
        if statement.lineno <= (where[0] or 0) <= (statement.end_lineno or 0):
            return f"what begins at {Path(path).name}:{statement.lineno}"
    return "what it runs"


def _import(script: GuardedScript) -> None:
    former, module = sys.modules[MAIN], ModuleType(MAIN)
    module.__file__, module.__package__ = script.path, script.package
    sys.argv[:] = script.argv
    sys.modules[MAIN] = module
    try:
        code = compile(_unguarded(script.path)[0], script.path, "exec", 0, True)
        exec(code, vars(module))
    except (Exception, SystemExit) as error:  # A script can raise anything.
        sys.modules[MAIN] = former
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f":{one.lineno}" for one in frames if one.filename == script.path]
        where = f"{script.path}{''.join(lines[-1:])}"
        said = f"cannot import the script {where}: {named_text(error)}"
        raise JdagError(said) from error
