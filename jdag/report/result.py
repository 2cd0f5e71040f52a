"""The result of a run, as `result.json` holds it."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from jdag.errors import ScenarioError, kind_of
from jdag.runtime.tables import parsed, text_in

RESULT, TRACE = "result.json", "trace.jsonl"
JSON_BYTES_MAX = 1 << 28  # Of a file of a run, which may be any by now.


class _Table(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class Expectation(_Table):
    """One expectation of a figure: what was wanted, what it is, whether it is met."""

    figure: str
    wanted: str
    got: Any
    met: bool


class Result(_Table):
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
    not_asked: list[str] = []
    digest: str | None
    window_ns: Annotated[list[int], Field(min_length=2, max_length=2)]


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
        ValueError: there is no result, or a key is missing or has another type.
    """
    try:
        return Result.model_validate(json_of(folder / RESULT)).model_dump()
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"{RESULT} has no {key}") from None
        named = f"{key} in {RESULT}" if key else RESULT
        allowed = first["msg"][0].lower() + first["msg"][1:]
        raise ValueError(f"{named} is {kind_of(first['input'])}: {allowed}") from None
