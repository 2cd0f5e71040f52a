"""The result of a run, as `result.json` holds it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins

from jdag.errors import ScenarioError
from jdag.runtime.tables import parsed, text_in

RESULT = "result.json"
JSON_BYTES_MAX = 1 << 28  # Of a file of a run, which may be any by now.


class Expectation(Struct):
    """One expectation of a figure: what was wanted, what it is, whether it is met."""

    figure: str
    wanted: str
    got: Any
    met: bool


class Result(Struct, kw_only=True):
    """What a report is made of; the figures stand beside it by their own names too."""

    name: str
    question: str
    answer: str
    command: str
    outcome: str
    seed: int
    workers: list[str]
    figures: dict[str, Any]
    exact: dict[str, Any]
    meaning: dict[str, str]
    versions: dict[str, str]
    expect: list[Expectation]
    not_asked: list[str] = []
    digest: str | None
    window_ns: list[int]


def json_of(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        ValueError: it cannot be read, has more than `JSON_BYTES_MAX`, is no JSON, or
            nested too deep.
    """
    try:
        return parsed(json.loads, text_in(path, JSON_BYTES_MAX))
    except ScenarioError as error:
        raise ValueError(f"{path.name}: {error}") from error


def read_result(folder: Path) -> Mapping[str, Any]:
    """Return the result of the run in a folder.

    Raises:
        ValueError: there is none, or something in it is missing or of another type.
    """
    try:
        result = convert(json_of(folder / RESULT), Result)
    except ValidationError as error:
        raise ValueError(f"{RESULT}: {error}") from error
    found: Mapping[str, Any] = to_builtins(result)
    return found
