"""Zeros take no bytes on the wire, and what they would have taken is counted."""

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.cluster import simulate
from jdag.ref import stop_gradient
from tests.face_cases import ONES, total

MODES = ("smart", "fast")
SAVED, SENT = "zero_bytes_saved", "payload_bytes_sent"


def nothing_of(*arrays: Any) -> Any:
    """An integer, so that no cotangent comes back from here."""
    return jnp.argmax(jnp.concatenate([jnp.ravel(array) for array in arrays]))


def saved(cluster: Any) -> dict[str, int]:
    """The zeros that workers did without, of those that did."""
    return {w: held[SAVED] for w, held in cluster.info().items() if held[SAVED]}


@pytest.mark.parametrize("mode", MODES)
def test_a_slot_that_gets_zeros_takes_no_bytes_and_is_counted_in_full(
    cluster: Any, mode: Any
):
    w, v = cluster.put("b", ONES), cluster.put("b", jnp.ones(5, "float32"))
    with cluster.context() as ctx:
        ctx.call("c", nothing_of, w, v)  # They travel together.
        loss = ctx.call("c", total, w)
        before = cluster.info()["c"][SENT]
        ctx.backward(loss, mode=mode)
        assert cluster.info()["c"][SENT] - before == 9 * 8
        assert saved(cluster) == {"c": 5 * 4}
        np.testing.assert_array_equal(ctx.gradient(w).fetch(), ONES)
        if mode == "fast":  # Which comes by all that was sent along.
            np.testing.assert_array_equal(ctx.gradient(v).fetch(), np.zeros(5))


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


@pytest.mark.parametrize("mode", MODES)
def test_where_all_slots_have_cotangents_nothing_is_saved(cluster: Any, mode: Any):
    leaves = [cluster.put("b", ONES) for _ in range(3)]
    with cluster.context() as ctx:
        parts = [ctx.call(to, total, *leaves) for to in ("c", "d", "a")]
        # A zero that a vjp gave is a value like any other.
        unused = ctx.call("c", lambda a, *_: jnp.sum(a), *leaves)
        ctx.backward(*parts, unused, mode=mode)
        np.testing.assert_array_equal(ctx.gradient(leaves[0]).fetch(), 4 * ONES)
        np.testing.assert_array_equal(ctx.gradient(leaves[2]).fetch(), 3 * ONES)
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


def test_abstract_runs_count_what_real_ones_do():
    counted = []
    for values in ("real", "abstract"):
        with simulate(["a", "b", "c"], seed=0, values=values) as cluster:
            w, v = cluster.put("b", ONES), cluster.put("b", jnp.ones(5, "float32"))
            with cluster.context() as ctx:
                ctx.call("c", nothing_of, w, v)
                ctx.backward(ctx.call("c", total, w))
            counted.append(
                {
                    name: (held[SAVED], held[SENT])
                    for name, held in cluster.info().items()
                }
            )
    assert counted[0] == counted[1] and counted[0]["c"][0] == 20
