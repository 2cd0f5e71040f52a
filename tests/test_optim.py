"""An optimizer steps each leaf on its owner, as optax does all of them in one place."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jdag.cluster import simulate
from jdag.errors import ContextError, JdagError
from jdag.optim import Optimizer, squared_norm
from jdag.ref import fetch
from tests.face_cases import ONES, nothing_is_left, total


def test_sgd_gives_the_peers_numbers(cluster):
    w1, w2 = cluster.put("b", ONES), cluster.put("c", ONES)
    optimizer = Optimizer(optax.sgd(0.05), [w1, w2])
    with cluster.context() as ctx:
        h = ctx.call("b", jnp.matmul, w1, ONES)
        h = ctx.call("c", lambda w, h: jnp.sum(w @ h + ONES), w2, h)
        ctx.backward(h)
        for gradient in fetch(ctx.gradient([w1, w2])):
            np.testing.assert_array_equal(gradient, 9 * ONES)
        optimizer.step(ctx)
    for leaf in (w1, w2):
        np.testing.assert_allclose(leaf.fetch(), 0.55 * ONES, rtol=1e-15)
    nothing_is_left(cluster)


def test_a_parameter_without_a_gradient_in_this_context_does_not_move(cluster):
    p, q = cluster.put("b", 1.0), cluster.put("c", 1.0)
    optimizer = Optimizer(optax.sgd(0.1), {"p": p, "q": q})
    for loss in (lambda p, q: p + q, lambda p, q: p):
        with cluster.context() as ctx:
            used = (p, q) if loss(1, 0) != loss(1, 1) else (p, 0.0)
            ctx.backward(ctx.call("d", loss, *used))
            optimizer.step(ctx)
    np.testing.assert_allclose(fetch([p, q]), [0.8, 0.9], rtol=1e-15)


def test_absent_leaves_keep_their_state_too(cluster):
    p, q = cluster.put("b", ONES), cluster.put("c", ONES)
    optimizer = Optimizer(optax.adam(0.1), [p, q])
    for leaves in ([p, q], [p]):
        with cluster.context() as ctx:
            ctx.backward(ctx.call("d", total, *leaves))
            optimizer.step(ctx)
    counts = [state[0].count for state in fetch(optimizer.states)]
    assert counts == [2, 1]
    assert p.fetch()[0, 0] < q.fetch()[0, 0] < 1


def scheduled():
    schedule = optax.cosine_decay_schedule(0.1, 10)
    return optax.chain(optax.clip(0.5), optax.adamw(schedule, weight_decay=0.01))


TRANSFORMATIONS = {
    "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: optax.adam(0.1),
    "scheduled": scheduled,
    "lamb": lambda: optax.lamb(0.1),
}


@pytest.mark.parametrize("clip_norm", [None, 0.5])
@pytest.mark.parametrize("name", TRANSFORMATIONS)
def test_steps_are_those_of_optax_over_all_leaves(cluster, name, clip_norm):
    params = {
        "b": jnp.linspace(0.5, 1, 4).astype("float32"),
        "a": [jnp.linspace(-1, 1, 6).reshape(2, 3), jnp.ones((3, 4))],
    }
    owners = {"b": "c", "a": ["b", "d"]}
    refs = jax.tree.map(lambda leaf, owner: cluster.put(owner, leaf), params, owners)
    optimizer = Optimizer(TRANSFORMATIONS[name](), refs, clip_norm=clip_norm)
    tx = TRANSFORMATIONS[name]()
    clip = (
        optax.identity() if clip_norm is None else optax.clip_by_global_norm(clip_norm)
    )
    state, clipped = tx.init(params), clip.init(params)

    def loss(p):
        return jnp.sum(jnp.tanh(p["a"][0] @ p["a"][1]) @ p["b"]) ** 2

    for _ in range(3):
        with cluster.context() as ctx:
            h = ctx.call("d", jnp.matmul, *refs["a"])
            out = ctx.call(
                "c", lambda h, b: jnp.sum(jnp.tanh(h) @ b) ** 2, h, refs["b"]
            )
            ctx.backward(out)
            optimizer.step(ctx)
        updates, clipped = clip.update(jax.grad(loss)(params), clipped)
        updates, state = tx.update(updates, state, params)
        params = optax.apply_updates(params, updates)
    for got, wanted in zip(
        jax.tree.leaves(fetch(refs)), jax.tree.leaves(params), strict=True
    ):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-7)
        assert got.dtype == wanted.dtype


def test_the_clipped_norm_is_that_over_all_owners(cluster):
    refs = [cluster.put(worker, jnp.asarray([0.0])) for worker in "bcd"]
    optimizer = Optimizer(optax.sgd(1.0), refs, clip_norm=7.0)
    with cluster.context() as ctx:
        loss = ctx.call("a", lambda x, y, z: jnp.sum(2 * x + 3 * y + 6 * z), *refs)
        ctx.backward(loss)
        optimizer.step(ctx)
        np.testing.assert_allclose(
            np.concatenate(fetch(refs)), [-2.0, -3.0, -6.0], rtol=1e-15
        )
        optimizer = Optimizer(optax.sgd(1.0), refs, clip_norm=3.5)
        optimizer.step(ctx)
        np.testing.assert_allclose(
            np.concatenate(fetch(refs)), [-3.0, -4.5, -9.0], rtol=1e-15
        )


def test_a_norm_that_is_no_number_spoils_all_leaves_as_in_optax(cluster):
    refs = [cluster.put("b", jnp.ones(2)), cluster.put("c", jnp.ones(2))]
    optimizer = Optimizer(optax.sgd(1.0), refs, clip_norm=1.0)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("b", lambda w, v: jnp.sum(w * jnp.nan + v), *refs))
        optimizer.step(ctx)
    assert np.isnan(fetch(refs)).all()


def test_squared_norms_are_taken_at_least_in_float32():
    # float(): JAX would take the other side of == to float16, where it is infinite too.
    assert float(squared_norm(jnp.full(4, 300.0, jnp.float16))) == 4 * 300.0**2
    assert squared_norm(jnp.asarray([3 + 4j])) == 25
    assert squared_norm(jnp.ones(2, jnp.float64)).dtype == jnp.float64


def through_a_state():
    """Carry the mean of all gradients to the next step, as nothing should."""

    def update(updates, state, params=None):
        mean = sum(jnp.mean(leaf) for leaf in jax.tree.leaves(updates))
        return jax.tree.map(lambda leaf: leaf - state, updates), mean

    return optax.GradientTransformation(lambda params: jnp.zeros(()), update)


MIXING: dict[str, Any] = {
    "global norm": lambda: optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
    "apply if finite": lambda: optax.apply_if_finite(optax.sgd(0.1), 3),
    "prodigy": optax.contrib.prodigy,
    "through a state": through_a_state,
}


@pytest.mark.parametrize("name", MIXING)
def test_a_transformation_that_mixes_leaves_is_refused(cluster, name):
    with pytest.raises(JdagError, match=r"mixes leaves.*clip_norm="):
        Optimizer(MIXING[name](), cluster.put("b", ONES))


SINGLE = {
    "adafactor": lambda: optax.adafactor(0.1),
    "lamb": lambda: optax.lamb(0.1),
    "multi-steps": lambda: optax.MultiSteps(
        optax.adam(0.1), 2
    ).gradient_transformation(),
    "injected": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
    "by block": lambda: optax.clip_by_block_rms(1.0),
}


@pytest.mark.parametrize("name", SINGLE)
def test_a_transformation_of_single_leaves_is_taken(cluster, name):
    w = cluster.put("b", ONES)
    optimizer = Optimizer(SINGLE[name](), [w])
    for _ in range(2):
        with cluster.context() as ctx:
            ctx.backward(ctx.call("c", total, w))
            optimizer.step(ctx)
    assert not np.array_equal(w.fetch(), ONES)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda c: Optimizer(optax.sgd(0.1), []), "there are none"),
        (lambda c: Optimizer(optax.sgd(0.1), [1.0]), "takes a ref"),
        (lambda c: Optimizer(optax.sgd(0.1), c.put("b", 3)), "float or complex leaves"),
        (
            lambda c: Optimizer(optax.sgd(0.1), [c.put("b", 1.0)] * 2),
            "a leaf is there twice",
        ),
        (
            lambda c: Optimizer(optax.sgd(0.1), c.put("b", 1.0), clip_norm=0.0),
            "clip_norm=0.0: it has to be above 0",
        ),
        (
            lambda c: Optimizer(optax.contrib.reduce_on_plateau(), c.put("b", 1.0)),
            "one that takes more is not supported",
        ),
    ],
)
def test_what_cannot_be_optimized_is_named(cluster, make, text):
    with pytest.raises(JdagError, match=text):
        make(cluster)


def test_a_step_needs_an_open_context_of_its_cluster(cluster):
    w = cluster.put("b", ONES)
    optimizer = Optimizer(optax.sgd(0.1), w)
    with cluster.context() as ctx:
        ctx.backward(ctx.call("c", total, w))
    with pytest.raises(ContextError, match="is over"):
        optimizer.step(ctx)
    with simulate(["x", "y"], seed=0) as other:
        theirs = other.put("y", ONES)
        with other.context() as ctx:
            ctx.backward(ctx.call("x", total, theirs))
            with pytest.raises(ContextError, match="leaves of the cluster of 'a', 'b'"):
                optimizer.step(ctx)


def test_states_are_dropped_with_their_optimizer(cluster):
    w = cluster.put("b", ONES)
    optimizer = Optimizer(optax.adam(0.1), w)
    cluster.driver.settle()
    assert cluster.info()["b"]["values_held"] == 4
    optimizer.drop()
    cluster.driver.settle()
    assert cluster.info()["b"]["values_held"] == 1
