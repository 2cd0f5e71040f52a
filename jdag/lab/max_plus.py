"""Times as longest paths: a graph whose edges cost what parameters say.

A node happens when all its predecessors have, and the cost of the edge from each has
passed. An edge costs `amount` times a parameter, in ns.

Inputs:  nodes in an order in which edges point forward; edges in the order of the nodes
         that they enter; costs of edges.
Outputs: times of nodes, exact for ints; `longest`, for many settings at once, in JAX,
         with the gradient by parameters along a longest path.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

CHUNK = 256  # Settings at a time: their times stay in the cache.


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

    def longest(self, matrix: tuple[Any, Any, Any], count: int) -> Callable[..., Any]:
        """A JAX function from `count` parameters to the time of the last node.

        Args:
            matrix: edges, parameters and amounts of what edges cost, beside each other:
                an edge may be there with several parameters.
            count: how many parameters there are.
        """
        edges, parameters, amounts = matrix
        shape: Any = jax.ShapeDtypeStruct

        def forward(values: Any) -> tuple[Any, Any]:
            values = np.asarray(values, np.float64)
            flat = values.reshape(-1, count)
            parts = [
                self._many(flat[at : at + CHUNK], edges, parameters, amounts)
                for at in range(0, len(flat), CHUNK)
            ]
            spans = np.concatenate([span for span, _ in parts])
            slopes = np.concatenate([slope for _, slope in parts])
            return spans.reshape(values.shape[:-1]), slopes.reshape(values.shape)

        def called(values: Any) -> Any:
            dtype = values.dtype
            found = (shape(values.shape[:-1], dtype), shape(values.shape, dtype))
            return jax.pure_callback(
                lambda given: tuple(one.astype(dtype) for one in forward(given)),
                found,
                values,
                vmap_method="broadcast_all",
            )

        span: Any = jax.custom_vjp(lambda values: called(values)[0])
        span.defvjp(called, lambda slope, given: (slope * given[..., None],))
        return lambda values: span(jnp.asarray(values))

    def _many(
        self, values: Any, edges: Any, parameters: Any, amounts: Any
    ) -> tuple[Any, Any]:
        """The spans of some settings, and their gradients by the parameters."""
        costs = np.zeros((len(self.sources), len(values)))
        np.add.at(costs, edges, amounts[:, None] * values.T[parameters])
        at = np.zeros((self.nodes, len(values)))
        by = np.full((self.nodes, len(values)), -1, np.int32)
        for node, first, end in self._entered:
            if end == first + 1:
                np.add(at[self.sources[first]], costs[first], out=at[node])
                by[node] = first
            else:
                times = at[self.sources[first:end]] + costs[first:end]
                at[node], by[node] = times.max(0), times.argmax(0) + first
        last = at.argmax(0)
        slopes = np.zeros_like(values)
        order = np.argsort(edges, kind="stable")
        begins = np.searchsorted(edges[order], np.arange(len(self.sources) + 1))
        for setting, node in enumerate(last):
            here = node
            while (edge := by[here, setting]) >= 0:
                for row in order[begins[edge] : begins[edge + 1]]:
                    slopes[setting, parameters[row]] += amounts[row]
                here = self.sources[edge]
        return at.max(0), slopes
