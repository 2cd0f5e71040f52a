"""The functions that jdag's side calls on workers.

For products and sums, the peer uses operators of torch, and our side jax.numpy.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def same(value: jax.Array) -> jax.Array:
    """Return the argument, so that an array makes a round trip."""
    return value


def total(values: Sequence[jax.Array]) -> jax.Array:
    """Return the sum of all elements of all arrays."""
    return jnp.sum(jnp.stack(values))


def layer(stage: dict[str, Any], x: jax.Array) -> jax.Array:
    """Compute a layer of the MLP; input and output are (batch, width)."""
    return jnp.tanh(x @ stage["weight"] + stage["bias"])


def mse(value: jax.Array, y: jax.Array) -> jax.Array:
    """Return the mean squared error."""
    return jnp.mean((value - y) ** 2)


def corner(weight: jax.Array) -> jax.Array:
    """Return one element of a weight. It is ready when the weight is computed."""
    return weight[0, 0]
