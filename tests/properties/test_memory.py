"""What users see of how long values live: bytes held, peaks, and nothing that stays."""

import gc
import json
import threading
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.cluster import Cluster
from jdag.api.drivers import simulate
from jdag.context.refs import stop_gradient
from jdag.engine.functions import program
from paper import many_uses
from paper.figures import RESULTS

WIDTH = 1000
LAYER = 8 * WIDTH  # Bytes of what one layer gives.
LAYERS = 64
KINDS = pytest.mark.parametrize("values", ["real", "abstract"])


def layer(h: Any) -> Any:
    return jnp.tanh(h) * 2


def square(h: Any) -> Any:
    return h * h


def first() -> Any:
    return jnp.ones(WIDTH)


def held(cluster: Cluster, what: str = "bytes_held") -> dict[str, Any]:
    cluster.driver.settle()
    return {worker: info[what] for worker, info in cluster.info().items()}


def in_layers(cluster: Cluster, what: str = "bytes_held") -> list[float]:
    return [number / LAYER for number in held(cluster, what).values()]


@KINDS
@pytest.mark.parametrize("workers", ["ab", "abcd"])
@pytest.mark.parametrize("waits", [False, True], ids=["at once", "layer by layer"])
def test_the_peak_of_a_forward_without_tracking_is_two_layers(
    values: str, workers: str, waits: bool
):
    with simulate(tuple(workers), seed=0, values=values) as cluster:
        with cluster.context() as ctx:
            h = ctx.call(workers[-1], first)
            for number in range(LAYERS):
                h = ctx.call(workers[number % len(workers)], layer, h)
                if waits:
                    h.fetch()
            h.fetch()
            assert in_layers(cluster, "bytes_peak") == [2] * len(workers)
            assert sum(in_layers(cluster)) == 1
        assert in_layers(cluster) == [0] * len(workers)


@KINDS
def test_what_residuals_hold_counts_though_no_ref_names_it(values: str):
    """The square's residual is its argument, which no key names any more."""
    with simulate(("a", "b"), seed=0, values=values) as cluster:
        leaf = cluster.put("b", first())
        with cluster.context() as ctx:
            h = leaf
            for _ in range(LAYERS):
                h = ctx.call("b", square, h)
            loss = ctx.call("b", jnp.sum, h)
            del h
            loss.fetch()
            # The leaf, and each layer but the last; and the sum.
            assert held(cluster)["b"] == LAYERS * LAYER + 8
            ctx.backward(loss)
            assert held(cluster)["b"] == 2 * LAYER + 8  # The leaf and its gradient.
        assert in_layers(cluster) == [0, 1]


@KINDS
def test_what_residuals_and_a_ref_hold_counts_once(values: str):
    with simulate(("a", "b"), seed=0, values=values) as cluster:
        leaf = cluster.put("b", first())
        with cluster.context() as ctx:
            x = ctx.call("b", square, leaf)
            y = ctx.call("b", square, x)
            ctx.call("b", square, stop_gradient(x)).fetch()
            assert held(cluster)["b"] == 4 * LAYER  # The leaf, x, y, the last one.
            del x
            loss = ctx.call("b", jnp.sum, y)
            loss.fetch()
            assert held(cluster)["b"] == 3 * LAYER + 8
            ctx.backward(loss)
            assert held(cluster)["b"] == 3 * LAYER + 8  # The leaf, y, a gradient.


def stored(cluster: Cluster, worker: str = "b") -> float:
    return held(cluster)[worker] / LAYER


def flush(ctx: Any) -> None:
    ctx.call("a", jnp.add, 1.0, 2.0).fetch()


