"""Exit codes, error messages and option parsing that all commands share."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jdag.errors import JoinError, ScenarioError, named_text, reason, unusable

if TYPE_CHECKING:
    from rich.console import Console

File = Annotated[Path, typer.Argument(help="TOML file of the scenario.")]
_DIGITS_MAX = 1000  # `int` accepts up to 4300 digits.


class Exit(IntEnum):
    MET = 0
    WRONG = 1  # An expectation was not met.
    BAD_INPUT = 2
    STUCK = 3  # A pass was stuck, which the scenario did not expect.


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Print an input error as one line without a traceback. Exit with code 2."""
    try:
        yield
    except ScenarioError as error:
        typer.echo(f"jdag: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(Exit.BAD_INPUT) from None
    except JoinError as error:  # The message may contain lines of a worker's output.
        typer.echo(f"jdag: {error}", err=True)
        raise typer.Exit(Exit.BAD_INPUT) from None


def check_one_of(key: str, value: str | None, *allowed: str) -> None:
    if value not in (None, *allowed):
        raise ScenarioError(unusable(key, value, f"one of {', '.join(allowed)}"))


def natural(key: str, text: str, least: int = 0) -> int:
    is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    if not is_number or int(text) < least:
        allowed = f"an integer >= {least} with at most {_DIGITS_MAX} digits"
        raise ScenarioError(unusable(key, text, allowed))
    return int(text)


def say(console: "Console", line: str) -> None:
    """Print a line without markup, highlighting or line breaks."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def no_run(folder: Path, error: Exception) -> ScenarioError:
    text = str(error) if isinstance(error, ValueError) else named_text(error)
    if isinstance(error, OSError):
        file = error.filename
        text = f"{file}: " * (file is not None) + reason(error)
    allowed = f"a folder that `jdag run` wrote; {text}"
    return ScenarioError(unusable("folder", str(folder), allowed))
