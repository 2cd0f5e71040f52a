"""The optimizer: one step on each owner, and absent leaves stand still."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import optax

import jdag
from tests.conformance.functions import ONES, total, weighted


def test_sgd_on_two_owners_gives_gradients_9_and_weights_055(cluster: Any):
    w1, w2 = cluster.put("b", ONES), cluster.put("c", ONES)
    optimizer = jdag.Optimizer(optax.sgd(0.05), [w1, w2])
    with cluster.context() as ctx:
        h = ctx.call("b", jnp.matmul, w1, ONES)
        ctx.backward(ctx.call("c", weighted, w2, h, ONES))
        for leaf in (w1, w2):
            np.testing.assert_array_equal(ctx.gradient(leaf).fetch(), 9 * ONES)
        optimizer.step(ctx)
    for leaf, owner in ((w1, "b"), (w2, "c")):
        assert leaf.worker == owner
        np.testing.assert_allclose(leaf.fetch(), 0.55 * ONES, rtol=1e-12)


def test_a_parameter_without_a_gradient_in_this_context_does_not_move(cluster: Any):
    p, q = cluster.put("b", 1.0), cluster.put("c", 1.0)
    optimizer = jdag.Optimizer(optax.sgd(0.1), {"p": p, "q": q})
    for used in ((p, q), (p,)):
        with cluster.context() as ctx:
            ctx.backward(ctx.call("d", total, *used))
            for leaf in used:
                assert float(ctx.gradient(leaf).fetch()) == 1.0
            optimizer.step(ctx)
    np.testing.assert_allclose(jdag.fetch([p, q]), [0.8, 0.9], rtol=1e-12)


def test_a_parameter_that_is_left_out_keeps_its_momentum_too(cluster: Any):
    p, q = cluster.put("b", 1.0), cluster.put("c", 1.0)
    optimizer = jdag.Optimizer(optax.sgd(0.1, momentum=0.5), [p, q])
    for used in ((p, q), (p,), (p, q)):
        with cluster.context() as ctx:
            ctx.backward(ctx.call("d", total, *used))
            optimizer.step(ctx)
    wanted = [1 - 0.1 * (1 + 1.5 + 1.75), 1 - 0.1 * (1 + 1.5)]
    np.testing.assert_allclose(jdag.fetch([p, q]), wanted, rtol=1e-12)
