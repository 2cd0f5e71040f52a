"""Names by which another process finds what was explored, and its property.

A place is module:name, or script.py:name for what the program that was started has.
"""

import os
import sys
from functools import cache
from pathlib import Path
from typing import Any

from jdag.errors import JdagError, ScenarioError, unusable
from jdag.processes.functions.script import MAIN, import_script, main_script
from jdag.scenario.program import imported

_imported = cache(import_script)


def place_of(thing: Any) -> str:
    """The place of an object; "" if it has none, as in a script without a guard."""
    for name, module in [*sys.modules.items()]:
        for key, value in [*getattr(module, "__dict__", {}).items()]:
            if value is thing and name != MAIN:
                return f"{name}:{key}"
            if value is thing and (script := main_script()) is not None:
                return f"{os.path.relpath(script.path)}:{key}"
    return ""


def check_is_here(file: str, named: str) -> None:
    """Raise ScenarioError if a file is not there; `named`: a command that names it."""
    if not Path(file).exists():
        said = "run this in the folder in which that was explored, or name it"
        raise ScenarioError(f"{file} is no file in {Path.cwd()}: {said}: {named}")


def at(place: str, bug: str | Path = "bug.json", what: str = "program") -> Any:
    """The object at a place; modules of the current folder come first.

    `bug` is the file of the saved run, `what` the name of the object in errors.

    Raises:
        ScenarioError: nothing is there.
    """
    where, _, name = place.rpartition(":")
    if not where.endswith(".py"):
        return imported(place, Path.cwd(), what)
    check_is_here(where, f"jdag replay {bug} PATH:NAME")
    try:
        return getattr(_imported(where), name)
    except (JdagError, AttributeError) as error:
        allowed = f"what a script has above its guard; {error}"
        raise ScenarioError(unusable(what, place, allowed)) from error
