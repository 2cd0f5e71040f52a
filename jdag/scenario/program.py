"""A scenario's program: found by its name, handed its settings, placed."""

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
from jdag.scenario.case import Case, Player
from jdag.scenario.scenario_schema import ScenarioTable
from jdag.settings.validation import converted

_FOLDER = "folder"  # A program that takes it is told where the scenario's file is.
_HERE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_LIBRARIES = tuple(library.__path__[0] + os.sep for library in (jax, np, importlib))


def player_of(settings: ScenarioTable, folder: Path) -> Player:
    """Import a scenario's program and call it with its settings.

    Args:
        settings: what the file says.
        folder: where the file is; modules are looked for there first, then in the
            current folder.

    Raises:
        ScenarioError: it cannot be imported, takes no such settings, raised, or
            returned what cannot be played; or there is no such parameter to place.
    """
    function = imported(settings.program, folder)
    if not callable(function):
        raise settings.refused(f"module:function; this is {repr_of(function)}")
    given = _given(settings, function, folder)
    try:
        player = function(settings.names, **given)
    except ScenarioError:
        raise
    except (Exception, SystemExit) as error:
        allowed = f"one that takes these settings, {settings.settings}"
        raise settings.refused(f"{allowed}; it raised {raised(error)}") from error
    has_figures = isinstance(getattr(player, "figures", None), Mapping)
    if not (has_figures and callable(getattr(player, "play", None))):
        raise settings.refused(
            "a function that returns a jdag.scenario.Case, or an object with figures "
            f"(what each is, by name) and play(run); it returned {repr_of(player)}"
        )
    return _placed(settings, player)


def raised(error: BaseException) -> str:
    """Say what a user's code raised, and in which of its lines."""
    text = named_text(error)
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        # A user's file is neither jdag's nor that of what it calls for the user.
        if not frame.filename.startswith((_HERE, *_LIBRARIES, "<frozen")):
            name = os.path.basename(frame.filename)
            return f"{text} ({name}:{frame.lineno} in {frame.name})"
    return text


@contextmanager
def raising_nothing(place: str, what: str = "program") -> Iterator[None]:
    """Turn what a program, or what else it is, raises into a ScenarioError."""
    try:
        yield
    except ScenarioError:
        raise
    except (Exception, SystemExit) as error:
        allowed = f"one that does not raise; it raised {raised(error)}"
        raise ScenarioError(unusable(what, place, allowed)) from error


def imported(program: str, folder: Path, what: str = "program") -> Any:
    """What `module:name` names, in a module that is found as for `player_of`.

    Raises:
        ScenarioError: it cannot be imported, or has no such name.
    """

    def refused(allowed: str) -> ScenarioError:
        return ScenarioError(unusable(what, program, allowed))

    module_name, _, name = program.partition(":")
    folders = tuple(dict.fromkeys((str(folder), str(Path.cwd()))))
    for place in reversed(folders):  # The last is looked into first.
        if place in sys.path:
            sys.path.remove(place)
        sys.path.insert(0, place)
    where = f"module:function, of a module in {', in '.join(folders)} or installed"
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        raise refused(f"{where}; {text_of(error)}") from error
    except (Exception, SystemExit) as error:
        why = f"importing this one raised {raised(error)}"
        raise refused(f"{where}; {why}") from error
    if not hasattr(module, name):
        why = f"{getattr(module, '__file__', None)} has no attribute {name!r}"
        raise refused(f"{where}; {why}{meant(name, dir(module))}")
    return getattr(module, name)


def _given(settings: ScenarioTable, function: Any, folder: Path) -> dict[str, Any]:
    """Return the program's settings, of the types in its annotations."""
    try:
        signature = inspect.signature(function)
        signature.bind_partial(())
        types = get_type_hints(function, include_extras=True)
    except (NameError, TypeError, ValueError) as error:
        allowed = "a function that takes the workers, then its settings, all with "
        allowed += f"annotations that can be read; {error}"
        raise settings.refused(allowed) from error
    parameters = dict(list(signature.parameters.items())[1:])
    is_open = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    named = {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
    }
    given: dict[str, Any] = {}
    for name, value in settings.settings.items():
        if (name not in named and not is_open) or name == _FOLDER:
            names = ", ".join(name for name in named if name != _FOLDER) or "none"
            allowed = f"one of the settings of {settings.program}: {names}"
            allowed += meant(name, named)
            raise ScenarioError(unusable(f"settings.{name}", value, allowed))
        # A list may become a tuple.
        given[name] = converted(types.get(name, Any), value, f"settings.{name}")
    if _FOLDER in named:
        given[_FOLDER] = folder
    for name, parameter in named.items():
        if parameter.default is parameter.empty and name not in given:
            raise ScenarioError(
                f"settings.{name} is missing; {settings.program} has to have it"
            )
    return given


def _placed(settings: ScenarioTable, player: Any) -> Player:
    if not isinstance(player, Case):
        checked: Player = player
        if settings.placement:
            said = f"nothing, as {settings.program} places its parameters itself"
            raise ScenarioError(unusable("placement", settings.placement, said))
        return checked
    params, own = player.params, player.placement
    if not (isinstance(params, Mapping) and isinstance(own, Mapping)):
        raise settings.refused(
            "one whose Case has params and their placement, both by name"
        )
    for name, worker in settings.placement.items():
        if name not in params:
            said = f"one of the parameters {', '.join(params)}{meant(name, params)}"
            raise ScenarioError(unusable(f"placement.{name}", worker, said))
        settings.check_worker(f"placement.{name}", worker)
    placement = {**own, **settings.placement}
    for name in params:
        place = placement.get(name)
        if place not in settings.names:
            why = "leaves it out" if place is None else "has it there"
            said = f"one of the workers {', '.join(settings.names)}; "
            said += f"{settings.program} {why}"
            raise ScenarioError(unusable(f"placement.{name}", place, said))
    return replace(player, placement=placement)
