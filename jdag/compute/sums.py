"""Sums of cotangents, left to right; zeros and ones."""

from collections.abc import Sequence
from functools import reduce
from operator import add as plus
from typing import Any

import jax
import jax.numpy as jnp

from jdag.compute.avals import Aval
from jdag.engine.share import ADDENDS_MAX


def fold(addends: Sequence[Any]) -> Any:
    """Return ((a0 + a1) + a2) + ...; at least one addend."""
    return reduce(plus, addends)


@jax.jit
def _fold(*addends: Any) -> Any:
    return fold(addends)


def add(addends: Sequence[Any]) -> Any:
    """Return the sum of arrays of one shape and dtype, strictly left to right.

    The first 8 are added in one compiled call, then 7 more at a time, to limit the
    number of compiled functions. The bits are those of the plain left fold.
    """
    if not addends:
        raise ValueError(
            "a sum needs at least one addend; zeros(aval) is the empty sum"
        )
    if len(addends) == 1:
        return addends[0]
    total = _fold(*addends[:ADDENDS_MAX])
    for start in range(ADDENDS_MAX, len(addends), ADDENDS_MAX - 1):
        total = _fold(total, *addends[start : start + ADDENDS_MAX - 1])
    return total


def zeros(aval: Aval) -> jax.Array:
    """Return an array of zeros of that shape and dtype, strongly typed."""
    filled: jax.Array = _zeros(aval.shape, aval.dtype)
    return filled


def ones(aval: Aval) -> jax.Array:
    """Return an array of ones of that shape and dtype, strongly typed."""
    filled: jax.Array = _ones(aval.shape, aval.dtype)
    return filled


# Compiled, they take a fifth of the time.
_zeros: Any = jax.jit(jnp.zeros, static_argnums=(0, 1))
_ones: Any = jax.jit(jnp.ones, static_argnums=(0, 1))
