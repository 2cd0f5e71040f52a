"""Membership: the workers of a session as known to one process. No I/O.

The tables below define the state transitions; error messages are derived from them.

Invariants: only main numbers the incarnations of a worker: 0, 1, ... When a new
incarnation exists, all former ones are lost. A lost incarnation never returns.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from jdag.errors import JoinError
from jdag.processes.session.requests import WorkerAddress

ABSENT, JOINED, LOST = "absent", "joined", "lost"
IDLE, HELD, STOPPING = "idle", "held", "stopping"

Transitions = Mapping[tuple[str, str], str]

# The states of a worker as seen by other processes: next state by (state, event).
MEMBER: Transitions = {
    (ABSENT, "attach"): JOINED,
    (JOINED, "lose"): LOST,
    (LOST, "lose"): LOST,
    (LOST, "attach"): JOINED,  # The next incarnation joins.
}
# The states of a worker process as seen by itself. HELD: a main program uses it.
LEASE: Transitions = {
    (IDLE, "attach"): HELD,
    (HELD, "end"): IDLE,
    (IDLE, "stop"): STOPPING,
    (HELD, "stop"): STOPPING,
    (STOPPING, "end"): STOPPING,
    (STOPPING, "stop"): STOPPING,
}


def after(table: Transitions, subject: str, state: str, event: str) -> str:
    following = table.get((state, event))
    if following is None:
        allowed = " or ".join([before for before, name in table if name == event])
        raise JoinError(f"cannot {event} {subject}: it is {state}; expected {allowed}")
    return following


@dataclass
class Member:
    """Another worker of a session, and its current process.

    `is_dialled` is true if this process dials the other one, and false if the other one
    dials this process. `whereabouts` is None until main has announced the process.
    """

    state: str = ABSENT
    incarnation: int = 0
    why: str = ""  # The reason for the loss of the worker.
    whereabouts: WorkerAddress | None = None
    is_dialled: bool = False

    @property
    def allowed(self) -> tuple[str, ...]:
        return () if self.whereabouts is None else self.whereabouts.allow


class Membership:
    """The workers of a session, as seen by the process of `worker`. Thread-safe."""

    def __init__(
        self, worker: str, workers: Sequence[str], incarnation: int = 0
    ) -> None:
        self.worker = worker
        self.incarnation = incarnation
        self._members = {name: Member() for name in workers if name != worker}
        self._lock = threading.Lock()

    def __getitem__(self, name: str) -> Member:
        if name not in self._members:
            raise JoinError(
                f"{name!r} is not a peer of {self.worker!r} in this session"
            )
        return self._members[name]

    @property
    def incarnations(self) -> dict[str, int]:
        others = {n: m.incarnation for n, m in self._members.items() if m.state != LOST}
        return {self.worker: self.incarnation, **others}

    @property
    def joined(self) -> tuple[str, ...]:
        return tuple(n for n, m in self._members.items() if m.state == JOINED)

    @property
    def announced(self) -> dict[str, WorkerAddress]:
        return {
            name: member.whereabouts
            for name, member in self._members.items()
            if member.state == JOINED and member.whereabouts is not None
        }

    @property
    def lost(self) -> dict[str, str]:
        return {n: m.why for n, m in self._members.items() if m.state == LOST}

    def next_incarnation(self, name: str) -> int:
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
        """Record the process of a worker, or more information about the process.

        Raises JoinError if a newer incarnation has replaced the process.
        """
        with self._lock:
            member = self[name]
            if incarnation < member.incarnation:
                raise JoinError(_replaced(name, incarnation, member.incarnation))
            if incarnation > member.incarnation or member.state == ABSENT:
                if member.state == JOINED:  # The former's loss was not detected.
                    self._apply(name, "lose")
                self._apply(name, "attach")
                member.incarnation = incarnation
                member.whereabouts = None
            if whereabouts is not None:
                member.whereabouts = whereabouts
            if is_dialled is not None:
                member.is_dialled = is_dialled

    def lose(self, name: str, incarnation: int, why: str) -> None:
        with self._lock:
            member = self[name]
            if member.state != ABSENT and incarnation == member.incarnation:
                member.why = why
                self._apply(name, "lose")

    def admit(self, name: str, incarnation: int) -> None:
        member = self[name]
        newest = member.incarnation
        if incarnation < newest:
            raise JoinError(_replaced(name, incarnation, newest), given_up=True)
        if member.state == LOST:
            text = f"worker {self.worker!r} considers {name!r} lost: {member.why}"
            raise JoinError(text, given_up=True)

    def _apply(self, name: str, event: str) -> None:
        member = self._members[name]
        member.state = after(MEMBER, f"worker {name!r}", member.state, event)


def _replaced(name: str, incarnation: int, newest: int) -> str:
    return (
        f"incarnation {incarnation} of {name!r} was replaced by {newest}; stop the old "
        "process"
    )
