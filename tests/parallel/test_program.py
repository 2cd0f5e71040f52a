"""One program over all devices: functions that reduce over the replicas."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdag.parallel import data_parallel, row_mean
from tests.parallel.cases import array, close, names, norm_params, normed, normed_alone


@pytest.mark.parametrize("how", ["pmap", "shard_map"])
@pytest.mark.parametrize(("rows", "devices"), [(8, 4), (7, 3), (2, 4)])
def test_batch_normalisation_is_that_of_one_device(how, rows, devices):
    params, x = norm_params(), array(rows, 3, seed=7)
    cotangent = array(rows, 4, seed=8)

    def spread(params: Any, x: Any) -> Any:
        settings: Any = {"axis_name": "all", "has_aux": True, "how": how}
        return data_parallel(normed, params, x, names(devices), **settings)

    wanted, alone_vjp, statistics = jax.vjp(normed_alone, params, x, has_aux=True)
    found, vjp, aux = jax.vjp(spread, params, x, has_aux=True)
    close(found, wanted)
    close(aux, statistics)
    close(vjp(cotangent), alone_vjp(cotangent), 1e-9)
    close(spread(params, x), (wanted, statistics))


def test_rows_that_fill_up_are_no_rows_and_divide_nothing_by_zero():
    def inverse(p: Any, x: Any, rows: Any) -> Any:
        assert rows.shape == (2,) and rows.dtype == jnp.float32
        return p / x + row_mean(1 / x, rows, "all"), jax.lax.psum(jnp.sum(rows), "all")

    x, p = jnp.asarray([1.0, 2.0, 4.0]), jnp.float64(3)

    def spread(p: Any, x: Any) -> Any:
        settings: Any = {"axis_name": "all", "has_aux": True}
        return data_parallel(inverse, p, x, names(2), **settings)

    out, vjp, count = jax.vjp(spread, p, x, has_aux=True)
    assert count == 3
    close(out, p / x + jnp.mean(1 / x))
    close(vjp(x), jax.vjp(lambda p, x: p / x + jnp.mean(1 / x), p, x)[1](x))


def test_a_mean_of_low_precision_has_a_sum_of_float32():
    def mean(p: Any, x: Any, rows: Any) -> Any:
        return x, row_mean(x, rows, "all")

    x = jnp.full(1001, 100, jnp.float16)  # Their sum is more than a float16 can be.
    _, found = data_parallel(mean, {}, x, names(4), axis_name="all", has_aux=True)
    assert found == 100 and found.dtype == jnp.float16
