"""Backward: exact gradients over one worker, several roots, round trips, passes."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from tests.conformance.functions import (
    ONES,
    add_here,
    first_alone,
    in_five,
    stacked,
    sum_of_chain,
    sum_of_cosine,
    sum_of_product,
    sum_of_quotient,
    sum_of_sum,
    times_transposed,
    total,
    two_outputs,
)
from tests.tools.error_texts import fails_with

equal = np.testing.assert_array_equal


def test_without_any_remote_call_all_leaves_have_gradients(cluster: Any):
    t1, t2 = cluster.put("a", ONES), cluster.put("a", 2 * ONES)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("a", sum_of_product, t1, t2))
        assert list(ctx.gradients()) == [t1, t2]
        equal(ctx.gradient(t1).fetch(), 2 * ONES)
        equal(ctx.gradient(t2).fetch(), ONES)


@pytest.mark.parametrize("workers", ["aaaa", "abcd", "bbcc"])
def test_several_roots_are_the_backward_of_their_sum(cluster: Any, workers: str):
    t1, t2 = cluster.put("a", jnp.zeros((3, 3))), cluster.put("b", 2 * ONES)
    with cluster.context() as ctx:
        first, second, third, fourth = list(workers)
        roots = [
            ctx.call(first, sum_of_sum, t1, t2),
            ctx.call(second, sum_of_product, t1, t2),
            ctx.call(third, sum_of_cosine, t1),
            ctx.call(fourth, sum_of_quotient, t1, t2),
        ]
        ctx.backward(*roots)
        equal(ctx.gradient(t1).fetch(), 3.5 * ONES)
        equal(ctx.gradient(t2).fetch(), ONES)


@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_round_trips_over_three_workers_give_4131_and_864_1728_54(
    cluster: Any, mode: str
):
    t1, t3, t5 = (cluster.put("a", ONES) for _ in range(3))
    with cluster.context() as ctx:
        v = ctx.call("b", jnp.add, t1, ONES)
        v = ctx.call("c", jnp.multiply, t3, v)
        s1 = ctx.call("a", stacked, ONES, v)
        s2 = ctx.call("b", stacked, t5, v)
        s = ctx.call("c", jnp.matmul, s1, s2)
        m = ctx.call("a", jnp.matmul, s, s)
        loss = ctx.call("b", jnp.sum, m)
        ctx.backward(loss, mode=mode)
        assert loss.fetch() == 4131
        for leaf, wanted in ((t1, 864), (t3, 1728), (t5, 54)):
            equal(ctx.gradient(leaf).fetch(), wanted * ONES)
        assert len(ctx.gradients()) == 3


@pytest.mark.parametrize("workers", ["aaaa", "bcda", "bbca"])
def test_a_product_of_products_gives_1594323_and_885735_1240029(
    cluster: Any, workers: str
):
    t1, t2 = cluster.put("a", ONES), cluster.put("b", ONES)
    with cluster.context() as ctx:
        t3 = ctx.call(workers[0], times_transposed, t1, t2)
        t4 = ctx.call(workers[1], times_transposed, t2, t3)
        t5 = ctx.call(workers[2], times_transposed, t3, t4)
        loss = ctx.call(workers[3], sum_of_chain, t1, t2, t3, t4, t5)
        ctx.backward(loss)
        assert loss.fetch() == 1594323
        equal(ctx.gradient(t1).fetch(), 885735 * ONES)
        equal(ctx.gradient(t2).fetch(), 1240029 * ONES)


def test_a_split_whose_parts_0_2_4_are_multiplied_gives_4_there_and_0_elsewhere(
    cluster: Any,
):
    rows = cluster.put("a", jnp.ones((10, 2)))
    with cluster.context() as ctx:
        parts = ctx.call("b", in_five, rows)
        assert [part.shape for part in parts] == [(2, 2)] * 5
        loss = ctx.call("a", sum_of_chain, *parts[::2])
        ctx.backward(loss)
        assert loss.fetch() == 16
        wanted = np.zeros((10, 2))
        wanted[[0, 1, 4, 5, 8, 9]] = 4
        equal(ctx.gradient(rows).fetch(), wanted)


def test_an_unused_argument_gets_an_explicit_zero(cluster: Any):
    t1, t2 = cluster.put("a", ONES), cluster.put("b", ONES)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("c", first_alone, t1, t2))
        assert list(ctx.gradients()) == [t1, t2]
        equal(ctx.gradient(t1).fetch(), ONES)
        equal(ctx.gradient(t2).fetch(), 0 * ONES)


def test_an_unused_output_is_a_zero_to_the_vjp(cluster: Any):
    t = cluster.put("a", 0 * ONES)
    with cluster.context() as ctx:
        sine, _ = ctx.call("b", two_outputs, t)
        ctx.backward(ctx.call("c", total, sine))
        equal(ctx.gradient(t).fetch(), ONES)


def test_a_second_pass_in_one_context_adds(cluster: Any):
    t1, t2 = cluster.put("a", ONES), cluster.put("b", 2 * ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", sum_of_product, t1, t2)
        for passes in (1, 2, 3):
            ctx.backward(loss, retain_graph=True)
            equal(ctx.gradient(t1).fetch(), 2 * passes * ONES)
            equal(ctx.gradient(t2).fetch(), passes * ONES)


def test_a_second_pass_without_retain_graph_is_an_error_that_says_so(cluster: Any):
    t = cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", total, t)
        ctx.backward(loss)
        with fails_with(jdag.errors.GraphError, "conformance.retain_graph_true"):
            ctx.backward(loss)
        equal(ctx.gradient(t).fetch(), ONES)


@pytest.mark.parametrize("callee", ["b", "c"])
def test_a_leaf_of_another_worker_is_handed_on_by_its_ref(cluster: Any, callee: str):
    """To a call on its owner, c, and to one on b, who is neither owner nor caller."""
    remote, own = cluster.put("c", ONES), cluster.put("a", 2 * ONES)
    with cluster.context() as ctx:
        made = ctx.call(callee, add_here, remote, own)
        ctx.backward(ctx.call("a", sum_of_product, made, own))
        equal(ctx.gradient(remote).fetch(), 2 * ONES)
        equal(ctx.gradient(own).fetch(), (3 + 2) * ONES)
        assert ctx.gradient(remote).worker == "c" and ctx.gradient(own).worker == "a"


def test_a_hundred_round_trips_are_a_hundred_sends_and_2_to_the_100(cluster: Any):
    w = cluster.put("a", ONES)
    with cluster.context() as ctx:
        h = w
        for _ in range(100):
            h = ctx.move("a", ctx.call("b", jnp.add, h, h))
        ctx.backward(ctx.call("a", total, h), retain_graph=True)
        drawn = ctx.graph()
        assert len(drawn["a"].sends) == len(drawn["b"].sends) == 100
        assert len(drawn["a"].recvs) == len(drawn["b"].recvs) == 100
        equal(ctx.gradient(w).fetch(), 2.0**100 * ONES)
