"""A scenario's program: found by its name, handed its settings, placed."""

import importlib
import inspect
import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import jax
import numpy as np
from pydantic import TypeAdapter, ValidationError

from jdag.errors import ScenarioError, meant, named_text, repr_of, text_of, unusable
from jdag.scenario.case import Case, Player
from jdag.scenario.tables import Settings

_FORMER = "jdag.programs."  # Where programs of scenarios were up to 0.1.
_FOLDER = "folder"  # A program that takes it is told where the scenario's file is.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(library.__path__[0] + os.sep for library in (jax, np, importlib))


def player_of(settings: Settings, folder: Path) -> Player:
    """Import a scenario's program and call it with its settings.

    Args:
        settings: what the file says.
        folder: where the file is; modules are looked for there first, then in the
            current folder.

    Raises:
        ScenarioError: it cannot be imported, takes no such settings, raised, or
            returned what cannot be played; or there is no such parameter to place.
    """
    function = _imported(settings.program, folder)
    given = _given(settings, function, folder)
    try:
        player = function(settings.names, **given)
    except ScenarioError:
        raise
    except (Exception, SystemExit) as error:
        said = f"one that takes these settings, {settings.settings}"
        said += f"; it raised {raised(error)}"
        raise ScenarioError(unusable("program", settings.program, said)) from error
    has_figures = isinstance(getattr(player, "figures", None), Mapping)
    if not (has_figures and callable(getattr(player, "play", None))):
        allowed = (
            "a function that returns a jdag.scenario.Case, or an object with figures "
            f"(what each is, by name) and play(run); it returned {repr_of(player)}"
        )
        raise ScenarioError(unusable("program", settings.program, allowed))
    return _placed(settings, player)


def raised(error: BaseException) -> str:
    """Say what a user's code raised, and in which of its lines."""
    text = named_text(error)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_users(frame.filename):
            name = os.path.basename(frame.filename)
            return f"{text} ({name}:{frame.lineno} in {frame.name})"
    return text


def _is_users(file: str) -> bool:
    """Whether a file is neither jdag's nor of what it calls for the user."""
    return not file.startswith((_HERE, *_LIBRARIES, "<frozen"))


def _imported(program: str, folder: Path) -> Any:
    module_name, _, name = program.partition(":")
    for place in (str(Path.cwd()), str(folder)):  # The last is looked into first.
        if place in sys.path:
            sys.path.remove(place)
        sys.path.insert(0, place)
    where = f"module:function, of a module in {folder}, in {Path.cwd()} or installed"
    moved = module_name.removeprefix(_FORMER)
    if moved != module_name:
        said = f'"{moved}:{name}": that module is now the file scenarios/{moved}.py, '
        said += "beside the scenarios that name it"
        raise ScenarioError(unusable("program", program, said))
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        said = f"{where}; {text_of(error)}"
        raise ScenarioError(unusable("program", program, said)) from error
    except (Exception, SystemExit) as error:
        said = f"{where}; importing this one raised {raised(error)}"
        raise ScenarioError(unusable("program", program, said)) from error
    if not hasattr(module, name):
        file = getattr(module, "__file__", None)
        said = f"{where}; {file} has no attribute {name!r}{meant(name, dir(module))}"
        raise ScenarioError(unusable("program", program, said))
    function = getattr(module, name)
    if not callable(function):
        said = f"{where}; this is {repr_of(function)}"
        raise ScenarioError(unusable("program", program, said))
    return function


def _given(settings: Settings, function: Any, folder: Path) -> dict[str, Any]:
    """The settings that the program takes, of the types that it says."""
    parameters = _parameters(settings.program, function)
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    types = _types(settings.program, function)
    allowed = ", ".join(name for name in named if name != _FOLDER) or "none"
    given: dict[str, Any] = {}
    for name, value in settings.settings.items():
        if (name not in named and not is_open) or name == _FOLDER:
            said = f"one of the settings of {settings.program}: {allowed}"
            said += meant(name, named)
            raise ScenarioError(unusable(f"settings.{name}", value, said))
        given[name] = _typed(name, value, types.get(name, Any))
    if _FOLDER in named:
        given[_FOLDER] = folder
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given:
            raise ScenarioError(
                f"settings.{name} is missing; {settings.program} has to have it"
            )
    return given


def _parameters(program: str, function: Any) -> Mapping[str, inspect.Parameter]:
    """What a program takes, by name, after the workers."""
    try:
        signature = inspect.signature(function)
        signature.bind_partial(())
    except (TypeError, ValueError) as error:
        said = f"a function that takes the workers, then its settings; {error}"
        raise ScenarioError(unusable("program", program, said)) from error
    return dict(list(signature.parameters.items())[1:])


def _types(program: str, function: Any) -> Mapping[str, Any]:
    try:
        return get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        said = f"a function whose annotations can be read; {error}"
        raise ScenarioError(unusable("program", program, said)) from error


def _typed(name: str, value: Any, type_: Any) -> Any:
    """The value as what the program says that it takes: a list may be a tuple."""
    try:
        # By way of JSON, where a strict reader still takes lists as tuples.
        return TypeAdapter(type_).validate_json(json.dumps(value), strict=True)
    except (ValidationError, TypeError) as error:
        allowed = str(error)
        if isinstance(error, ValidationError):
            allowed = error.errors()[0]["msg"].removeprefix("Input should be ")
        raise ScenarioError(unusable(f"settings.{name}", value, allowed)) from error


def _placed(settings: Settings, player: Any) -> Player:
    """Put parameters where the file wants them."""
    if not isinstance(player, Case):
        checked: Player = player
        if settings.placement:
            said = f"nothing, as {settings.program} places its parameters itself"
            raise ScenarioError(unusable("placement", settings.placement, said))
        return checked
    if not (
        isinstance(player.params, Mapping) and isinstance(player.placement, Mapping)
    ):
        said = "one whose Case has params and their placement, both by name"
        raise ScenarioError(unusable("program", settings.program, said))
    for name, worker in settings.placement.items():
        if name not in player.params:
            said = f"one of the parameters {', '.join(player.params)}"
            said += meant(name, player.params)
            raise ScenarioError(unusable(f"placement.{name}", worker, said))
        settings.check_worker(f"placement.{name}", worker)
    placement = {**player.placement, **settings.placement}
    for name in player.params:
        place = placement.get(name)
        if place not in settings.names:
            why = "leaves it out" if place is None else "has it there"
            said = f"one of the workers {', '.join(settings.names)}; "
            said += f"{settings.program} {why}"
            raise ScenarioError(unusable(f"placement.{name}", place, said))
    return replace(player, placement=placement)
