"""Functions that the tests of the face call, and what they look at afterwards."""

import functools

import jax
import jax.numpy as jnp

from jdag.engine.functions import unjitted

ONES = jnp.ones((3, 3))


def total(*arrays):
    return sum(jnp.sum(array) for array in arrays)


def squares(*arrays):
    return sum((jnp.sum(jnp.abs(a) ** 2) for a in arrays), jnp.zeros(()))


def product(*arrays):
    return functools.reduce(jnp.multiply, arrays)


def nothing_is_left(cluster):
    cluster.driver.settle()
    for worker, held in cluster.info().items():
        assert not held["live_contexts"] and not held["live_passes"], (worker, held)


@unjitted(shapes=lambda a: a)
def raises_at_run_time(a):
    raise RuntimeError("only at run time")


@jax.custom_vjp
def fails_forward(a):
    return jax.pure_callback(_no_way_on, jax.ShapeDtypeStruct(a.shape, a.dtype), a)


def _no_way_on(_):
    raise RuntimeError("no way on")


fails_forward.defvjp(lambda a: (fails_forward(a), None), lambda _, g: (g,))


@jax.custom_vjp
def fails_backward(a):
    return a


def _no_way_back(_):
    raise RuntimeError("no way back")


def _fails_bwd(residual, cotangent):
    shape = jax.ShapeDtypeStruct(cotangent.shape, cotangent.dtype)
    return (jax.pure_callback(_no_way_back, shape, cotangent),)


fails_backward.defvjp(lambda a: (a, None), _fails_bwd)
