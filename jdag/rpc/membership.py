"""Membership: which workers are in a session, as a state machine without I/O.

Inputs: events, as main or a worker learns of them: a worker is attached, has joined, or
    is lost; and of a worker process: it is attached, its session ends, it is to stop.
Outputs: the states, and a JoinError for an event that may not happen in a state. The
    tables below are the diagram, the rule and the text of the error.
Invariants: the incarnations of a name are numbered 0, 1, ... by main. A newer one means
    that all former ones are lost. A lost incarnation never comes back.
"""

from collections.abc import Iterable, Mapping

from jdag.errors import JoinError

ABSENT, ATTACHED, JOINED, LOST = "absent", "attached", "joined", "lost"
IDLE, HELD, STOPPING = "idle", "held", "stopping"

Transitions = Mapping[tuple[str, str], str]

# A worker, as main and the other workers see it: (state, event) to the next state.
MEMBER: Transitions = {
    (ABSENT, "attach"): ATTACHED,
    (ATTACHED, "join"): JOINED,
    (ATTACHED, "lose"): LOST,
    (JOINED, "join"): JOINED,  # Its connection was made again.
    (JOINED, "lose"): LOST,
    (LOST, "lose"): LOST,
    (LOST, "join"): LOST,  # It was lost while it joined.
    (LOST, "attach"): ATTACHED,  # As the next incarnation.
}
# A worker process, as it sees itself: one caller at a time holds it.
LEASE: Transitions = {
    (IDLE, "attach"): HELD,
    (HELD, "end"): IDLE,
    (IDLE, "stop"): STOPPING,
    (HELD, "stop"): STOPPING,
    (STOPPING, "end"): STOPPING,
    (STOPPING, "stop"): STOPPING,
}


def after(table: Transitions, subject: str, state: str, event: str) -> str:
    """Return the state after an event.

    Raises:
        JoinError: the event may not happen in this state; says in which it may.
    """
    following = table.get((state, event))
    if following is None:
        allowed = " or ".join([one for one, known in table if known == event])
        raise JoinError(
            f"{subject} is {state}; to {event} it, it would have to be {allowed}"
        )
    return following


class Membership:
    """The other workers of a session, as one process sees them.

    Not thread-safe: its owner has a lock.

    Args:
        here: the worker of this process.
        names: of all workers.

    Attributes:
        incarnations: the number of each worker that is known.
        lost: why each lost worker is.
    """

    def __init__(self, here: str, names: Iterable[str]) -> None:
        self._here = here
        self._states = {name: ABSENT for name in names if name != here}
        self.lost: dict[str, str] = {}
        self.incarnations: dict[str, int] = {}

    def check(self, name: str) -> None:
        """Refuse a name that is none of the other workers'."""
        if name not in self._states:
            raise JoinError(f"{name!r} is none of the others of {self._here!r}")

    def next_incarnation(self, name: str) -> int:
        """Return the number that the next process of this name gets.

        Raises:
            JoinError: that worker may not be attached now.
        """
        after(MEMBER, f"worker {name!r}", self._states[name], "attach")
        return self.incarnations[name] + 1 if name in self.lost else 0

    def attach(self, name: str, incarnation: int) -> None:
        """A process has this name now; the same one may be reported again.

        Raises:
            JoinError: a newer one has.
        """
        self.check(name)
        known = self.incarnations.get(name, -1)
        if incarnation < known:
            raise JoinError(_replaced(name, incarnation, known))
        if incarnation > known:
            if known >= 0:
                self.lose(name, f"incarnation {incarnation} has taken its place")
            self._apply(name, "attach")
            self.lost.pop(name, None)
            self.incarnations[name] = incarnation

    def join(self, name: str) -> None:
        """A worker that was attached is connected to all others."""
        self._apply(name, "join")

    def lose(self, name: str, why: str) -> None:
        """A worker is lost."""
        self._apply(name, "lose")
        self.lost[name] = why

    @property
    def present(self) -> tuple[str, ...]:
        """The workers that are attached or have joined."""
        there = (ATTACHED, JOINED)
        return tuple(name for name, now in self._states.items() if now in there)

    def admit(self, name: str, incarnation: int) -> None:
        """Refuse a process that is not the one of this name.

        Raises:
            JoinError: the name is unknown; the process was replaced (`given_up`), or is
                not announced yet.
        """
        self.check(name)
        known = self.incarnations.get(name)
        if known is None:
            raise JoinError(f"{name!r} is lost, and no other process has joined as it")
        if incarnation > known:
            raise JoinError(
                f"incarnation {incarnation} of {name!r} is not announced yet; {known} "
                "is known"
            )
        if incarnation < known:
            raise JoinError(_replaced(name, incarnation, known), given_up=True)

    def _apply(self, name: str, event: str) -> None:
        now = self._states[name]
        self._states[name] = after(MEMBER, f"worker {name!r}", now, event)


def _replaced(name: str, incarnation: int, known: int) -> str:
    return (
        f"incarnation {incarnation} of {name!r} is gone, and {known} has joined in its "
        "place; the old process has to stop"
    )
