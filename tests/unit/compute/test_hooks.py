"""A hook's result takes a cotangent's place, if it is of its shape and dtype."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.avals import aval_of
from jdag.compute.duals import Dual
from jdag.compute.hooks import hooked, seen
from jdag.errors import JdagError
from tests.tools.error_texts import fails_with

COTANGENT = jnp.arange(6.0).reshape(2, 3)


def test_what_a_hook_returns_takes_the_place_of_what_it_is_given_unless_it_is_none():
    replaced = hooked(lambda c: c * float(c[1, 2]), COTANGENT)
    np.testing.assert_array_equal(replaced, COTANGENT * 5)
    seen: list[Any] = []
    assert hooked(seen.append, COTANGENT) is seen[0] is COTANGENT


def test_an_array_that_the_hook_goes_on_writing_to_is_not_what_goes_on():
    mine = np.ones((2, 3))
    given = hooked(lambda _: mine, COTANGENT)
    mine[:] = 7
    np.testing.assert_array_equal(given, np.ones((2, 3)))


def test_what_goes_on_has_no_weak_type():
    weak = jnp.asarray(2.0)
    assert aval_of(weak).weak
    assert hooked(lambda _: weak, jnp.asarray(np.float64(1))).weak_type is False


@pytest.mark.parametrize(
    ("hook", "said"),
    [
        (lambda c: c[0], r"returned float64\[3\], but the cotangent is float64\[2,3\]"),
        (lambda c: c.astype("float32"), r"returned float32\[2,3\]"),
        (lambda c: c.astype(int), r"returned int64\[2,3\]"),
        (lambda c: 2.0, "returned a float,"),
        (lambda c: [c], "returned a list,"),
        (lambda c: "c", "returned a str,"),
    ],
)
def test_what_is_no_such_array_is_refused_and_says_what_would_be_right(hook, said):
    with pytest.raises(JdagError, match=said) as caught:
        hooked(hook, COTANGENT)
    assert "an array of that shape and dtype, or None" in str(caught.value)


def test_an_abstract_cotangent_is_traced_and_stays_abstract():
    aval = aval_of(COTANGENT)
    seen: list[Any] = []
    assert hooked(seen.append, aval) is aval
    assert hooked(lambda c: c * 2, aval) == aval
    assert isinstance(seen[0], jax.core.Tracer)
    with fails_with(JdagError, "compute.returned_float64_3"):
        hooked(lambda c: c[0], aval)
    with fails_with(JdagError, "compute.returned_float64"):
        hooked(lambda c: 2.0, aval)


@pytest.mark.parametrize("gives", [0.0, "seen", None, [COTANGENT], COTANGENT[0]])
def test_what_a_hook_that_only_sees_returns_is_ignored(gives):
    aval, shown = aval_of(COTANGENT), []

    def hook(gradient: Any) -> Any:
        shown.append(gradient)
        return gives

    for value in (COTANGENT, aval, Dual(COTANGENT, COTANGENT)):
        seen(hook, value)
    assert shown[0] is COTANGENT and shown[2] is COTANGENT
    assert isinstance(shown[1], jax.core.Tracer)


def test_a_bfloat16_and_a_complex_cotangent_keep_their_dtype():
    for dtype in ("bfloat16", "complex64"):
        one = jnp.ones(3, dtype)
        assert hooked(lambda c: c * 2, one).dtype == dtype
        with pytest.raises(JdagError, match=f"the cotangent is {dtype}"):
            hooked(lambda c: jnp.ones(3), one)
