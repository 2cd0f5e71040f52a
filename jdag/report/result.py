"""The file `result.json`, the result of a run."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, ValidationError, convert

from jdag.errors import ScenarioError
from jdag.settings.toml_files import parsed_text, text_in

RESULT, TRACE = "result.json", "trace.jsonl"
JSON_BYTES_MAX = 1 << 28  # Limits memory use if the file was replaced.


class Expectation(Struct):
    figure: str
    wanted: str
    got: Any
    met: bool


class _Result(Struct):
    """The contents of `result.json`. Each metric is also a top-level key."""

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
    try:
        return parsed_text(json.loads, text_in(path, JSON_BYTES_MAX))
    except ScenarioError as error:
        raise ValueError(f"{path.name}: {error}") from error


def read_result(folder: Path) -> Mapping[str, Any]:
    """Return the result of a run. Raises ValueError if it is missing or invalid."""
    contents = json_of(folder / RESULT)
    try:
        result = convert(contents, _Result)
    except ValidationError as error:
        text, _, place = str(error).partition(" - at `$")
        key = f"{place[1:-1]} in " if place[1:] else ""
        raise ValueError(f"{key}{RESULT}: {text[0].lower()}{text[1:]}") from None
    return {"not_asked": result.not_asked, **contents}
