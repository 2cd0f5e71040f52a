"""Changes of a scenario's settings, by dotted keys such as `faults[0].probability`."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from jdag.errors import ScenarioError, unusable


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a scenario's table with other values at some keys.

    A text at `schedule` is the kind of the schedule. Tables that are missing are made.

    Raises:
        ScenarioError: a key leads into what has no such part.
    """
    found = deepcopy(dict(table))
    for key, value in changes.items():
        is_kind = key == "schedule" and isinstance(value, str)
        at: Any = {"": found}  # A place in a list begins with a bracket.
        part: Any = ""
        for text in ("schedule.kind" if is_kind else key).replace("[", ".[").split("."):
            is_place = text.startswith("[") and text[1:-1].isdecimal()
            at = at.setdefault(part, {}) if isinstance(at, dict) else at[part]
            part = int(text[1:-1]) if is_place else text
            has = part in range(len(at)) if isinstance(at, list) else not is_place
            if not (has and isinstance(at, dict | list)):
                allowed = "a key of the file, such as network.latency_ns or seed"
                raise ScenarioError(unusable(key, value, f"{allowed}; {text} is none"))
        at[part] = value
    return found
