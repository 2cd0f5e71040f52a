"""The functions and hooks of random programs, and a fuse that makes them raise.

They are smooth with slopes far from zero, so that rounding stays small, and no two
elements that they make are equal by construction, so that ranks are no matter of
rounding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

SIZE = 3

# All positive: of an array that is there several times nothing cancels out, which would
# leave a gradient that is nothing but rounding.
WEIGHTS = (0.83, 0.41, 1.07, 0.79, 0.53, 1.21, 0.31, 0.97, 0.57, 0.37, 0.61, 1.13)


def mix(*arrays):
    terms = [w * array for w, array in zip(WEIGHTS, arrays, strict=False)]
    return jnp.sin(sum(terms[1:], terms[0]) / len(terms) + 0.1)


def product(a, b):
    return jnp.sin(a * b + 0.5 * a)


def total(*arrays):
    terms = [w * jnp.sum(array) for w, array in zip(WEIGHTS, arrays, strict=False)]
    return sum(terms[1:], terms[0])


def split(count, *arrays):
    whole = mix(*arrays)
    return tuple(jnp.sin((0.3 + 0.1 * k) * whole + 0.1 * k) for k in range(count))


def ranks(a):
    return jnp.argsort(a)


def gather(index, a):
    return a[index] + 0.1 * a


def scale(index, a):
    return a * (index + 1) / SIZE


def both(a, b):
    return {"ranks": jnp.argsort(b), "value": jnp.sin(a + 0.5 * b)}


# Whether each output is inexact; of `split` as many as asked for, of `moved` as it is.
INEXACT = {
    "mix": (True,),
    "product": (True,),
    "total": (True,),
    "ranks": (False,),
    "gather": (True,),
    "scale": (True,),
    "both": (False, True),
}


# Hooks. Zeros stay zeros, as FAST has some where SMART has nothing.


def look(cotangent):
    del cotangent


def weigh(cotangent):
    return 0.7 * cotangent


def clip(cotangent):
    return jnp.clip(cotangent, -0.5, 0.5)


# "gradient" is by ctx.on_gradient, the others by on_cotangent.
HOOKS: dict[str, Callable[[Any], Any]] = {
    "look": look, "weigh": weigh, "clip": clip, "bend": jnp.sin, "gradient": look
}  # fmt: skip


@dataclass(frozen=True)
class Hook:
    id: int
    variable: int
    how: str


class Broken(RuntimeError):
    """What a function or program that is to fail raises."""


class Fuse:
    """Makes functions raise, in "forward" or "vjp", so and so many times."""

    def __init__(self) -> None:
        self.left = {"forward": 0, "vjp": 0}
        self.burnt = {"forward": 0, "vjp": 0}

    def light(self, when: str, times: int) -> None:
        self.left[when] = times
        self.burnt[when] = 0

    def burn(self, when: str, array: Any) -> Any:
        if self.left[when] > 0:
            self.left[when] -= 1
            self.burnt[when] += 1
            raise Broken(f"the fuse for {when}")
        return array


FUSE = Fuse()


def _struct(array):
    return jax.ShapeDtypeStruct(array.shape, array.dtype)


@jax.custom_vjp
def _fused_forward(array):
    return jax.pure_callback(lambda a: FUSE.burn("forward", a), _struct(array), array)


_fused_forward.defvjp(lambda a: (_fused_forward(a), None), lambda _, g: (g,))


@jax.custom_vjp
def _fused_vjp(array):
    return array


def _burnt(_, g):
    return (jax.pure_callback(lambda a: FUSE.burn("vjp", a), _struct(g), g),)


_fused_vjp.defvjp(lambda a: (a, None), _burnt)


def fused(when, function, *arguments):
    outputs, tree = jax.tree.flatten(function(*arguments))
    through = _fused_forward if when == "forward" else _fused_vjp
    outputs[-1] = through(outputs[-1])
    return jax.tree.unflatten(tree, outputs)
