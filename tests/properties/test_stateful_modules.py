"""Modules of equinox and flax with dropout and running statistics, and plain JAX."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jdag
from tests.tools.compute_cases import array

X = jnp.asarray(array(8, 3), jnp.float32)
Y = X[:, :1] ** 2


class Net(eqx.Module):
    inner: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    dropout: eqx.nn.Dropout
    outer: eqx.nn.Linear

    def __init__(self, key: Any) -> None:
        self.inner = eqx.nn.Linear(3, 8, key=key)
        self.norm = eqx.nn.BatchNorm(8, "rows", mode="batch")
        self.dropout = eqx.nn.Dropout(0.25)
        self.outer = eqx.nn.Linear(8, 1, key=key)

    def __call__(self, x: Any, state: Any, key: Any) -> Any:
        h, state = self.norm(self.inner(x), state)
        return self.outer(self.dropout(jnp.tanh(h), key=key)), state


def of_equinox(rest: Any, params: Any, state: Any, x: Any, y: Any) -> Any:
    stats, key = state
    axes: Any = {"in_axes": (0, None, 0), "out_axes": (0, None), "axis_name": "rows"}
    net = jax.vmap(eqx.combine(params, rest), **axes)
    out, stats = net(x, stats, jax.random.split(key, len(x)))
    return jnp.mean((out - y) ** 2), (stats, jax.random.split(key)[0])


class NnxNet(nnx.Module):
    def __init__(self, rngs: Any) -> None:
        self.inner = nnx.Linear(3, 8, rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.dropout = nnx.Dropout(0.25, rngs=rngs)
        self.outer = nnx.Linear(8, 1, rngs=rngs)

    def __call__(self, x: Any) -> Any:
        return self.outer(self.dropout(jnp.tanh(self.norm(self.inner(x)))))


def of_nnx(graph: Any, params: Any, state: Any, x: Any, y: Any) -> Any:
    net = nnx.merge(graph, params, state)
    return jnp.mean((net(x) - y) ** 2), nnx.state(net, nnx.Not(nnx.Param))


def made(library: str) -> tuple[Any, Any, Any, Any, Any]:
    """A loss, what is fixed in training and in evaluation, parameters, and state."""
    if library == "equinox":
        net, stats = eqx.nn.make_with_state(Net)(jax.random.key(0))
        params, rest = eqx.partition(net, eqx.is_inexact_array)
        evaluated = eqx.nn.inference_mode(rest)
        return of_equinox, rest, evaluated, params, (stats, jax.random.key(1))
    module = NnxNet(nnx.Rngs(0))
    graph, *parts = nnx.split(module, nnx.Param, ...)
    params, state = parts
    module.eval()
    fixed, evaluated = jdag.static(graph), jdag.static(nnx.graphdef(module))
    return of_nnx, fixed, evaluated, params, state


def plain_of(fn: Any, fixed: Any) -> Any:
    fixed = fixed.value if isinstance(fixed, type(jdag.static(1))) else fixed

    def plain(params: Any, state: Any) -> Any:
        return fn(fixed, params, jax.tree.map(jnp.asarray, state), X, Y)

    return plain


def close(found: Any, wanted: Any) -> None:
    (leaves, form), (others, wanted_form) = map(jax.tree.flatten, (found, wanted))
    assert str(form) == str(wanted_form)
    for one, other in zip(leaves, others, strict=True):
        if jnp.issubdtype(other.dtype, jax.dtypes.prng_key):
            one, other = map(jax.random.key_data, (one, other))  # noqa: PLW2901
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def replaced(old: Any, new: Any) -> Any:
    del old
    return new


LIBRARIES = [pytest.param("equinox", marks=pytest.mark.second), "nnx"]


@pytest.mark.parametrize("library", LIBRARIES)
def test_dropout_and_running_statistics_are_those_of_plain_jax(cluster, library):
    fn, fixed, evaluated, params, state = made(library)
    there = cluster.put("b", params)
    held = cluster.put("b", state, tracked=False)
    optimizer = jdag.Optimizer(optax.sgd(0.1), there)
    plain = jax.value_and_grad(plain_of(fn, fixed), has_aux=True)
    for _ in range(3):
        (value, state), gradient = plain(params, state)
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradient)
        with cluster.context() as ctx:
            loss, new = ctx.call("b", fn, fixed, there, held, X, Y)
            ctx.backward(loss)
            close(jdag.fetch((loss, ctx.gradient(there))), (value, gradient))
            optimizer.step(ctx)
            cluster.update(replaced, held, new)
        close(jdag.fetch((there, held)), (params, state))
    wanted = plain_of(fn, evaluated)(params, state)[0]
    with cluster.context() as ctx:  # Without dropout, by the running statistics.
        loss, _ = ctx.call("b", fn, evaluated, there, held, X, Y)
        close(loss.fetch(), wanted)
        again, _ = ctx.call("b", fn, evaluated, there, held, X, Y)
        assert again.fetch() == loss.fetch()
        trained, _ = ctx.call("b", fn, fixed, there, held, X, Y)
        assert trained.fetch() != loss.fetch()
