"""Locations by which another process finds an explored program and its property.

A place is module:name, or script.py:name for objects of the script that was started.
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
    """Return the place of an object, or "" (also in a script without a main guard)."""
    for name, module in [*sys.modules.items()]:
        for key, value in [*getattr(module, "__dict__", {}).items()]:
            if value is thing and name != MAIN:
                return f"{name}:{key}"
            if value is thing and (script := main_script()) is not None:
                return f"{os.path.relpath(script.path)}:{key}"
    return ""


def check_is_here(file: str, command: str) -> None:
    if not Path(file).exists():
        raise ScenarioError(
            f"{file} does not exist in {Path.cwd()}: run this command in the folder of "
            f"the exploration, or give the path: {command}"
        )


def object_at(place: str, bug: str | Path = "bug.json", what: str = "program") -> Any:
    """Return the object at a place. Errors name its role `what` and the file `bug`."""
    where, _, name = place.rpartition(":")
    if not where.endswith(".py"):
        return imported(place, Path.cwd(), what)
    check_is_here(where, f"jdag replay {bug} PATH:NAME")
    try:
        return getattr(_imported(where), name)
    except (JdagError, AttributeError) as error:
        allowed = f"a name that the script defines above its main guard; {error}"
        raise ScenarioError(unusable(what, place, allowed)) from error
