"""A program with hooks is its own oracle: same numbers, same hooks, in order."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.oracle import oracle, pullback
from jdag.api.value_and_grad import value_and_grad
from jdag.context.refs import stop_gradient
from jdag.errors import ContextError, GraphError, JdagError, RemoteError
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import total

W = jnp.arange(1.0, 7.0).reshape(2, 3) / 5
X = jnp.cos(W) + 2


class Log:
    def __init__(self) -> None:
        self.given: list[tuple[str, Any]] = []

    def hook(self, name: str, make: Callable[[Any], Any] = lambda c: c) -> Any:
        def hook(cotangent: Any) -> Any:
            self.given.append((name, np.asarray(cotangent)))
            return make(cotangent)

        return hook


def _logged(program: Any, log: Log, ctx: Any, *args: Any) -> Any:
    return program(ctx, log, *args)


def agree(cluster: Any, program: Any, *args: Any, **settings: Any) -> list[str]:
    logs = Log(), Log()
    ours, theirs = (partial(_logged, program, log) for log in logs)
    found = [
        value_and_grad(ours, cluster, **settings)(*args),
        oracle(theirs, **settings)(*args),
    ]
    near: dict[str, Any] = {"rtol": 1e-12, "atol": 1e-12}
    pairs = zip(*map(jax.tree.leaves, found), strict=True)
    for mine, wanted in pairs:
        np.testing.assert_allclose(mine, wanted, **near)
    given = [sorted(log.given, key=lambda one: one[0]) for log in logs]
    for (name, mine), (other, wanted) in zip(*given, strict=True):
        assert name == other
        np.testing.assert_allclose(mine, wanted, **near)
    return [name for name, _ in logs[0].given]


def test_zeros_are_hooked_where_the_pass_comes_by_and_nowhere_else(cluster: Any):
    def run(ctx, log, w, x):
        h, k = ctx.call("b", lambda w: (jnp.sin(w), w * w), w)
        far = ctx.call("c", jnp.square, w)  # Not part of the loss.
        plus = lambda c: c + 7  # noqa: E731
        ctx.on_cotangent(k, log.hook("k", plus))
        ctx.on_cotangent(x, log.hook("x", plus))
        ctx.on_cotangent(far, log.hook("never", plus))
        ctx.on_cotangent(
            stop_free := ctx.call("b", jnp.negative, w), log.hook("no", plus)
        )
        return ctx.call("d", lambda h, x, s: jnp.sum(h), h, x, stop_gradient(stop_free))

    assert sorted(agree(cluster, run, W, X, argnums=(0, 1))) == ["k", "x"]


def test_leaves_that_are_not_differentiated_by_are_hooked_as_well(cluster: Any):
    v = cluster.put("c", X)

    def run(ctx, log, w, v):
        ctx.on_cotangent(v, log.hook("v", lambda c: -c))
        ctx.on_gradient(v, log.hook("sees v"))
        return ctx.call("b", lambda w, v: jnp.sum(w * v), w, v)

    assert agree(cluster, run, W, v) == ["v", "sees v"]


def test_what_moves_and_what_is_moved_beside_it(cluster: Any):
    def run(ctx, log, w, x):
        there, beside = ctx.move("c", [w, x])
        ctx.on_cotangent(there, log.hook("there", lambda c: c * 2))
        ctx.on_cotangent(beside, log.hook("beside", lambda c: c + 1))
        return ctx.call("d", total, there, ctx.call("c", jnp.sin, there))

    found = agree(cluster, run, W, X, argnums=(0, 1))
    assert sorted(found) == ["beside", "there"]


def test_complex_and_narrow_values_are_hooked_in_their_own_dtype(cluster: Any):
    def run(ctx, log, z, b):
        h = ctx.call("b", jnp.multiply, z, z)
        ctx.on_cotangent(h, log.hook("z", lambda c: c * 1j))
        k = ctx.call("c", jnp.sin, b)
        ctx.on_cotangent(k, log.hook("b", lambda c: c * 2))
        square = ctx.call("d", lambda h: jnp.sum(jnp.abs(h) ** 2), h)
        return ctx.call("d", lambda s, k: s + jnp.sum(k).astype("float64"), square, k)

    z, b = W + 1j * X, jnp.arange(4, dtype="float32")
    assert sorted(agree(cluster, run, z, b, argnums=(0, 1))) == ["b", "z"]


def test_pullback_gives_hooks_the_cotangents_of_its_roots():
    log = Log()

    def run(ctx, w):
        h = ctx.call("b", jnp.sin, w)
        ctx.on_cotangent(h, log.hook("h", lambda c: 10 * c))
        return [h, h]

    _, gradient = pullback(run)(W, cotangents=[X, W])
    np.testing.assert_allclose(gradient, 10 * (X + W) * jnp.cos(W))
    (given,) = log.given
    np.testing.assert_allclose(given[1], X + W)


def test_what_cannot_be_hooked_is_refused_as_on_a_cluster(cluster: Any):
    def hooking(hook: Callable[..., None]) -> Any:
        def run(ctx, w):
            h = ctx.call("b", jnp.sin, w)
            hook(ctx, w, h)
            return ctx.call("b", total, h)

        return run

    foreign = cluster.put("b", W)
    cases: list[tuple[Any, type, str]] = [
        (lambda ctx, w, h: ctx.on_gradient(h, abs), JdagError, "takes a leaf"),
        (lambda ctx, w, h: ctx.on_cotangent(3, abs), JdagError, "takes a ref as first"),
        (lambda ctx, w, h: ctx.on_cotangent(h, 3), JdagError, "takes a function"),
        (
            lambda ctx, w, h: ctx.on_cotangent(stop_gradient(w), abs),
            GraphError,
            "is not tracked",
        ),
    ]
    for hook, kind, said in cases:
        for run in (oracle(hooking(hook)), value_and_grad(hooking(hook), cluster)):
            with pytest.raises(kind, match=said):
                run(W)
    with fails_with(ContextError, "api.is_of_a_cluster"):
        oracle(hooking(lambda ctx, w, h: ctx.on_cotangent(foreign, abs)))(W)


def test_a_hook_that_fails_on_one_machine_is_named_with_its_place():
    def no_way(c: Any) -> Any:
        raise ValueError("no such direction")

    def run(ctx, w):
        h = ctx.call("b", jnp.sin, w)
        ctx.on_cotangent(h, no_way if w.shape == (2, 3) else lambda c: c[0])
        return ctx.call("c", total, h)

    with fails_with(RemoteError, "api.no_way_failed_on_b"):
        oracle(run)(W)
    with fails_with(JdagError, "api.lambda_failed_on_b_the"):
        oracle(run)(W[:1])
