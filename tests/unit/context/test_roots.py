"""A root, or a cotangent, that cannot be one says why, before anything runs."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.context.refs import stop_gradient
from jdag.errors import RootError
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, total

BAD_ROOTS: tuple[tuple[Any, str], ...] = (
    (lambda ctx, w: [None], "root 0 is None"),
    (lambda ctx, w: [], r"no roots: .*ctx.backward\(loss\)"),
    (lambda ctx, w: [ctx.call("b", total, ONES)], "root 0, .* is a constant"),
    (lambda ctx, w: [stop_gradient(ctx.call("b", total, w))], "is a constant"),
    (lambda ctx, w: [w], "root 0 is leaf 0 on b, a leaf"),
    (
        lambda ctx, w: [ctx.call("b", total, w), ctx.call("c", jnp.sin, w)],
        r"root 1 is float64\[3,3\], of size 9; .* must be 1",
    ),
    (lambda ctx, w: [ctx.call("b", jnp.argmax, w)], "its dtype is int64"),
    (
        lambda ctx, w: [ctx.call("b", lambda a: jnp.sum(a) * 1j, w)],
        "which is complex and so needs a cotangent",
    ),
    (
        lambda ctx, w: [ctx.call("b", total, w).fetch()],
        "were fetched, or .* are not in the graph",
    ),
    (lambda ctx, w: [[ctx.call("b", total, w)]], r"write ctx.backward\(\*roots\)"),
)


@pytest.mark.parametrize(("roots", "text"), BAD_ROOTS)
def test_a_root_that_cannot_be_one_says_why(cluster, roots, text):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        with pytest.raises(RootError, match=text):
            ctx.backward(*roots(ctx, w))
        loss = ctx.call("c", total, w)
        ctx.backward(loss)
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), ONES)


@pytest.mark.parametrize(
    ("cotangents", "text"),
    [
        ([ONES], "1 cotangents for 2 roots"),
        ([ONES, 1.0, 1.0], "3 cotangents for 2 roots"),
        (ONES, "cotangents is a .*; for 2 roots it must be a list or tuple"),
        ({"h": ONES}, "cotangents is a dict"),
        ([jnp.ones(3), None], r"cotangent 0 is float64\[3\], but root 0 is .*\[3,3\]"),
        ([ONES.astype("float32"), None], "cotangent 0 is float32.* is float64"),
        ([None, None], "root 0 is .*, of size 9"),
        ([ONES, 1j], r"cotangent 1 is ~?complex128\[\]"),
        ([1.0, None], "cotangent 0 is ~?float64"),
        (["x", None], "cotangent 0: a str is not an array"),
        ([object(), None], "cotangent 0: an object is not an array"),
    ],
)
def test_cotangents_are_checked_against_their_roots(cluster, cotangents, text):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        h = ctx.call("c", jnp.sin, w)
        loss = ctx.call("d", total, h)
        with pytest.raises(RootError, match=text):
            ctx.backward(h, loss, cotangents=cotangents)


def test_a_ref_as_a_cotangent_is_refused(cluster):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        h = ctx.call("c", jnp.sin, w)
        with fails_with(RootError, "context.cotangent_0_is_a_ref"):
            ctx.backward(h, cotangents=[h])


def test_a_number_is_a_cotangent_of_any_float_root_with_x64_off():
    with jax.enable_x64(False), jdag.simulate(["a", "b"], seed=0) as cluster:
        w = cluster.put("b", 3.0)
        with cluster.context() as ctx:
            ctx.backward(ctx.call("b", jnp.square, w), cotangents=2.0)
            found = ctx.gradient(w).fetch()
    assert (found, found.dtype) == (12.0, jnp.float32)
