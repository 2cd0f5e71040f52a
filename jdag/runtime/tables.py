"""Settings from TOML files and arguments: their types and their errors.

All errors have one wording: `key = value: allowed is ...`.
"""

import io
import math
import os
import stat
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from numbers import Real
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from jdag.errors import (
    ScenarioError,
    meant,
    reason,
    spelled,
    text_of,
    unusable,
)


def only(allowed: str, usable: Callable[[Any], bool]) -> BeforeValidator:
    """Return a validator whose error names the allowed values."""

    def check(value: Any) -> Any:
        if not usable(value):
            raise PydanticCustomError("unusable", "{allowed}", {"allowed": allowed})
        return value

    return BeforeValidator(check)


def is_ns(value: Any) -> bool:
    """Whether a value is a time in nanoseconds: an integer of at most 63 bits."""
    return type(value) is int and 0 <= value < 1 << 63


def at_least(least: int) -> Callable[[Any], bool]:
    """Return whether a value is an integer of at least `least`, as a function."""
    return lambda value: type(value) is int and value >= least


def up_to(most: int) -> Callable[[Any], bool]:
    """Return whether a value is an integer from 1 to `most`, as a function."""
    return lambda value: type(value) is int and 1 <= value <= most


def is_number(value: Any) -> bool:
    """Whether a value is a real number, of Python or in an array without axes."""
    if not isinstance(value, Real) and getattr(value, "ndim", None) != 0:
        return False
    kind = getattr(getattr(value, "dtype", None), "kind", "f")
    try:
        float(value)
    except (TypeError, ValueError, OverflowError):
        return False
    return type(value) is not bool and kind in "iufV"  # V: bfloat16 and its like.


def number(least: float, most: float) -> Callable[[Any], bool]:
    """Return whether a value is a number from `least` to `most`, as a function."""
    return lambda value: is_number(value) and bool(least <= value <= most)


def positive(most: float = math.inf) -> Callable[[Any], bool]:
    """Return whether a value is a number above 0 and at most `most`, as a function."""
    return lambda value: is_number(value) and bool(0 < value <= most)


def is_flag(value: object) -> bool:
    """Whether a value is True or False."""
    return type(value) is bool


def one_of(*names: str) -> BeforeValidator:
    """Return a validator for one of some names."""
    return only("one of " + ", ".join(names), lambda value: value in names)


def is_table(value: Any) -> bool:
    """Whether a value is a table."""
    return isinstance(value, dict)


def is_listed(value: object) -> bool:
    """Whether a value is an ordered collection: not a text, set or dict."""
    if isinstance(value, str | bytes | bytearray | set | frozenset | Mapping):
        return False
    return isinstance(value, Iterable) and getattr(value, "ndim", 1) > 0


def is_path(value: object) -> bool:
    """Whether a value may be the path of a file or folder."""
    text = os.fspath(value) if isinstance(value, os.PathLike) else value
    return isinstance(text, str) and text != "" and "\0" not in text


NESTING_MAX = 200  # Default depth to which programs may call each other.
NS = "an integer >= 0 and < 2^63"  # 292 years: sums of them are still floats.
BYTES_MAX = 1 << 20  # Of a file.

TEXT = Annotated[str, only("a text", lambda v: isinstance(v, str) and bool(v))]
FLAG = Annotated[bool, only("true or false", is_flag)]
COUNT = Annotated[int, only("an integer >= 1", at_least(1))]
NESTING = Annotated[int, only("an integer from 1 to 4,000", up_to(4000))]
TABLE = Annotated[dict[str, Any], only("a table", is_table)]


class Table(BaseModel):
    """A table of settings: unknown and missing keys are refused by name."""

    model_config = ConfigDict(frozen=True)

    @model_validator(mode="before")
    @classmethod
    def _check_keys(cls, table: Any) -> Any:
        if not isinstance(table, dict):
            raise PydanticCustomError("unusable", "{allowed}", {"allowed": "a table"})
        known = list(cls.model_fields)
        for key in table:
            if key not in cls.model_fields:
                keys = ", ".join(known)
                allowed = f"one of the keys {keys}{meant(key, known)}"
                context = {"key": key, "allowed": allowed}
                raise PydanticCustomError("unknown", "{allowed}", context)
        return table


Checked = TypeVar("Checked", bound=Table)


def checked(model: type[Checked], values: Mapping[str, Any]) -> Checked:
    """Return settings as a table of this class.

    Raises:
        ScenarioError: key, value and what is allowed, of the first that is unusable.
    """
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ScenarioError(said(error)) from None


@contextmanager
def wrong(path: Path) -> Iterator[None]:
    """Prefix errors with the name of the file."""
    try:
        yield
    except ScenarioError as error:
        raise ScenarioError(f"{spelled(path)}: {text_of(error)}") from error


def read(path: Path, what: str) -> tuple[str, dict[str, Any]]:
    """Return the text of a TOML file, and its content.

    Args:
        path: the file.
        what: a description of the file for errors.

    Raises:
        ScenarioError: it cannot be read, or is not TOML.
    """
    try:
        text = text_in(path)
    except ScenarioError as error:
        raise ScenarioError(f"{error}; allowed is {what}") from error
    try:
        return text, parsed(tomllib.loads, text)
    except ValueError as error:
        raise ScenarioError(f"this is not TOML: {error}") from error


def parsed(parse: Callable[[str], Any], text: str) -> Any:
    """Return the content of a text, by a parser of TOML or JSON.

    Raises:
        ValueError: the parser refuses it, or its values are nested too deep.
    """
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def value_in(text: str) -> Any:
    """Return the number, text, flag, list or table that a text is in TOML.

    Raises:
        ValueError: it is none of these.
    """
    value = parsed(tomllib.loads, f"value = {text}")["value"]
    if isinstance(value, bool | int | float | str | list | dict):
        return value
    raise ValueError(f"{text} is a date or a time")


def text_in(path: Path, bytes_max: int = BYTES_MAX) -> str:
    """Return the text of a regular file, in UTF-8 with or without a byte order mark.

    Raises:
        ScenarioError: it cannot be read, is too large, or is in another encoding.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # A pipe would be waited for.
            raise ScenarioError("this is no regular file")
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except (OSError, ValueError) as error:
        raise ScenarioError(reason(error)) from error
    if len(data) > bytes_max:
        raise ScenarioError(f"this has more than {bytes_max:,} bytes, the most allowed")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        byte = f"byte {error.object[error.start]:#04x} in line {line}"
        why = f"this is not UTF-8, by {byte}: save it as UTF-8"
        raise ScenarioError(why) from error
    return io.StringIO(text, newline=None).read()  # Lines as files have them.


def said(error: ValidationError, place: list[Any] | None = None) -> str:
    """Return the text of the first error: key, value and what is allowed.

    Args:
        error: the error of pydantic.
        place: the keys that lead to the value, in place of pydantic's.
    """
    first = error.errors(include_url=False)[0]
    place = list(first["loc"]) if place is None else list(place)
    context = first.get("ctx", {})
    match first["type"]:
        case "missing":
            return f"{dotted(place)} is missing; it has to be there"
        case "unknown":
            value = first["input"][context["key"]]
            place.append(context["key"])
        case _:
            value = first["input"]
    return unusable(dotted(place), value, context.get("allowed", first["msg"]))


def dotted(place: list[Any]) -> str:
    """Return keys as they are written: faults[0].probability."""
    text = ""
    for part in place:
        text += f"[{part}]" if isinstance(part, int) else f".{part}"
    return text.lstrip(".")
