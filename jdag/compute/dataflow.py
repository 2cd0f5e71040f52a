"""The calls of a program, and what differentiation adds, as a graph over workers.

Invariants
- Values have numbers, and nodes places, in the order in which they are made.
- `differentiate` adds what a SMART pass of the engine (`jdag.engine.backward`)
  computes: the same sums, in the same order, with the same symbolic zeros. So the
  nodes, run one by one, give its bits.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from functools import partial
from itertools import compress, repeat
from operator import and_
from typing import Any, NamedTuple

from jdag.compute.avals import Aval
from jdag.compute.pairs import input_types, output_types
from jdag.engine.addends import top
from jdag.engine.names import LeafId, Tag, Worker
from jdag.engine.segments import NodeKind

Numbers = tuple[int, ...]
_Places = Sequence[int | None]  # Addends by place; None is a symbolic zero.
_SENT = ("input", "constant")  # By the caller of a step, straight to their readers.


class DataflowValue(NamedTuple):
    """A value: where it is made or lives, and its `source` if no node makes it."""

    worker: Worker
    aval: Aval
    tracked: bool
    source: str = ""  # "input", "constant" or "leaf".
    leaf: LeafId | None = None


class DataflowNode(NamedTuple):
    """A node as in `jdag.engine.segments`; ~i names the residuals of the node at i."""

    kind: NodeKind
    worker: Worker
    inputs: tuple[Numbers, ...]
    outputs: Numbers
    pair: Any = None
    name: str = ""
    site: str = ""
    keeps: bool = False
    update: bool = False
    tag: Tag | None = None  # Of a call that a schedule lists, and of its vjp;
    action: str = ""  # the action: F, B, I or W.
    weights: tuple[bool, ...] = ()


class DataflowGraph:
    """A program over workers: `values` by number, and `nodes` in program order."""

    def __init__(self) -> None:
        self.values: list[DataflowValue] = []
        self.nodes: list[DataflowNode] = []
        # For a value on another worker: the first call there, and the slot it takes.
        self._transfers: dict[tuple[int, Worker, bool], tuple[int, int]] = {}
        # Of each value: worker, place and position of a consumer, and its cotangent,
        # None for a symbolic zero.
        self._cotangents: dict[int, list[tuple[Worker, int, int, int | None]]]
        self._cotangents = defaultdict(list)
        self._seeds: dict[int, list[int]] = defaultdict(list)
        self._listed = False  # Whether a schedule lists a call.

    def worker(self, value: int) -> Worker:
        """The worker where a value is made, or lives."""
        return self.values[value].worker

    def aval(self, value: int, at: Worker = "") -> Aval:
        """The abstract value of a value, or of its copy on another worker."""
        home, aval, *_ = self.values[value]
        return aval if at in ("", home) else aval.on(None)

    def tracked(self, value: int) -> bool:
        """Whether cotangents flow to a value."""
        return self.values[value].tracked

    def crosses(self, value: int, worker: Worker) -> bool:
        """Whether a value comes to this worker from another one's call or leaf."""
        home, _, _, source, _ = self.values[value]
        return worker != home and source not in _SENT

    def source(
        self,
        kind: str,
        worker: Worker,
        aval: Aval,
        *,
        leaf: LeafId | None = None,
        tracked: bool = False,
    ) -> int:
        """Add an "input" or "constant" of the caller, or a "leaf"; give its number."""
        self.values.append(DataflowValue(worker, aval, tracked, kind, leaf))
        return len(self.values) - 1

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
        tag: Tag | None = None,
    ) -> Numbers:
        """Add a call, in program order; return the numbers of its outputs.

        Cotangents flow back to `tracked` inputs. An `update` makes new versions of
        leaves there, from older ones and gradients; no call reads what it makes. A
        schedule lists a call with a `tag`.
        """
        slots: dict[Worker, int] = defaultdict(int)
        for value, on in zip(inputs, tracked, strict=True):
            transfer, owner = (value, worker, on), self.worker(value)
            if self.crosses(value, worker) and transfer not in self._transfers:
                self._transfers[transfer] = (len(self.nodes), slots[owner])
                slots[owner] += 1
        about = output_types(pair), pair, name, site
        made = (NodeKind.FORWARD, worker, (tuple(inputs),), *about)
        acts: Any = {"tag": tag, "action": "F"} if tag else {}
        self._listed = self._listed or tag is not None
        return self._add(*made, tracked=pair.out_tracked, update=update, **acts)

    def differentiate(self, roots: Sequence[int]) -> dict[LeafId, int]:
        """Add the nodes of a backward pass from these values, seeded by ones; once.

        Returns:
            The gradient of each leaf that the roots need, in the order of the leaves'
            numbers. One that is a single cotangent is on the worker that made that.
        """
        needed = bytearray(len(self.values))
        calls = [*enumerate(self.nodes)]
        for root in roots:
            needed[root] = 1
            self._seeds[root].append(self._filled(root, ones=True))
        for place, node in reversed(calls):
            outputs = [value for value in node.outputs if self.tracked(value)]
            if any([needed[value] for value in outputs]):
                for value in compress(node.inputs[0], node.pair.tracked):
                    needed[value] = 1
                addends = [_present(self._addends(value)) for value in outputs]
                self._carry_back(place, node, addends)
        gradients: dict[LeafId, int] = {}
        for number, (worker, _, tracked, _, leaf) in enumerate(
            self.values[: len(needed)]
        ):
            if leaf is not None and tracked and needed[number]:
                total = self._sum(worker, self._addends(number))
                if total is None:
                    total = self._filled(number, ones=False)
                gradients[leaf] = total
        return gradients

    def _carry_back(
        self, place: int, node: DataflowNode, addends: Sequence[Numbers]
    ) -> None:
        worker, pair = node.worker, node.pair
        inputs, came = [*compress(node.inputs[0], pair.tracked)], [*map(bool, addends)]
        read = ((~place,), *addends)
        made = self._vjp(node, read, inputs, input_types(pair)) if any(came) else ()
        for position, value in enumerate(inputs):
            here = any(map(and_, pair.reaches[position], came))
            cotangent = (worker, place, position, made[position] if here else None)
            self._cotangents[value].append(cotangent)

    def _vjp(
        self,
        node: DataflowNode,
        read: tuple[Numbers, ...],
        inputs: Sequence[int],
        avals: Sequence[Aval],
    ) -> Numbers:
        """Add the vjp of a call, or both halves where a schedule has these."""
        worker, tag, about = node.worker, node.tag, (node.pair, node.name, node.site)
        if tag is None or not tag.halves:
            acts: Any = {"tag": tag, "action": "B"} if tag else {}
            return self._add(NodeKind.VJP, worker, read, avals, *about, **acts)
        homes = [(self.values[value].source, self.worker(value)) for value in inputs]
        weights = tuple([home == ("leaf", worker) for home in homes])
        acts = {"tag": tag, "weights": weights}
        few = [aval for aval, late in zip(avals, weights, strict=True) if not late]
        kinds = NodeKind.INPUTS, NodeKind.WEIGHTS
        first = self._add(kinds[0], worker, read, few, *about, action="I", **acts)
        stash, few = ((~(len(self.nodes) - 1),),), [*compress(avals, weights)]
        second = self._add(kinds[1], worker, stash, few, *about, action="W", **acts)
        made = iter(first), iter(second)
        return tuple([next(made[late]) for late in weights])

    def _addends(self, value: int) -> _Places:
        """The addends of a value's cotangent, in order.

        Cotangents from calls on another worker are summed there, and count as one.
        """
        by_worker: dict[Worker, list[tuple[int, int, int | None]]] = defaultdict(list)
        for worker, place, position, number in self._cotangents[value]:
            by_worker[worker].append((place, position, number))
        found = by_worker.pop(self.worker(value), [])
        for worker, few in by_worker.items():
            total = self._sum(worker, _in_order(few))
            found.append((*self._transfers[value, worker, True], total))
        return (*_in_order(found), *self._seeds[value])

    def _sum(self, worker: Worker, addends: _Places) -> int | None:
        if self._listed or None in addends:  # Few gradients wait for the last action.
            addends = top(addends, partial(self._add_sum, worker))
        came = _present(addends)
        return self._add_sum(worker, came) if len(came) > 1 else next(iter(came), None)

    def _add_sum(self, worker: Worker, addends: Sequence[int]) -> int:
        avals = [self.aval(addends[-1], worker)]  # On the device of its last addend.
        return self._add(NodeKind.SUM, worker, (tuple(addends),), avals)[0]

    def _filled(self, like: int, *, ones: bool) -> int:
        worker, aval, *_ = self.values[like]
        made = (NodeKind.FILL, worker, ((like,),), [aval.strong])
        return self._add(*made, keeps=ones)[0]

    def _add(
        self,
        kind: NodeKind,
        worker: Worker,
        inputs: tuple[Numbers, ...],
        avals: Sequence[Aval],
        *about: Any,
        tracked: Sequence[bool] = (),
        **more: Any,
    ) -> Numbers:
        start, on = len(self.values), tracked or (False,) * len(avals)
        self.values += map(DataflowValue, repeat(worker), avals, on)
        outputs = tuple(range(start, len(self.values)))
        self.nodes.append(DataflowNode(kind, worker, inputs, outputs, *about, **more))
        return outputs


def _in_order(addends: Iterable[tuple[int, int, int | None]]) -> _Places:
    return [number for _, _, number in sorted(addends)]


def _present(addends: _Places) -> Numbers:
    return tuple([number for number in addends if number is not None])
