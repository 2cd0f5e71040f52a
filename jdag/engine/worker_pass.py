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

from jdag.engine.addends import ADDENDS_MAX, Addend, AddendEdge, Tree, addend_tree
from jdag.engine.credit import NOTHING, Credit, split_credit
from jdag.engine.graph import CallNode, Fragment, LocalVertex, RecvEnd, SendEnd, Value
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

SEED = (inf,)  # Sorts after every path: seeds come last.
# Edges to count: path of the consumer, position of the first one there, their values.
Uses = tuple[tuple[float, ...], int, tuple[Value, ...]]


class PendingSend(Struct):
    """A message to be sent once its credit and change in owed sends are known.

    `values` are sent with it; `zeros` are the shapes of the symbolic zeros.
    """

    to: Worker
    message: Callable[[Credit, int], Credited]
    values: tuple[Key, ...] = ()
    zeros: tuple[Any, ...] = ()


class Due(Struct):
    """Cotangents of one vertex: those that arrived, and how many are still awaited.

    Of a recv or leaf, `edges` are those that are counted, each with its slot. Sums of
    many in one slot are awaited too.
    """

    addends: list[list[Addend]]
    edges: list[tuple[AddendEdge, int]] | None
    remaining: int = 0
    hooked: bool = False  # Hooks were applied.
    trees: dict[int, Tree] = {}  # Of slots with many addends.

    def plant(self) -> None:
        """Make the trees, when the first addend arrives: all edges are counted."""
        by_slot: dict[int, list[AddendEdge]] = {}
        for edge, slot in self.edges or ():
            by_slot.setdefault(slot, []).append(edge)
        many = [slot for slot, edges in by_slot.items() if len(edges) > ADDENDS_MAX]
        self.trees = {
            slot: addend_tree(by_slot[slot], self.addends[slot]) for slot in many
        }
        self.edges = None

    def held(self) -> list[Key]:
        """The keys of all cotangents and sums that wait here."""
        keys = [key for slot in self.addends for _, _, key in slot]
        for one in self.trees.values():
            keys += one.waiting()
        return keys

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
    outbox: list[PendingSend] = []
    # Jobs, and nodes that have all cotangents but whose forward has not run.
    busy: int = 0
    owed: dict[Path, SendEnd] = {}
    counted: dict[Path, list[bool]] = {}  # Per send, which slots are counted.
    needed: dict[Value, None] = {}  # SMART: slots of recvs that roots need.
    dues: dict[LocalVertex, Due] = {}
    ready: list[Any] = []  # Vertices that have all their contributions.
    staged: dict[LeafId, Key | None] = {}
    oldest: dict[LeafId, int] = {}  # The oldest version differentiated.
    observed: dict[LeafId, Key] = {}  # This pass's gradients, for hooks.
    roots: tuple[Root, ...] = ()  # Roots on this worker.
    seeded: bool = False  # The roots have their cotangents.
    sighted: bool = False  # FAST: dependencies have been counted here.
    failed: bool = False
    outcome: Outcome | None = None  # None while it is in progress.

    def less(self, vertex: LocalVertex) -> None:
        """One that a vertex waited for is there; after the last it is ready."""
        due = self.dues[vertex]
        due.remaining -= 1
        if due.remaining == 0:
            self.ready.append(vertex)

    def parcel(self) -> list[tuple[PendingSend, Credited]]:
        """Empty the outbox: split the credit among its messages, with a part if busy.

        The first message carries the change in owed sends.
        """
        outbox, self.outbox = self.outbox, []
        count = len(outbox) + (self.busy > 0)
        parts = [self.credit] if count == 1 else split_credit(self.credit, count)
        self.credit = parts.pop(0) if self.busy else NOTHING
        owed, self.unreported = self.unreported, 0
        sent = []
        for outgoing, part in zip(outbox, parts, strict=True):
            sent.append((outgoing, outgoing.message(part, owed)))
            owed = 0
        return sent


def first(live: Pass) -> list[Uses]:
    """Edges to count from first: roots here and, in FAST, unspent slots of sends."""
    values = live.fragment.values
    uses: list[Uses] = [(SEED, r.number, (values[r.key],)) for r in live.roots]
    if live.mode is Mode.FAST:
        for send in live.fragment.sends.values():
            slots = [slot for slot, spent in enumerate(send.spent) if not spent]
            if slots:
                uses.extend(_owe(live, send, slots))
    return uses


def marked(live: Pass, transfers: Iterable[Marked]) -> list[Uses]:
    """Edges to count from when these slots of sends are marked."""
    uses: list[Uses] = []
    for transfer in transfers:
        slots = [slot for slot, here in enumerate(transfer.slots) if here]
        uses.extend(_owe(live, live.fragment.sends[transfer.path], slots))
    return uses


def _owe(live: Pass, send: SendEnd, slots: list[int]) -> list[Uses]:
    """Count slots of a send, which is one dependency, owed until answered."""
    counted = live.counted.get(send.path)
    if counted is None:
        counted = live.counted[send.path] = [False] * len(send.inputs)
        live.owed[send.path] = send
        live.unreported += 1
    uses: list[Uses] = []
    for slot in slots:
        value = send.inputs[slot]
        assert value is not None and not counted[slot], (send.path, slot)
        counted[slot] = True
        send.spent[slot] = send.spent[slot] or not live.retain
        uses.append((send.path, slot, (value,)))
    return uses


def walk(
    uses: Iterable[Uses], dues: dict[LocalVertex, Due]
) -> tuple[list[CallNode], list[tuple[RecvEnd, int]]]:
    """Count in `dues` these edges and those to everything behind them.

    Returns:
        The nodes that had no due before, and the slots of recvs that were reached.
    """
    reached: list[CallNode] = []
    received: list[tuple[RecvEnd, int]] = []
    stack: list[CallNode] = []
    while True:
        for path, start, values in uses:
            for position, value in enumerate(values, start):
                vertex = value.producer
                if vertex is None:
                    continue  # It was never here; its call holds the failure.
                due = dues.get(vertex)
                if due is None:
                    due = dues[vertex] = Due([[] for _ in vertex.outputs], None)
                    if type(vertex) is CallNode:
                        reached.append(vertex)
                        stack.append(vertex)
                    else:
                        due.edges = []
                due.remaining += 1
                if due.edges is not None:
                    due.edges.append(((path, position), value.index))
                if type(vertex) is RecvEnd:
                    received.append((vertex, value.index))
        if not stack:
            return reached, received
        node = stack.pop()
        uses = ((node.path, 0, node.inputs),)
