"""The phases of a context at its owner: one table, used by code and errors."""

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
    GATHERING = "gathering"  # A pass was requested; waiting for acknowledgements.
    ANNOUNCING = "announcing"  # FAST with roots on several workers: sending Starts.
    MARKING = "marking"  # SMART: marking what the roots need.
    RUNNING = "running"  # Cotangents flow.
    ENDING = "ending"  # Waiting for every participant's Ended.
    FAILED = "failed"  # A participating worker was lost.
    LEAVING = "leaving"
    RELEASED = "released"


# The transitions, caused by events of its programs and by messages to or from workers.
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
    """The fragment of a context on its owner."""

    phase: Phase = Phase.OPEN
    lost: Failure | None = None  # The first loss of a participating worker.
    waiter: int = 0
    passes: int = 0
    roots: tuple[tuple[Worker, Root], ...] = ()  # Roots and `retain` of the last pass.
    retain: bool = False
    outcome: Outcome = Outcome.FINISHED
    failure: Failure | None = None
    awaited: dict[Worker, None] = field(default_factory=dict)
    answers: list[Ended] = field(default_factory=list)
    # Failures that workers found, collected as the context is released.
    gathered: list[Failure] = field(default_factory=list)

    def advance(self, cause: type) -> None:
        """Make the transition of `cause`; the error lists the allowed ones."""
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
