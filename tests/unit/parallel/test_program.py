"""One program over all devices: leaves of any number, reductions over replicas."""

import gc
import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdag.compute.jaxprs import collectives
from jdag.errors import JdagError
from jdag.parallel import data_parallel, row_mean
from tests.tools.error_texts import fails_with
from tests.unit.parallel.cases import (
    array,
    close,
    names,
    norm_params,
    normed,
    normed_alone,
    where,
)

D = jax.devices()


def test_rows_along_another_dim_are_not_taken_for_those_along_the_first():
    def fn(p: Any, x: Any, rows: Any) -> Any:
        return jnp.cumsum(x[0], 0) + x[1]

    y = jnp.arange(4.0).reshape(2, 2)
    found = data_parallel(fn, {}, (y, y), names(1), dim=1, axis_name="all")
    np.testing.assert_array_equal(found, [[0, 2], [4, 7]])


# ------------------------------------------------ functions that reduce over replicas


@pytest.mark.parametrize(("rows", "devices"), [(7, 3), (2, 4)])
def test_batch_normalisation_is_that_of_one_device(rows, devices):
    params, x = norm_params(), array(rows, 3, seed=7)
    cotangent = array(rows, 4, seed=8)

    def spread(params: Any, x: Any) -> Any:
        settings: Any = {"axis_name": "all", "has_aux": True}
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


def test_complex_rows_are_reduced_over_replicas_as_on_one_device():
    def turned(p: Any, x: Any, mean: Any) -> Any:
        h = jnp.exp(x * p["a"]) * jnp.conj(p["b"])
        return (h - mean(h)) * jnp.abs(mean(h * h)), jnp.sin(h)

    def spread(p: Any, x: Any) -> Any:
        def fn(p: Any, x: Any, rows: Any) -> Any:
            return turned(p, x, lambda h: row_mean(h, rows, "all"))

        return data_parallel(fn, p, x, names(3), axis_name="all")

    def alone(p: Any, x: Any) -> Any:
        return turned(p, x, lambda h: jnp.mean(h, 0))

    x, a, b = [array(*shape, seed=4) for shape in ((7, 2), (2,), (2,))]
    p = {"a": a + 0.5j * b, "b": jnp.asarray([1 - 2j, 0.5j])}
    rows = x * (1 + 1j)
    wanted, alone_vjp = jax.vjp(alone, p, rows)
    found, vjp = jax.vjp(spread, p, rows)
    close(found, wanted)
    close(spread(p, rows), wanted)
    cotangents = (rows * (2 - 1j), jnp.conj(rows))
    close(vjp(cotangents), alone_vjp(cotangents), 1e-9)


def mean(p: Any, x: Any, rows: Any) -> Any:
    return x, row_mean(x, rows, "all")


def test_a_mean_of_integers_is_refused():
    with fails_with(JdagError, "parallel.row_mean_takes_floats_not"):
        data_parallel(mean, {}, jnp.arange(6), names(3), axis_name="all", has_aux=True)


def test_a_mean_of_low_precision_has_a_sum_of_float32():
    x = jnp.full(1001, 100, jnp.float16)  # Their sum is more than a float16 can be.
    _, found = data_parallel(mean, {}, x, names(4), axis_name="all", has_aux=True)
    assert found == 100 and found.dtype == jnp.float16


def reduced(x: Any) -> Any:
    y = x * jax.lax.axis_index("all") + jax.lax.psum(x, "all")
    y = jax.lax.cond(True, lambda y: jax.lax.psum(y[:, 0], "all"), lambda y: y[:, 1], y)
    return jax.lax.all_gather(y, "all")


