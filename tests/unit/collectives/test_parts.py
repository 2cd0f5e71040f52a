"""What replicas call on workers: copies, sums, and arrays in parts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.collectives.parts import added, copies, divided, joined


def test_copies_add_their_cotangents_from_the_first_to_the_last():
    big = np.float32(2**24)
    cotangents = [big, np.float32(1), np.float32(1), np.float32(-big)]
    _, vjp = jax.vjp(lambda x: copies(4, x), jnp.float32(0))
    assert vjp(tuple((jnp.asarray(one),) for one in cotangents))[0] == 0
    assert added(4, *[jnp.asarray(one) for one in cotangents])[0] == 0
    assert added(4, *[jnp.asarray(one) for one in cotangents[::-1]])[0] == 2


@pytest.mark.parametrize("count", [1, 2, 3, 5, 16])
def test_what_is_divided_is_as_equal_as_can_be_and_is_joined_again(count):
    arrays = [
        jnp.arange(6.0).reshape(2, 3),
        jnp.arange(4),
        jnp.float64(7),
        jnp.zeros((0, 2)),
        jnp.arange(3),
    ]
    parts = divided(count, *arrays)
    sizes = [[vector.size for vector in part] for part in parts]
    for kind in zip(*sizes, strict=True):
        assert max(kind) - min(kind) <= 1
        assert sum(kind) == 7
    form = ((0, (2, 3)), (1, (4,)), (0, ()), (0, (0, 2)), (1, (3,)))
    again = joined(form, *[vector for part in parts for vector in part])
    for one, other in zip(arrays, again, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == other.dtype
