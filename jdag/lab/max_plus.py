"""Longest paths in a graph of events, whose edges have costs that depend on parameters.

Each incoming edge of a node gives a time: the time of the edge's source plus the cost
of the edge. The node's time is the largest of these. The cost of an edge is `amount`
times a parameter, in ns.

Inputs:  the number of nodes, in topological order; edges, sorted by the node that they
         enter; costs of edges.
Outputs: the times of nodes, which are exact for ints; `span`, a JAX function that takes
         many settings at once and has a gradient by the parameters, along the longest
         paths.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_CHUNK = 256  # Settings per batch, whose times fit into the cache.


class MaxPlus:
    """A graph of longest paths. Nodes without incoming edges have time 0.

    `edges` has (source, target) of each edge, sorted by target.
    """

    def __init__(self, nodes: int, edges: Sequence[tuple[int, int]]) -> None:
        self.nodes = nodes
        self.sources = np.array([source for source, _ in edges], np.int64)
        targets = np.array([target for _, target in edges], np.int64)
        assert (np.diff(targets) >= 0).all() and (self.sources < targets).all()
        starts = np.searchsorted(targets, np.arange(nodes + 1))
        # (node, index of its first edge, end of its edges), for nodes with edges.
        self._entered = [
            (node, int(starts[node]), int(starts[node + 1]))
            for node in range(nodes)
            if starts[node] < starts[node + 1]
        ]

    def times(self, costs: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return each node's time, and the edge that determines it (-1: no edge)."""
        sources = self.sources.tolist()
        times, edges = [0] * self.nodes, [-1] * self.nodes
        for node, first, end in self._entered:
            best, latest = first, times[sources[first]] + costs[first]
            for edge in range(first + 1, end):
                arrival = times[sources[edge]] + costs[edge]
                if arrival > latest:
                    best, latest = edge, arrival
            times[node], edges[node] = latest, best
        return times, edges

    def span(
        self,
        matrix: tuple[Any, Any, Any],
        count: int,
        starts: Sequence[int],
        ends: Sequence[int],
    ) -> Callable[..., Any]:
        """Return a JAX function from `count` parameters to the time between nodes.

        The time begins at the earliest of the nodes `starts` and ends at the latest of
        `ends`. `matrix` has edges, parameters and amounts, as parallel arrays. If an
        edge occurs several times, its costs add up.
        """
        between = np.array(starts), np.array(ends)
        shape: Any = jax.ShapeDtypeStruct

        def times(settings: Any) -> Any:
            node_times, _ = self._many(settings, matrix)
            return node_times[between[1]].max(0) - node_times[between[0]].min(0)

        def slopes(settings: Any) -> Any:
            return self._slopes(settings, matrix, *between)

        def called(function: Callable[[Any], Any], values: Any, axes: int) -> Any:
            """Run a host function on batches. It reduces the last `axes` axes."""
            dtype = values.dtype

            def host(settings: Any) -> Any:
                results = np.concatenate([*map(function, _chunks(settings, count))])
                shape = settings.shape[: settings.ndim - axes]
                return results.reshape(shape).astype(dtype)

            result_shape = shape(values.shape[: values.ndim - axes], dtype)
            return jax.pure_callback(
                host, result_shape, values, vmap_method="broadcast_all"
            )

        span: Any = jax.custom_vjp(lambda values: called(times, values, 1))
        span.defvjp(
            lambda values: (called(times, values, 1), values),
            lambda values, g: (called(slopes, values, 0) * g[..., None],),
        )
        return lambda values: span(jnp.asarray(values))

    def _many(self, values: Any, matrix: tuple[Any, Any, Any]) -> tuple[Any, Any]:
        """Return the times of nodes and the costs of edges, for several settings."""
        edges, parameters, amounts = matrix
        costs = np.zeros((len(self.sources), len(values)))
        np.add.at(costs, edges, amounts[:, None] * values.T[parameters])
        times = np.zeros((self.nodes, len(values)))
        sources = self.sources.tolist()
        for node, first, end in self._entered:
            latest = times[node]
            np.add(times[sources[first]], costs[first], out=latest)
            for edge in range(first + 1, end):
                np.maximum(latest, times[sources[edge]] + costs[edge], out=latest)
        return times, costs

    def _slopes(
        self, values: Any, matrix: tuple[Any, Any, Any], starts: Any, ends: Any
    ) -> Any:
        """Return the gradients of several settings' spans by the parameters."""
        edges, parameters, amounts = matrix
        node_times, costs = self._many(values, matrix)
        order = np.argsort(edges, kind="stable")
        begins = np.searchsorted(edges[order], np.arange(len(self.sources) + 1))
        entered = {node: (first, end) for node, first, end in self._entered}
        gradients = np.zeros_like(values)
        lasts = ends[node_times[ends].argmax(0)].tolist()
        firsts = starts[node_times[starts].argmin(0)].tolist()
        # Costs on both paths, such as the set-up, cancel.
        walks = [(1, node) for node in lasts], [(-1, node) for node in firsts]
        for setting, (sign, node) in chain(*map(enumerate, walks)):
            visited = node
            while visited in entered:
                first, end = entered[visited]
                sources = self.sources[first:end]
                edge = first
                if end > first + 1:
                    times = node_times[sources, setting] + costs[first:end, setting]
                    edge += int(times.argmax())
                for row in order[begins[edge] : begins[edge + 1]]:
                    gradients[setting, parameters[row]] += sign * amounts[row]
                visited = int(self.sources[edge])
        return gradients


def _chunks(values: Any, count: int) -> list[Any]:
    flat = np.asarray(values, np.float64).reshape(-1, count)
    return [flat[start : start + _CHUNK] for start in range(0, len(flat), _CHUNK)]
