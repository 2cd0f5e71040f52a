"""Passes give the right gradients, a context its errors, and nothing stays."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.context.refs import stop_gradient
from jdag.engine.functions import program
from jdag.errors import GraphError, JdagError
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, total


def test_one_cotangent_alone_will_do_for_one_root(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", total, w)
        ctx.backward(loss, cotangents=2, retain_graph=True)
        ctx.backward(loss, cotangents=np.float64(3))
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 5 * ONES)


def test_double_backward_is_refused_by_name(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("b", lambda a: jnp.sum(a**3), w))
        gradient = ctx.gradient(w)
        norm = ctx.call("b", lambda g, w: jnp.sum(g * w), gradient, w)
        for root in (gradient, norm):
            with fails_with(GraphError, "context.double_backward_root_0_leaf"):
                ctx.backward(root)
        stopped = stop_gradient(gradient)
        ctx.backward(ctx.call("b", lambda g, w: jnp.sum(g * w), stopped, w))
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 6 * ONES)


def test_double_backward_is_refused_through_programs_too(cluster):
    w = cluster.put("b", ONES)
    prog = program(lambda ctx, g, w: ctx.call("c", lambda g, w: jnp.sum(g * w), g, w))
    with cluster.context() as ctx:
        ctx.backward(ctx.call("c", total, w))
        root = ctx.call("d", prog, ctx.gradient(w), w)
        with fails_with(GraphError, "context.double_backward"):
            ctx.backward(root)


def test_the_mode_is_one_that_there_is(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        loss = ctx.call("c", total, w)
        with fails_with(JdagError, "context.mode_slow_allowed_is_smart"):
            ctx.backward(loss, mode="slow")


def test_gradients_come_back_in_the_structure_of_the_leaves(cluster):
    p = cluster.put("b", {"w": ONES, "b": [jnp.ones(3)]})
    with cluster.context() as ctx:
        loss = ctx.call("c", lambda p: jnp.sum(ONES @ p["w"] + p["b"][0]), p)
        ctx.backward(loss)
        g = ctx.gradient(p)
        assert g["w"].worker == "b" and not g["w"].tracked and g["w"].shape == (3, 3)
        np.testing.assert_array_equal(g["b"][0].fetch(), 3 * jnp.ones(3))
        found = ctx.gradients()
        assert list(found) == [p["b"][0], p["w"]] and found[p["w"]] == g["w"]


def test_a_leaf_never_reached_has_no_gradient_and_says_so(cluster):
    w, v = cluster.put("b", ONES), cluster.put("c", ONES)
    n = cluster.put("c", jnp.arange(3))
    with cluster.context() as ctx:
        with fails_with(GraphError, "context.reached_by_no_pass_of"):
            ctx.gradient(w)
        h = ctx.call("c", total, w)
        ctx.call("c", total, v)
        ctx.backward(h)
        assert list(ctx.gradients()) == [w]
        with fails_with(GraphError, "context.leaf_1_on_c_was"):
            ctx.gradient([w, v])
        with fails_with(GraphError, "context.leaf_2_on_c_is"):
            ctx.gradient(n)
        with fails_with(GraphError, "context.output_0_of_call_1"):
            ctx.gradient(h)
        with fails_with(JdagError, "context.leaf_x_is_an_int"):
            ctx.gradient({"x": 1})


def test_a_context_may_be_entered_after_a_later_one_has_been_left(cluster: Any):
    w = cluster.put("b", 3.0)
    early = cluster.context()
    with cluster.context() as later:
        later.backward(later.call("b", jnp.square, w))
    with early:
        early.backward(early.call("b", jnp.square, w))
        assert float(early.gradient(w).fetch()) == 6.0
    assert early.id != later.id


def test_the_gradient_of_a_leaf_that_was_dropped_says_so(cluster: Any):
    w = cluster.put("b", 3.0)
    with cluster.context() as ctx:
        loss = ctx.call("b", jnp.square, w)
        cluster.drop(w)
        ctx.backward(loss)
        with fails_with(GraphError, "context.was_dropped_by_cluster_drop"):
            ctx.gradient(w)


def test_a_pass_says_which_leaves_were_updated_since_forward_read_them(cluster):
    """And the gradient is that of the versions that it read."""
    cubed, squared, twice = (
        cluster.put(worker, jnp.array([1.0, 2.0, 3.0])) for worker in "bca"
    )

    def loss_of(x, y, z):
        return jnp.sum(x**3 + y**2 + 2 * z)

    with cluster.context() as ctx:
        loss = ctx.call("d", loss_of, cubed, squared, twice)
        report = ctx.backward(loss, retain_graph=True)
        assert (report.number, report.stale) == (1, {})
        for _ in range(3):
            cluster.update(jnp.add, squared, 1.0)
        cluster.update(jnp.multiply, cubed, 2.0)
        report = ctx.backward(loss)
        assert report.number == 2
        assert list(report.stale.items()) == [(cubed, 1), (squared, 3)]
        np.testing.assert_array_equal(ctx.gradient(cubed).fetch(), [6, 24, 54])
        np.testing.assert_array_equal(ctx.gradient(squared).fetch(), [4, 8, 12])
        with pytest.raises(AttributeError):
            report.number = 4


def test_a_leaf_that_was_dropped_is_not_reported_as_stale(cluster):
    leaf, other = (cluster.put("b", ONES) for _ in range(2))
    with cluster.context() as ctx:
        loss = ctx.call("b", lambda *a: sum(map(jnp.sum, a)), leaf, other)
        cluster.update(jnp.add, [leaf, other], 1.0)
        cluster.drop(leaf)
        assert ctx.backward(loss).stale == {other: 1}
