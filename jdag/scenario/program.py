"""Imports a scenario's program by name, and calls it with its settings."""

import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import jax
import numpy as np

from jdag.errors import ScenarioError, meant, named_text, repr_of, text_of, unusable
from jdag.scenario.case import Case
from jdag.scenario.player import Player
from jdag.scenario.scenario_schema import ScenarioTable
from jdag.settings.validation import converted

_FOLDER = "folder"  # Parameter of a program that receives the scenario's folder.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(library.__path__[0] + os.sep for library in (jax, np, importlib))


def player_of(settings: ScenarioTable, folder: Path) -> Player:
    """Import a scenario's program and call it with its settings.

    Modules are searched for in `folder`, which has the scenario's file, then in the
    current folder, then among installed modules. Raises ScenarioError if the program
    cannot be imported, does not take these settings, raises an exception or does not
    return a player, or if `placement` is invalid.
    """
    function = imported(settings.program, folder)
    if not callable(function):
        raise settings.refused(f"module:function; this is {repr_of(function)}")
    arguments = _arguments(settings, function, folder)
    try:
        player = function(settings.names, **arguments)
    except ScenarioError:
        raise
    except (Exception, SystemExit) as error:
        allowed = f"a program that takes these settings, {settings.settings}"
        raise settings.refused(f"{allowed}; it raised {raised(error)}") from error
    has_figures = isinstance(getattr(player, "figures", None), Mapping)
    if not (has_figures and callable(getattr(player, "play", None))):
        raise settings.refused(
            "a function that returns a jdag.scenario.Case, or an object with figures "
            f"(descriptions by name) and play(run); it returned {repr_of(player)}"
        )
    return _placed(settings, player)


def raised(error: BaseException) -> str:
    text = named_text(error)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # Skip frames of jdag and of the libraries that it calls.
        if not frame.filename.startswith((_HERE, *_LIBRARIES, "<frozen")):
            name = os.path.basename(frame.filename)
            return f"{text} ({name}:{frame.lineno} in {frame.name})"
    return text


@contextmanager
def raising_nothing(value: str, key: str = "program") -> Iterator[None]:
    """Convert an exception of a user's code into a ScenarioError for `key = value`."""
    try:
        yield
    except ScenarioError:
        raise
    except (Exception, SystemExit) as error:
        allowed = f"one that does not raise; it raised {raised(error)}"
        raise ScenarioError(unusable(key, value, allowed)) from error


def imported(program: str, folder: Path, key: str = "program") -> Any:
    """Import the object `module:name`. Searches the same folders as `player_of`."""

    def refused(why: str) -> ScenarioError:
        places = ", in ".join(folders)
        allowed = f"module:function, of a module in {places} or installed"
        return ScenarioError(unusable(key, program, f"{allowed}; {why}"))

    module_name, _, name = program.partition(":")
    folders = tuple(dict.fromkeys((str(folder), str(Path.cwd()))))
    for each in reversed(folders):  # Afterwards `folder` is the first of sys.path.
        if each in sys.path:
            sys.path.remove(each)
        sys.path.insert(0, each)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise refused(text_of(error)) from error
    except (Exception, SystemExit) as error:
        raise refused(f"importing this one raised {raised(error)}") from error
    if not hasattr(module, name):
        why = f"{getattr(module, '__file__', None)} has no attribute {name!r}"
        raise refused(f"{why}{meant(name, dir(module))}")
    return getattr(module, name)


def _arguments(settings: ScenarioTable, function: Any, folder: Path) -> dict[str, Any]:
    try:
        signature = inspect.signature(function)
        signature.bind_partial(())
        types = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        allowed = "a function of the workers and its settings, with valid annotations"
        raise settings.refused(f"{allowed}; {error}") from error
    parameters = dict(list(signature.parameters.items())[1:])
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    arguments: dict[str, Any] = {}
    for name, value in settings.settings.items():
        if (name not in named and not is_open) or name == _FOLDER:
            names = ", ".join(name for name in named if name != _FOLDER) or "none"
            allowed = f"one of the settings of {settings.program}: {names}"
            allowed += meant(name, named)
            raise ScenarioError(unusable(f"settings.{name}", value, allowed))
        # The annotation may require conversion, such as a list to a tuple.
        arguments[name] = converted(types.get(name, Any), value, f"settings.{name}")
    if _FOLDER in named:
        arguments[_FOLDER] = folder
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in arguments:
            raise ScenarioError(
                f"settings.{name} is missing; {settings.program} requires it"
            )
    return arguments


def _placed(settings: ScenarioTable, player: Any) -> Player:
    if not isinstance(player, Case):
        checked: Player = player
        if settings.placement:
            allowed = f"no entry, since {settings.program} places its parameters itself"
            raise ScenarioError(unusable("placement", settings.placement, allowed))
        return checked
    params, defaults = player.params, player.placement
    if not (isinstance(params, Mapping) and isinstance(defaults, Mapping)):
        raise settings.refused("a Case with params and their placement, both by name")
    for name, worker in settings.placement.items():
        if name not in params:
            allowed = f"one of the parameters {', '.join(params)}{meant(name, params)}"
            raise ScenarioError(unusable(f"placement.{name}", worker, allowed))
        settings.check_worker(f"placement.{name}", worker)
    placement = {**defaults, **settings.placement}
    for name in params:
        place = placement.get(name)
        if place not in settings.names:
            why = "does not place it" if place is None else "places it there"
            allowed = f"one of the workers {', '.join(settings.names)}"
            allowed += f"; {settings.program} {why}"
            raise ScenarioError(unusable(f"placement.{name}", place, allowed))
    return replace(player, placement=placement)
