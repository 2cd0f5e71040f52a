"""What the cache of pairs keeps apart, sums, abstract values, and fingerprints."""

import functools
import gc
import operator
import warnings
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.avals import Aval, aval_of
from jdag.compute.pairs import ANEW_MAX, Pair, PairCache
from jdag.compute.pytrees import split
from jdag.compute.sums import add, fold
from jdag.errors import JdagError
from jdag.sim.digest import fingerprint
from tests.tools.compute_cases import Call, Leaf, array, setting, summed
from tests.tools.error_texts import fails_with


def pair_of(fn: Any, *args: Any, **kwargs: Any) -> Pair:
    return Call(fn, *args, **kwargs).pair


def test_the_same_call_gets_the_same_pair() -> None:
    def fn(x: Any, n: Any) -> Any:
        return x * n

    first = pair_of(fn, Leaf(array(3)), 2.0)
    assert pair_of(fn, Leaf(array(3, seed=1)), 7.0) is first
    assert pair_of(fn, array(3), 2.0) is not first
    assert pair_of(fn, Leaf(array(4)), 2.0) is not first
    assert pair_of(fn, Leaf(array(3)), 2) is not first
    assert pair_of(fn, Leaf(array(3)), np.float64(2.0)) is not first
    assert pair_of(fn, Leaf(array(3)), n=2.0) is not first


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("jax_enable_x64", False),
        ("jax_default_prng_impl", "rbg"),
        ("jax_disable_most_optimizations", True),
        ("jax_optimization_level", "O1"),
    ],
)
def test_each_setting_of_the_configuration_has_pairs_of_its_own(
    name: str, value: Any
) -> None:
    def fn(x: Any) -> Any:
        return x + x

    x = array(3, dtype=np.float32)
    before = pair_of(fn, x)
    with setting(name, value):
        assert pair_of(fn, x) is not before
    assert pair_of(fn, x) is before


def test_shapes_are_those_of_the_x64_setting_at_the_call() -> None:
    def fn(x: Any) -> Any:
        return x * 2.0 + jnp.arange(3)

    x = array(3, dtype=np.float32)
    wide = pair_of(fn, x)
    with setting("jax_enable_x64", False):
        narrow = pair_of(lambda: jnp.arange(3))
        assert str(narrow.out_avals[0]) == "int32[3]"
        assert str(aval_of(np.ones(3))) == "float32[3]"
        assert str(aval_of(1.0)) == "~float32[]"
    assert str(aval_of(1.0)) == "~float64[]"
    assert str(wide.out_avals[0]) == "float32[3]"


def in_cache(cache: PairCache, fn: Any, *args: Any) -> Pair:
    parts = split(args, {}, lambda _: False)
    values = [value for _, value in parts.constants]
    tracked = (False,) * len(values)
    return cache.pair(fn, parts.template, tuple(map(aval_of, values)), tracked)


def test_the_cache_is_bounded_and_drops_what_was_used_longest_ago() -> None:
    cache = PairCache(3)
    x = array(2)
    first, second = (in_cache(cache, fn, x) for fn in (jnp.sin, jnp.cos))
    in_cache(cache, jnp.tan, x)
    assert in_cache(cache, jnp.sin, x) is first
    in_cache(cache, jnp.exp, x)
    assert len(cache) == 3
    assert in_cache(cache, jnp.sin, x) is first
    assert in_cache(cache, jnp.cos, x) is not second


def test_a_lambda_made_anew_over_other_values_is_warned_of_once() -> None:
    cache = PairCache(100)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for n in range(ANEW_MAX - 1):
            in_cache(cache, lambda x, n=n: x + n, array(2))
        assert not caught
        for n in range(2 * ANEW_MAX):
            in_cache(cache, lambda x, m=n: x + m, array(2))
    assert len(caught) == 1
    assert [len(seen) for seen in cache._keys.values()] == [ANEW_MAX - 1, ANEW_MAX]
    assert "lambda" in str(caught[0].message)
    assert "test_compute.py" in str(caught[0].message)
    assert "jdag.static" in str(caught[0].message)


def test_many_shapes_and_equal_lambdas_are_not_warned_of() -> None:
    cache = PairCache(1000)
    for n in range(ANEW_MAX + 4):
        in_cache(cache, lambda x: x + 1, np.ones(n))
    assert len(cache) == ANEW_MAX + 4
    for _ in range(ANEW_MAX + 4):
        in_cache(cache, lambda x: x + 2, np.ones(1))
    assert len(cache) == ANEW_MAX + 5


def test_a_pair_that_was_dropped_is_freed_with_its_function() -> None:
    cache = PairCache(1)

    def fn(x: Any) -> Any:
        return x * 3.0

    held = weakref.ref(in_cache(cache, fn, array(2)))
    held_fn = weakref.ref(fn)
    del fn
    in_cache(cache, jnp.sin, array(2))
    gc.collect()
    assert held() is None
    assert held_fn() is None


