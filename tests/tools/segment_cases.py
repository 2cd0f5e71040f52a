"""Segments as plans have them, of one worker: forward and backward, or each alone."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdag.compute.avals import aval_of
from jdag.compute.cutting import Piece, _bundle, _segment
from jdag.compute.dataflow import DataflowGraph
from jdag.compute.segments import SegmentFunction
from jdag.engine.names import LeafId
from tests.tools.compute_cases import pair_of
from tests.tools.cutting_cases import one_by_one


def array(*shape: int, seed: int = 0) -> Any:
    made = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(made.astype(np.float32))


class Tape:
    """Calls of functions of arrays, which are the first values of a graph."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays, self.avals = arrays, tuple(map(aval_of, arrays))
        self.graph = DataflowGraph()
        for number, aval in enumerate(self.avals):
            leaf = LeafId("a", number)
            self.graph.source("leaf", "a", aval, leaf=leaf, tracked=aval.inexact)
        self.gradients: dict[LeafId, int] = {}
        self._calls = 0

    def pair_of(self, fn: Any, *inputs: int) -> Any:
        avals = map(self.graph.aval, inputs)
        return pair_of(fn, *[np.zeros(aval.shape, aval.dtype) for aval in avals])

    def call(self, fn: Any, *inputs: int) -> Any:
        found = fn if hasattr(fn, "avals") else self.pair_of(fn, *inputs)
        self._calls += 1
        about = found.tracked, found.name, f"case.py:{self._calls}"
        outputs = self.graph.call("a", found, inputs, *about)
        return outputs[0] if len(outputs) == 1 else outputs

    def whole(self, root: int, wanted: Sequence[int], exact: bool = False) -> Any:
        """One segment: forward and backward; the root, then gradients of `wanted`."""
        self._differentiate(root)
        (found,) = self._cut([self._arrays], exact)
        return self._with(found, [root, *self._gradients_of(wanted)])

    def halves(
        self, root: int, wanted: Sequence[int], exact: bool = False
    ) -> tuple[SegmentFunction, SegmentFunction]:
        """Two segments: forward returns the root, which backward is given."""
        self._differentiate(root)
        kept = [~at for at in range(self._calls) if self._is_kept(at)]
        forward, backward = self._cut([self._arrays, [root, *kept]], exact)
        gradients = self._with(backward, self._gradients_of(wanted))
        return self._with(forward, [root]), gradients

    def segment(self, outputs: Sequence[int], exact: bool = False) -> SegmentFunction:
        return self._with(self._cut([self._arrays], exact)[0], outputs)

    def one_by_one(self, root: int, wanted: Sequence[int]) -> list[Any]:
        values = one_by_one(self.graph, dict(enumerate(self.arrays)))
        return [values[number] for number in (root, *self._gradients_of(wanted))]

    @property
    def _arrays(self) -> list[int]:
        return [*range(len(self.arrays))]

    def _differentiate(self, root: int) -> None:
        self.gradients = self.gradients or self.graph.differentiate([root])

    def _gradients_of(self, wanted: Sequence[int]) -> list[int]:
        return [self.gradients[LeafId("a", number)] for number in wanted]

    def _is_kept(self, place: int) -> bool:
        return any(~place in slots for one in self.graph.nodes for slots in one.inputs)

    def _cut(self, reads: Sequence[Sequence[int]], exact: bool) -> list[Any]:
        ends = [*[self._calls] * (len(reads) - 1), len(self.graph.nodes)]
        starts = [0, *ends]
        pieces = [
            Piece("a", 0, False, tuple(range(start, end)), tuple(read))
            for start, end, read in zip(starts, ends, reads, strict=False)
        ]
        _bundle(self.graph, pieces)
        every = range(len(self.graph.values))
        return [_segment(self.graph, one, every, {}, exact) for one in pieces]

    def _with(self, segment: Any, outputs: Sequence[int]) -> SegmentFunction:
        of = segment.function
        number = {slot: at for at, slot in enumerate(segment.needs)}
        number.update(zip(segment.makes, of.outputs, strict=False))
        return replace(of, outputs=tuple([number[one] for one in outputs]))


def dense(w: Any, b: Any, x: Any) -> Any:
    return jnp.tanh(x @ w + b)


def square(x: Any) -> Any:
    return (x * x).sum()


def mlp(depth: int, width: int = 8, batch: int = 4) -> tuple[Tape, int, list[int]]:
    params = [
        array(*shape, seed=layer)
        for layer in range(depth)
        for shape in ((width, width), (width,))
    ]
    tape = Tape(*params, array(batch, width, seed=99))
    x: Any = len(params)
    for layer in range(depth):
        x = tape.call(dense, 2 * layer, 2 * layer + 1, x)
    return tape, tape.call(square, x), list(range(len(params)))


def mlp_of(depth: int) -> Callable[..., Any]:
    def loss(*arrays: Any) -> Any:
        x = arrays[-1]
        for layer in range(depth):
            x = dense(arrays[2 * layer], arrays[2 * layer + 1], x)
        return square(x)

    return loss
