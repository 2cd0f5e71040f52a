"""What is read off jaxprs: dependence that is never missed, and callbacks."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jdag.compute.jaxprs import (
    depends,
    forwarded_inputs,
    has_callback,
    reaches,
)
from tests.tools.compute_cases import Call, Leaf, array

X, Y, Z = array(3), array(3, seed=1), array(3, seed=2)


def of(fn: Any, *args: Any) -> list[str]:
    outputs, vjp = jax.vjp(lambda *args: jax.tree.leaves(fn(*args)), *args)
    found = reaches(vjp, len(args), len(outputs))
    assert [len(row) for row in found] == [len(outputs)] * len(args)
    return ["".join(str(j) for j, on in enumerate(row) if on) for row in found]


def two(x: Any, y: Any) -> tuple[Any, Any]:
    return jnp.sin(x), jnp.cos(y)


def crossed(x: Any, y: Any) -> tuple[Any, Any]:
    return y * 2.0, x * y


@jax.custom_vjp
def elsewhere(x: Any, y: Any) -> Any:
    """Hands a cotangent to y, on which its output does not depend."""
    return x * 1.0


elsewhere.defvjp(lambda x, y: (x * 1.0, None), lambda _, g: (g, 5.0 * g))


@jax.custom_vjp
def deaf(x: Any, y: Any) -> Any:
    """Its cotangents are the same for whatever cotangent comes."""
    return x * 1.0


deaf.defvjp(lambda x, y: (x * 1.0, None), lambda _, g: (jnp.ones(3), jnp.ones(3)))


@jax.custom_jvp
def moved_by(x: Any, y: Any) -> Any:
    return x * 1.0


@moved_by.defjvp
def _(primals: Any, tangents: Any) -> Any:
    return primals[0] * 1.0, tangents[0] + 2.0 * tangents[1]


PROGRAMS: dict[str, tuple[Any, list[str]]] = {
    "apart": (lambda x, y, z: two(x, y), ["0", "1", ""]),
    "identity": (lambda x, y, z: (z, x, y), ["1", "2", "0"]),
    "jit": (lambda x, y, z: jax.jit(two)(x, y), ["0", "1", ""]),
    "jit in jit": (
        jax.jit(lambda x, y, z: (jax.jit(crossed)(x, y), z)),
        ["1", "01", "2"],
    ),
    "remat": (lambda x, y, z: jax.checkpoint(two)(x, y), ["0", "1", ""]),
    "cond": (
        lambda x, y, z: lax.cond(x[0] > 0, two, crossed, x, y),
        ["01", "01", ""],
    ),
    "vmap": (lambda x, y, z: jax.vmap(two)(x, y), ["0", "1", ""]),
    "stopped": (lambda x, y, z: (x * lax.stop_gradient(y), z), ["0", "", "1"]),
    "integers": (lambda x, y, z: (x[jnp.argmax(y)], jnp.sign(z)), ["0", "", ""]),
    "constants": (lambda x, y, z: (jnp.ones(3), y, jnp.zeros(2)), ["", "1", ""]),
    "nothing": (lambda x, y, z: (jnp.ones(3),), ["", "", ""]),
    "split": (lambda x, y, z: jnp.split(x, 3), ["012", "", ""]),
    "scan": (
        lambda x, y, z: lax.scan(lambda c, t: (two(*c), 2 * t), (x, y), z),
        ["012", "012", "012"],  # What goes round in it is not followed.
    ),
    "solve": (lambda x, y, z: (jnp.linalg.solve(jnp.diag(x), y), z), ["0", "0", "1"]),
    "custom_vjp": (lambda x, y, z: (elsewhere(x, y), z), ["0", "0", "1"]),
    "custom_vjp in jit": (lambda x, y, z: (jax.jit(deaf)(x, y), z), ["0", "0", "1"]),
    "custom_vjp in remat": (
        lambda x, y, z: (jax.checkpoint(elsewhere)(x, y), z),
        ["0", "0", "1"],
    ),
    "custom_vjp in cond": (
        lambda x, y, z: (lax.cond(z[0] > 0, elsewhere, deaf, x, y), z),
        ["0", "0", "1"],
    ),
    "custom_vjp in vmap": (
        lambda x, y, z: (jax.vmap(elsewhere)(x, y), z),
        ["0", "0", "1"],
    ),
    "custom_jvp": (lambda x, y, z: (moved_by(x, y), z), ["0", "0", "1"]),
    "relu": (lambda x, y, z: (jax.nn.relu(x), jax.nn.silu(y)), ["0", "1", ""]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_an_input_reaches_what_it_may_get_a_cotangent_from_and_others_give_it_zeros(
    name: str,
):
    program, expected = PROGRAMS[name]
    assert of(program, X, Y, Z) == expected
    # Of each output by itself, as JAX has it without the others' zeros.
    for place, output in enumerate(jax.tree.leaves(program(X, Y, Z))):
        alone = lambda *args, j=place: jax.tree.leaves(program(*args))[j]  # noqa: E731
        gradients = jax.vjp(alone, X, Y, Z)[1](output + 1)
        for row, gradient in zip(expected, gradients, strict=True):
            assert str(place) in row or not np.any(gradient), (name, row, place)


def test_a_pair_says_it_of_what_is_tracked_alone():
    def mixed(n: Any, x: Any, c: Any, y: Any) -> Any:
        return n + 1, x * c, jnp.argmax(x), y * c, x * y

    call = Call(mixed, Leaf(jnp.arange(3)), Leaf(X), Y, Leaf(Z))
    assert call.tracked == (False, True, False, True)
    assert call.pair.reaches == ((True, False, True), (False, True, True))
    assert Call(mixed, jnp.arange(3), X, Y, Z).pair.reaches == ()


def test_of_a_vjp_that_is_not_understood_all_depends_on_all():
    assert reaches(jax.tree_util.Partial(two), 2, 3) == ((True,) * 3,) * 2


def test_masks_of_many_bits_go_through_a_jaxpr():
    jaxpr = jax.make_jaxpr(lambda x, y, z: (x + y, 1.0, two(z, y)))(X, Y, Z).jaxpr
    assert depends(jaxpr, [3, 12, 1 << 70]) == [15, 0, 1 << 70, 12]


def test_a_callback_is_found_in_what_is_inside():
    def calls(x: Any) -> Any:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    def deep(x: Any) -> Any:
        return lax.cond(x[0] > 0, jax.jit(calls), jnp.cos, x)

    assert has_callback(jax.make_jaxpr(calls)(X))
    assert has_callback(jax.make_jaxpr(deep)(X))
    assert not has_callback(jax.make_jaxpr(two)(X, Y))


@pytest.mark.parametrize(
    ("fn", "places"),
    [
        (lambda x, y, z: (x, y, z), (0, 1, 2)),
        (lambda x, y, z: {"a": z, "b": x}, (2, 0)),
        (lambda x, y, z: (y, y), (1, 1)),
        (lambda x, y, z: (), ()),
        (lambda x, y, z: (x, 2.0 * y), None),
        (lambda x, y, z: (x, 2.0), None),
        (lambda x, y, z: (x, np.ones(3)), None),
        (jax.jit(lambda x, y, z: x), None),
        (lambda x, y, z: (jax.debug.print("{}", x), y)[1], None),
    ],
)
def test_only_of_what_computes_nothing_each_output_is_an_input(
    fn: Any, places: Any
) -> None:
    assert forwarded_inputs(jax.make_jaxpr(fn)(X, Y, Z)) == places
