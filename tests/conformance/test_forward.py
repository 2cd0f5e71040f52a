"""What forward records: sends and recvs for each worker, and what is tracked."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from tests.conformance.functions import (
    ONES,
    add_and_forward,
    add_here,
    multiply_if_tracked,
    sum_of_product,
    three_times,
    total,
    tracked_of,
)
from tests.tools.error_texts import fails_with


def ends(ctx: Any) -> dict[str, tuple[int, int]]:
    """For each worker of a context how many sends and recvs it has."""
    return {
        worker: (len(drawn.sends), len(drawn.recvs))
        for worker, drawn in ctx.graph().items()
    }


def test_an_add_elsewhere_has_one_send_and_one_recv_at_either_end(cluster: Any):
    t1, t2 = cluster.put("a", ONES), cluster.put("a", ONES)
    with cluster.context() as ctx:
        moved = ctx.move("b", [t1, t2])
        back = ctx.move("a", ctx.call("b", add_here, *moved))
        ctx.backward(ctx.call("a", total, back), retain_graph=True)
        assert ends(ctx) == {"a": (1, 1), "b": (1, 1)}


def test_both_inputs_of_the_add_come_from_the_same_recv(cluster: Any):
    t1, t2 = cluster.put("a", ONES), cluster.put("a", ONES)
    with cluster.context() as ctx:
        ctx.move("a", ctx.call("b", jnp.add, t1, t2))
        drawn = ctx.graph()["b"]
        (recv,) = drawn.recvs
        (add,) = drawn.nodes
        assert len(add.inputs) == 2 and len(dict.fromkeys(add.inputs)) == 2
        assert recv.values == add.inputs and recv.peer == "a"
        edges = [edge for edge in drawn.edges if edge.value in add.inputs]
        assert len(edges) == 2
        assert {edge.producer for edge in edges} == {f"recv {recv.path}"}
        assert {edge.consumer for edge in edges} == {f"node {add.path}"}
        (send,) = ctx.graph()["a"].sends
        assert send.peer == "b" and send.path == recv.path and len(send.values) == 2


def test_three_hops_have_one_of_each_at_the_ends_and_two_in_the_middle(cluster: Any):
    t1, t2 = cluster.put("a", ONES), cluster.put("a", ONES)
    with cluster.context() as ctx:
        made = ctx.call("b", add_and_forward, *ctx.move("b", (t1, t2)))
        loss = ctx.call("a", total, ctx.move("a", made))
        ctx.backward(loss, retain_graph=True)
        assert ends(ctx) == {"a": (1, 1), "b": (2, 2), "c": (2, 2), "d": (1, 1)}
        assert loss.fetch() == 4 * 9  # t1, and t2 once on each of three workers.
        np.testing.assert_array_equal(ctx.gradient(t1).fetch(), ONES)
        np.testing.assert_array_equal(ctx.gradient(t2).fetch(), 3 * ONES)


def test_a_leaf_on_the_callees_own_worker_has_its_one_gradient_there(cluster: Any):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("b", sum_of_product, w, 5 * ONES)
        ctx.backward(loss, retain_graph=True)
        found = ctx.gradients()
        assert list(found) == [w] and found[w].worker == "b"
        np.testing.assert_array_equal(found[w].fetch(), 5 * ONES)
        drawn = ctx.graph()
        assert len(drawn["b"].leaves) == 1 and not drawn["a"].leaves
        assert ends(ctx) == {"a": (0, 0), "b": (0, 0)}


def test_the_callee_sees_which_arguments_are_tracked(cluster: Any):
    leaf, number = cluster.put("b", ONES), cluster.put("b", jnp.arange(3))
    with cluster.context() as ctx:
        constant = ctx.call("c", three_times, ONES)
        made = ctx.call("c", three_times, leaf)
        given = (leaf, number, constant, made, jdag.stop_gradient(leaf))
        assert ctx.call("d", tracked_of, *given) == [
            [True, "b"],
            [False, "b"],
            [False, "c"],
            [True, "c"],
            [False, "b"],
        ]


def test_untracked_arguments_get_no_entry_in_the_gradients(cluster: Any):
    tracked, stopped = cluster.put("a", ONES), cluster.put("b", 2 * ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", sum_of_product, tracked, jdag.stop_gradient(stopped))
        ctx.backward(loss)
        assert list(ctx.gradients()) == [tracked]
        np.testing.assert_array_equal(ctx.gradient(tracked).fetch(), 2 * ONES)
        with fails_with(jdag.errors.GraphError, "conformance.reached_by_no_pass"):
            ctx.gradient(stopped)


@pytest.mark.parametrize(("is_tracked", "wanted"), [(True, 2.0), (False, -1.0)])
def test_a_function_that_asks_whether_t2_is_tracked_sees_the_right_flag(
    cluster: Any, is_tracked: bool, wanted: float
):
    t1, t2 = cluster.put("a", ONES), cluster.put("a", 2 * ONES)
    with cluster.context() as ctx:
        other = t2 if is_tracked else jdag.stop_gradient(t2)
        made = ctx.call("b", multiply_if_tracked, t1, other)
        ctx.backward(ctx.call("a", total, made))
        np.testing.assert_array_equal(made.fetch(), wanted * ONES)
        assert list(ctx.gradients()) == ([t1, t2] if is_tracked else [t1])
        np.testing.assert_array_equal(
            ctx.gradient(t1).fetch(), (2 if is_tracked else 1) * ONES
        )


def test_a_call_without_tracked_inputs_records_nothing_and_still_takes_part(
    cluster: Any,
):
    with cluster.context() as ctx:
        ctx.call("b", total, ONES, ONES).fetch()
        drawn = ctx.graph()["b"]
        assert not (drawn.nodes or drawn.sends or drawn.recvs or drawn.leaves)
