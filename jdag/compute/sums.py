"""Sums of cotangents, and arrays of zeros and ones."""

from collections.abc import Sequence
from functools import reduce
from operator import add as plus
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from jdag.compute.avals import Aval
from jdag.compute.configuration import SUMS_IN_FLOAT32
from jdag.compute.devices import put
from jdag.engine.addends import ADDENDS_MAX, top


def fold(addends: Sequence[Any]) -> Any:
    return _left(top(addends, _left))


def _left(addends: Sequence[Any]) -> Any:
    dtype = jtu.tree_leaves(addends[0])[0].dtype  # The first addend may be a dual.
    if not SUMS_IN_FLOAT32.value or jnp.finfo(dtype).bits >= 32:
        return reduce(plus, addends)
    return _as(reduce(plus, _as(addends, jnp.float32)), dtype)


def _as(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(lambda array: array.astype(dtype), tree)


@jax.jit
def _sum(*addends: Any) -> Any:
    return _left(addends)


def add(addends: Sequence[Any]) -> Any:
    """Return the sum of arrays of one shape and dtype, bitwise equal to `fold`.

    At most 8 are added in one compiled call, to limit the number of compiled functions.
    """
    if not addends:
        raise ValueError(
            "a sum needs at least one addend; use filled(aval, 0) for an empty sum"
        )
    sums = top(addends, lambda group: _sum(*group))
    return sums[0] if len(sums) == 1 else _sum(*sums)


def limited(cotangents: Sequence[Sequence[Any]]) -> tuple[tuple[Any, ...], ...]:
    return tuple([tuple(c) if len(c) <= ADDENDS_MAX else (add(c),) for c in cotangents])


def addends_n(count: int) -> int:
    return count if count <= ADDENDS_MAX else 1


def filled(aval: Aval, value: int) -> Any:
    """Return a strongly typed array of zeros or ones on the device of `aval`."""
    assert value in (0, 1), value
    array = (_ones if value else _zeros)(aval.shape, aval.dtype)
    return array if aval.device is None else put((array,), aval.device)[0]


# Compiled functions take a fifth of the time.
_zeros: Any = jax.jit(jnp.zeros, static_argnums=(0, 1))
_ones: Any = jax.jit(jnp.ones, static_argnums=(0, 1))
