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
from typing import Any

from msgspec import Struct

from jdag.engine.credit import NOTHING, Credit, split
from jdag.engine.graph import Fragment, Node, RecvEnd, SendEnd, Value, Vertex
from jdag.engine.protocol import (
    Credited,
    Key,
    LeafId,
    Marked,
    Mode,
    Outcome,
    Path,
    Root,
    Worker,
)

# Path of the consumer, position there, key of the value.
Addend = tuple[tuple[float, ...], int, Key]
SEED = (inf,)  # Sorts after every path: seeds come last.


class Outgoing(Struct):
    """A message to be sent once its credit and change in owed sends are known.

    `values` are sent with it; `zeros` are the shapes of those that are left out.
    """

    to: Worker
    message: Callable[[Credit, int], Credited]
    values: tuple[Key, ...] = ()
    zeros: tuple[Any, ...] = ()


class Due(Struct):
    """The cotangents of one vertex: how many are awaited, and those that have come."""

    addends: list[list[Addend]]
    remaining: int = 0
    hooked: bool = False  # What has come has been through its hooks.

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


class Pass(Struct, eq=False):
    """One backward pass as one worker sees it."""

    fragment: Fragment
    number: int
    mode: Mode
    retain: bool
    # Who spoke of it first: a failure goes there. None on the pass's owner.
    parent: Worker | None
    credit: Credit = NOTHING
    unreported: int = 0  # The change in owed sends that nobody was told of.
    outbox: list[Outgoing] = []
    # Jobs, and nodes with all their cotangents whose forward has not run.
    busy: int = 0
    owed: dict[Path, SendEnd] = {}
    counted: dict[Path, list[bool]] = {}  # Of each send, the slots that are.
    needed: dict[Value, None] = {}  # SMART: slots of recvs that roots need.
    dues: dict[Vertex, Due] = {}
    ready: list[Any] = []  # Vertices with all their contributions.
    staged: dict[LeafId, Key | None] = {}
    oldest: dict[LeafId, int] = {}  # The versions that it differentiated.
    observed: dict[LeafId, Key] = {}  # This pass's gradients, for hooks.
    roots: tuple[Root, ...] = ()  # Those here.
    seeded: bool = False  # They have their cotangents.
    sighted: bool = False  # FAST: dependencies have been counted here.
    failed: bool = False
    outcome: Outcome | None = None  # None while it is in progress.

    def parcel(self) -> list[tuple[Outgoing, Credited]]:
        """Empty the outbox: the messages with all the credit, or, if busy, with a part.

        The first message carries the change in owed sends.
        """
        outbox, self.outbox = self.outbox, []
        parts = split(self.credit, len(outbox) + (self.busy > 0))
        self.credit = parts.pop(0) if self.busy else NOTHING
        owed, self.unreported = self.unreported, 0
        sent = []
        for outgoing, part in zip(outbox, parts, strict=True):
            sent.append((outgoing, outgoing.message(part, owed)))
            owed = 0
        return sent


def first(live: Pass) -> list[Value]:
    """What to count from first: roots here and, in FAST, all unspent slots of sends."""
    values = [live.fragment.values[root.key] for root in live.roots]
    if live.mode is Mode.FAST:
        for send in live.fragment.sends.values():
            slots = [slot for slot, spent in enumerate(send.spent) if not spent]
            if slots:
                values.extend(_owe(live, send, slots))
    return values


def marked(live: Pass, transfers: Iterable[Marked]) -> list[Value]:
    """What to count from as these slots of sends are needed."""
    values: list[Value] = []
    for transfer in transfers:
        slots = [slot for slot, here in enumerate(transfer.slots) if here]
        values.extend(_owe(live, live.fragment.sends[transfer.path], slots))
    return values


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


def walk(
    values: Iterable[Value], dues: dict[Vertex, Due]
) -> tuple[list[Node], list[tuple[RecvEnd, int]]]:
    """Count in `dues` the edges to these values and all behind them.

    Returns:
        The nodes that had no due before, and the slots of recvs that were reached.
    """
    reached: list[Node] = []
    received: list[tuple[RecvEnd, int]] = []
    stack: list[Node] = []
    while True:
        for value in values:
            vertex = value.producer
            if vertex is None:
                continue  # It was never here: its call holds the failure.
            due = dues.get(vertex)
            if due is None:
                due = dues[vertex] = Due([[] for _ in vertex.outputs])
                if type(vertex) is Node:
                    reached.append(vertex)
                    stack.append(vertex)
            due.remaining += 1
            if type(vertex) is RecvEnd:
                received.append((vertex, value.index))
        if not stack:
            return reached, received
        values = stack.pop().inputs
