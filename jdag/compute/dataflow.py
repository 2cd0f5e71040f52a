"""The calls of a program, and what differentiation adds to them, as a dataflow graph.

A value that is used on another worker crosses once; a call that the program makes to
move it is a call like others.

Invariants
- Values have numbers, and nodes places, in the order in which they are made: what a
  node reads has smaller numbers than what it makes.
- `differentiate` adds what a SMART pass of the engine (`jdag.engine.backward`)
  computes: the same sums, in the same order, with the same symbolic zeros. So the
  nodes, run one by one, give its bits.
"""

from collections.abc import Sequence
from itertools import compress
from operator import and_
from typing import Any, NamedTuple

from jdag.compute.avals import Aval
from jdag.engine.names import LeafId, Worker
from jdag.engine.segments import NodeKind

# What the caller of a step sends to each worker that reads it; it never crosses.
SENT = ("input", "constant")


class Value(NamedTuple):
    """A value: where it is made, and its source if no node makes it.

    `source` is "input", "constant" or "leaf"; "" is what a node makes.
    """

    worker: Worker
    aval: Aval
    tracked: bool
    source: str = ""
    leaf: LeafId | None = None


class Node(NamedTuple):
    """A node as in `jdag.engine.segments`, over values of the graph.

    `inputs` of a VJP are the addends alone; `forward` is the place of its forward.
    """

    kind: NodeKind
    worker: Worker
    inputs: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    pair: Any = None
    name: str = ""
    site: str = ""
    keeps: bool = False  # FILL: ones instead of zeros.
    update: bool = False  # It makes new versions of leaves.
    forward: int | None = None


