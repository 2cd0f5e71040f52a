"""Values held by key: what they count, and that what goes is counted back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.avals import Aval, aval_of
from jdag.compute.values import Values
from tests.tools.compute_cases import pair_of


def test_bytes_follow_what_is_held_and_the_peak_stays() -> None:
    values = Values()
    values.put("a", jnp.ones(10))
    values.put("b", np.ones(5))
    values.put("c", jnp.ones(3, jnp.bfloat16))
    assert (values.held, values.bytes_held, values.bytes_peak) == (3, 126, 126)
    values.drop(["a"])
    assert (values.held, values.bytes_held, values.bytes_peak) == (2, 46, 126)
    values.drop(["b"])
    values.drop(["c"])
    assert (values.held, values.bytes_held, values.bytes_peak) == (0, 0, 126)
    values.put("a", jnp.ones(2))
    assert (values.held, values.bytes_held, values.bytes_peak) == (1, 16, 126)


def test_what_is_under_a_key_is_had_until_it_is_dropped() -> None:
    values = Values()
    array = jnp.ones(2)
    values.put(("path", 1), array)
    assert ("path", 1) in values
    assert values.get(("path", 1)) is array
    values.drop([("path", 1)])
    assert ("path", 1) not in values
    with pytest.raises(KeyError):
        values.get(("path", 1))
    values.drop([("path", 1)])  # That is no error.


def test_an_array_under_several_keys_counts_once_until_the_last_is_dropped() -> None:
    values = Values()
    array = jnp.ones(10)
    for key in ("a", "b", "c"):
        values.put(key, array)
    assert values.bytes_held == values.bytes_peak == 80
    values.drop(["a"])
    values.drop(["c"])
    assert values.bytes_held == 80
    values.drop(["b"])
    assert values.bytes_held == 0


def test_a_value_put_in_place_of_another_counts_the_other_back() -> None:
    values = Values()
    values.put("a", jnp.ones(10))
    values.put("a", jnp.ones(3))
    assert (values.held, values.bytes_held) == (1, 24)
    values.put("a", None)
    values.put("a", jnp.ones(2))
    assert (values.held, values.bytes_held) == (1, 16)


def test_what_residuals_and_keys_keep_alive_counts_once_until_both_are_gone() -> None:
    args = [jnp.ones((4, 4)), jnp.ones((4, 8))]
    made = pair_of(lambda w, x: jnp.sin(w @ x) ** 2, *args)
    outputs, residuals = made.forward(args)
    assert residuals is not None and residuals.nbytes > 0
    values = Values()
    for key, value in enumerate((*args, *outputs)):
        values.put(key, value)
    before = values.bytes_held
    values.put("residuals", residuals)
    assert values.bytes_held == before + residuals.nbytes
    values.drop([0, 1, 2])
    assert any(kept is args[0] for kept in residuals.keeps)
    assert values.bytes_held == sum(kept.nbytes for kept in residuals.keeps)
    values.drop(["residuals"])
    assert values.bytes_held == 0


def test_abstract_values_count_as_what_they_stand_for_and_errors_as_nothing() -> None:
    values = Values()
    values.put("abstract", Aval((4, 8), np.dtype(np.float32)))
    values.put("error", ValueError("no"))
    values.put("scalar", 2.0)
    values.put("key", jax.random.key(0))
    assert (values.held, values.bytes_held) == (4, 128 + 8)


def test_a_buffer_counts_until_the_abstract_value_and_all_who_keep_it_are_gone() -> (
    None
):
    class Kept:
        def __init__(self, *keeps: Any) -> None:
            self.keeps = keeps

    values = Values()
    aval = aval_of(jnp.ones((4, 8), jnp.float32))
    for key in ("x", "y"):
        values.put(key, aval)
    values.put("r", Kept(values.buffer("x")))
    values.put("s", Kept(values.buffer("x"), values.buffer("y")))
    assert values.bytes_held == 2 * 128
    values.drop(["x"])
    values.put("y", aval)  # In place of the one that is kept.
    values.drop(["r"])
    assert values.bytes_held == 3 * 128
    values.drop(["s"])
    assert values.bytes_held == 128
    values.drop(["y"])
    assert (values.bytes_held, values.bytes_peak) == (0, 3 * 128)
