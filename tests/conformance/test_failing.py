"""Where the peer fails and jdag does not: order, what is not used, what is left."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from tests.conformance import functions
from tests.conformance.drivers import held, leaving_nothing
from tests.conformance.functions import (
    ONES,
    fails_backward,
    three_times,
    total,
    wave,
)
from tests.tools.error_texts import fails_with

RUNS = 100
W = jnp.linspace(0.1, 1.3, 4)
V = jnp.linspace(-0.7, 0.9, 4)


# ------------------------------------------------------------------------ repeatable


def wide(cluster: Any, t: Any, k: int) -> bytes:
    away = cluster.workers[1:]
    with cluster.context() as ctx:
        losses = [ctx.call(away[i % len(away)], wave, t, float(i)) for i in range(k)]
        ctx.backward(*losses)
        return np.asarray(ctx.gradient(t).fetch()).tobytes()


@pytest.mark.parametrize("k", [pytest.param(3, marks=pytest.mark.second), 24])
def test_k_parallel_calls_on_one_leaf_have_one_bit_pattern_in_100_runs(
    driver: Any, k: int
):
    workers = driver.names(1 + min(k, driver.workers_max - 1))
    patterns = []
    for cluster in driver.rough(workers, RUNS):
        t = cluster.put("a", jnp.float32(0.37) * jnp.arange(1, 9, dtype=jnp.float32))
        patterns.append(wide(cluster, t, k))
    assert len(patterns) == RUNS and len(dict.fromkeys(patterns)) == 1


# ------------------------------------------------------------------ what is not used

# Each program on which the peer hangs or gives up: the sends that FAST waits for, as
# (from, to, the function that it was sent for).
UNUSED: dict[Callable[..., Any], list[tuple[str, str, str]]] = {
    functions.dropped_reply: [("a", "b", "sum_of_product")],
    functions.stopped_gradient: [("a", "b", "multiply")],
    functions.integer_reply: [("a", "b", "argmax")],
    functions.only_logged: [("b", "d", "transferred")],
    functions.nested_dropped_reply: [("a", "c", "square_sum")],
}


def on_two_workers(cluster: Any) -> tuple[Any, Any]:
    return cluster.put("a", W), cluster.put("b", V)


def wanted_of(program: Callable[..., Any]) -> Any:
    """The truth: `jax.grad` of the same program on one machine."""

    def summed(ctx: Any, params: Any) -> Any:
        return ctx.call("a", total, *program(ctx, *params))

    return jdag.oracle(summed)((W, V))[1]


def used(cluster: Any, ctx: Any, leaf: Any) -> Any:
    """The gradient of a leaf; zeros where no pass has reached it."""
    found = ctx.gradients()
    return found[leaf].fetch() if leaf in found else jnp.zeros_like(W)


@pytest.mark.parametrize("program", UNUSED, ids=lambda program: program.__name__)
def test_what_hangs_the_peer_has_the_right_gradients_under_smart(
    driver: Any, cluster: Any, program: Callable[..., Any]
):
    leaves = on_two_workers(cluster)
    with leaving_nothing(driver, cluster), cluster.context() as ctx:
        ctx.backward(*program(ctx, *leaves))
        for leaf, wanted in zip(leaves, wanted_of(program), strict=True):
            np.testing.assert_allclose(used(cluster, ctx, leaf), wanted, rtol=1e-13)


@pytest.mark.parametrize("program", UNUSED, ids=lambda program: program.__name__)
def test_what_hangs_the_peer_ends_at_once_under_fast_with_its_culprit(
    driver: Any, cluster: Any, program: Callable[..., Any]
):
    leaves = on_two_workers(cluster)
    with leaving_nothing(driver, cluster), cluster.context() as ctx:
        roots = program(ctx, *leaves)
        with pytest.raises(jdag.errors.UnusedSendError) as caught:
            ctx.backward(*roots, mode="fast")
        sends: Any = caught.value.sends
        owed = [
            (send.worker, send.destination, send.function.rpartition(":")[2])
            for send in sends
        ]
        assert owed == UNUSED[program]
        said = str(caught.value)
        for send in sends:
            assert f"{send.worker} -> {send.destination}, sent for " in said, said
            moved = send.function.endswith(":transferred")
            assert f"sent for {'ctx.move' if moved else send.function}" in said, said
            assert send.call_site in said, said
            assert send.call_site.startswith("functions.py:"), said
        assert ctx.gradients() == {}
        assert all(passes == 0 for _, passes, _ in held(cluster).values())


def test_two_losses_of_one_context_are_differentiated_one_at_a_time(
    driver: Any, cluster: Any
):
    leaves = on_two_workers(cluster)
    with leaving_nothing(driver, cluster), cluster.context() as ctx:
        for loss in functions.two_losses(ctx, *leaves):
            ctx.backward(loss)
        for leaf, wanted in zip(leaves, wanted_of(functions.two_losses), strict=True):
            np.testing.assert_allclose(ctx.gradient(leaf).fetch(), wanted, rtol=1e-13)


def test_two_losses_one_at_a_time_are_stuck_under_fast_on_the_other_ones_sends(
    driver: Any, cluster: Any
):
    leaves = on_two_workers(cluster)
    with leaving_nothing(driver, cluster), cluster.context() as ctx:
        first, second = functions.two_losses(ctx, *leaves)
        others = {first: [("a", "c"), ("b", "c")], second: [("a", "b")]}
        for loss, owed in others.items():
            with pytest.raises(jdag.errors.UnusedSendError) as caught:
                ctx.backward(loss, mode="fast", retain_graph=True)
            sends: Any = caught.value.sends
            assert [(send.worker, send.destination) for send in sends] == owed
        ctx.backward(first, second, mode="fast")
        for leaf, wanted in zip(leaves, wanted_of(functions.two_losses), strict=True):
            np.testing.assert_allclose(ctx.gradient(leaf).fetch(), wanted, rtol=1e-13)


# -------------------------------------------------------------------- what is left


def test_a_pass_that_fails_between_two_visits_of_a_worker_leaves_no_live_pass(
    driver: Any, cluster: Any
):
    """The peer keeps one on b for ever: b -> a, which fails -> b again."""
    w = cluster.put("b", W)
    with leaving_nothing(driver, cluster), cluster.context() as ctx:
        h = ctx.call("b", three_times, w)
        h = ctx.call("a", fails_backward, h)
        loss = ctx.call("b", total, h)
        for _ in range(3):
            with fails_with(jdag.errors.RemoteError, "conformance.no_way_back"):
                ctx.backward(loss, retain_graph=True)
            assert [passes for _, passes, _ in held(cluster).values()] == [0] * 4


def test_roots_may_be_on_any_worker_and_of_any_shape(cluster: Any):
    w = cluster.put("b", ONES)
    with cluster.context() as ctx:
        h = ctx.call("c", three_times, w)
        k = ctx.call("d", three_times, h)
        ctx.backward(h, k, cotangents=[2 * ONES, ONES])
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), (6 + 9) * ONES)


def test_neither_functions_nor_values_travel_as_pickle(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
):
    def refused(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("something was pickled")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(f"pickle.{name}", refused)
    w = cluster.put("b", W)
    with cluster.context() as ctx:
        h = ctx.call("b", functions.nested_drop, ctx.call("c", three_times, w))
        ctx.backward(ctx.call("d", total, h))
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), 9 * np.ones(4))
