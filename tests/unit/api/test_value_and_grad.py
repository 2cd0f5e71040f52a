"""`value_and_grad` over a cluster gives what the oracle gives, in one structure."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.api.hvp import hvp
from jdag.api.oracle import oracle
from jdag.api.value_and_grad import value_and_grad
from jdag.context.refs import fetch
from jdag.engine.functions import program
from jdag.errors import JdagError, RemoteError, RootError
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, nothing_is_left, total

X = jnp.linspace(-0.5, 1, 12).reshape(4, 3)


def layer(w, x):
    return jnp.tanh(x @ w)


@program
def block(ctx, w, x, depth):
    h = ctx.call(ctx.here, layer, w, x)
    if depth == 0 or ctx.call(ctx.here, jnp.max, h).fetch() < 0:
        return h
    return ctx.call("c" if ctx.here == "b" else "b", block, w, h, depth - 1)


def loss(ctx, params, x, scale):
    h = ctx.call("b", block, params["w"], x, 3)
    h = ctx.call("d", lambda h, v, s: h * v * s, h, params["v"][0], scale)
    return ctx.call("a", total, h)


PARAMS = {"w": ONES / 3, "v": [jnp.arange(3.0)], "unused": jnp.ones((2, 2))}


def assert_close(got, wanted):
    assert jax.tree.map(np.shape, got) == jax.tree.map(np.shape, wanted)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-13)


def test_arrays_give_the_oracles_value_and_gradients(cluster):
    got = value_and_grad(loss, cluster)(PARAMS, X, 2.0)
    assert_close(got, oracle(loss)(PARAMS, X, 2.0))
    np.testing.assert_array_equal(got[1]["unused"], np.zeros((2, 2)))
    nothing_is_left(cluster)
    held = {name: info["values_held"] for name, info in cluster.info().items()}
    assert held == {"a": 0, "b": 0, "c": 0, "d": 0}, "arrays were put meanwhile"


def test_refs_give_the_same_and_stay(cluster):
    refs = {
        "w": cluster.put("c", PARAMS["w"]),
        "v": cluster.put("d", PARAMS["v"]),
        "unused": cluster.put("b", PARAMS["unused"]),
    }
    wanted = oracle(loss)(PARAMS, X, 2.0)
    assert_close(value_and_grad(loss, cluster)(refs, X, 2.0), wanted)
    assert_close(oracle(loss)(refs, X, 2.0), wanted)
    assert_close(fetch(refs), PARAMS)


def test_argnums_and_aux_are_as_in_jax(cluster):
    def with_aux(ctx, w, x, v):
        h = ctx.call("b", layer, w, x)
        return ctx.call("c", lambda h, v: jnp.sum(h * v), h, v), {"h": h, "n": 3}

    args = (ONES, X, jnp.arange(3.0))
    for argnums in (2, (0, 2), (2, 0)):
        options: Any = {"argnums": argnums, "has_aux": True}
        got = value_and_grad(with_aux, cluster, **options)(*args)
        assert_close(got, oracle(with_aux, **options)(*args))
        assert got[0][1]["n"] == 3


def test_a_loss_that_depends_on_nothing_has_zero_gradients(cluster):
    def constant(ctx, w):
        return ctx.call("b", jnp.sum, X)

    value, gradient = value_and_grad(constant, cluster)(ONES)
    np.testing.assert_allclose(value, jnp.sum(X), atol=1e-15)
    np.testing.assert_array_equal(gradient, 0 * ONES)


@pytest.mark.parametrize(
    ("program", "given", "error", "text"),
    [  # Of roots more in test_roots; these may be constants.
        (lambda ctx, w: None, ONES, RootError, "root 0 is None"),
        (lambda ctx, w: ctx.call("b", jnp.sin, X), ONES, RootError, "size must be"),
        (loss, {"n": [np.int64(3)]}, JdagError, r"argument 0\['n'\]\[0\]: int64\[\]"),
        (lambda ctx, w: ctx.call("b", layer, X, w), ONES, RemoteError, "layer failed"),
    ],
)
def test_bad_losses_are_named_and_nothing_stays(cluster, program, given, error, text):
    with pytest.raises(error, match=text):
        value_and_grad(program, cluster)(given)
    nothing_is_left(cluster)
    assert not any(info["values_held"] for info in cluster.info().values())


def test_a_ref_that_is_no_leaf_is_refused(cluster):
    with cluster.context() as ctx:
        h = ctx.call("b", jnp.sin, ONES)
        with fails_with(JdagError, "api.is_no_leaf"):
            value_and_grad(loss, cluster)(h)


def test_abstract_programs_give_shapes():
    with simulate(["a", "b", "c", "d"], seed=0, values="abstract") as cluster:

        def one_layer(ctx, p, x):
            return ctx.call("c", jnp.sum, ctx.call("b", layer, p["w"], x))

        value, gradients = value_and_grad(one_layer, cluster)(PARAMS, X)
        assert value.shape == () and gradients["unused"].shape == (2, 2)
        assert isinstance(gradients["w"], jax.ShapeDtypeStruct)


@pytest.mark.parametrize("transform", [value_and_grad, hvp])
@pytest.mark.parametrize("has_aux", [False, True])
def test_what_returns_more_than_a_loss_is_told_of_has_aux(cluster, transform, has_aux):
    def several(ctx, w, *_):
        return [ctx.call("b", jnp.sum, w)] * 3

    texts = r"sum several .* has_aux=True", r"\(loss, aux\), but this one \[Ref"
    with pytest.raises(RootError, match=texts[has_aux]):
        transform(several, cluster, has_aux=has_aux)(ONES, ONES)


def test_an_argument_that_is_named_twice_is_refused(cluster):
    makers: Any = (partial(value_and_grad, cluster=cluster), oracle)
    for make in (*makers, partial(hvp, cluster=cluster)):
        for argnums in ((0, 0), (0, 1, 0)):
            with fails_with(JdagError, "api.names_an_argument_twice"):
                make(loss, argnums=argnums)(ONES, ONES, ONES)


@pytest.mark.parametrize("transform", [value_and_grad, hvp])
def test_what_is_no_program_and_what_is_no_cluster_are_named(cluster, transform):
    with fails_with(JdagError, "api.takes_a_function_of_a"):
        transform(3, cluster)
    with fails_with(JdagError, "api.takes_a_cluster_second_not"):
        transform(block, None)
