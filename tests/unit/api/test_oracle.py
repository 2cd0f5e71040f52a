"""The oracle gives what plain JAX gives, for programs that call, fetch and branch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.api.oracle import oracle, pullback
from jdag.context.refs import stop_gradient
from jdag.engine.functions import program
from jdag.errors import ContextError, JdagError, RemoteError, RootError
from tests.tools.error_texts import fails_with

X = jnp.linspace(-1, 1, 12).reshape(3, 4)
W = jnp.linspace(0, 1, 8).reshape(4, 2)


def hidden(w, x):
    return jnp.tanh(x @ w)


def total(h):
    return jnp.sum(h**2)


def times(a, factor):
    return a * factor


def product(a, b):
    return jnp.sum(a * b)


def two_layers(ctx, w, x):
    return ctx.call("b", total, ctx.call("a", hidden, w, x))


def test_value_and_gradient_are_those_of_plain_jax():
    value, gradient = oracle(two_layers)(W, X)
    wanted = jax.value_and_grad(lambda w: total(hidden(w, X)))(W)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-14)
    np.testing.assert_allclose(gradient, wanted[1], rtol=1e-14)


def test_gradients_have_the_structure_of_the_arguments():
    def loss(ctx, p, x, q):
        h = ctx.call("a", hidden, p["w"], x)
        return ctx.call("b", product, ctx.call("b", times, h, p["s"][0]), q)

    p = {"w": W, "s": [jnp.asarray(2.0)]}
    _, (dp, dq) = oracle(loss, argnums=(0, 2))(p, X, jnp.ones((3, 2)))
    assert jax.tree.map(np.shape, dp) == jax.tree.map(np.shape, p)
    np.testing.assert_allclose(dq, 2 * hidden(W, X), rtol=1e-14)
    np.testing.assert_allclose(dp["s"][0], jnp.sum(hidden(W, X)), rtol=1e-14)


def test_aux_comes_back_as_values():
    def loss(ctx, w, x):
        h = ctx.call("a", hidden, w, x)
        return ctx.call("b", total, h), {"h": h, "note": "kept"}

    (_, aux), _ = oracle(loss, has_aux=True)(W, X)
    np.testing.assert_array_equal(aux["h"], hidden(W, X))
    assert aux["note"] == "kept"


@pytest.mark.parametrize(("scale", "factor"), [(0.1, 3.0), (10.0, -1.0)])
def test_a_program_may_branch_on_what_it_fetches(scale, factor):
    def loss(ctx, w, x):
        value = ctx.call("b", total, ctx.call("a", hidden, w, x))
        return ctx.call("a", times, value, 3.0 if value.fetch() < 1 else -1.0)

    value, gradient = oracle(loss)(W * scale, X)
    wanted = jax.value_and_grad(lambda w: factor * total(hidden(w, X)))(W * scale)
    np.testing.assert_allclose(value, wanted[0], rtol=1e-14)
    np.testing.assert_allclose(gradient, wanted[1], rtol=1e-14)


def test_a_fetched_value_is_a_constant():
    def loss(ctx, w):
        return ctx.call("a", product, w, w.fetch())

    np.testing.assert_array_equal(oracle(loss)(W)[1], W)


def test_a_program_that_fetches_more_the_second_time_is_refused():
    runs = []

    def loss(ctx, w):
        runs.append(0)
        for _ in runs:
            w.fetch()
        return ctx.call("a", total, w)

    with fails_with(ContextError, "api.the_same_each_time"):
        oracle(loss)(W)


@program
def power(ctx, a, b, n):
    assert ctx.here == f"w{n}"
    if n == 0:
        return ctx.call("w0", product, a, b)
    return ctx.call(f"w{n - 1}", power, ctx.call("a", jnp.multiply, a, b), b, n=n - 1)


def test_programs_nest_and_recurse():
    def loss(ctx, w):
        return ctx.call("w3", power, w, w, n=3)

    value, gradient = oracle(loss)(W)
    np.testing.assert_allclose(value, jnp.sum(W**5), rtol=1e-14)
    np.testing.assert_allclose(gradient, 5 * W**4, rtol=1e-14)


def test_a_stopped_gradient_is_a_constant():
    def loss(ctx, w):
        moved = ctx.move("b", w)
        assert moved.tracked and moved.worker == "b"
        assert not stop_gradient(moved).tracked
        return ctx.call("b", product, moved, stop_gradient(moved))

    np.testing.assert_array_equal(oracle(loss)(W)[1], W)


def test_integer_outputs_are_untracked():
    def loss(ctx, w):
        best = ctx.call("a", jnp.argmax, w)
        assert not best.tracked and best.dtype == jnp.int64
        return ctx.call("a", lambda w, i: w.reshape(-1)[i] ** 2, w, best)

    gradient = oracle(loss)(W)[1]
    assert gradient[-1, -1] == 2 and jnp.sum(gradient != 0) == 1


def test_outputs_lose_their_weak_type_at_each_call():
    def step(x):
        return jnp.where(x > 0, 1.0, 0.0)  # Weak: it would give way to bfloat16.

    def loss(ctx, w):
        return ctx.call("b", product, w, ctx.call("a", step, w))

    w = jnp.ones(3, jnp.bfloat16)
    assert oracle(loss)(w)[0].dtype == jnp.float64


def test_several_roots_with_cotangents_are_a_pullback():
    def roots(ctx, w, x):
        h = ctx.call("a", hidden, w, x)
        return [h, ctx.call("b", total, h), h]

    cotangents = [jnp.ones((3, 2)), 2.0, jnp.full((3, 2), 3.0)]
    values, gradient = pullback(roots)(W, X, cotangents=cotangents)
    _, vjp = jax.vjp(lambda w: (hidden(w, X), total(hidden(w, X))), W)
    wanted = vjp((jnp.full((3, 2), 4.0), jnp.asarray(2.0)))[0]
    np.testing.assert_allclose(gradient, wanted, rtol=1e-14)
    assert [value.shape for value in values] == [(3, 2), (), (3, 2)]


def test_a_pullback_of_complex_values_follows_jax():
    def roots(ctx, z):
        return [ctx.call("a", jnp.sin, z)]

    z, cotangent = jnp.asarray([1 + 1j, 2j, 0.5]), jnp.asarray([1 + 2j, 3, 1j])
    _, gradient = pullback(roots)(z, cotangents=[cotangent])
    wanted = jax.vjp(jnp.sin, z)[1](cotangent)[0]
    np.testing.assert_allclose(gradient, wanted, rtol=1e-14)


def test_an_error_names_function_worker_and_the_users_line():
    def loss(ctx, w):
        return ctx.call("b", hidden, w, w)

    with pytest.raises(RemoteError) as caught:
        oracle(loss)(W)
    said = str(caught.value)
    where = r"test_oracle:hidden failed on 'b', called at .*in .*loss"
    assert re.search(where, said)
    assert "return jnp.tanh(x @ w)" in said and "site-packages" not in said
    assert isinstance(caught.value.__cause__, TypeError)


@pytest.mark.parametrize(
    ("result", "error", "text"),
    [
        (lambda ctx, w: None, RootError, "NoneType"),
        (lambda ctx, w: ctx.call("a", hidden, w.fetch(), X), RootError, "shape"),
        (lambda ctx, w: ctx.call("a", jnp.argmax, w), RootError, "int64"),
        (lambda ctx, w: ctx.backward(w), ContextError, "returns its loss"),
        (lambda ctx, w: ctx.workers[0], ContextError, "pass their names to the"),
        (lambda ctx, w: ctx.gradient(w), ContextError, "returns its loss"),
        (lambda ctx, w: ctx.gradients(), ContextError, "returns its loss"),
        (lambda ctx, w: ctx.call(hidden, w), JdagError, "worker comes first"),
        (3, JdagError, "jdag.oracle takes a function of a context, not 3"),
    ],
)
def test_misuse_says_what_would_have_been_right(result, error, text):
    with pytest.raises(error, match=text):
        oracle(result)(W)


def test_an_integer_parameter_is_named():
    with fails_with(JdagError, "api.argument_0_n_is_int64"):
        oracle(two_layers)({"n": np.int64(1)}, X)


@pytest.mark.filterwarnings("ignore:argument 0, at:UserWarning")
def test_an_argument_of_numbers_alone_has_nothing_to_differentiate_by():
    with fails_with(JdagError, "api.argument_0_has_no_arrays"):
        oracle(lambda ctx, w: ctx.call("a", jnp.sin, w["a"]))({"a": 0.5})


def test_a_ref_of_another_run_is_refused():
    kept = []

    def keep(ctx, w):
        kept.append(w)
        return ctx.call("a", total, w)

    oracle(keep)(W)
    with fails_with(ContextError, "api.pass_everything_that_it_reads"):
        oracle(lambda ctx, w: ctx.call("a", product, w, kept[0]))(W)
    with (
        simulate(["a", "b"], seed=0) as cluster,
        cluster.context() as ctx,
        fails_with(ContextError, "api.is_of_a_run_of"),
    ):
        ctx.call("b", total, kept[0])
