"""Entries of a log of what a program told its engine, and what is read off them."""

from typing import Any, NamedTuple

from jdag.api.current_names import Values
from jdag.engine.protocol import Assigned, ContextId, LeafId
from jdag.errors import WorkerLost


class Entry(NamedTuple):
    """One event of the log; `news` are the programs that a Collected told of."""

    number: int
    event: Any
    values: Values = ()
    news: tuple[Any, ...] = ()


def is_lost(failure: Any) -> bool:
    """Whether a failure, or None, is the loss of a worker."""
    return failure is not None and failure.error == WorkerLost.__name__


def context_of(event: Any) -> Any:
    """Return the context of an event, None if it has none."""
    return getattr(event, "context", None)


def place_of(event: Any) -> Any:
    """Return the context and the path of an event."""
    return context_of(event), getattr(event, "path", None)


def used_by(event: Assigned) -> list[ContextId]:
    """The contexts of which an assignment uses values."""
    inputs = [key for part in event.parts for key in part.inputs]
    return [key.context for key in inputs if key.context is not None]


def changed_by(event: Any) -> dict[LeafId, bool]:
    """The leaves that an event changes, and whether it brings the values itself."""
    if type(event) is dict:  # A snapshot.
        return dict.fromkeys(event, False)
    parts = event.parts if type(event) is Assigned else ()
    return {key.name: part.function is None for part in parts for key in part.outputs}
