"""Cutting a graph into segments: convex, in order, and right in any order."""

from random import Random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.cutting import Cut
from jdag.compute.dataflow import Graph
from tests.compute_cases import array
from tests.cutting_cases import Recorded, Values, bits, draw, recorded, step

SEEDS = range(12)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(w * x + 0.3)


def total(*arrays: Any) -> Any:
    return sum([jnp.sum(one * (0.7 + i)) for i, one in enumerate(arrays)])


def shown(made: Cut) -> list[tuple[str, int, int]]:
    """Of each segment worker, level and number of nodes."""
    return [(piece.worker, piece.level, len(piece.nodes)) for piece in made.pieces]


def predecessors(graph: Graph) -> list[list[int]]:
    """The nodes that each node reads from, that of its residuals too."""
    maker = {v: at for at, node in enumerate(graph.nodes) for v in node.outputs}
    found = []
    for node in graph.nodes:
        read = [maker[v] for slots in node.inputs for v in slots if v in maker]
        found.append(read + ([] if node.forward is None else [node.forward]))
    return found


def assert_convex(graph: Graph, made: Cut) -> None:
    """Brute force: no path leaves a segment and comes back; each node is in one."""
    before = predecessors(graph)
    assert sorted(at for piece in made.pieces for at in piece.nodes) == [
        *range(len(graph.nodes))
    ]
    for piece in made.pieces:
        inside = set(piece.nodes)
        behind: list[bool] = []  # Whether a path comes from inside by the outside.
        from_inside: list[bool] = []
        for at, several in enumerate(before):
            outside = [n for n in several if n not in inside]
            behind.append(any(behind[n] or from_inside[n] for n in outside))
            assert not (at in inside and behind[at]), (piece, at)
            from_inside.append(at in inside or any(from_inside[n] for n in several))
    for edge in made.edges:
        if edge.source is not None and edge.target is not None:
            assert edge.source < edge.target


def check(made: Recorded, expected: Values, rng: Random, **options: Any) -> Cut:
    """Cut a graph with its gradients as results; run it in some orders."""
    results = [*made.gradients.values()]
    found = made.cut(results, **options)
    assert_convex(made.graph, found)
    for _ in range(2):
        there = step(found, made.given, rng)
        for number in results:
            value = there[made.home][number]
            if options.get("exact", True):
                assert bits(value) == bits(expected[number])
            else:
                np.testing.assert_allclose(value, expected[number], 1e-12, 1e-12)
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_random_programs_give_the_same_bits_in_any_order(seed: int) -> None:
    rng = Random(f"cut {seed}")
    made = recorded(draw(rng, 12))
    expected = made.one_by_one()
    whole = check(made, expected, rng)
    for nodes_max in (1, 3):
        parts = check(made, expected, rng, nodes_max=nodes_max)
        assert max(len(piece.nodes) for piece in parts.pieces) <= nodes_max
        assert len(parts.pieces) >= len(whole.pieces)
    if seed < 3:
        check(made, expected, rng, exact=False)


def three_layers() -> Recorded:
    made = Recorded("a")
    x = made.sent(array(5, seed=9))
    leaves = [made.leaf(at, array(5, seed=i)) for i, at in enumerate("abc")]
    for at, w in zip("abc", leaves, strict=True):
        x = made.call(at, layer, w, x)
    made.differentiate(made.call("c", total, x))
    return made


def test_forward_and_backward_merge_on_the_last_worker_alone() -> None:
    made = three_layers()
    found = made.cut([*made.gradients.values()])
    # On c: two forwards, a seed and two vjps.
    levels = [("a", 0, 1), ("b", 1, 1), ("c", 2, 5), ("b", 3, 1), ("a", 4, 1)]
    assert shown(found) == levels
    hops = [[hop.to for hop in piece.segment.hops] for piece in found.pieces]
    assert hops == [["b"], ["c"], ["a", "b"], ["a"], []]
    assert_convex(made.graph, found)
