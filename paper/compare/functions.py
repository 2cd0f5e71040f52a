"""The functions that our side calls on workers; they travel by name.

The peer has its own operators for products and sums; so has our side `jax.numpy`'s.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp


def same(value: jax.Array) -> jax.Array:
    """What goes there and back."""
    return value


def total(values: Sequence[jax.Array]) -> jax.Array:
    """The sum of all elements of all arrays: a scalar."""
    return jnp.sum(jnp.stack(values))


def layer(stage: dict[str, Any], x: jax.Array) -> jax.Array:
    """One layer of the MLP: (batch, width)."""
    return jnp.tanh(x @ stage["weight"] + stage["bias"])


def mse(value: jax.Array, y: jax.Array) -> jax.Array:
    """The loss: a scalar."""
    return jnp.mean((value - y) ** 2)


def corner(weight: jax.Array) -> jax.Array:
    """One number of a weight: it is there when the weight is."""
    return weight[0, 0]
