"""The result of a run, as `result.json` holds it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from jdag.errors import ScenarioError
from jdag.settings.toml_files import parsed_text, text_in

RESULT, TRACE = "result.json", "trace.jsonl"
JSON_BYTES_MAX = 1 << 28  # Of a file of a run, which may be any by now.


class Expectation(Struct):
    """One expectation of a figure: what was wanted, what it is, whether it is met."""

    figure: str
    wanted: str
    got: Any
    met: bool


class _Result(Struct):
    """The contents of `result.json`; each figure is also a key of its own."""

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
    digest: str | None
    window_ns: Annotated[list[int], Meta(min_length=2, max_length=2)]
    not_asked: list[str] = []


def json_of(path: Path) -> Any:
    """Return the contents of a JSON file.

    Raises:
        ValueError: it cannot be read, has more than `JSON_BYTES_MAX`, is no JSON, or
            nested too deep.
    """
    try:
        return parsed_text(json.loads, text_in(path, JSON_BYTES_MAX))
    except ScenarioError as error:
        raise ValueError(f"{path.name}: {error}") from error


def read_result(folder: Path) -> Mapping[str, Any]:
    """Return the result of the run in a folder.

    Raises:
        ValueError: there is no result, or a key is missing or has another type.
    """
    found = json_of(folder / RESULT)
    try:
        known = convert(found, _Result)
    except ValidationError as error:
        said, _, place = str(error).partition(" - at `$")
        key = f"{place[1:-1]} in " if place[1:] else ""
        raise ValueError(f"{key}{RESULT}: {said[0].lower()}{said[1:]}") from None
    return {"not_asked": known.not_asked, **found}
