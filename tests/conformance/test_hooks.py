"""Hooks: on a leaf's complete cotangent, on a ref between, and after accumulation."""

from typing import Any

import numpy as np
import pytest

import jdag
from tests.conformance.functions import (
    ONES,
    SEEN,
    doubled,
    first_alone,
    noted,
    noted_again,
    of_another_shape,
    plus_one,
    refuses,
    square_sum,
    three_times,
    total,
)

equal = np.testing.assert_array_equal


@pytest.fixture(autouse=True)
def nothing_seen():
    SEEN.clear()


def four_uses(ctx: Any, w: Any) -> Any:
    """A loss to which w gives four addends from three workers, 1 + 3 + 3 + 3."""
    parts = [ctx.call(worker, three_times, w) for worker in "bcd"]
    return ctx.call("d", total, w, *parts)


def test_a_function_on_a_leafs_cotangent_may_replace_it_once_when_it_is_complete(
    cluster: Any,
):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        ctx.on_cotangent(w, plus_one)
        ctx.backward(four_uses(ctx, w))
        equal(ctx.gradient(w).fetch(), 11 * ONES)


@pytest.mark.parametrize(
    ("chain", "wanted"), [((plus_one, doubled), 22.0), ((doubled, plus_one), 21.0)]
)
def test_several_on_one_leaf_are_chained_in_their_order(
    cluster: Any, chain: Any, wanted: float
):
    w = cluster.put("c", ONES)
    with cluster.context() as ctx:
        for fn in chain:
            ctx.on_cotangent(w, fn)
        ctx.backward(four_uses(ctx, w))
        equal(ctx.gradient(w).fetch(), wanted * ONES)


def test_a_function_after_accumulation_sees_this_pass_once_each_in_order(cluster: Any):
    w = cluster.put("a", ONES)
    with cluster.context() as ctx:
        ctx.on_gradient(w, noted)
        ctx.on_gradient(w, noted_again)
        loss = four_uses(ctx, w)
        ctx.backward(loss, retain_graph=True)
        assert len(SEEN) == 2
        ctx.backward(loss, cotangents=2.0)
        equal(ctx.gradient(w).fetch(), 30 * ONES)
    assert len(SEEN) == 4
    for seen, wanted in zip(SEEN, (10, -10, 20, -20), strict=True):
        equal(seen, wanted * ONES)


def test_an_intermediate_refs_complete_cotangent_may_be_replaced_where_it_lives(
    cluster: Any,
):
    w = cluster.put("a", ONES)
    with cluster.context() as ctx:
        h = ctx.call("b", three_times, w)
        ctx.on_cotangent(h, plus_one)
        uses = [ctx.call(worker, three_times, h) for worker in "cda"]
        ctx.backward(ctx.call("c", total, h, *uses))
        equal(ctx.gradient(w).fetch(), 3 * (10 + 1) * ONES)


def test_a_hook_on_a_zero_is_called_with_zeros_and_may_replace_them(cluster: Any):
    w, v = cluster.put("a", ONES), cluster.put("b", ONES)
    with cluster.context() as ctx:
        ctx.on_cotangent(v, plus_one)
        h = ctx.call("c", three_times, v)
        ctx.on_cotangent(h, plus_one)
        ctx.backward(ctx.call("d", first_alone, w, h))
        equal(ctx.gradient(v).fetch(), (3 * 1 + 1) * ONES)


def test_a_hook_is_of_its_context_alone(cluster: Any):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        ctx.on_cotangent(w, doubled)
        ctx.backward(four_uses(ctx, w))
        equal(ctx.gradient(w).fetch(), 20 * ONES)
    with cluster.context() as ctx:
        ctx.backward(four_uses(ctx, w))
        equal(ctx.gradient(w).fetch(), 10 * ONES)


def test_a_hook_that_raises_or_gives_another_shape_is_an_error_with_its_name(
    cluster: Any,
):
    w = cluster.put("b", ONES)
    for fn, part in (
        (refuses, "ValueError: the hook will not have it"),
        (of_another_shape, r"the hook returned float64\[\]"),
    ):
        with cluster.context() as ctx:
            ctx.on_cotangent(w, fn)
            loss = ctx.call("c", square_sum, w)
            with pytest.raises(jdag.JdagError, match=part) as caught:
                ctx.backward(loss)
            assert f"{fn.__name__} failed on 'b'" in str(caught.value)
            assert "test_hooks.py:" in str(caught.value)
            assert ctx.gradients() == {}


def test_what_a_function_after_accumulation_raises_backward_raises(cluster: Any):
    w = cluster.put("c", ONES)
    with cluster.context() as ctx:
        ctx.on_gradient(w, refuses)
        said = "refuses failed on 'c', called at .*will not have it"
        with pytest.raises(jdag.errors.RemoteError, match=said):
            ctx.backward(ctx.call("b", total, w))
        equal(ctx.gradient(w).fetch(), ONES)
