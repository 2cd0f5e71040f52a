"""Zeros take no bytes on the wire, and what they would have taken is counted."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.api.hvp import hvp
from jdag.api.oracle import oracle
from jdag.api.value_and_grad import value_and_grad
from jdag.context.refs import stop_gradient
from tests.tools.compute_cases import array
from tests.tools.face_cases import ONES, total

MODES = ("smart", "fast")
SAVED, SENT = "zero_bytes_saved", "payload_bytes_sent"


def nothing_of(*arrays: Any) -> Any:
    """An integer, so that no cotangent comes back from here."""
    return jnp.argmax(jnp.concatenate([jnp.ravel(array) for array in arrays]))


def first(a: Any, *_: Any) -> Any:
    return jnp.sum(a)


def saved(cluster: Any) -> dict[str, int]:
    return {w: held[SAVED] for w, held in cluster.info().items() if held[SAVED]}


@pytest.mark.parametrize("mode", MODES)
def test_each_pass_and_each_transfer_counts_its_own(cluster: Any, mode: Any):
    w, v = cluster.put("b", ONES), cluster.put("b", jnp.ones(4))
    x, y = cluster.put("a", jnp.ones(2, "bfloat16")), cluster.put("a", jnp.ones(3))
    with cluster.context() as ctx:
        ctx.call("c", nothing_of, w, v)
        ctx.call("d", nothing_of, x, y)
        losses = ctx.call("c", total, w), ctx.call("d", total, y)
        for _ in range(3):
            ctx.backward(*losses, mode=mode, retain_graph=True)
    assert saved(cluster) == {"c": 3 * 4 * 8, "d": 3 * 2 * 2}


@pytest.mark.parametrize("mode", MODES)
def test_what_is_not_tracked_would_not_have_come_and_is_not_counted(
    cluster: Any, mode: Any
):
    w, n = cluster.put("b", ONES), cluster.put("b", jnp.arange(7))
    k = stop_gradient(cluster.put("b", jnp.ones(6)))
    with cluster.context() as ctx:
        ctx.call("c", nothing_of, w, n, k)
        loss = ctx.call("c", total, w)
        ctx.backward(loss, mode=mode)
    assert saved(cluster) == {}


def test_of_a_transfer_of_zeros_alone_all_is_saved_and_smart_passes_send_none():
    found = {}
    mode: Any
    for mode in MODES:
        with simulate(["a", "b", "c"], seed=0) as cluster:
            w, x = cluster.put("b", ONES), cluster.put("a", jnp.ones(5))
            with cluster.context() as ctx:
                h = ctx.call("b", lambda x: jnp.concatenate([x, x]), x)
                ctx.call("c", nothing_of, w, h)
                loss = ctx.call("c", total, w)
                loss.fetch()
                before = cluster.info()["b"][SENT]
                ctx.backward(loss, mode=mode)
                assert cluster.info()["b"][SENT] == before
            found[mode] = saved(cluster)
    assert found == {"smart": {"c": 10 * 8}, "fast": {"b": 5 * 8, "c": 10 * 8}}


def counted(cluster: Any) -> dict[str, tuple[int, int]]:
    return {w: (held[SENT], held[SAVED]) for w, held in cluster.info().items()}


def grown(cluster: Any, before: dict[str, tuple[int, int]]) -> dict[str, Any]:
    changes = {
        w: (sent - before[w][0], kept - before[w][1])
        for w, (sent, kept) in counted(cluster).items()
    }
    return {w: change for w, change in changes.items() if any(change)}


def unused_argument(ctx: Any, w: Any, v: Any) -> Any:
    return ctx.call("c", first, ctx.call("b", jnp.sin, w), ctx.call("d", jnp.sin, v))


def moved_together(ctx: Any, w: Any, v: Any) -> Any:
    parts = ctx.call("b", lambda w: tuple(w * k for k in (1.0, 2.0, 3.0)), w)
    return ctx.call("c", jnp.sum, ctx.move("c", parts)[1])


def split_in_five(ctx: Any, w: Any, v: Any) -> Any:
    parts = ctx.call("d", lambda v: tuple(jnp.split(v * v, 5)), v)
    moved = ctx.move("c", list(parts))
    return ctx.call("c", total, *moved[::2])


V = jnp.arange(20.0, dtype="float32").reshape(10, 2)
# The program; the payload bytes that workers send in backward and save; gradients.
PROGRAMS: dict[str, Any] = {
    # The sine of v is not differentiated: its zero goes on from d to the leaf on a.
    "unused": (
        unused_argument,
        {"c": (9 * 8, 20 * 4), "d": (0, 20 * 4)},
        (np.cos(ONES), 0 * V),
    ),
    "moved": (moved_together, {"c": (9 * 8, 2 * 9 * 8)}, (2 * ONES, None)),
    "split": (
        split_in_five,
        {"c": (3 * 4 * 4, 2 * 4 * 4), "d": (20 * 4, 0)},
        (None, 2 * V * np.repeat([1, 0, 1, 0, 1], 2)[:, None]),
    ),
}


@pytest.mark.parametrize("values", ["real", "abstract"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_zero_of_an_input_that_nothing_used_takes_no_bytes_and_is_counted(
    name: str, mode: Any, values: Any
):
    program, expected, gradients = PROGRAMS[name]
    with simulate(["a", "b", "c", "d"], seed=0, values=values) as cluster:
        w, v = cluster.put("b", ONES), cluster.put("a", V)
        with cluster.context() as ctx:
            loss = program(ctx, w, v)
            loss.fetch()
            before = counted(cluster)
            ctx.backward(loss, mode=mode)
            assert grown(cluster, before) == expected
            for leaf, gradient in zip((w, v), gradients, strict=True):
                assert (leaf in ctx.gradients()) == (gradient is not None)
                if gradient is not None and values == "real":
                    found = ctx.gradient(leaf).fetch()
                    assert (found.dtype, found.shape) == (leaf.dtype, leaf.shape)
                    np.testing.assert_allclose(found, gradient, rtol=1e-6)


@pytest.mark.parametrize("mode", MODES)
def test_the_array_of_such_a_zero_is_not_held_after_its_vjp(cluster: Any, mode: Any):
    w, v = cluster.put("b", ONES), cluster.put("a", V)
    with cluster.context() as ctx:
        loss = unused_argument(ctx, w, v)
        loss.fetch()
        before = cluster.info()["c"]
        ctx.backward(loss, mode=mode, retain_graph=True)
        after = cluster.info()["c"]
    for held in ("values_held", "bytes_held"):
        assert after[held] == before[held], held


def hostile(ctx: Any, params: Any) -> Any:
    """The vjp of a reciprocal of zero makes no number of a zero."""
    x, y = params["x"], params["y"]
    _, doubled = ctx.call("b", lambda x, y: (1 / x, y * 2), x, y)
    parts = ctx.call("d", lambda y: tuple(jnp.split(y, 3)), doubled)
    return ctx.call("c", first, *ctx.move("c", list(parts[1:])), params["z"])


@pytest.mark.parametrize("mode", MODES)
def test_gradients_are_those_of_the_oracle_also_where_a_zero_meets_infinity(mode: Any):
    params = {"x": jnp.zeros(3), "y": array(3), "z": array(4)}
    with simulate(["a", "b", "c", "d"], seed=0) as cluster:
        refs = {
            name: cluster.put(worker, params[name])
            for name, worker in (("x", "a"), ("y", "d"), ("z", "b"))
        }
        with cluster.context() as ctx:
            ctx.backward(hostile(ctx, refs), mode=mode)
            found = {name: ctx.gradient(refs[name]).fetch() for name in refs}
        assert cluster.info()["b"][SAVED] == 3 * 8  # Of x.
    _, expected = oracle(hostile)(params)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    np.testing.assert_array_equal(found["y"], [0, 2, 0])


@jax.custom_vjp
def straight(x: Any, y: Any) -> Any:
    """What comes for it goes to y as well, on which it does not depend."""
    return jnp.round(x)


straight.defvjp(lambda x, y: (jnp.round(x), None), lambda _, g: (g, 3 * g))


def hands_on(ctx: Any, params: Any) -> Any:
    return ctx.call("d", jnp.sum, ctx.call("c", straight, *params))


def test_what_a_custom_vjp_hands_to_an_argument_that_it_does_not_use_is_no_zero():
    params = (array(3), array(3, seed=1))
    with simulate(["a", "b", "c", "d"], seed=0) as cluster:
        _, found = value_and_grad(hands_on, cluster)(params)
        assert saved(cluster) == {}
    _, expected = oracle(hands_on)(params)
    for one, other, wanted in zip(found, expected, (1, 3), strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, [wanted] * 3)


def bent(ctx: Any, params: Any) -> Any:
    w, v, u = params
    parts = ctx.call("b", lambda w, v: (jnp.sin(w), w * v, jnp.cos(v)), w, v)
    moved = ctx.move("c", list(parts))
    return ctx.call("c", lambda s, h, *_: s @ h, ctx.call("d", jnp.sin, v), *moved, u)


def test_a_zero_is_one_of_the_primal_and_of_the_tangent():
    params = tuple(array(3, seed=k) for k in range(3))
    along = tuple(array(3, seed=3 + k) for k in range(3))
    with simulate(["a", "b", "c", "d"], seed=0) as cluster:
        found = hvp(bent, cluster)(params, along)
        assert saved(cluster)
    _, expected = jax.jvp(lambda p: oracle(bent)(p)[1], (params,), (along,))
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-12, atol=1e-12)