@pytest.mark.parametrize("dtype", [np.float32, np.float64, jnp.bfloat16, np.complex64])
def test_a_sum_has_the_bits_of_a_tree_of_eight_neighbours(dtype: Any) -> None:
    scale = 10.0 ** np.random.default_rng(0).integers(-3, 4, 70)
    addends = [array(50, seed=n, dtype=dtype) * scale[n] for n in range(70)]
    addends = [addend.astype(dtype) for addend in addends]
    differs = False
    for count in (*range(1, 20), 63, 64, 65, 70):
        some = addends[:count]
        total = summed(some)
        assert np.asarray(add(some)).tobytes() == np.asarray(total).tobytes()
        assert np.asarray(fold(some)).tobytes() == np.asarray(total).tobytes()
        left = functools.reduce(operator.add, some)
        assert count > 9 or np.asarray(left).tobytes() == np.asarray(total).tobytes()
        differs = differs or bool((left != total).any())
    assert differs


def test_a_sum_of_nothing_is_refused() -> None:
    with fails_with(ValueError, "properties.at_least_one_addend"):
        add([])


def test_the_sum_inside_a_vjp_has_the_bits_of_the_tree() -> None:
    scales = [10.0 ** (n % 5) for n in range(21)]
    addends = [array(200, seed=n, dtype=np.float32) * s for n, s in enumerate(scales)]
    call = Call(lambda x: x * 1.0, Leaf(array(200, dtype=np.float32)))
    for count in (3, 5, 8, 9, 21):
        total = summed(addends[:count])
        (gradient,) = call.vjp(addends[:count])
        assert np.asarray(gradient).tobytes() == np.asarray(total).tobytes()


@pytest.mark.parametrize(
    ("value", "text", "nbytes", "inexact"),
    [
        (np.ones((2, 3), np.float32), "float32[2,3]", 24, True),
        (jnp.ones((2, 3), jnp.bfloat16), "bfloat16[2,3]", 12, True),
        (jnp.ones(2, jnp.complex64), "complex64[2]", 16, True),
        (np.float32(1), "float32[]", 4, True),
        (np.float64(1), "float64[]", 8, True),
        (np.bool_(True), "bool[]", 1, False),
        (np.zeros((0, 4), np.int32), "int32[0,4]", 0, False),
        (3, "~int64[]", 8, False),
        (3.0, "~float64[]", 8, True),
        (3j, "~complex128[]", 16, True),
        (jax.ShapeDtypeStruct((2,), np.float32), "float32[2]", 8, True),
    ],
)
def test_an_abstract_value_is_what_jax_makes_of_the_value(
    value: Any, text: str, nbytes: int, inexact: bool
) -> None:
    aval = aval_of(value)
    assert (str(aval), aval.nbytes, aval.inexact) == (text, nbytes, inexact)
    assert aval_of(aval) is aval
    made_anew = Aval(aval.shape, aval.dtype, aval.weak)
    assert made_anew == aval
    assert hash(made_anew) == hash(aval)
    assert aval_of(value) is aval


def test_keys_have_shapes_and_bytes_but_are_not_inexact() -> None:
    keys = jax.random.split(jax.random.key(0), 3)
    aval = aval_of(keys)
    assert (aval.shape, aval.size, aval.nbytes, aval.inexact) == ((3,), 3, 24, False)


@pytest.mark.parametrize(
    "value", ["text", [1.0], np.array(["a"]), object(), np.ma.ones(2)]
)
def test_what_is_no_array_has_no_abstract_value(value: Any) -> None:
    with fails_with(JdagError, "properties.is_no_array_arrays_are"):
        aval_of(value)


def test_each_flipped_bit_changes_the_fingerprint() -> None:
    raw = np.arange(6, dtype=np.float64).tobytes()
    prints = {fingerprint(np.frombuffer(raw, np.float64))}
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << (bit % 8)
        prints.add(fingerprint(np.frombuffer(bytes(flipped), np.float64)))
    assert len(prints) == 8 * len(raw) + 1


def test_any_two_bytes_exchanged_change_the_fingerprint() -> None:
    raw = np.arange(1, 65, dtype=np.uint8)
    whole = fingerprint(raw)
    for one in range(64):
        for other in range(one):
            turned = raw.copy()
            turned[[one, other]] = turned[[other, one]]
            assert fingerprint(turned) != whole


def test_shape_dtype_and_kind_of_scalar_are_part_of_the_fingerprint() -> None:
    same_bytes: list[Any] = [
        np.zeros(4, np.float32),
        np.zeros((2, 2), np.float32),
        np.zeros(4, np.int32),
        np.zeros(2, np.float64),
        np.zeros((0, 4)),
        np.zeros((4, 0)),
        0,
        0.0,
        -0.0,
        0j,
        np.float64(0),
        Aval((4,), np.dtype(np.float32)),
    ]
    assert len({fingerprint(value) for value in same_bytes}) == len(same_bytes)


def test_one_value_has_one_fingerprint_whoever_holds_it() -> None:
    x = np.arange(12.0).reshape(3, 4)
    assert fingerprint(x) == fingerprint(jnp.asarray(x)) == fingerprint(x.T.copy().T)
    assert fingerprint(jnp.bfloat16(1.5)) == fingerprint(jnp.asarray(1.5, jnp.bfloat16))
    assert fingerprint(np.float64(0.1)) == fingerprint(jnp.asarray(0.1, jnp.float64))
    one, other = jax.random.key(1), jax.random.key(2)
    assert fingerprint(one) == fingerprint(jax.random.key(1)) != fingerprint(other)
    assert fingerprint(aval_of(x)) == fingerprint(jax.ShapeDtypeStruct((3, 4), x.dtype))
