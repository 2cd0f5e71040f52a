"""What some outputs of a jaxpr need, and when two slices compute the same."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.jaxpr_slicing import Slicer

X = [jnp.linspace(0.1, 1 + n, 3) for n in range(4)]


def plain(*xs: Any) -> list[Any]:
    keys = jax.random.split(jax.random.key(0), len(xs))
    both = list(zip(xs, keys, strict=True))
    return [x * n + jax.random.normal(key, (3,)) for n, (x, key) in enumerate(both)]


def jitted(*xs: Any) -> list[Any]:
    return jax.jit(lambda *xs: [jnp.where(x > 0.5, x, 2 * x) for x in xs])(*xs)


def branching(*xs: Any) -> list[Any]:
    def either(*xs: Any) -> list[Any]:
        return [jnp.sin(x) for x in xs]

    def other(*xs: Any) -> list[Any]:
        return [jnp.exp(x) for x in xs]

    many = jax.lax.cond(jnp.asarray(2) > 1, either, other, *xs)
    return jax.jit(lambda many: jax.lax.cond(many[0][0] > 9, other, either, *many))(
        [jnp.zeros(3), *many[1:]]
    )


def unread(*xs: Any) -> list[Any]:
    return [jax.jit(lambda x, *_: x + 1, keep_unused=True)(x, *xs) for x in xs]


@pytest.mark.parametrize("function", [plain, jitted, branching, unread])
def test_a_slice_computes_what_the_whole_does(function: Any) -> None:
    closed = jax.make_jaxpr(function)(*X)
    slicer = Slicer()
    for place, wanted in enumerate(function(*X)):
        run = slicer.function(closed, [closed.jaxpr.outvars[place]])
        (got,) = run({closed.jaxpr.invars[place]: X[place]})
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def keys(function: Any) -> list[Any]:
    closed = jax.make_jaxpr(function)(*X)
    both = zip(closed.jaxpr.invars, closed.jaxpr.outvars, strict=True)
    slicer = Slicer()
    return [slicer.key(closed, [given], [made]) for given, made in both]


def test_slices_that_compute_the_same_have_equal_keys_and_no_others() -> None:
    assert len(set(keys(jitted))) == 1
    assert len(set(keys(branching)[1:])) == 1
    assert len(set(keys(plain))) == 4
    rates = [jnp.asarray([one, 1.0, 1.0]) for one in (0.1, 0.1, 0.2, 0.1)]
    found = keys(lambda *xs: [x * r for x, r in zip(xs, rates, strict=True)])
    assert found[0] == found[1] == found[3] != found[2]


def test_a_branch_over_many_is_narrowed_to_what_is_needed() -> None:
    closed = jax.make_jaxpr(branching)(*X)
    part = Slicer().slice(closed.jaxpr, closed.jaxpr.outvars[2:3])
    assert part.reads == closed.jaxpr.invars[2:3]
    for equation in part.equations:
        for inner in equation.params.get("branches", ()):
            assert len(inner.jaxpr.outvars) == len(inner.jaxpr.eqns) == 1
