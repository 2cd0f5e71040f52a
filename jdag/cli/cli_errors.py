"""What commands share: exit codes, errors as one line, values of options."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from jdag.errors import JoinError, ScenarioError, named_text, reason, unusable

File = Annotated[Path, typer.Argument(help="The scenario, a TOML file.")]
_DIGITS_MAX = 1000  # Python reads no more than 4300.


class Exit(IntEnum):
    """Exit codes."""

    MET = 0
    WRONG = 1  # An expectation is not met.
    BAD_INPUT = 2
    STUCK = 3  # A pass was stuck, and nothing expected it.


@contextmanager
def errors_in_one_line() -> Iterator[None]:
    """Turn an error of the user into one line and an exit code, without traceback."""
    try:
        yield
    except ScenarioError as error:
        typer.echo(f"jdag: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(Exit.BAD_INPUT) from None
    except JoinError as error:  # The last lines of a worker's output are lines.
        typer.echo(f"jdag: {error}", err=True)
        raise typer.Exit(Exit.BAD_INPUT) from None


def check_one_of(key: str, value: str | None, *allowed: str) -> None:
    """Raise ScenarioError if an option has a value that is not one of these."""
    if value not in (None, *allowed):
        raise ScenarioError(unusable(key, value, f"one of {', '.join(allowed)}"))


def natural(key: str, text: str, least: int = 0) -> int:
    """Return the integer that an option's text is; ScenarioError for any other."""
    is_number = text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX
    if not is_number or int(text) < least:
        allowed = f"an integer >= {least} of at most {_DIGITS_MAX} digits"
        raise ScenarioError(unusable(key, text, allowed))
    return int(text)


def say(console: Console, line: str) -> None:
    """Print a line as it is: names in it are no markup, and it is not folded."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)


def no_run(folder: Path, error: Exception) -> ScenarioError:
    """The error for a folder in which a file is missing, or not as `jdag run` wrote."""
    text = str(error) if isinstance(error, ValueError) else named_text(error)
    if isinstance(error, OSError):
        file = error.filename
        text = f"{file}: " * (file is not None) + reason(error)
    said = f"a folder that `jdag run` wrote; {text}"
    return ScenarioError(unusable("folder", str(folder), said))
