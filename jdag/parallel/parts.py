"""What replicas call on workers: copies whose cotangents add up, sums, and parts.

The vjp of `copies` is ReduceAdd, the private transpose of replication in PyTorch's
`data_parallel.h`: it adds the cotangents of all copies, in their order.
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
    """Return as many copies of some arrays; cotangents of copies add up in order."""
    # Of each array on its own, so that no cotangent of one waits for another's.
    each = [movement.copies([array], count) for array in arrays]
    return tuple(zip(*each, strict=True))


@remote
def added(count: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Return the sums of `count` equal lists of arrays, each from left to right."""
    size = len(arrays) // count
    lists = [arrays[start : start + size] for start in range(0, len(arrays), size)]
    return tuple([reduce(add, addends) for addends in zip(*lists, strict=True)])


@remote
def divided(count: int, *arrays: jax.Array) -> tuple[tuple[jax.Array, ...], ...]:
    """Return arrays as `count` parts, as equal as can be: a vector a dtype in each."""
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
    """Return what `divided` divided.

    Args:
        form: of each array the number of its dtype, and its shape.
        parts: the vectors of all parts, one part after another.
    """
    kinds = 1 + max(kind for kind, _ in form)
    rest = []
    for number in range(kinds):
        sizes = [math.prod(shape) for kind, shape in form if kind == number]
        ends = [sum(sizes[:index]) for index in range(1, len(sizes))]
        vector = jnp.concatenate(parts[number::kinds])
        rest.append(iter(jnp.split(vector, ends)))
    return tuple([jnp.reshape(next(rest[kind]), shape) for kind, shape in form])
