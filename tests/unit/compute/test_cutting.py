"""Cutting a graph into segments: convex, in order, and right in any order."""

from random import Random
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.cutting import CutPlan
from jdag.compute.dataflow import DataflowGraph
from jdag.engine.names import LeafId
from tests.tools.compute_cases import array
from tests.tools.cutting_cases import Recorded, Values, Var, bits, draw, recorded, step
from tests.tools.tiers import sized

SEEDS = range(sized(4, 12))


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(w * x + 0.3)


def total(*arrays: Any) -> Any:
    return sum([jnp.sum(one * (0.7 + i)) for i, one in enumerate(arrays)])


def shown(made: CutPlan) -> list[tuple[str, int, int]]:
    return [(piece.worker, piece.level, len(piece.nodes)) for piece in made.pieces]


def predecessors(graph: DataflowGraph) -> list[list[int]]:
    maker = {v: at for at, node in enumerate(graph.nodes) for v in (~at, *node.outputs)}
    return [
        [maker[name] for slots in node.inputs for name in slots if name in maker]
        for node in graph.nodes
    ]


def assert_convex(graph: DataflowGraph, made: CutPlan) -> None:
    before = predecessors(graph)
    nodes = sorted(at for piece in made.pieces for at in piece.nodes)
    assert nodes == [*range(len(graph.nodes))]
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


def check(made: Recorded, expected: Values, rng: Random, **options: Any) -> CutPlan:
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


@pytest.mark.parametrize("seed", SEEDS)
def test_a_call_that_reads_gradients_comes_after_their_sums(seed: int) -> None:
    rng = Random(f"norms {seed}")
    made = recorded(draw(rng, 12))
    for worker in "abc":
        read = [Var(number, False) for number in made.gradients.values()]
        (norm,) = made.call(worker, lambda *given: [total(*given)], *read)
        made.gradients[LeafId(worker, 99)] = norm.number
    expected = made.one_by_one()
    check(made, expected, rng)
    check(made, expected, rng, nodes_max=3)


def three_layers() -> Recorded:
    made = Recorded("a")
    x = made.sent(array(5, seed=9))
    leaves = [made.leaf(at, array(5, seed=i)) for i, at in enumerate("abc")]
    for at, w in zip("abc", leaves, strict=True):
        x = made.call(at, layer, w, x)
    made.differentiate(made.call("c", total, x))
    return made


def test_micro_batches_stay_apart_and_what_fans_out_and_comes_together_does_not() -> (
    None
):
    piped, fanned = Recorded("a"), Recorded("a")
    v, w = [piped.leaf(at, array(5, seed=i)) for i, at in enumerate("bc")]
    ends = []
    for seed in range(3):
        x = piped.call("b", layer, v, piped.sent(array(5, seed=seed)))
        ends.append(piped.call("c", total, piped.call("c", layer, w, x)))
    piped.differentiate(*ends)
    found = check(piped, piped.one_by_one(), Random(1))
    # Forward on b, both on c, and vjps on b for each; a sum for each leaf.
    levels = [("b", 0, 1)] * 3 + [("c", 1, 5)] * 3 + [("c", 1, 1)]
    assert shown(found) == [*levels, *[("b", 2, 1)] * 3, ("b", 2, 1)]
    u = fanned.leaf("b", array(5, seed=9))
    parts = [fanned.call("b", layer, u, array(5, seed=i)) for i in range(3)]
    fanned.differentiate(fanned.call("a", total, *parts))
    found = check(fanned, fanned.one_by_one(), Random(2))
    assert shown(found) == [("b", 0, 3), ("a", 1, 3), ("b", 2, 4)]


def test_forward_and_backward_merge_on_the_last_worker_alone() -> None:
    made = three_layers()
    found = made.cut([*made.gradients.values()])
    # On c: two forwards, a seed and two vjps.
    levels = [("a", 0, 1), ("b", 1, 1), ("c", 2, 5), ("b", 3, 1), ("a", 4, 1)]
    assert shown(found) == levels
    hops = [[hop.to for hop in piece.segment.hops] for piece in found.pieces]
    assert hops == [["b"], ["c"], ["a", "b"], ["a"], []]
    assert_convex(made.graph, found)


def test_a_value_crosses_once_however_many_calls_read_it() -> None:
    made = Recorded("a")
    w, v = made.leaf("a", array(5)), made.leaf("c", array(5, seed=1))
    x = made.call("a", layer, w, w)
    several = [made.call("b", layer, x, x) for _ in range(3)]
    other = made.call("c", layer, x, v)
    made.differentiate(made.call("b", total, *several, other))
    found = check(made, made.one_by_one(), Random(0))
    hops = [hop for piece in found.pieces for hop in piece.segment.hops]
    assert [hop.slots for hop in hops if x.number in hop.slots] == [(x.number,)] * 2
    assert len({(hop.to, slot) for hop in hops for slot in hop.slots}) == sum(
        [len(hop.slots) for hop in hops]
    )


def test_a_leaf_that_is_read_on_two_other_workers_is_sent_by_its_owner() -> None:
    made = Recorded("a")
    x, w = made.sent(array(5)), made.leaf("b", array(5, seed=1))
    parts = [made.call(at, layer, w, x) for at in "acc"]
    made.differentiate(made.call("c", total, *parts))
    found = check(made, made.one_by_one(), Random(0))
    first, parts_by_worker = found.pieces[0], dict(found.parts)
    assert (first.worker, first.nodes, first.segment.makes) == ("b", (), ())
    hops = [(hop.to, hop.slots) for hop in first.segment.hops]
    assert hops == [("a", (w.number,)), ("c", (w.number,))]
    assert [read.slot for read in parts_by_worker["b"].reads] == [w.number]
    assert not parts_by_worker["a"].reads
    assert found.inputs == (("a", (x.number,)), ("c", (x.number,)))


