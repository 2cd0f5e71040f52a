"""Calls that look alike share what is made of them, and others do not."""

import gc
import weakref
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.errors import JdagError
from jdag.parallel import data_parallel
from tests.parallel.cases import HOW, array, close, names, where

D = jax.devices()


def kept(p: Any, x: Any) -> Any:
    """Outputs that show the dtypes and weak types of what was given."""
    return x * p, x + jnp.zeros((), jnp.bfloat16), p * jnp.ones(2, jnp.float32)


@pytest.mark.parametrize("how", HOW)
def test_other_dtypes_weak_types_and_shapes_are_other_calls(how):
    ones = np.ones(6)
    for dtype, rows in ((np.float32, 6), (np.int32, 6), (np.float32, 4)) * 2:
        for p in (2.0, jnp.float64(2), 2):
            x = ones.astype(dtype)[:rows]
            found = data_parallel(kept, p, x, names(2), how=how)
            wanted = [kept(jnp.asarray(p), part) for part in jnp.split(x, 2)]
            close(found, jax.tree.map(lambda *a: jnp.concatenate(a), *wanted))


@pytest.mark.parametrize("how", HOW)
def test_arrays_may_live_elsewhere_in_the_next_call(how):
    def fn(p: Any, x: Any) -> Any:
        return p * x

    x, p = jnp.arange(4.0), jnp.float64(3)
    mesh = jax.sharding.Mesh(np.asarray(D[4:6]), ("some",))
    spread = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("some"))
    for devices in (names(2), names(1, 3)):
        for there in (None, D[3], spread, D[0], None):
            at = x if there is None else jax.device_put(x, there)
            for one in (p, jax.device_put(p, D[3])):
                for output in (None, "cpu:7", None):
                    found = data_parallel(fn, one, at, devices, output, how=how)
                    assert where(found) == [output or devices[0]]
                    np.testing.assert_array_equal(found, 3 * np.arange(4.0))
                grad = jax.grad(
                    lambda p, at=at, d=devices: jnp.sum(
                        data_parallel(fn, p, at, d, how=how)
                    )
                )(one)
                assert grad.devices() == one.devices() and grad == 6


@pytest.mark.parametrize("how", HOW)
def test_the_default_device_may_change_between_calls(how):
    def fn(p: Any, x: Any) -> Any:
        return p * x

    x, p = jnp.arange(4.0), jnp.float64(3)
    for count in (1, 2):
        for device in (D[5], None, D[2]):
            with jax.default_device(device):
                found = data_parallel(fn, p, x, names(count), how=how)
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


def test_what_a_function_holds_counts_by_value():
    def made(held: Any) -> Any:
        return lambda p, x: x * held[0]

    for value in (2, 3, 2.5, True, 1, 2):
        found = data_parallel(made([value]), {}, jnp.ones(3, jnp.int8), names(1))
        wanted = jnp.ones(3, jnp.int8) * value
        close(found, wanted)
        found = data_parallel(
            lambda p, x: x * p["by"], {"by": jdag.static(value)}, wanted, names(1)
        )
        close(found, wanted * value)


def test_options_that_are_equal_and_not_the_same_are_kept_apart():
    x = array(2, 4)
    for _ in range(2):
        close(data_parallel(jnp.add, 1.0, x, names(1), dim=np.int64(1)), 1.0 + x)
        with pytest.raises(JdagError, match=r"dim = True: allowed is an int"):
            data_parallel(jnp.add, 1.0, x, names(1), dim=True)


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


@pytest.mark.parametrize("how", HOW)
def test_an_array_that_was_deleted_is_refused_in_a_call_that_ran_before(how):
    p, x = {"w": jnp.float64(2)}, array(4)

    def fn(p: Any, x: Any) -> Any:
        return p["w"] * x

    for tree in (p, x):
        close(data_parallel(fn, p, x, names(2), how=how), 2 * array(4))
        (leaf,) = jax.tree.leaves(tree)
        leaf.delete()
        with pytest.raises(JdagError, match=r"was deleted, or donated"):
            data_parallel(fn, p, x, names(2), how=how)
        p = {"w": jnp.float64(2)}


def test_a_tracer_in_a_closure_is_refused_after_a_call_with_a_number_there():
    def made(by: Any, x: Any) -> Any:
        return data_parallel(lambda p, x: x * by, {}, x, names(1))

    x = jnp.arange(3.0)
    for by in (2.0, jnp.float64(2)):
        close(made(by, x), 2 * x)
        with pytest.raises(JdagError, match="closes over a tracer"):
            jax.grad(lambda by: jnp.sum(made(by, x)))(2.0)


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
