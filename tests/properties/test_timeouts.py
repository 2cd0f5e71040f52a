"""A pass that is given a time ends by then, says what is owed, and leaves nothing."""

import re
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from jdag.engine.protocol import Owed
from jdag.errors import JdagError, PassTimeout
from jdag.sim import DeviceModel, LinkModel
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import ONES, nothing_is_left, total

SECOND_NS = 1_000_000_000
LATENCY_NS = 1_000_000
FEW_NS = 6 * LATENCY_NS  # The end of a pass is told and answered, beside what goes on.
MODES = ("smart", "fast")


def slow(a: Any) -> Any:
    return jnp.sin(a)


def long_ago(backward_s: int = 10) -> Any:
    """A cluster where the vjp of `slow` takes so long, with links that take time."""
    name = f"{slow.__module__}:{slow.__qualname__}"
    model = DeviceModel(functions={name: (1000, backward_s * SECOND_NS)})
    network = LinkModel(latency_ns=LATENCY_NS)
    return simulate(["a", "b", "c", "d"], seed=0, network=network, devices=model)


@pytest.mark.parametrize("mode", MODES)
def test_a_pass_ends_by_its_time_and_a_few_latencies_though_a_device_computes(mode):
    with long_ago() as cluster:
        w = cluster.put("b", ONES)
        with cluster.context() as ctx:
            h = ctx.call("c", slow, w)
            loss = ctx.call("d", total, h)
            loss.fetch()
            began_ns = cluster.now_ns
            with pytest.raises(PassTimeout) as caught:
                ctx.backward(loss, timeout_s=0.5, mode=mode, retain_graph=True)
            took_ns = cluster.now_ns - began_ns
            assert SECOND_NS // 2 <= took_ns <= SECOND_NS // 2 + FEW_NS
            owed = caught.value.sends
            if mode == "smart":  # A FAST pass has not come to b yet.
                (send,) = owed
                assert isinstance(send, Owed)
                assert (send.path, send.worker, send.destination) == ((1,), "b", "c")
                said = str(caught.value)
                assert "pass 1 took longer than timeout_s=0.5" in said
                wanted = r"call 1: b -> c, sent for .*:slow, called at test_timeouts"
                assert re.search(wanted, said), said
            for worker, held in cluster.info().items():
                assert not held["live_passes"], worker
            with fails_with(JdagError, "properties.was_reached_by_no_pass"):
                ctx.gradient(w)
            ctx.backward(loss, mode=mode)
            wanted_gradient = np.cos(ONES)
            np.testing.assert_allclose(ctx.gradient(w).fetch(), wanted_gradient)
        nothing_is_left(cluster)


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
