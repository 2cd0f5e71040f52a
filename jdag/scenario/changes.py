"""Overrides of scenario settings by dotted key, such as `faults[0].probability`."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from jdag.errors import ScenarioError, unusable


def changed(table: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a scenario's table with some values replaced.

    A string at `schedule` replaces `schedule.kind`. Missing tables are added. Raises
    ScenarioError if a key does not fit the structure of the table.
    """
    result = deepcopy(dict(table))
    for key, value in changes.items():
        is_kind = key == "schedule" and isinstance(value, str)
        parent: Any = {"": result}
        part: Any = ""
        for text in ("schedule.kind" if is_kind else key).replace("[", ".[").split("."):
            is_index = text.startswith("[") and text[1:-1].isdecimal()
            if isinstance(parent, dict):
                parent = parent.setdefault(part, {})
            else:
                parent = parent[part]
            part = int(text[1:-1]) if is_index else text
            is_list = isinstance(parent, list)
            fits = part in range(len(parent)) if is_list else not is_index
            if not (fits and isinstance(parent, dict | list)):
                allowed = "a key of the file, such as network.latency_ns or seed"
                raise ScenarioError(
                    unusable(key, value, f"{allowed}; {text} does not exist in it")
                )
        parent[part] = value
    return result
