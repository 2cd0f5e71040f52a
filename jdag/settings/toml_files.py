"""Reading of TOML and JSON files within bounds. Error texts have one line."""

import io
import stat
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from jdag.errors import ScenarioError, reason, spelled, text_of

TOML_BYTES_MAX = 1 << 20  # Bytes of a file.


@contextmanager
def wrong(path: Path) -> Iterator[None]:
    try:
        yield
    except ScenarioError as error:
        raise ScenarioError(f"{spelled(path)}: {text_of(error)}") from error


def read_toml(path: Path, what: str) -> tuple[str, dict[str, Any]]:
    """Return the text and content of a TOML file. In errors, `what` describes the file.

    Raises:
        ScenarioError: the file cannot be read, or is not TOML.
    """
    try:
        text = text_in(path)
    except ScenarioError as error:
        raise ScenarioError(f"{error}; expected {what}") from error
    try:
        return text, parsed_text(tomllib.loads, text)
    except ValueError as error:
        raise ScenarioError(f"this is not TOML: {error}") from error


def parsed_text(parse: Callable[[str], Any], text: str) -> Any:
    """Call a parser of TOML or JSON. Values nested too deep raise a ValueError too."""
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("its values are nested too deep") from None


def value_in(text: str) -> Any:
    value = parsed_text(tomllib.loads, f"value = {text}")["value"]
    if isinstance(value, bool | int | float | str | list | dict):
        return value
    raise ValueError(f"{text} is a date or a time")


def text_in(path: Path, bytes_max: int = TOML_BYTES_MAX) -> str:
    """Return the text of a regular file, in UTF-8 with or without a byte order mark.

    Raises:
        ScenarioError: the file cannot be read, is too large, or is not UTF-8.
    """
    try:
        if not stat.S_ISREG(path.stat().st_mode):  # Reading a pipe could block.
            raise ScenarioError("this is not a regular file")
        with path.open("rb") as file:
            data = file.read(bytes_max + 1)
    except (OSError, ValueError) as error:
        raise ScenarioError(reason(error)) from error
    if len(data) > bytes_max:
        raise ScenarioError(f"this file has more than {bytes_max:,} bytes, the maximum")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = 1 + error.object.count(b"\n", 0, error.start)
        byte = f"byte {error.object[error.start]:#04x} in line {line}"
        why = f"this is not UTF-8 because of {byte}: save the file as UTF-8"
        raise ScenarioError(why) from error
    return io.StringIO(text, newline=None).read()  # Universal newlines.
