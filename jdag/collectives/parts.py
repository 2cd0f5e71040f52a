"""Remote functions of replicas: copying, summing, dividing into parts and joining.

The vjp of `copies` is ReduceAdd, as for replication in PyTorch's `data_parallel.h`: the
cotangents of all copies are added in order.
"""

import math
from functools import reduce
from operator import add

import jax
import jax.numpy as jnp

from jdag.engine.functions import remote
from jdag.parallel import movement


@remote
def copies(count: int, *arrays: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
    # One call per array, so that no cotangent waits for that of another array.
    each = [movement.repeat_arrays([array], count) for array in arrays]
    return tuple(zip(*each, strict=True))


@remote
def added(count: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Add `count` lists of arrays elementwise, from left to right."""
    size = len(arrays) // count
    lists = [arrays[start : start + size] for start in range(0, len(arrays), size)]
    return tuple([reduce(add, addends) for addends in zip(*lists, strict=True)])


@remote
def divided(count: int, *arrays: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
    """Split arrays into `count` nearly equal parts. A part has a vector per dtype."""
    vectors = []
    for dtype in dict.fromkeys(array.dtype for array in arrays):
        flat = [jnp.ravel(array) for array in arrays if array.dtype == dtype]
        vector = jnp.concatenate(flat)
        cuts = [vector.size * part // count for part in range(1, count)]
        vectors.append(jnp.split(vector, cuts))
    return tuple(zip(*vectors, strict=True))


@remote
def joined(
    form: tuple[tuple[int, tuple[int, ...]], ...], *parts: jax.Array
) -> tuple[jax.Array, ...]:
    """Join parts, one after the other, into arrays: the inverse of `divided`.

    For each array, `form` contains the index of its dtype, and its shape.
    """
    kinds = 1 + max(kind for kind, _ in form)
    rest = []
    for number in range(kinds):
        sizes = [math.prod(shape) for kind, shape in form if kind == number]
        ends = [sum(sizes[:index]) for index in range(1, len(sizes))]
        vector = jnp.concatenate(parts[number::kinds])
        rest.append(iter(jnp.split(vector, ends)))
    return tuple([jnp.reshape(next(rest[kind]), shape) for kind, shape in form])
