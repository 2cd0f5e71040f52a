"""A pass that is given a time ends by then, says what is owed, and leaves nothing."""

from typing import Any

import jax.numpy as jnp
import pytest

from jdag.api.drivers import simulate
from jdag.sim import DeviceModel, LinkModel
from tests.tools.face_cases import ONES, nothing_is_left, total

SECOND_NS = 1_000_000_000
LATENCY_NS = 1_000_000


def slow(a: Any) -> Any:
    return jnp.sin(a)


def long_ago(backward_s: int = 10) -> Any:
    name = f"{slow.__module__}:{slow.__qualname__}"
    model = DeviceModel(functions={name: (1000, backward_s * SECOND_NS)})
    network = LinkModel(latency_ns=LATENCY_NS)
    return simulate(["a", "b", "c", "d"], seed=0, network=network, devices=model)


def test_an_alarm_that_is_not_needed_does_not_move_the_clock():
    ends = []
    for timeout_s in (None, 3600.0):
        with long_ago() as cluster:
            w = cluster.put("b", ONES)
            with cluster.context() as ctx:
                loss = ctx.call("d", total, ctx.call("c", slow, w))
                ctx.backward(loss, timeout_s=timeout_s)
                assert cluster.now_ns < 11 * SECOND_NS
            nothing_is_left(cluster)  # All has happened that is to happen.
            ends.append(cluster.now_ns)
    assert ends[0] == ends[1]


def test_the_alarm_of_a_pass_that_was_interrupted_goes_with_it():
    def interrupt(_: Any) -> Any:
        raise KeyboardInterrupt

    with long_ago() as cluster:
        w = cluster.put("b", ONES)
        with pytest.raises(KeyboardInterrupt), cluster.context() as ctx:
            ctx.on_cotangent(w, interrupt)
            ctx.backward(ctx.call("c", total, w), timeout_s=3600)
        nothing_is_left(cluster)
        assert cluster.now_ns < SECOND_NS