class Graph:
    """A program over workers: `values` by number and `nodes` in program order."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.nodes: list[Node] = []
        # The first call that uses a value on another worker, and the slot there.
        self._transfers: dict[tuple[int, Worker, bool], tuple[int, int]] = {}
        # Of each value: worker, place and position of a consumer, and its cotangent.
        self._cotangents: dict[int, list[tuple[Worker, int, int, int]]] = {}
        self._seeds: dict[int, list[int]] = {}

    def worker(self, value: int) -> Worker:
        """The worker where a value is made, or lives."""
        return self.values[value].worker

    def aval(self, value: int) -> Aval:
        """The abstract value of a value."""
        return self.values[value].aval

    def tracked(self, value: int) -> bool:
        """Whether cotangents flow to a value."""
        return self.values[value].tracked

    def source(
        self,
        kind: str,
        worker: Worker,
        aval: Aval,
        *,
        leaf: LeafId | None = None,
        tracked: bool = False,
    ) -> int:
        """Add an "input" or "constant" of the caller, or a "leaf" of its owner.

        Returns:
            The number of the value: its slot in the plan.
        """
        assert (kind == "leaf") == (leaf is not None), (kind, leaf)
        return self._value(Value(worker, aval, tracked, kind, leaf))

    def call(
        self,
        worker: Worker,
        pair: Any,
        inputs: Sequence[int],
        tracked: Sequence[bool],
        name: str,
        site: str,
        *,
        update: bool = False,
    ) -> tuple[int, ...]:
        """Add a call, in program order; return the numbers of its outputs.

        Args:
            worker: where it runs.
            pair: a `jdag.compute.pairs.Pair` or alike.
            inputs: the value of each argument.
            tracked: whether cotangents flow back to it.
            name: of the function, for errors and pictures.
            site: of the call, for errors.
            update: it makes new versions of leaves of that worker, from versions of
                leaves there and from gradients; no call reads what it makes.
        """
        slots: dict[Worker, int] = {}
        for value, on in zip(inputs, tracked, strict=True):
            owner, transfer = self.worker(value), (value, worker, on)
            if owner == worker or self.values[value].source in SENT:
                continue
            if transfer not in self._transfers:
                slots[owner] = slot = slots.get(owner, -1) + 1
                self._transfers[transfer] = (len(self.nodes), slot)
        outputs = self._made(worker, pair.out_avals, pair.out_devices, pair.out_tracked)
        made = (NodeKind.FORWARD, worker, (tuple(inputs),), outputs, pair, name, site)
        self.nodes.append(Node(*made, update=update))
        return outputs

    def differentiate(self, roots: Sequence[int]) -> dict[LeafId, int]:
        """Add the nodes of a backward pass from these values, seeded by ones; once.

        Returns:
            The gradient of each leaf that the roots need, in the order of the leaves'
            numbers. If it is a single cotangent, its worker is where that was made.
        """
        needed = bytearray(len(self.values))
        calls = len(self.nodes)
        for root in roots:
            needed[root] = 1
            self._seeds.setdefault(root, []).append(self._like(root, ones=True))
        for place in reversed(range(calls)):
            node = self.nodes[place]
            outputs = [value for value in node.outputs if self.tracked(value)]
            if any([needed[value] for value in outputs]):
                for value in compress(node.inputs[0], node.pair.tracked):
                    needed[value] = 1
                addends = tuple(map(self._addends, outputs))
                if any(addends):
                    self._vjp(place, node, addends)
        gradients: dict[LeafId, int] = {}
        for number, known in enumerate(self.values[: len(needed)]):
            if known.leaf is not None and known.tracked and needed[number]:
                found = self._addends(number) or (self._like(number, ones=False),)
                gradients[known.leaf] = self._sum(known.worker, found)
        return gradients

    def _vjp(
        self, place: int, node: Node, addends: tuple[tuple[int, ...], ...]
    ) -> None:
        pair, worker = node.pair, node.worker
        inputs = tuple(compress(node.inputs[0], pair.tracked))
        avals = [aval.strong for aval in compress(pair.avals, pair.tracked)]
        outputs = self._made(worker, avals, pair.in_devices, (False,) * len(avals))
        made = (NodeKind.VJP, worker, addends, outputs, pair, node.name, node.site)
        self.nodes.append(Node(*made, forward=place))
        came = list(map(bool, addends))
        for position, reached in enumerate(pair.reaches):
            if any(map(and_, reached, came)):  # Otherwise it is a symbolic zero.
                cotangent = (worker, place, position, outputs[position])
                self._cotangents.setdefault(inputs[position], []).append(cotangent)

    def _addends(self, value: int) -> tuple[int, ...]:
        """The addends of a value's cotangent, in order; none is a symbolic zero.

        Cotangents from calls on another worker are summed there, and count as one.
        """
        found: list[tuple[int, int, int]] = []
        elsewhere: dict[Worker, list[tuple[int, int, int]]] = {}
        for worker, *addend in self._cotangents.pop(value, ()):
            here = worker == self.worker(value)
            few = found if here else elsewhere.setdefault(worker, [])
            few.append((addend[0], addend[1], addend[2]))
        for worker, few in elsewhere.items():
            total = self._sum(worker, [number for _, _, number in sorted(few)])
            found.append((*self._transfers[value, worker, True], total))
        return (
            *[number for _, _, number in sorted(found)],
            *self._seeds.get(value, ()),
        )

    def _sum(self, worker: Worker, addends: Sequence[int]) -> int:
        if len(addends) == 1:
            return addends[0]
        aval = self.aval(addends[-1])  # A sum is on the device of its last addend.
        total = self._value(Value(worker, aval, False))
        self.nodes.append(Node(NodeKind.SUM, worker, (tuple(addends),), (total,)))
        return total

    def _like(self, value: int, *, ones: bool) -> int:
        worker, aval = self.worker(value), self.aval(value).strong
        filled = self._value(Value(worker, aval, False))
        made = (NodeKind.FILL, worker, ((value,),), (filled,))
        self.nodes.append(Node(*made, keeps=ones))
        return filled

    def _made(
        self,
        worker: Worker,
        avals: Sequence[Aval],
        devices: Sequence[str | None] | None,
        tracked: Sequence[bool],
    ) -> tuple[int, ...]:
        where = devices or (None,) * len(avals)
        sides = zip(avals, where, tracked, strict=True)
        values = [Value(worker, aval.on(device), on) for aval, device, on in sides]
        return tuple(map(self._value, values))

    def _value(self, value: Value) -> int:
        self.values.append(value)
        return len(self.values) - 1