def test_inputs_and_constants_go_to_their_readers_and_are_results_too() -> None:
    made = Recorded("a")
    x, c = made.sent(array(5)), made.sent(array(5, seed=1))
    w = made.leaf("a", array(5, seed=2))
    away = made.leaf("b", array(5, seed=3))
    y = made.call("b", layer, x, c)
    results = [one.number for one in (x, c, w, away, y, y)]
    found = made.cut(results)
    assert dict(found.inputs) == {"a": (x.number,), "b": (x.number,)}
    assert shown(found) == [("b", 0, 0), ("b", 0, 1)]  # Neither waits for a hop.
    parts = dict(found.parts)
    assert [parts[at].constants for at in "ab"] == [(c.number,)] * 2
    assert [read.leaf for read in parts["a"].reads] == made.leaves[:1]
    assert (parts["a"].segments, parts["a"].reports) == ((), False)
    there = step(found, made.given, Random(0))["a"]
    expected = made.one_by_one()
    for slot in results:
        assert bits(there[slot]) == bits(expected[slot])


def test_what_nobody_waits_for_runs_and_reports() -> None:
    made = Recorded("a")
    x, w = made.sent(array(5)), made.leaf("b", array(5, seed=1))
    y = made.call("b", layer, w, x)
    made.call("c", layer, w, y)
    found = made.cut([y.number])
    reports = [(worker, part.reports) for worker, part in found.parts]
    assert reports == [("b", False), ("c", True)]
    last = found.pieces[-1].segment
    assert (last.function.name, last.makes, last.hops) == ("layer", (), ())
    step(found, made.given, Random(0))


def test_what_comes_from_a_named_device_of_another_worker_is_on_the_default_one() -> (
    None
):
    made = Recorded("a")
    w, values = made.leaf("b", array(5)), made.graph.values
    values[w.number] = values[w.number]._replace(
        aval=made.graph.aval(w.number).on("cpu:1")
    )
    for worker in "ab":
        made.call(worker, layer, w, w)
    functions = [piece.segment.function for piece in made.cut([]).pieces]
    devices = [[aval.device for aval in one.avals] for one in functions]
    assert devices == [["cpu:1"], ["cpu:1"], [None]]


def test_a_move_home_and_back_stays() -> None:
    made = Recorded("a")
    x = made.call("a", layer, made.leaf("a", array(5)), made.sent(array(5, seed=1)))
    (there,) = made.move("b", [x])
    (back,) = made.move("a", [there])
    made.differentiate(made.call("a", total, back))
    found = check(made, made.one_by_one(), Random(0))
    levels = [(worker, level) for worker, level, _ in shown(found)]
    assert levels == [*zip("ababa", range(5), strict=True)]


def test_residuals_for_another_segment_are_one_bundle() -> None:
    made = Recorded("a")
    x, w = made.sent(array(5)), made.leaf("a", array(5, seed=1))
    for _ in range(3):
        x = made.call("a", layer, w, x)
    (x,) = made.move("b", [x])
    made.differentiate(made.call("b", total, x))
    found = check(made, made.one_by_one(), Random(0))
    forward, last, backward = found.pieces
    count = len(made.graph.values)
    assert forward.segment.makes[-1] == backward.segment.needs[-1] == count
    assert backward.segment.function.bundles == (3,)
    assert len(found.nbytes) == count + 1
    assert found.nbytes[count] > 0
    assert not last.segment.function.bundles
    edges = [(edge.source, edge.target) for edge in found.edges]
    assert edges == [(0, 1), (1, 2), (0, 2)]
    # Split in program order: on b twice, on a forward and backward.
    halves = made.cut([*made.gradients.values()], nodes_max=2)
    taken = [piece.segment.function.bundles for piece in halves.pieces if piece.nodes]
    assert [bundles for bundles in taken if bundles] == [(1,), (1,), (1, 1), (1,)]


def new(w: Any, gradient: Any, scale: Any) -> Any:
    return w - scale * gradient


def test_updates_are_segments_of_their_own_and_are_staged() -> None:
    made = three_layers()
    rate = made.sent(jnp.float64(0.1))
    graph, gradients = made.graph, dict(made.gradients)
    squares = [
        made.call("a", jnp.vdot, *[Var(g, False)] * 2) for g in gradients.values()
    ]
    scale = made.call("a", new, rate, *squares[:2])
    stages = []
    for leaf, gradient in gradients.items():
        (slot,) = [at for at, one in enumerate(graph.values) if one.leaf == leaf]
        factor = rate if leaf.worker == "c" else scale
        given = Var(slot, False), Var(gradient, False), factor
        stages.append((leaf, made.call(leaf.worker, new, *given, update=True).number))
    found = made.cut([scale.number, stages[0][1]], stages=stages)
    assert_convex(graph, found)
    updates = [piece for piece in found.pieces if piece.update]
    assert updates == list(found.pieces[-3:])
    expected = made.one_by_one()
    there = step(found, made.given, Random(0))
    parts = dict(found.parts)
    by_worker = {piece.worker: piece.segment for piece in updates}
    for leaf, slot in stages:
        part = parts[leaf.worker]
        assert [(one.leaf, one.slot) for one in part.stages] == [(leaf, slot)]
        assert [part.segments[at] for at in part.updates] == [by_worker[leaf.worker]]
        assert part.reports
        assert bits(there[leaf.worker][slot]) == bits(expected[slot])
