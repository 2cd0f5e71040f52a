"""The phases of a context at its owner, a table that code and errors read."""

from collections.abc import Mapping
from enum import Enum

from msgspec import field

from jdag.engine.graph import Fragment
from jdag.engine.protocol import (
    Attached,
    Differentiated,
    End,
    Ended,
    Failure,
    Go,
    Issued,
    Launched,
    Left,
    Lost,
    Mark,
    Outcome,
    Released,
    Root,
    Start,
    Worker,
)
from jdag.errors import ContextError, WorkerLost


class Phase(Enum):
    """What a context is doing."""

    OPEN = "open"
    GATHERING = "gathering"  # A pass is asked for; calls are not all acknowledged.
    ANNOUNCING = "announcing"  # FAST, roots on several workers: all hear of the pass.
    MARKING = "marking"  # SMART: what the roots need is being found.
    RUNNING = "running"  # Cotangents flow.
    ENDING = "ending"  # Every participant is being told.
    FAILED = "failed"  # A worker of it was lost.
    LEAVING = "leaving"
    RELEASED = "released"


# What moves a context on: what its programs tell, what goes to or comes from all.
NEXT: Mapping[Phase, Mapping[type, Phase]] = {
    Phase.OPEN: {
        Issued: Phase.OPEN,
        Launched: Phase.OPEN,
        Attached: Phase.OPEN,
        Differentiated: Phase.GATHERING,
        Left: Phase.LEAVING,
        Lost: Phase.FAILED,
    },
    Phase.GATHERING: {
        Start: Phase.ANNOUNCING,
        Mark: Phase.MARKING,
        Go: Phase.RUNNING,
        End: Phase.ENDING,
        Left: Phase.LEAVING,
    },
    Phase.ANNOUNCING: {Go: Phase.RUNNING, End: Phase.ENDING, Left: Phase.LEAVING},
    Phase.MARKING: {Go: Phase.RUNNING, End: Phase.ENDING, Left: Phase.LEAVING},
    Phase.RUNNING: {End: Phase.ENDING, Left: Phase.LEAVING},
    Phase.ENDING: {Ended: Phase.OPEN, Lost: Phase.FAILED, Left: Phase.LEAVING},
    Phase.FAILED: {Left: Phase.LEAVING},
    Phase.LEAVING: {Released: Phase.RELEASED},
    Phase.RELEASED: {},
}


class OwnedFragment(Fragment, eq=False):
    """The part of a context on the worker that opened it."""

    phase: Phase = Phase.OPEN
    lost: Failure | None = None  # The first loss of a worker that took part.
    waiter: int = 0
    passes: int = 0
    roots: tuple[tuple[Worker, Root], ...] = ()  # These two of the last pass.
    retain: bool = False
    outcome: Outcome = Outcome.FINISHED
    failure: Failure | None = None
    awaited: dict[Worker, None] = field(default_factory=dict)
    answers: list[Ended] = field(default_factory=list)
    # Failures that workers found, collected as the context is released.
    gathered: list[Failure] = field(default_factory=list)

    def advance(self, cause: type) -> None:
        """Take a step of the table, or say what the phase allows."""
        following = NEXT[self.phase].get(cause)
        if following is None:
            if self.lost is not None:
                said = f"context {self.context} has failed"
                raise WorkerLost(f"{said}: {self.lost.message}")
            allowed = ", ".join(kind.__name__ for kind in NEXT[self.phase]) or "nothing"
            raise ContextError(
                f"context {self.context} is {self.phase.value} and cannot take "
                f"{cause.__name__}; it takes {allowed}"
            )
        self.phase = following