HOLDERS: dict[str, Callable[[Any], Any]] = {
    "a list": lambda ref: [ref],
    "a dict in a tuple": lambda ref: ({"h": ref},),
    "a closure": lambda ref: lambda: ref,
    "its untracked kin": stop_gradient,
    "a bound method": lambda ref: ref.fetch,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_a_value_lives_as_long_as_there_is_a_ref_in(cluster, holder: str):
    with cluster.context() as ctx:
        ref = ctx.call("b", first)
        kept = HOLDERS[holder](ref)
        flush(ctx)
        del ref
        flush(ctx)
        assert stored(cluster) == 1
        del kept
        assert stored(cluster) == 1  # Nobody was told yet.
        flush(ctx)
        assert stored(cluster) == 0


def test_each_output_of_a_call_lives_by_itself(cluster):
    with cluster.context() as ctx:
        some = ctx.call("b", lambda: {"x": first(), "y": first(), "z": first()})
        assert stored(cluster) == 3
        del some["y"]
        flush(ctx)
        assert stored(cluster) == 2
        z = some["z"]
        del some
        flush(ctx)
        assert stored(cluster) == 1
        assert (z.fetch() == 1).all()


def test_refs_that_die_in_no_order_are_told_in_program_order(cluster):
    """A set lets go of its refs in the order of their hashes."""
    with cluster.context() as ctx:
        some = {ctx.call("bcd"[number % 3], first) for number in range(12)}
        del some
        flush(ctx)
        told = [r.detail for r in cluster.trace.of_kind("send")]
        assert [to for to, kind, *_ in told if kind == "Discard"] == ["b", "c", "d"]
        assert in_layers(cluster)[1:] == [0, 0, 0]


@pytest.mark.parametrize("threshold", [0, 1, 700])
def test_what_only_the_collector_of_cycles_finds_lives_until_its_context_ends(
    cluster, threshold: int
):
    """When it runs is no part of a program, so nothing follows from it."""
    before = gc.get_threshold()
    gc.set_threshold(threshold)
    try:
        with cluster.context() as ctx:
            cycle: list[Any] = [ctx.call("b", first)]
            cycle.append(cycle)
            del cycle
            for _ in range(20):
                flush(ctx)
            if threshold:
                gc.collect()
            flush(ctx)
            assert stored(cluster) == 1
        assert stored(cluster) == 0
    finally:
        gc.set_threshold(*before)


def test_the_last_ref_counts_while_another_thread_looks_for_cycles(cluster):
    begun, over = threading.Event(), threading.Event()

    class Slow:
        def __del__(self) -> None:
            begun.set()
            over.wait(60)

    gc.disable()
    try:
        with cluster.context() as ctx:
            h = ctx.call("b", first)
            cycle: list[Any] = [Slow()]
            cycle.append(cycle)
            del cycle
            thread = threading.Thread(target=gc.collect)
            thread.start()
            assert begun.wait(60)
            del h
            over.set()
            thread.join()
            flush(ctx)
            assert stored(cluster) == 0
    finally:
        gc.enable()


@program
def two_layers(ctx: Any, h: Any) -> Any:
    h = ctx.call("c", layer, h)
    return ctx.call("b", layer, h)


@program
def the_same(ctx: Any, h: Any) -> Any:
    ctx.call("c", layer, h).fetch()
    return {"again": [h, h], "more": ctx.call("b", layer, h)}


@program
def outer(ctx: Any, h: Any) -> Any:
    some = ctx.call("d", the_same, h)
    return ctx.call("c", the_same, some["more"]), some["again"][1]


def test_the_peak_of_a_forward_by_programs_is_two_layers(cluster):
    with cluster.context() as ctx:
        h = ctx.call("b", first)
        for _ in range(LAYERS // 2):
            h = ctx.call("d", two_layers, h)
        h.fetch()
        # What a reads is its program's, and not held.
        assert in_layers(cluster, "bytes_peak") == [0, 2, 2, 0]
        del h
        flush(ctx)
    assert in_layers(cluster) == [0, 0, 0, 0]


def test_what_a_program_leaves_behind_goes_when_its_caller_waits(cluster):
    with cluster.context() as ctx:
        h = ctx.call("b", first)
        out = ctx.call("d", two_layers, h)
        assert in_layers(cluster) == [0, 3, 2, 0]
        out.fetch()
        assert in_layers(cluster) == [0, 2, 0, 0]
        assert (h.fetch() == 1).all()


def test_a_ref_that_programs_hand_back_and_forth_is_one(cluster):
    with cluster.context() as ctx:
        h = ctx.call("b", first)
        (inner, same) = ctx.call("c", outer, h)
        flush(ctx)
        assert in_layers(cluster)[1:] == [3, 0, 0]  # h and two of a layer.
        del h
        flush(ctx)
        assert stored(cluster) == 3
        assert (same.fetch() == 1).all()
        del same
        flush(ctx)
        assert stored(cluster) == 2
        del inner["again"][0]
        flush(ctx)
        assert stored(cluster) == 2
        more = inner.pop("more")
        del inner
        flush(ctx)
        assert stored(cluster) == 1
        np.testing.assert_array_equal(more.fetch(), layer(layer(first())))
        del more
        flush(ctx)
        assert in_layers(cluster)[1:] == [0, 0, 0]


def test_a_ref_that_got_out_of_its_program_names_its_value_all_the_same(cluster):
    kept: list[Any] = []

    @program
    def leaks(ctx: Any, returns: bool) -> Any:
        kept.append(ctx.call("b", first))
        return kept[-1] if returns else None

    with cluster.context() as ctx:
        for returns in (True, False):
            ref = ctx.call("c", leaks, returns)
            del ref
            flush(ctx)
            assert (ctx.call("d", layer, kept.pop()).fetch() > 1).all()
        assert stored(cluster) == 2  # Nobody counts such refs.
    assert in_layers(cluster) == [0, 0, 0, 0]


COMMITTED = json.loads((RESULTS / "many_uses.json").read_text())["rows"]


def shifted(w: Any, x: Any) -> Any:
    return x + jnp.sum(w)


@pytest.mark.parametrize("values", ["real", "abstract"])
@pytest.mark.parametrize("home", ["a", "b"])
@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_of_the_cotangents_of_a_leaf_with_many_uses_few_are_held(
    values: str, home: str, mode: Any
):
    with simulate(("a", "b"), seed=0, values=values) as cluster:
        w = cluster.put(home, jnp.ones(WIDTH))
        with cluster.context() as ctx:
            x = ctx.call("a", jnp.sum, w)
            for _ in range(599):
                x = ctx.call("a", shifted, w, x)
            ctx.backward(x, mode=mode)
            assert cluster.info()["a"]["bytes_peak"] < 30 * 8 * WIDTH
            if values == "real":
                np.testing.assert_array_equal(ctx.gradient(w).fetch(), [600] * WIDTH)


def test_what_is_committed_is_what_comes_out():
    uses = many_uses.USES[0]
    assert many_uses.measured(uses)[1] == COMMITTED[str(uses)]["waiting"] == 25
    assert [COMMITTED[str(uses)]["waiting"] for uses in many_uses.USES[1:]] == [30, 36]
