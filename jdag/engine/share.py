"""One worker's share of one pass: what it waits for, and what it is about to send.

Each edge that is counted is one contribution to wait for. FAST counts once, when the
pass is first seen: everything behind the roots and all sends here. SMART counts only
what the roots need, as marks come: from the roots here, and from each slot of a send
that a recv elsewhere needs. A recv that is reached marks its slots, each once.

Invariants: `remaining` of a vertex is the number of its counted edges that have brought
nothing yet; a worker that is not passive holds credit; what is in `outbox` is sent
before the handling of the current event ends.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any, NamedTuple

from jdag.engine.credit import NOTHING, WHOLE, Credit, added, split
from jdag.engine.graph import Fragment, Node, RecvEnd, SendEnd, Value, Vertex
from jdag.engine.protocol import (
    Credited,
    Key,
    LeafId,
    Marked,
    Mode,
    Path,
    Root,
    Worker,
)

Addend = tuple[
    tuple[float, ...], int, Key
]  # Path of the consumer, position there, value.
SEED = (inf,)  # Sorts after every path: seeds come last.


class Outgoing(NamedTuple):
    """A message to be sent once its credit and change in owed sends are known.

    `values` are sent with it; `zeros` are the shapes of those that are left out.
    """

    to: Worker
    message: Callable[[Credit, int], Credited]
    values: tuple[Key, ...]
    zeros: tuple[Any, ...]


class Due:
    """The cotangents of one vertex: how many are awaited, and those that have come."""

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

    def replace(self, slot: int, key: Key) -> bool:
        """Put in a value made of what was taken; whether it is the last awaited."""
        self.addends[slot] = [(SEED, 0, key)]
        self.remaining -= 1
        return self.remaining == 0


def ordered(addends: list[Addend]) -> tuple[Key, ...]:
    """The addends in the order of the program, whatever order they came in."""
    if len(addends) == 1:
        return (addends[0][2],)
    return tuple([key for _, _, key in sorted(addends)])


class Pass:
    """One backward pass as one worker sees it."""

    __slots__ = (
        "computing",
        "counted",
        "credit",
        "dues",
        "failed",
        "mode",
        "needed",
        "number",
        "observed",
        "oldest",
        "outbox",
        "owed",
        "parent",
        "ready",
        "retain",
        "roots",
        "seeded",
        "sighted",
        "staged",
        "unreported",
        "untold",
        "waiting",
    )  # fmt: skip

    def __init__(
        self, number: int, mode: Mode, retain: bool, parent: Worker | None
    ) -> None:
        self.number = number
        self.mode = mode
        self.retain = retain
        # Who spoke of it first: a failure goes there. None on the pass's owner.
        self.parent = parent
        self.credit = WHOLE if parent is None else NOTHING
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
    def passive(self) -> bool:
        """Whether nothing here can go on by itself."""
        return not (self.computing or self.waiting or self.ready)

    def take(self, credit: Credit, owed: int) -> None:
        """A message of the pass came, with a part of its credit."""
        self.credit = added(self.credit, credit)
        self.unreported += owed

    def say(
        self,
        to: Worker,
        message: Callable[[Credit, int], Credited],
        values: tuple[Key, ...] = (),
        zeros: tuple[Any, ...] = (),
    ) -> None:
        """Note what is to be sent; it is given its credit by `parcel`."""
        self.outbox.append(Outgoing(to, message, values, zeros))

    def parcel(self, is_passive: bool) -> list[tuple[Outgoing, Credited]]:
        """What is to be sent, with its credit: all of it, unless some is needed here.

        The first message carries the change in owed sends.
        """
        outbox, self.outbox = self.outbox, []
        if is_passive:
            parts, self.credit = split(self.credit, len(outbox)), NOTHING
        else:
            self.credit, *parts = split(self.credit, len(outbox) + 1)
        owed, self.unreported = self.unreported, 0
        sent = []
        for outgoing, part in zip(outbox, parts, strict=True):
            sent.append((outgoing, outgoing.message(part, owed)))
            owed = 0
        return sent

    def hand_back(self) -> tuple[Credit, int]:
        """All the credit held here, and the change in owed sends, for the owner."""
        credit, self.credit = self.credit, NOTHING
        owed, self.unreported = self.unreported, 0
        return credit, owed


def count(fragment: Fragment, live: Pass) -> Node | None:
    """Count every edge behind the roots here and, in FAST, behind all unspent sends."""
    values = [fragment.values[root.key] for root in live.roots]
    if live.mode is Mode.FAST:
        for send in fragment.sends.values():
            slots = [slot for slot, spent in enumerate(send.spent) if not spent]
            if slots:
                values.extend(_owe(live, send, slots))
    return _walk(live, values)


def mark(fragment: Fragment, live: Pass, transfers: Iterable[Marked]) -> Node | None:
    """Count every edge behind these slots of sends here."""
    values: list[Value] = []
    for marked in transfers:
        slots = [slot for slot, here in enumerate(marked.slots) if here]
        values.extend(_owe(live, fragment.sends[marked.path], slots))
    return _walk(live, values)


def _owe(live: Pass, send: SendEnd, slots: list[int]) -> list[Value]:
    """Count slots of a send: the send is one dependency, owed until it is answered."""
    counted = live.counted.get(send.path)
    if counted is None:
        counted = live.counted[send.path] = [False] * len(send.inputs)
        live.owed[send.path] = send
        live.unreported += 1
    values = []
    for slot in slots:
        value = send.inputs[slot]
        assert value is not None and not counted[slot], (send.path, slot)
        counted[slot] = True
        send.spent[slot] = send.spent[slot] or not live.retain
        values.append(value)
    return values


def _walk(live: Pass, values: Iterable[Value]) -> Node | None:
    """Count the edges to these values and all behind them.

    If the graph is not retained, what is counted is spent by that.

    Returns:
        None, or a node that was reached although an earlier pass had spent it.
    """
    spends = not live.retain
    smart = live.mode is Mode.SMART
    stack: list[Node] = []
    dues = live.dues
    while True:
        for value in values:
            vertex = value.producer
            if vertex is None:
                continue  # It was never here: its call holds the failure.
            due = dues.get(vertex)
            if due is None:
                due = dues[vertex] = Due(len(vertex.outputs))
                if type(vertex) is Node:
                    if vertex.spent:
                        return vertex
                    vertex.spent = spends
                    stack.append(vertex)
            due.remaining += 1
            if smart and type(vertex) is RecvEnd:
                _need(live, vertex, value.index)
        if not stack:
            return None
        values = stack.pop().inputs


def _need(live: Pass, recv: RecvEnd, slot: int) -> None:
    needed = live.needed.setdefault(recv, {})
    if slot not in needed:
        needed[slot] = None
        live.untold.setdefault(recv, {})[slot] = None
