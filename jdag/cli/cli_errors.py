"""How the commands end: exit codes, and one line for each mistake."""

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import typer

from jdag.errors import JoinError, ScenarioError


class Exit(IntEnum):
    """Exit codes."""

    MET = 0
    WRONG = 1  # Something that was expected is not so.
    BAD_INPUT = 2
    STUCK = 3  # A pass was stuck, and nothing expected it.


@contextmanager
def said_in_one_line() -> Iterator[None]:
    """A mistake of the user's is one line and an exit code, never a traceback."""
    try:
        yield
    except ScenarioError as error:
        typer.echo(f"jdag: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(Exit.BAD_INPUT) from None
    except JoinError as error:  # The last lines of a worker's output are lines.
        typer.echo(f"jdag: {error}", err=True)
        raise typer.Exit(Exit.BAD_INPUT) from None
