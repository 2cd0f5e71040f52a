"""Times as longest paths: a graph whose edges cost what parameters say.

A node happens when all its predecessors have, and the cost of the edge from each has
passed. An edge costs `amount` times a parameter, in ns.

Inputs:  nodes in an order in which edges point forward; edges in the order of the nodes
         that they enter; costs of edges.
Outputs: times of nodes, exact for ints; `span`, for many settings at once, in JAX, with
         the gradient by parameters along longest paths.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_CHUNK = 256  # Settings at a time: their times stay in the cache.


class MaxPlus:
    """A graph of longest paths, ready to be asked many times.

    Args:
        nodes: how many there are; those without edges happen at 0.
        edges: (from, to) by node; `to` never decreases.
    """

    def __init__(self, nodes: int, edges: Sequence[tuple[int, int]]) -> None:
        self.nodes = nodes
        self.sources = np.array([source for source, _ in edges], np.int64)
        targets = np.array([target for _, target in edges], np.int64)
        assert (np.diff(targets) >= 0).all() and (self.sources < targets).all()
        starts = np.searchsorted(targets, np.arange(nodes + 1))
        # (node, its first edge, and the one after its last), where there are any.
        self._entered = [
            (node, int(starts[node]), int(starts[node + 1]))
            for node in range(nodes)
            if starts[node] < starts[node + 1]
        ]

    def times(self, costs: Sequence[int]) -> tuple[list[int], list[int]]:
        """When each node happens, and the edge that it waited for last (-1: none)."""
        sources = self.sources.tolist()
        at, by = [0] * self.nodes, [-1] * self.nodes
        for node, first, end in self._entered:
            best, latest = first, at[sources[first]] + costs[first]
            for edge in range(first + 1, end):
                time = at[sources[edge]] + costs[edge]
                if time > latest:
                    best, latest = edge, time
            at[node], by[node] = latest, best
        return at, by

    def span(
        self,
        matrix: tuple[Any, Any, Any],
        count: int,
        starts: Sequence[int],
        ends: Sequence[int],
    ) -> Callable[..., Any]:
        """A JAX function from `count` parameters to a time between nodes.

        Args:
            matrix: edges, parameters and amounts of what edges cost, beside each other:
                an edge may be there with several parameters.
            count: how many parameters there are.
            starts: nodes; the time begins when the first of them happens.
            ends: nodes; it ends when the last of them happens.
        """
        between = np.array(starts), np.array(ends)
        shape: Any = jax.ShapeDtypeStruct

        def times(of: Any) -> Any:
            at, _ = self._many(of, matrix)
            return at[between[1]].max(0) - at[between[0]].min(0)

        def slopes(of: Any) -> Any:
            return self._slopes(of, matrix, *between)

        def called(function: Callable[[Any], Any], values: Any, axes: int) -> Any:
            """What a function of some settings at a time gives; the last axes go."""
            dtype = values.dtype

            def host(given: Any) -> Any:
                found = np.concatenate([*map(function, _chunks(given, count))])
                return found.reshape(given.shape[: given.ndim - axes]).astype(dtype)

            found = shape(values.shape[: values.ndim - axes], dtype)
            return jax.pure_callback(host, found, values, vmap_method="broadcast_all")

        span: Any = jax.custom_vjp(lambda values: called(times, values, 1))
        span.defvjp(
            lambda values: (called(times, values, 1), values),
            lambda values, given: (called(slopes, values, 0) * given[..., None],),
        )
        return lambda values: span(jnp.asarray(values))

    def _many(self, values: Any, matrix: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        """When each node happens with some settings, and what edges cost."""
        edges, parameters, amounts = matrix
        costs = np.zeros((len(self.sources), len(values)))
        np.add.at(costs, edges, amounts[:, None] * values.T[parameters])
        at = np.zeros((self.nodes, len(values)))
        sources = self.sources.tolist()
        for node, first, end in self._entered:
            here = at[node]
            np.add(at[sources[first]], costs[first], out=here)
            for edge in range(first + 1, end):
                np.maximum(here, at[sources[edge]] + costs[edge], out=here)
        return at, costs

    def _slopes(
        self, values: Any, matrix: tuple[Any, Any, Any], starts: Any, ends: Any
    ) -> Any:
        """The gradients of the spans of some settings by the parameters."""
        edges, parameters, amounts = matrix
        at, costs = self._many(values, matrix)
        order = np.argsort(edges, kind="stable")
        begins = np.searchsorted(edges[order], np.arange(len(self.sources) + 1))
        entered = {node: (first, end) for node, first, end in self._entered}
        found = np.zeros_like(values)
        lasts = ends[at[ends].argmax(0)].tolist()
        firsts = starts[at[starts].argmin(0)].tolist()
        # What comes before both, such as set-up, counts for nothing.
        walks = [(1, node) for node in lasts], [(-1, node) for node in firsts]
        for setting, (sign, node) in chain(*map(enumerate, walks)):
            here = node
            while here in entered:
                first, end = entered[here]
                sources = self.sources[first:end]
                edge = first
                if end > first + 1:
                    times = at[sources, setting] + costs[first:end, setting]
                    edge += int(times.argmax())
                for row in order[begins[edge] : begins[edge + 1]]:
                    found[setting, parameters[row]] += sign * amounts[row]
                here = int(self.sources[edge])
        return found


def _chunks(values: Any, count: int) -> list[Any]:
    flat = np.asarray(values, np.float64).reshape(-1, count)
    return [flat[at : at + _CHUNK] for at in range(0, len(flat), _CHUNK)]
