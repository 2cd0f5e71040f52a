"""One pass on one worker, and its place in the Dijkstra-Scholten tree.

A message of the pass either engages a worker (the sender becomes its parent) or, if it
is engaged already, is answered at once. A worker answers its parent when it is passive;
then it may be engaged again. The owner is the root of the tree and never answers
anybody.

Every answer carries `unreported`: the change in this worker's count of owed sends since
its last answer, plus the changes that answers brought it. So each change climbs to the
owner exactly once, and when the owner is passive the sum it holds is the number of
sends owed everywhere.

Why the owner is passive only when everybody is: a worker with an unanswered message is
not passive, so each engaged worker's parent is engaged too; by induction the owner is
not passive while anybody is engaged, and somebody is engaged while any message of the
pass is under way (its sender has it unanswered) or any job of it runs (its worker is
not passive).
"""

from typing import Any

from jdag.engine.graph import SendEnd, Vertex
from jdag.engine.vocabulary import Key, LeafId, Path, Root, Worker

Addend = tuple[
    tuple[float, ...], int, Key
]  # Path of the consumer, position there, value.


class Due:
    """The cotangents of one vertex: how many are awaited, what has come."""

    __slots__ = ("addends", "remaining")

    def __init__(self, width: int) -> None:
        self.remaining = 0
        self.addends: list[list[Addend]] = (
            [[]] if width == 1 else [[] for _ in range(width)]
        )


class Pass:
    """One backward pass as one worker sees it."""

    __slots__ = (
        "computing", "dues", "engaged", "failed", "is_owner", "number", "oldest",
        "owed", "parent", "ready", "retain", "roots", "sighted", "staged", "unanswered",
        "unreported", "waiting",
    )  # fmt: skip

    def __init__(self, number: int, retain: bool, is_owner: bool) -> None:
        self.number = number
        self.retain = retain
        self.is_owner = is_owner
        self.engaged = is_owner
        self.parent: Worker | None = None
        self.unanswered = 0
        self.computing = 0
        self.waiting = 0  # Nodes with all their cotangents whose forward has not run.
        self.unreported = 0
        self.owed: dict[Path, SendEnd] = {}
        self.dues: dict[Vertex, Due] = {}
        self.ready: list[Any] = []  # Vertices with all their contributions.
        self.staged: dict[LeafId, Key | None] = {}
        self.oldest: dict[LeafId, int] = {}  # The versions that it differentiated.
        self.roots: tuple[Root, ...] = ()  # Those here that have no cotangent yet.
        self.sighted = False  # Dependencies have been counted here.
        self.failed = False

    def engage(self, sender: Worker) -> bool:
        """Take a message of the pass; whether it engaged this worker."""
        if self.engaged:
            return False
        self.engaged = True
        self.parent = sender
        return True

    @property
    def passive(self) -> bool:
        """Whether nothing here can go on by itself or still owes an answer."""
        return not (self.unanswered or self.computing or self.waiting or self.ready)

    def report(self) -> int:
        """The change in owed sends that the next answer carries."""
        change, self.unreported = self.unreported, 0
        return change