def test_collectives_are_those_over_the_axis_in_their_order():
    mesh = Mesh(np.array(jax.devices()[:2]), ("all",))
    spec = PartitionSpec("all")
    program = jax.shard_map(
        reduced, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    jaxpr = jax.make_jaxpr(program)(jnp.ones((4, 3)))
    found = ["psum(float64[2,3])", "psum(float64[2])", "all_gather(float64[2])"]
    assert collectives(jaxpr, "all") == found
    assert collectives(jaxpr, "rows") == []


# --------------------------------- calls that look alike share a program, others do not


def scaled(p: Any, x: Any) -> Any:
    return p * x


def test_arrays_may_live_elsewhere_in_the_next_call():
    x, p = jnp.arange(4.0), jnp.float64(3)
    mesh = Mesh(np.asarray(D[4:6]), ("some",))
    over_two = NamedSharding(mesh, PartitionSpec("some"))
    for devices in (names(2), names(1, 3)):
        for there in (None, D[3], over_two, D[0], None):
            at = x if there is None else jax.device_put(x, there)
            for one in (p, jax.device_put(p, D[3])):
                for output in (None, "cpu:7", None):
                    found = data_parallel(scaled, one, at, devices, output)
                    assert where(found) == [output or devices[0]]
                    np.testing.assert_array_equal(found, 3 * np.arange(4.0))
                spread = partial(data_parallel, scaled, x=at, devices=devices)
                grad = jax.grad(lambda p, spread=spread: jnp.sum(spread(p)))(one)
                assert grad.devices() == one.devices() and grad == 6


def test_the_default_device_may_change_between_calls():
    x, p = jnp.arange(4.0), jnp.float64(3)
    for count in (1, 2):
        for device in (D[5], None, D[2]):
            with jax.default_device(device):
                found = data_parallel(scaled, p, x, names(count))
            assert where(found) == ["cpu:0"]
            np.testing.assert_array_equal(found, 3 * np.arange(4.0))


def test_settings_of_jax_may_change_between_calls():
    def fn(p: Any, x: Any) -> Any:
        wide: Any = jax.config
        return (x, x + 1) if wide.jax_enable_x64 else x

    x = jnp.arange(4, dtype=jnp.float32)
    for enabled in (True, False, True):
        with jax.enable_x64(enabled):
            found = data_parallel(fn, {}, x, names(1))
            close(found, (x, x + 1) if enabled else x)


def test_numpy_arrays_may_change_between_calls_and_before_the_vjp():
    x = np.arange(16.0)
    for n in range(3):
        x[:] = n
        found, vjp = jax.vjp(
            lambda p: data_parallel(jnp.multiply, p, x, names(1)), jnp.float64(2)
        )
        x[:] = -7
        np.testing.assert_array_equal(found, np.full(16, 2.0 * n))
        assert vjp(jnp.ones(16)) == (16 * n,)


def test_an_array_that_was_deleted_is_refused_in_a_call_that_ran_before():
    p, x = {"w": jnp.float64(2)}, array(4)

    def fn(p: Any, x: Any) -> Any:
        return p["w"] * x

    for tree in (p, x):
        close(data_parallel(fn, p, x, names(2)), 2 * array(4))
        (leaf,) = jax.tree.leaves(tree)
        leaf.delete()
        with fails_with(JdagError, "parallel.was_deleted_or_donated"):
            data_parallel(fn, p, x, names(2))
        p = {"w": jnp.float64(2)}


def test_what_is_kept_of_a_call_keeps_no_array():
    p, x = {"w": array(3)}, array(4, 3)
    data_parallel(lambda p, x: x @ p["w"], p, x, names(2))
    held = [weakref.ref(p["w"]), weakref.ref(x)]
    del p, x
    gc.collect()
    assert [one() for one in held] == [None, None]


def test_a_guard_against_moves_that_nobody_asked_for_lets_these_pass():
    spread = partial(data_parallel, jnp.multiply, 3.0, devices=names(2))
    x = jnp.arange(4.0)
    for _ in range(2):
        with jax.transfer_guard_device_to_device("disallow"):
            close(spread(x), 3.0 * x)
        close(spread(x), 3.0 * x)
