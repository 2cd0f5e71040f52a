"""The calls of a program and of its backward pass, as a graph over workers.

Invariants
- Values are numbered and nodes are indexed, both in program order.
- `differentiate` adds the computation of a SMART pass of the engine
  (`jdag.engine.backward`): the same sums, in the same order, with the same symbolic
  zeros. So the nodes, run one by one, give the same bits.
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
_Places = Sequence[int | None]  # Addends by position; None is a symbolic zero.
_SENT = ("input", "constant")  # The caller of a step sends these to their readers.


class DataflowValue(NamedTuple):
    worker: Worker
    aval: Aval
    tracked: bool
    source: str = ""  # "input", "constant" or "leaf".
    leaf: LeafId | None = None


class DataflowNode(NamedTuple):
    """A node as in `jdag.engine.segments`. Input ~i means the residuals of node i."""

    kind: NodeKind
    worker: Worker
    inputs: tuple[Numbers, ...]
    outputs: Numbers
    pair: Any = None
    name: str = ""
    site: str = ""
    keeps: bool = False
    update: bool = False
    tag: Tag | None = None  # Set if a schedule lists the call.
    action: str = ""  # The tag's action: F, B, I or W.
    weights: tuple[bool, ...] = ()


class DataflowGraph:
    def __init__(self) -> None:
        self.values: list[DataflowValue] = []
        self.nodes: list[DataflowNode] = []
        # By value, reading worker and tracked flag: the index of the first call that
        # reads the value there, and the number of the transfer in that call.
        self._transfers: dict[tuple[int, Worker, bool], tuple[int, int]] = {}
        # The consumers of each value: worker, node, position, and cotangent (None: a
        # symbolic zero).
        self._cotangents: dict[int, list[tuple[Worker, int, int, int | None]]]
        self._cotangents = defaultdict(list)
        self._seeds: dict[int, list[int]] = defaultdict(list)
        self._listed = False  # Whether a schedule lists a call.

    def worker(self, value: int) -> Worker:
        return self.values[value].worker

    def aval(self, value: int, worker: Worker = "") -> Aval:
        home, aval, *_ = self.values[value]
        return aval if worker in ("", home) else aval.on(None)

    def tracked(self, value: int) -> bool:
        return self.values[value].tracked

    def crosses(self, value: int, worker: Worker) -> bool:
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

        Cotangents flow back to `tracked` inputs. An `update` computes new versions of
        leaves of its worker from older ones and gradients; no call reads its outputs. A
        call with a `tag` is listed by a schedule.
        """
        slots: dict[Worker, int] = defaultdict(int)
        for value, is_tracked in zip(inputs, tracked, strict=True):
            transfer, owner = (value, worker, is_tracked), self.worker(value)
            if self.crosses(value, worker) and transfer not in self._transfers:
                self._transfers[transfer] = (len(self.nodes), slots[owner])
                slots[owner] += 1
        call = output_types(pair), pair, name, site
        node = (NodeKind.FORWARD, worker, (tuple(inputs),), *call)
        action: Any = {"tag": tag, "action": "F"} if tag else {}
        self._listed = self._listed or tag is not None
        return self._add(*node, tracked=pair.out_tracked, update=update, **action)

    def differentiate(self, roots: Sequence[int]) -> dict[LeafId, int]:
        """Add the nodes of one backward pass from these values, seeded with ones.

        Returns:
            The gradient of each leaf that the roots depend on, ordered by leaf number.
            A gradient that is a single cotangent is on the worker that computed it.
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
        values = self.values[: len(needed)]
        for number, (worker, _, tracked, _, leaf) in enumerate(values):
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
        inputs = [*compress(node.inputs[0], pair.tracked)]
        is_present, read = [*map(bool, addends)], ((~place,), *addends)
        cotangents: Numbers = ()
        if any(is_present):
            cotangents = self._vjp(node, read, inputs, input_types(pair))
        for position, value in enumerate(inputs):
            is_reached = any(map(and_, pair.reaches[position], is_present))
            cotangent = cotangents[position] if is_reached else None
            self._cotangents[value].append((worker, place, position, cotangent))

    def _vjp(
        self,
        node: DataflowNode,
        read: tuple[Numbers, ...],
        inputs: Sequence[int],
        avals: Sequence[Aval],
    ) -> Numbers:
        worker, tag, call = node.worker, node.tag, (node.pair, node.name, node.site)
        if tag is None or not tag.halves:
            action: Any = {"tag": tag, "action": "B"} if tag else {}
            return self._add(NodeKind.VJP, worker, read, avals, *call, **action)
        homes = [(self.values[value].source, self.worker(value)) for value in inputs]
        weights = tuple([home == ("leaf", worker) for home in homes])
        action = {"tag": tag, "weights": weights}
        types = [aval for aval, late in zip(avals, weights, strict=True) if not late]
        kinds = NodeKind.INPUTS, NodeKind.WEIGHTS
        first = self._add(kinds[0], worker, read, types, *call, action="I", **action)
        stash, types = ((~(len(self.nodes) - 1),),), [*compress(avals, weights)]
        second = self._add(kinds[1], worker, stash, types, *call, action="W", **action)
        halves = iter(first), iter(second)
        return tuple([next(halves[is_weight]) for is_weight in weights])

    def _addends(self, value: int) -> _Places:
        """Return the addends of a value's cotangent, in order.

        Cotangents from calls on another worker are summed there. The sum counts as one
        addend.
        """
        by_worker: dict[Worker, list[tuple[int, int, int | None]]] = defaultdict(list)
        for worker, place, position, number in self._cotangents[value]:
            by_worker[worker].append((place, position, number))
        addends = by_worker.pop(self.worker(value), [])
        for worker, remote in by_worker.items():
            total = self._sum(worker, _in_order(remote))
            addends.append((*self._transfers[value, worker, True], total))
        return (*_in_order(addends), *self._seeds[value])

    def _sum(self, worker: Worker, addends: _Places) -> int | None:
        if self._listed or None in addends:  # Partial sums can start early.
            addends = top(addends, partial(self._add_sum, worker))
        present = _present(addends)
        if len(present) > 1:
            return self._add_sum(worker, present)
        return next(iter(present), None)

    def _add_sum(self, worker: Worker, addends: Sequence[int]) -> int:
        avals = [self.aval(addends[-1], worker)]  # Sum on the last addend's device.
        return self._add(NodeKind.SUM, worker, (tuple(addends),), avals)[0]

    def _filled(self, like: int, *, ones: bool) -> int:
        worker, aval, *_ = self.values[like]
        node = (NodeKind.FILL, worker, ((like,),), [aval.strong])
        return self._add(*node, keeps=ones)[0]

    def _add(
        self,
        kind: NodeKind,
        worker: Worker,
        inputs: tuple[Numbers, ...],
        avals: Sequence[Aval],
        *call: Any,
        tracked: Sequence[bool] = (),
        **fields: Any,
    ) -> Numbers:
        start, flags = len(self.values), tracked or (False,) * len(avals)
        self.values += map(DataflowValue, repeat(worker), avals, flags)
        outputs = tuple(range(start, len(self.values)))
        self.nodes.append(DataflowNode(kind, worker, inputs, outputs, *call, **fields))
        return outputs


def _in_order(addends: Iterable[tuple[int, int, int | None]]) -> _Places:
    return [number for _, _, number in sorted(addends)]


def _present(addends: _Places) -> Numbers:
    return tuple([number for number in addends if number is not None])
