"""One worker's share of one pass: what it waits for, and what it is about to send.

Each counted edge is one contribution to wait for. FAST counts once, when the pass is
first seen: everything behind the roots and all sends here. SMART counts only what the
roots need, as marks arrive: from the roots here, and from each slot of a send that a
recv elsewhere needs. A recv that is reached marks its slots, each once.

Invariants: `remaining` of a vertex is the number of its counted edges that have not yet
delivered; a worker that is not passive holds credit; `outbox` is empty when the
handling of an event ends.
"""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any

from msgspec import Struct

from jdag.engine.credit import NOTHING, Credit, split
from jdag.engine.graph import Fragment, LeafEnd, Node, RecvEnd, SendEnd, Value, Vertex
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
Edge = tuple[tuple[float, ...], int]  # An addend without its value.
SEED = (inf,)  # Sorts after every path: seeds come last.
FOLDED = ()  # Sorts before every path: the sum of the first ones.
# So many are summed at once, also by the machine: its bits may depend on that.
ADDENDS_MAX = 8


class Outgoing(Struct):
    """A message to be sent once its credit and change in owed sends are known.

    `values` are sent with it; `zeros` are the shapes of the symbolic zeros.
    """

    to: Worker
    message: Callable[[Credit, int], Credited]
    values: tuple[Key, ...] = ()
    zeros: tuple[Any, ...] = ()


class Due(Struct):
    """Cotangents of one vertex: those that arrived, and how many are still awaited."""

    addends: list[list[Addend]]
    remaining: int = 0
    hooked: bool = False  # Hooks were applied.
    came: dict[Edge, None] = {}  # Of a leaf with many contributions: those that came.
    folding: bool = False

    def taken(self, slot: int) -> tuple[Key, ...]:
        """Remove and return one slot's addends, in order; the caller drops them."""
        taken = ordered(self.addends[slot])
        self.addends[slot] = []
        return taken


def ordered(addends: list[Addend]) -> tuple[Key, ...]:
    """The keys of addends in program order, whatever their order of arrival."""
    if len(addends) == 1:
        return (addends[0][2],)
    return tuple([key for _, _, key in sorted(addends)])


class Pass(Struct, eq=False):
    """One backward pass as one worker sees it."""

    fragment: Fragment
    number: int
    mode: Mode
    retain: bool
    # The worker that first sent a message of the pass; failures go there. None at the
    # owner.
    parent: Worker | None
    credit: Credit = NOTHING
    unreported: int = 0  # Change in owed sends, not yet sent.
    outbox: list[Outgoing] = []
    # Jobs, and nodes that have all cotangents but whose forward has not run.
    busy: int = 0
    owed: dict[Path, SendEnd] = {}
    counted: dict[Path, list[bool]] = {}  # Per send, which slots are counted.
    needed: dict[Value, None] = {}  # SMART: slots of recvs that roots need.
    dues: dict[Vertex, Due] = {}
    expected: dict[LeafEnd, list[Edge]] = {}  # The contributions that are counted.
    ready: list[Any] = []  # Vertices that have all their contributions.
    staged: dict[LeafId, Key | None] = {}
    oldest: dict[LeafId, int] = {}  # The oldest version differentiated.
    observed: dict[LeafId, Key] = {}  # This pass's gradients, for hooks.
    roots: tuple[Root, ...] = ()  # Roots on this worker.
    seeded: bool = False  # The roots have their cotangents.
    sighted: bool = False  # FAST: dependencies have been counted here.
    failed: bool = False
    outcome: Outcome | None = None  # None while it is in progress.

    def parcel(self) -> list[tuple[Outgoing, Credited]]:
        """Empty the outbox: split the credit among its messages, with a part if busy.

        The first message carries the change in owed sends.
        """
        outbox, self.outbox = self.outbox, []
        count = len(outbox) + (self.busy > 0)
        parts = [self.credit] if count == 1 else split(self.credit, count)
        self.credit = parts.pop(0) if self.busy else NOTHING
        owed, self.unreported = self.unreported, 0
        sent = []
        for outgoing, part in zip(outbox, parts, strict=True):
            sent.append((outgoing, outgoing.message(part, owed)))
            owed = 0
        return sent


def first(live: Pass) -> list[Value]:
    """Values to count from first: roots here and, in FAST, unspent slots of sends."""
    values = [live.fragment.values[root.key] for root in live.roots]
    for root, value in zip(live.roots, values, strict=True):
        expect(live, value, (SEED, root.number))
    if live.mode is Mode.FAST:
        for send in live.fragment.sends.values():
            slots = [slot for slot, spent in enumerate(send.spent) if not spent]
            if slots:
                values.extend(_owe(live, send, slots))
    return values


def marked(live: Pass, transfers: Iterable[Marked]) -> list[Value]:
    """Values to count from when these slots of sends are marked."""
    values: list[Value] = []
    for transfer in transfers:
        slots = [slot for slot, here in enumerate(transfer.slots) if here]
        values.extend(_owe(live, live.fragment.sends[transfer.path], slots))
    return values


def expect(live: Pass, value: Value, edge: Edge) -> None:
    """Note that an edge contributes to the gradient of a leaf, if the value is one."""
    if type(value.producer) is LeafEnd:
        live.expected.setdefault(value.producer, []).append(edge)


def _owe(live: Pass, send: SendEnd, slots: list[int]) -> list[Value]:
    """Count slots of a send, which is one dependency, owed until answered."""
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
        expect(live, value, (send.path, slot))
        values.append(value)
    return values


def walk(
    values: Iterable[Value], dues: dict[Vertex, Due]
) -> tuple[list[Node], list[tuple[RecvEnd, int]]]:
    """Count in `dues` the edges to these values and to everything behind them.

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
                continue  # It was never here; its call holds the failure.
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
