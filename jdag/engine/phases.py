"""The phases of a context, at its owner and at participants, as tables.

`NEXT` contains the owner's transitions, for code and error texts. `TAKES` contains the
events and messages that an engine may receive in each phase; `jdag.explore` measures
its coverage.
"""

from collections.abc import Mapping
from enum import Enum

from msgspec import field

from jdag.engine.graph import Fragment
from jdag.engine.protocol import (
    Acknowledged,
    Answer,
    Answered,
    Asked,
    Attach,
    Attached,
    Awaited,
    Call,
    Collected,
    Computed,
    Cotangent,
    Differentiated,
    Discard,
    Discarded,
    End,
    Ended,
    Expired,
    Fail,
    Failure,
    Go,
    Issued,
    Joined,
    Launched,
    Left,
    Listing,
    Lost,
    Mark,
    Outcome,
    Primal,
    Release,
    Released,
    Return,
    Returned,
    Root,
    Run,
    Ship,
    Start,
    Tell,
    TimedOut,
    Worker,
)
from jdag.errors import ContextError, WorkerLost


class Phase(Enum):
    OPEN = "open"
    GATHERING = "gathering"  # A pass was requested, and waits for acknowledgements.
    ANNOUNCING = "announcing"  # FAST with roots on several workers: sending Starts.
    MARKING = "marking"  # SMART: marking the sends that the roots need.
    RUNNING = "running"  # Workers run vjps and send cotangents.
    ENDING = "ending"  # Waiting for every participant's Ended.
    FAILED = "failed"  # A participating worker was lost.
    LEAVING = "leaving"
    RELEASED = "released"
    __hash__ = object.__hash__  # Faster than Enum's hash, which is Python code.


# The transitions. Their causes are events of programs, and sent or received messages.
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


class PartPhase(Enum):
    ABSENT = "absent"
    OPEN = "open"
    PASS = "in a pass"
    FAILED = "in a failed pass"
    LEAVING = "leaving"  # Released, but calls or transfers are pending.
    RELEASED = "released"
    __hash__ = object.__hash__


Situation = tuple[Phase | PartPhase, type]  # A phase, and an event in this phase.
Triple = tuple[str, str, str]  # Role, phase and event, as strings.


def triple(phase: Phase | PartPhase, event: type) -> Triple:
    role = "owner" if isinstance(phase, Phase) else "participant"
    return role, phase.value, event.__name__


# Events of all program frames, not only of the top frame, and messages about calls.
_FRAMES = (Issued, Launched, Attached, Discarded, Collected, TimedOut, Answered)
_CALLS = (Call, Ship, Run, Return, Tell, Attach, Discard, Listing)
_WORKERS = (Lost, Joined)  # These events concern all contexts.

# The events and messages that an engine may receive about a context in this phase.
TAKES: Mapping[Phase | PartPhase, tuple[type, ...]] = {
    Phase.OPEN: (
        *(Computed, Primal, Acknowledged, Awaited, Asked, Returned, Differentiated),
        *(Left, *_FRAMES, *_CALLS, *_WORKERS),
    ),
    Phase.GATHERING: (Computed, Primal, Acknowledged, Expired, Left, *_WORKERS),
    Phase.ANNOUNCING: (Computed, Primal, Answer, Fail, Expired, Left, *_WORKERS),
    Phase.MARKING: (Computed, Primal, Mark, Answer, Fail, Expired, Left, *_WORKERS),
    Phase.RUNNING: (
        *(Computed, Primal, Cotangent, Answer, Fail, Expired, Left, *_WORKERS),
    ),
    Phase.ENDING: (
        *(Computed, Primal, Acknowledged, Mark, Cotangent, Answer, Fail, Ended),
        *(Expired, Left, *_WORKERS),
    ),
    Phase.FAILED: (
        *(Computed, Primal, Acknowledged, Differentiated, Returned, Left),
        *(*_FRAMES, *_CALLS, *_WORKERS),
    ),
    Phase.LEAVING: (
        *(Computed, Primal, Acknowledged, Mark, Cotangent, Answer, Fail, Ended),
        *(Released, *_CALLS, *_WORKERS),
    ),
    Phase.RELEASED: (Computed, Issued, Returned, Released),
    PartPhase.ABSENT: (Primal, Call, Ship, Run, Attach, Release),
    PartPhase.OPEN: (
        *(Computed, Primal, Acknowledged, Start, Mark, Cotangent, Fail, End, Release),
        *(Asked, Returned, *_FRAMES, *_CALLS, *_WORKERS),
    ),
    PartPhase.PASS: (
        *(Computed, Primal, Start, Mark, Go, Cotangent, Fail, End, Release, Discard),
        *(Listing, *_WORKERS),
    ),
    PartPhase.FAILED: (
        *(Computed, Primal, Start, Mark, Go, Cotangent, Fail, End, Release, Discard),
        *(Listing, *_WORKERS),
    ),
    PartPhase.LEAVING: (Computed, Primal, Release, Listing, *_WORKERS),
    PartPhase.RELEASED: (
        *(Computed, Primal, Call, Ship, Run, Attach, Mark, Cotangent),
        *(Fail, Release, Issued, Returned, Listing),
    ),
}

TRIPLES: tuple[Triple, ...] = tuple(
    [triple(phase, event) for phase, events in TAKES.items() for event in events]
)
OF_CONTEXTS = frozenset([event for events in TAKES.values() for event in events])


class OwnedFragment(Fragment, eq=False):
    phase: Phase = Phase.OPEN
    lost: Failure | None = None  # The first loss of a participating worker.
    waiter: int = 0
    passes: int = 0  # Number of passes so far. The next fields describe the last pass.
    roots: tuple[tuple[Worker, Root], ...] = ()
    retain: bool = False
    outcome: Outcome = Outcome.FINISHED
    failure: Failure | None = None
    awaited: dict[Worker, None] = field(default_factory=dict)
    answers: list[Ended] = field(default_factory=list)
    # Failures on all workers, from their answers to Release.
    gathered: list[Failure] = field(default_factory=list)

    def advance(self, cause: type) -> None:
        following = NEXT[self.phase].get(cause)
        if following is None:
            if self.lost is not None:
                raise WorkerLost(
                    f"context {self.context} has failed: {self.lost.message}"
                )
            allowed = ", ".join(kind.__name__ for kind in NEXT[self.phase]) or "nothing"
            raise ContextError(
                f"context {self.context} is {self.phase.value} and cannot handle "
                f"{cause.__name__}; in this phase it handles {allowed}"
            )
        self.phase = following


def phase_of(part: Fragment) -> Phase | PartPhase:
    if isinstance(part, OwnedFragment):
        return part.phase
    if part.release is not None:
        return PartPhase.LEAVING
    if part.live is not None:
        return PartPhase.FAILED if part.live.failed else PartPhase.PASS
    return PartPhase.RELEASED if part.released else PartPhase.OPEN
