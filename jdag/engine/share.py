"""The share of one worker in one pass: what it awaits, what it is about to say.

Invariants: `remaining` of a vertex is how many of its counted edges have brought
nothing yet; a worker that is not passive holds weight; what is in `outbox` is sent
before the event in hand has been handled.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jdag.engine.graph import RecvEnd, SendEnd, Vertex
from jdag.engine.vocabulary import Key, LeafId, Mode, Path, Root, Weighted, Worker
from jdag.engine.weight import NOTHING, WHOLE, Weight, added, split

Addend = tuple[
    tuple[float, ...], int, Key
]  # Path of the consumer, position there, value.


class Outgoing(NamedTuple):
    """To whom, what is said once it has weight and a change in owed sends, and with it.

    `zeros` are the shapes of those that it does without.
    """

    to: Worker
    message: Callable[[Weight, int], Weighted]
    values: tuple[Key, ...]
    zeros: tuple[Any, ...]


class Due:
    """The cotangents of one vertex: how many are awaited, what has come."""

    __slots__ = ("addends", "hooked", "remaining")

    def __init__(self, width: int) -> None:
        self.remaining = 0
        self.hooked = False  # What has come has been through its hooks.
        self.addends: list[list[Addend]] = (
            [[]] if width == 1 else [[] for _ in range(width)]
        )

    def taken(self, slot: int) -> tuple[Key, ...]:
        """Take what has come for one slot, in order: whoever sums it drops it."""
        taken = ordered(self.addends[slot])
        self.addends[slot] = []
        return taken


def ordered(addends: list[Addend]) -> tuple[Key, ...]:
    """The addends in the order of the program, whatever order they came in."""
    if len(addends) == 1:
        return (addends[0][2],)
    return tuple([key for _, _, key in sorted(addends)])


class Pass:
    """One backward pass as one worker sees it."""

    __slots__ = (
        "computing", "counted", "dues", "failed", "mode", "needed", "number",
        "observed", "oldest", "outbox", "owed", "parent", "ready", "retain", "roots",
        "seeded", "sighted", "staged", "unreported", "untold", "waiting", "weight",
    )  # fmt: skip

    def __init__(
        self, number: int, mode: Mode, retain: bool, parent: Worker | None
    ) -> None:
        self.number = number
        self.mode = mode
        self.retain = retain
        # Who spoke of it first: a failure goes there. None on the pass's owner.
        self.parent = parent
        self.weight = WHOLE if parent is None else NOTHING
        self.unreported = 0  # The change in owed sends that nobody was told of.
        self.outbox: list[Outgoing] = []
        self.computing = 0
        self.waiting = 0  # Nodes with all their cotangents whose forward has not run.
        self.owed: dict[Path, SendEnd] = {}
        self.counted: dict[Path, list[bool]] = {}  # Of each send, the slots that are.
        # SMART: of each recv, the slots that roots need; those not yet told its send.
        self.needed: dict[RecvEnd, dict[int, None]] = {}
        self.untold: dict[RecvEnd, dict[int, None]] = {}
        self.dues: dict[Vertex, Due] = {}
        self.ready: list[Any] = []  # Vertices with all their contributions.
        self.staged: dict[LeafId, Key | None] = {}
        self.oldest: dict[LeafId, int] = {}  # The versions that it differentiated.
        self.observed: dict[LeafId, Key] = {}  # This pass's gradients, for hooks.
        self.roots: tuple[Root, ...] = ()  # Those here.
        self.seeded = False  # They have their cotangents.
        self.sighted = False  # FAST: dependencies have been counted here.
        self.failed = False

    @property
    def is_owner(self) -> bool:
        """Whether the pass is this worker's own."""
        return self.parent is None

    @property
    def passive(self) -> bool:
        """Whether nothing here can go on by itself."""
        return not (self.computing or self.waiting or self.ready)

    @property
    def whole(self) -> bool:
        """Whether this worker holds all the weight there is."""
        return self.weight == WHOLE

    def take(self, weight: Weight, owed: int) -> None:
        """A message of the pass came, with a part of its weight."""
        self.weight = added(self.weight, weight)
        self.unreported += owed

    def say(
        self,
        to: Worker,
        message: Callable[[Weight, int], Weighted],
        values: tuple[Key, ...] = (),
        zeros: tuple[Any, ...] = (),
    ) -> None:
        """Note what is to be sent; it is given its weight by `parcel`."""
        self.outbox.append(Outgoing(to, message, values, zeros))

    def parcel(self) -> list[tuple[Outgoing, Weighted]]:
        """What is to be sent, with its weight: all of it, unless some is needed here.

        The first message carries the change in owed sends.
        """
        outbox, self.outbox = self.outbox, []
        if not outbox:
            return []
        if self.passive:
            parts, self.weight = split(self.weight, len(outbox)), NOTHING
        else:
            self.weight, *parts = split(self.weight, len(outbox) + 1)
        owed, self.unreported = self.unreported, 0
        sent = []
        for outgoing, part in zip(outbox, parts, strict=True):
            sent.append((outgoing, outgoing.message(part, owed)))
            owed = 0
        return sent

    def hand_back(self) -> tuple[Weight, int]:
        """All the weight held here, and the change in owed sends, for the owner."""
        weight, self.weight = self.weight, NOTHING
        owed, self.unreported = self.unreported, 0
        return weight, owed
