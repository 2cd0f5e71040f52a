"""The state of one pass on one worker: awaited contributions and messages to send.

Each counted edge is one contribution to wait for. FAST counts once, at the first
message of the pass: all dependencies of the roots and of all sends here. SMART counts
only what the roots need, as marks arrive: dependencies of the roots here, and of each
marked slot of a send. A recv that is reached marks its slots, each once.

Invariants: `remaining` of a vertex is the number of its counted edges that have not yet
delivered; a worker that is not passive holds credit; `outbox` is empty when the
handling of an event ends.
"""

from collections.abc import Callable, Iterable, Sequence
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

SEED = (inf,)  # This path sorts last, so seeds are the last addends.
# Edges to count: the consumer's path, the first edge's position, the edges' values.
Uses = tuple[tuple[float, ...], int, tuple[Value, ...]]


class PendingSend(Struct):
    """A message of a pass before its credit and its change in owed sends are known.

    `values` are sent with it; `zeros` are the shapes of the symbolic zeros.
    """

    to: Worker
    message: Callable[[Credit, int], Credited]
    values: tuple[Key, ...] = ()
    zeros: tuple[Any, ...] = ()


class Due(Struct):
    """The cotangents of one vertex: arrived addends, and the number still awaited.

    `edges` has the counted edges of a recv or leaf, each with its slot, until the first
    addend arrives. `remaining` includes sums of trees.
    """

    addends: list[Any]  # For each slot a list of addends, or () before the first.
    edges: list[tuple[tuple[float, ...], int, int]] | None
    remaining: int = 0
    hooked: bool = False  # Whether hooks were applied.
    trees: dict[int, Tree] | None = None  # For slots with more than eight addends.

    def plant(self) -> None:
        """Create the trees at the first addend. All edges are counted by then."""
        by_slot: dict[int, list[AddendEdge]] = {}
        for path, position, slot in self.edges or ():
            by_slot.setdefault(slot, []).append((path, position))
        self.trees, self.edges = {}, None
        for slot, edges in by_slot.items():
            if len(edges) > ADDENDS_MAX:
                self.addends[slot] = []
                self.trees[slot] = addend_tree(edges, self.addends[slot])

    def waiting(self) -> list[Key]:
        keys = [key for slot in self.addends for _, _, key in slot]
        for tree in (self.trees or {}).values():
            keys += tree.waiting()
        return keys

    def take(self, slot: int) -> tuple[Key, ...]:
        """Remove and return a slot's addends, in order. The caller must drop them."""
        addends = ordered(self.addends[slot])
        self.addends[slot] = ()
        return addends


def ordered(addends: Sequence[Addend]) -> tuple[Key, ...]:
    if len(addends) == 1:
        return (addends[0][2],)
    return tuple([key for _, _, key in sorted(addends)])


class Pass(Struct, eq=False):
    fragment: Fragment
    number: int
    mode: Mode
    retain: bool
    # The sender of the pass's first message, which receives failures. None at the
    # owner.
    parent: Worker | None
    credit: Credit = NOTHING
    unreported: int = 0  # Change in the number of owed sends, not yet sent.
    outbox: list[PendingSend] = []
    # Number of jobs in progress, plus nodes that have all cotangents before their
    # forward.
    busy: int = 0
    owed: dict[Path, SendEnd] = {}  # Counted sends without a cotangent.
    counted: dict[Path, list[bool]] = {}  # By send, whether each slot is counted.
    needed: dict[Value, None] = {}  # SMART: slots of recvs that roots need.
    dues: dict[LocalVertex, Due] = {}
    ready: list[Any] = []  # Vertices that have all their contributions.
    staged: dict[LeafId, Key | None] = {}
    oldest: dict[LeafId, int] = {}  # By leaf, the oldest version that the pass reached.
    observed: dict[LeafId, Key] = {}  # Gradients of this pass, for observing hooks.
    roots: tuple[Root, ...] = ()  # Roots on this worker.
    seeded: bool = False  # Whether the roots have their cotangents.
    sighted: bool = False  # FAST: whether dependencies have been counted here.
    failed: bool = False
    outcome: Outcome | None = None  # None while the pass is in progress.

    def count_down(self, vertex: LocalVertex) -> None:
        due = self.dues[vertex]
        due.remaining -= 1
        if due.remaining == 0:
            self.ready.append(vertex)

    def parcel(self) -> list[tuple[PendingSend, Credited]]:
        """Empty the outbox; split the credit among its messages.

        A worker that is still busy keeps a part of the credit. The first message
        carries the change in owed sends.
        """
        outbox, self.outbox = self.outbox, []
        owed, self.unreported = self.unreported, 0
        if len(outbox) == 1 and not self.busy:
            part, self.credit = self.credit, NOTHING
            return [(outbox[0], outbox[0].message(part, owed))]
        parts = split_credit(self.credit, len(outbox) + (self.busy > 0))
        self.credit = parts.pop(0) if self.busy else NOTHING
        sent = []
        for outgoing, part in zip(outbox, parts, strict=True):
            sent.append((outgoing, outgoing.message(part, owed)))
            owed = 0
        return sent


def first(live: Pass) -> list[Uses]:
    values = live.fragment.values
    uses: list[Uses] = [(SEED, r.number, (values[r.key],)) for r in live.roots]
    if live.mode is Mode.FAST:
        for send in live.fragment.sends.values():
            slots = [slot for slot, spent in enumerate(send.spent) if not spent]
            if slots:
                uses.extend(_owe(live, send, slots))
    return uses


def marked(live: Pass, transfers: Iterable[Marked]) -> list[Uses]:
    uses: list[Uses] = []
    for transfer in transfers:
        slots = [slot for slot, needed in enumerate(transfer.slots) if needed]
        uses.extend(_owe(live, live.fragment.sends[transfer.path], slots))
    return uses


def _owe(live: Pass, send: SendEnd, slots: list[int]) -> list[Uses]:
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
    """Count in `dues` these edges and all edges to their dependencies.

    Returns:
        The nodes that had no `Due` before, and the slots of recvs that were reached.
    """
    reached: list[CallNode] = []
    received: list[tuple[RecvEnd, int]] = []
    stack: list[CallNode] = []
    while True:
        for path, start, values in uses:
            for position, value in enumerate(values, start):
                vertex = value.producer
                if vertex is None:
                    continue  # The value is missing, so its call fails.
                due = dues.get(vertex)
                if due is None:
                    due = dues[vertex] = Due([()] * len(vertex.outputs), None)
                    if type(vertex) is CallNode:
                        reached.append(vertex)
                        stack.append(vertex)
                    else:
                        due.edges = []
                due.remaining += 1
                if due.edges is not None:
                    due.edges.append((path, position, value.index))
                if type(vertex) is RecvEnd:
                    received.append((vertex, value.index))
        if not stack:
            return reached, received
        node = stack.pop()
        uses = ((node.path, 0, node.inputs),)
