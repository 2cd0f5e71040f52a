"""Membership: the workers of a session as known to one process; no I/O.

The tables below define what may follow what, and the error texts.
Invariants: main alone numbers the incarnations of a name: 0, 1, ... A newer one means
that all former ones are lost. A lost incarnation never comes back.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jdag.errors import JoinError
from jdag.processes.session.requests import WorkerAddress

ABSENT, JOINED, LOST = "absent", "joined", "lost"
IDLE, HELD, STOPPING = "idle", "held", "stopping"

Transitions = Mapping[tuple[str, str], str]

# A worker, as main and the other workers see it: (state, event) to the next state.
MEMBER: Transitions = {
    (ABSENT, "attach"): JOINED,
    (JOINED, "lose"): LOST,
    (LOST, "lose"): LOST,
    (LOST, "attach"): JOINED,  # As the next incarnation.
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
        JoinError: the state does not permit the event; names the states that do.
    """
    following = table.get((state, event))
    if following is None:
        allowed = " or ".join([one for one, known in table if known == event])
        raise JoinError(
            f"{subject} is {state}; to {event} it, it would have to be {allowed}"
        )
    return following


@dataclass
class Member:
    """Another worker of a session, and the process that has its name now.

    `is_dialled`: this process dials it, and not the other way round. `whereabouts` is
    None until main has announced them.
    """

    state: str = ABSENT
    incarnation: int = 0
    why: str = ""  # It is lost.
    whereabouts: WorkerAddress | None = None
    is_dialled: bool = False

    @property
    def allowed(self) -> tuple[str, ...]:
        """The modules whose functions may be named there."""
        return () if self.whereabouts is None else self.whereabouts.allow


class Membership:
    """The workers of a session, as the process of `here` sees them; thread-safe."""

    def __init__(self, here: str, workers: Sequence[str], incarnation: int = 0) -> None:
        self.here = here
        self.incarnation = incarnation
        self._members = {name: Member() for name in workers if name != here}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Member:
        """Another worker; JoinError if the name is none of the others'."""
        if name not in self._members:
            raise JoinError(f"{name!r} is none of the others of {self.here!r}")
        return self._members[name]

    @property
    def incarnations(self) -> dict[str, int]:
        """The number of each worker that is not lost, this one and absent ones too."""
        others = {
            name: one.incarnation
            for name, one in self._members.items()
            if one.state != LOST
        }
        return {self.here: self.incarnation, **others}

    @property
    def joined(self) -> tuple[str, ...]:
        """The other workers that are neither absent nor lost."""
        return tuple(n for n, one in self._members.items() if one.state == JOINED)

    @property
    def announced(self) -> dict[str, WorkerAddress]:
        """Where the other workers are that have joined, as far as that is known."""
        return {
            name: one.whereabouts
            for name, one in self._members.items()
            if one.state == JOINED and one.whereabouts is not None
        }

    @property
    def lost(self) -> dict[str, str]:
        """Why each lost worker is lost."""
        return {n: one.why for n, one in self._members.items() if one.state == LOST}

    def next_incarnation(self, name: str) -> int:
        """Return the number that the next process of this name gets.

        Raises:
            JoinError: no process may take the name now.
        """
        member = self[name]
        after(MEMBER, f"worker {name!r}", member.state, "attach")
        return member.incarnation + (member.state == LOST)

    def attach(
        self,
        name: str,
        incarnation: int,
        whereabouts: WorkerAddress | None = None,
        *,
        is_dialled: bool | None = None,
    ) -> None:
        """Record the process of a name, or more facts about the same one.

        Raises:
            JoinError: a newer one has joined.
        """
        with self._lock:
            member = self[name]
            if incarnation < member.incarnation:
                raise JoinError(_replaced(name, incarnation, member.incarnation))
            if incarnation > member.incarnation or member.state == ABSENT:
                if member.state == JOINED:  # Nobody has noticed its loss.
                    self._apply(name, "lose")
                self._apply(name, "attach")
                member.incarnation = incarnation
                member.whereabouts = None
            if whereabouts is not None:
                member.whereabouts = whereabouts
            if is_dialled is not None:
                member.is_dialled = is_dialled

    def lose(self, name: str, incarnation: int, why: str) -> None:
        """Record the loss of an incarnation; ignored for a former one."""
        with self._lock:
            member = self[name]
            if member.state != ABSENT and incarnation == member.incarnation:
                member.why = why
                self._apply(name, "lose")

    def admit(self, name: str, incarnation: int) -> None:
        """Refuse a process that is lost or was replaced: JoinError, `given_up`."""
        member = self[name]
        known = member.incarnation
        if incarnation < known:
            raise JoinError(_replaced(name, incarnation, known), given_up=True)
        if member.state == LOST:
            said = f"worker {self.here!r} has given {name!r} up: {member.why}"
            raise JoinError(said, given_up=True)

    def _apply(self, name: str, event: str) -> None:
        member = self._members[name]
        member.state = after(MEMBER, f"worker {name!r}", member.state, event)


def _replaced(name: str, incarnation: int, known: int) -> str:
    return (
        f"incarnation {incarnation} of {name!r} is gone, and {known} has joined in its "
        "place; the old process has to stop"
    )
