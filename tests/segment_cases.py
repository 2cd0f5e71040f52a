"""Segments built by hand: calls recorded in order, then their backward."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jdag.compute.avals import aval_of
from jdag.compute.pairs import pair
from jdag.compute.pytrees import split
from jdag.compute.segments import SegmentFunction
from jdag.engine.segments import NodeKind, SegmentNode


def array(*shape: int, seed: int = 0) -> Any:
    made = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(made.astype(np.float32))


def _is_no_ref(_: Any) -> bool:
    return False


class Taped(NamedTuple):
    """A call on a tape, with the numbers of its values."""

    pair: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    residuals: int | None


class Tape:
    """Calls of functions of arrays; values are numbered as in a segment."""

    def __init__(self, *arrays: Any) -> None:
        self.arrays = arrays
        self.avals = [aval_of(one) for one in arrays]
        self.known: list[Any] = list(self.avals)
        self.pairs: list[Any] = []
        self.taped: list[Taped] = []
        self.names: list[tuple[str, str]] = []

    def pair_of(self, fn: Any, *inputs: int) -> Any:
        """The pair of a function of these values; all that are inexact are tracked."""
        avals = tuple([self.known[one] for one in inputs])
        args = tuple([np.zeros(aval.shape, aval.dtype) for aval in avals])
        template = split(args, {}, _is_no_ref).template
        return pair(fn, template, avals, tuple([aval.inexact for aval in avals]))

    def call(self, fn: Any, *inputs: int) -> Any:
        """Record a call of a function or pair; return its outputs' numbers."""
        found = fn if hasattr(fn, "avals") else self.pair_of(fn, *inputs)
        if found not in self.pairs:
            self.pairs.append(found)
        first = len(self.known)
        outputs = tuple(range(first, first + len(found.out_avals)))
        self.known += found.out_avals
        keeps = any(found.out_tracked)
        if keeps:
            self.known.append(None)
        residuals = len(self.known) - 1 if keeps else None
        index = self.pairs.index(found)
        self.taped.append(Taped(index, inputs, outputs, residuals))
        self.names.append((found.name, f"case.py:{len(self.taped)}"))
        return outputs[0] if len(outputs) == 1 else outputs

    def forward(self) -> list[SegmentNode]:
        """The nodes of all calls."""
        return [
            SegmentNode(
                NodeKind.FORWARD, one.pair, (one.inputs,), one.residuals is not None
            )
            for one in self.taped
        ]

    def backward(
        self, root: int, like: int, residuals: dict[int, int], first: int
    ) -> tuple[list[SegmentNode], dict[int, tuple[int, ...]], list[tuple[str, str]]]:
        """The nodes of the backward from a root, and the addends of each value."""
        nodes = [SegmentNode(NodeKind.FILL, 0, ((like,),), True)]
        names = [("", "")]
        addends: dict[int, tuple[int, ...]] = {root: (first,)}
        first += 1
        for one, name in zip(reversed(self.taped), reversed(self.names), strict=True):
            found = self.pairs[one.pair]
            tracked = [
                n for n, t in zip(one.outputs, found.out_tracked, strict=True) if t
            ]
            given = tuple([addends.get(n, ()) for n in tracked])
            if not any(given):
                continue
            assert one.residuals is not None
            inputs = ((residuals[one.residuals],), *given)
            nodes.append(SegmentNode(NodeKind.VJP, one.pair, inputs))
            names.append(name)
            for n, is_tracked in zip(one.inputs, found.tracked, strict=True):
                if is_tracked:
                    addends[n] = (*addends.get(n, ()), first)
                    first += 1
        return nodes, addends, names

    def whole(self, root: int, wanted: Sequence[int], exact: bool = False) -> Any:
        """One segment: forward and backward; the root, then gradients of `wanted`."""
        same = {number: number for number in self.held}
        nodes, addends, names = self.backward(root, root, same, len(self.known))
        end = len(self.known) + self._count(nodes)
        nodes, outputs, names = _summed(nodes, addends, wanted, names, end)
        return self._segment(
            self.avals,
            (),
            [*self.forward(), *nodes],
            [root, *outputs],
            [],
            [*self.names, *names],
            exact,
        )

    def halves(
        self, root: int, wanted: Sequence[int], exact: bool = False
    ) -> tuple[SegmentFunction, SegmentFunction]:
        """Two segments: forward returns the root, which backward is given."""
        held = self.held
        forward = self._segment(
            self.avals, (), self.forward(), [root], [held], self.names, exact
        )
        moved = {number: 1 + index for index, number in enumerate(held)}
        nodes, addends, names = self.backward(root, 0, moved, 1 + len(held))
        end = 1 + len(held) + self._count(nodes)
        nodes, outputs, names = _summed(nodes, addends, wanted, names, end)
        avals, count = [self.known[root]], (len(held),)
        backward = self._segment(avals, count, nodes, outputs, [], names, exact)
        return forward, backward

    def segment(self, outputs: Sequence[int], exact: bool = False) -> SegmentFunction:
        """All calls as one segment, without backward."""
        return self._segment(
            self.avals, (), self.forward(), outputs, [], self.names, exact
        )

    @property
    def held(self) -> list[int]:
        """The numbers of all residuals."""
        return [one.residuals for one in self.taped if one.residuals is not None]

    def _segment(
        self, avals: Any, bundles: Any, nodes: Any, outputs: Any, *rest: Any
    ) -> SegmentFunction:
        carries, names, exact = rest
        return SegmentFunction(
            tuple(self.pairs),
            tuple(avals),
            bundles,
            tuple(nodes),
            tuple(outputs),
            tuple(map(tuple, carries)),
            tuple(names),
            exact,
        )

    def _count(self, nodes: Sequence[SegmentNode]) -> int:
        return sum(
            [
                sum(self.pairs[n.pair].tracked) if n.kind is NodeKind.VJP else 1
                for n in nodes
            ]
        )


def _summed(nodes: Any, addends: Any, wanted: Any, names: Any, first: int) -> Any:
    nodes, names, outputs = list(nodes), list(names), []
    for number in wanted:
        found = addends[number]
        if len(found) == 1:
            outputs.append(found[0])
            continue
        nodes.append(SegmentNode(NodeKind.SUM, 0, (found,)))
        names.append(("", ""))
        outputs.append(first)
        first += 1
    return nodes, outputs, names


def dense(w: Any, b: Any, x: Any) -> Any:
    return jnp.tanh(x @ w + b)


def square(x: Any) -> Any:
    return (x * x).sum()


def mlp(depth: int, width: int = 8, batch: int = 4) -> tuple[Tape, int, list[int]]:
    """Layers and a loss: the tape, the loss, and the weights and biases."""
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
    """The same as a function of all arrays."""

    def loss(*arrays: Any) -> Any:
        x = arrays[-1]
        for layer in range(depth):
            x = dense(arrays[2 * layer], arrays[2 * layer + 1], x)
        return square(x)

    return loss
