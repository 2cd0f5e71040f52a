"""Links that break for good while both ends live: everybody gets to know."""

from typing import Any

import jax.numpy as jnp
import pytest

import jdag

LINK = jdag.sim.LinkSettings(resend_ns=1_000, resend_max=3, ack_delay_ns=100)
SLOW = jdag.sim.DeviceModel(forward_ns=100_000_000)


def layer(w: Any) -> Any:
    """Doubles."""
    return w * 2.0


def total(x: Any) -> Any:
    """A scalar."""
    return jnp.sum(x)


def cut(one: str, other: str, from_ns: int) -> jdag.sim.Partition:
    """These two hear no more of each other."""
    return jdag.sim.Partition(((one,), (other,)), from_ns=from_ns)


def alive(cluster: jdag.Cluster) -> list[int]:
    """Contexts and passes that are left on any worker, once all is quiet."""
    cluster.driver.settle()
    info = cluster.info().values()
    return [worker[k] for worker in info for k in ("live_contexts", "live_passes")]


@pytest.mark.parametrize("at_ns", [10_000, 15_000, 20_000, 25_000])
def test_a_pass_fails_when_a_worker_loses_the_peer_that_owes_it(at_ns: int):
    devices = jdag.sim.DeviceModel(forward_ns=0, backward_ns=10_000)
    with jdag.simulate(
        ["a", "b", "c"],
        seed=0,
        network=jdag.sim.LinkModel(latency_ns=100),
        devices=devices,
        faults=[cut("b", "c", at_ns)],
        link=LINK,
    ) as cluster:
        w = cluster.put("c", jnp.ones(3))
        with pytest.raises(jdag.errors.WorkerLost), cluster.context() as ctx:
            h = ctx.call("b", layer, ctx.call("c", layer, w))
            ctx.backward(ctx.call("a", total, h))
            cluster.driver.settle()
            ctx.backward(ctx.call("a", total, ctx.call("b", layer, ctx.move("b", w))))
        assert not any(alive(cluster))


@jdag.program
def inner(ctx: Any, w: Any) -> Any:
    """On c: a call on d of what c has yet to compute; waits for it."""
    y = ctx.call("d", total, ctx.call("c", layer, w))
    y.fetch()
    return y


@jdag.program
def outer(ctx: Any, w: Any) -> Any:
    """On b: has c run the other."""
    return ctx.call("c", inner, w)


def test_a_worker_that_only_a_lost_one_knew_of_keeps_no_context():
    with jdag.simulate(
        ["a", "b", "c", "d"],
        seed=0,
        network=jdag.sim.LinkModel(latency_ns=100),
        devices=SLOW,
        faults=[cut("c", "b", 700), cut("c", "d", 20_000)],
        link=LINK,
    ) as cluster:
        w = cluster.put("c", jnp.ones(3))
        said = r"worker 'c' is lost .*: it is out of reach"
        with pytest.raises(jdag.errors.WorkerLost, match=said):  # noqa: SIM117
            with cluster.context() as ctx:
                ctx.call("b", outer, w)
        assert not any(alive(cluster))
