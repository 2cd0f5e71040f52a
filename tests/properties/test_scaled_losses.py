"""Scaled losses: a step with an inf or a NaN on any owner is skipped by all."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag.context.refs import fetch
from jdag.training.optimizer import Optimizer
from tests.tools.face_cases import total


def scaled(loss):
    """A loss of float16 whose cotangents are scaled on the way, not at its leaves."""

    @jax.custom_vjp
    def leaf(w, scale):
        return w

    leaf.defvjp(lambda w, scale: (w, scale), lambda scale, ct: (ct / scale, None))
    return lambda w, x, scale: loss(leaf(w, scale), x) * scale


def overflowing(w, x):
    return jnp.sum(jnp.sin(w.astype("float16") * x).astype("float32"))


SCALED, SCALES = scaled(overflowing), [4.0, 1e6, 8.0, 1e5, 16.0]


def scaled_program(ctx, refs, x, scale):
    parts = [ctx.call(ref.worker, SCALED, ref, x, scale) for ref in refs]
    return ctx.call("a", total, *parts)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("kind", ["eager", "plan"])
def test_a_step_with_an_inf_on_one_owner_is_skipped_by_all(cluster, kind, clip_norm):
    params = [jnp.linspace(0.1, 1 + n, 3).astype("float32") for n in range(3)]
    refs = [cluster.put("bcb"[n], leaf) for n, leaf in enumerate(params)]
    optimizer = Optimizer(optax.adam(0.1), refs, clip_norm, skip_not_finite=True)
    step = jdag.compile(scaled_program, cluster, optimizer)
    clip = [] if clip_norm is None else [optax.clip_by_global_norm(clip_norm)]
    tx = optax.chain(*clip, optax.adam(0.1))
    state, steps, x = tx.init(params), [], jnp.asarray([0.5, 1.0, 3.0], "float16")
    for scale in SCALES:
        if kind == "plan":
            step(refs, x, scale)
        else:
            with cluster.context() as ctx:
                ctx.backward(scaled_program(ctx, refs, x, scale))
                optimizer.step(ctx)
        steps.append(optimizer.steps)
        gradients = [jax.grad(SCALED)(leaf, x, scale) for leaf in params]
        if all([jnp.isfinite(one).all() for one in gradients]):
            updates, state = tx.update(gradients, state, params)
            params = optax.apply_updates(params, updates)
    assert steps == [1, 1, 2, 2, 3]
    for got, wanted in zip(fetch(refs), params, strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-3)


def test_a_finite_gradient_whose_square_is_not_is_not_skipped(cluster):
    refs = [cluster.put(worker, jnp.zeros(2, "float32")) for worker in "bcd"]
    optimizer = Optimizer(optax.sign_sgd(1.0), refs, skip_not_finite=True)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("a", lambda *w: 1e30 * total(*w), *refs))
        optimizer.step(ctx)
    np.testing.assert_array_equal(fetch(refs), -jnp.ones((3, 2)))
    assert optimizer.steps == 1
