"""Hooks as users see them: what they are given, what they change, what is refused."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.context.refs import stop_gradient
from jdag.errors import ContextError, GraphError, JdagError, WorkerLost
from jdag.sim import Crash
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, nothing_is_left, total


def test_any_callable_can_be_a_hook(cluster: Any):
    class Plus:
        def __call__(self, c: Any) -> Any:
            return c + 1

    seen: list[Any] = []
    hooks = [jnp.negative, functools.partial(jnp.multiply, 3), Plus(), seen.append]
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        for hook in (*hooks, jax.jit(lambda c: c * 5)):
            ctx.on_cotangent(w, hook)
        ctx.backward(ctx.call("c", total, w))
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), -10 * ONES)
    assert len(seen) == 1


def test_a_hook_cannot_use_the_cluster(cluster: Any):
    w = cluster.put("b", ONES)
    used = [
        lambda ctx: w.fetch(),
        lambda ctx: cluster.put("b", 1.0),
        lambda ctx: cluster.context().__enter__(),
        lambda ctx: cluster.close(),
        lambda ctx: ctx.call("b", total, w),
    ]
    for use in used:
        with cluster.context() as ctx:
            ctx.on_cotangent(w, lambda _, use=use, ctx=ctx: use(ctx))
            loss = ctx.call("c", total, w)
            said = "that a worker computes, such as a hook, cannot use the cluster"
            with pytest.raises(JdagError, match=said):
                ctx.backward(loss)


def test_what_cannot_be_hooked_says_why(cluster: Any):
    w, n = cluster.put("b", ONES), cluster.put("b", 3)
    with cluster.context() as other:
        theirs = other.call("b", jnp.square, w)
        with cluster.context() as ctx:
            h = ctx.call("b", jnp.square, w)
            i = ctx.call("b", jnp.argmax, w)
            constant = ctx.call("b", jnp.square, ONES)
            for ref in (n, i, constant, stop_gradient(w), stop_gradient(h)):
                with fails_with(GraphError, "properties.on_cotangent_is_not_tracked"):
                    ctx.on_cotangent(ref, jnp.negative)
            with fails_with(GraphError, "properties.on_gradient_is_not_tracked"):
                ctx.on_gradient(n, jnp.negative)
            with fails_with(JdagError, "properties.on_gradient_takes_a_leaf"):
                ctx.on_gradient(h, jnp.negative)
            with fails_with(JdagError, "properties.takes_a_ref_first_not"):
                ctx.on_cotangent(3, jnp.negative)
            for hook in (None, 3, "negative"):
                with pytest.raises(JdagError, match=f"takes a function.*not {hook!r}"):
                    ctx.on_cotangent(h, hook)
            with fails_with(ContextError, "properties.is_of_context_and_this"):
                ctx.on_cotangent(theirs, jnp.negative)
            with simulate(["a", "b"], seed=0) as another:
                far = another.put("a", ONES)
                with fails_with(ContextError, "properties.refs_do_not_leave_their"):
                    ctx.on_gradient(far, jnp.negative)
            ctx.backward(ctx.call("b", total, h))
            gradient = ctx.gradient(w)
            with fails_with(GraphError, "properties.is_not_tracked"):
                ctx.on_cotangent(gradient, jnp.negative)
            np.testing.assert_array_equal(gradient.fetch(), 2 * ONES)


def test_on_a_worker_that_is_lost_nothing_can_be_hooked():
    faults = [Crash("c", at_ns=10, detect_ns=10)]
    with simulate(["a", "b", "c"], seed=0, faults=faults) as cluster:
        w = cluster.put("c", ONES)
        cluster.driver.settle()
        with (
            cluster.context() as ctx,
            fails_with(WorkerLost, "properties.hooked_on_c_worker_c"),
        ):
            ctx.on_cotangent(w, jnp.negative)
        nothing_is_left(cluster)


def test_a_worker_that_is_lost_before_it_hears_of_a_hook_fails_the_context():
    faults = [Crash("c", at_ns=10, detect_ns=10)]
    with simulate(["a", "b", "c"], seed=0, faults=faults) as cluster:
        w, v = cluster.put("c", ONES), cluster.put("b", ONES)
        with cluster.context() as ctx, pytest.raises(WorkerLost):
            ctx.on_cotangent(w, jnp.negative)
            ctx.backward(ctx.call("b", total, v))
            cluster.driver.settle()
            ctx.backward(ctx.call("b", total, v))
        nothing_is_left(cluster)
