"""Exit codes, and errors of commands as one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path

import typer

from jdag.errors import JoinError, ScenarioError, named_text, reason, unusable


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


def no_run(folder: Path, error: Exception) -> ScenarioError:
    """The error for a folder in which a file is missing, or not as `jdag run` wrote."""
    text = str(error) if isinstance(error, ValueError) else named_text(error)
    if isinstance(error, OSError):
        file = error.filename
        text = f"{file}: " * (file is not None) + reason(error)
    said = f"a folder that `jdag run` wrote; {text}"
    return ScenarioError(unusable("folder", str(folder), said))
