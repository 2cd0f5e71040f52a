"""Exit codes, and errors of commands as one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer

from jdag.errors import JoinError, ScenarioError


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
