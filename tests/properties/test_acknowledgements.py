"""Acknowledgements: numbers in the headers of frames, or frames without messages."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdag

LINK = jdag.sim.LinkModel(latency_ns=1_000)
SLOW = jdag.sim.LinkModel(latency_ns=1_000, bandwidth_bytes_per_s=1_000_000)


def sent_by_b(network):
    """Return (message, number) of all sends of b in a program that makes three calls.

    The number of an acknowledgement is that of the acknowledged messages.
    """
    with jdag.simulate(["a", "b"], seed=0, network=network) as cluster:
        x = cluster.put("b", np.ones(3, np.float32))
        cluster.driver.settle()
        with cluster.context() as ctx:
            found = ctx.call("b", jnp.sin, ctx.call("b", jnp.sin, x))
            ctx.call("a", jnp.sum, found).fetch()
            cluster.driver.settle()
            fields = [r.named for r in cluster.trace.of_kind("send") if r.worker == "b"]
    return [(each["message"], each["number"]) for each in fields]


CALLS = [("Acknowledge", 1), ("Acknowledge", 3), ("Primal", 0)]


@pytest.mark.parametrize(
    "network",
    [
        LINK,
        SLOW,
        jdag.sim.Network(LINK, control_lane=True),
        jdag.sim.Network(LINK, control_lane=jdag.sim.LinkModel(latency_ns=500)),
    ],
)
def test_a_bundle_is_acknowledged_by_one_frame(network):
    assert sent_by_b(network) == CALLS


def test_calls_of_different_instants_are_acknowledged_one_by_one():
    costs = jdag.sim.DeviceModel(call_ns=10)
    with jdag.simulate(["a", "b"], seed=0, network=LINK, devices=costs) as cluster:
        x = cluster.put("b", np.ones(3, np.float32))
        with cluster.context() as ctx:
            ctx.call("b", jnp.sin, ctx.call("b", jnp.sin, x)).fetch()
            numbers = [
                record.named["number"]
                for record in cluster.trace.of_kind("send")
                if record.named["message"] == "Acknowledge"
            ]
    assert numbers == [1, 1, 1]


def test_an_answer_of_the_same_action_carries_the_acknowledgement():
    with jdag.simulate(["a", "b"], seed=0, network=LINK) as cluster:
        cluster.put("b", np.ones(3, np.float32)).fetch()
        came = [
            (record.kind, record.named["message"], record.causes)
            for record in cluster.trace.of_kind("send", "deliver")
            if "b" in (record.worker, record.detail[0])
        ]
        (sent,) = [r for r in cluster.trace.of_kind("send") if r.worker == "b"]
        info = cluster.info()["b"]
    assert [each[:2] for each in came] == [
        *(("send", "Assign"), ("send", "Read")),
        *(("deliver", "Assign"), ("deliver", "Read")),
        *(("send", "Reading"), ("deliver", "Acknowledge"), ("deliver", "Reading")),
    ]
    assert [causes for *_, causes in came[-2:]] == [(sent.index,)] * 2
    assert (info["messages_sent"], info["frames_sent"]) == (1, 1)


def test_an_acknowledgement_overtakes_no_message_and_is_overtaken_by_none():
    with jdag.simulate(["a", "b"], seed=0, network=LINK) as cluster:
        x, y = [cluster.put("b", np.ones(size, np.float32)) for size in (3, 4)]
        cluster.driver.settle()
        before, frames = len(cluster.trace), cluster.info()["b"]["frames_sent"]
        with cluster.context() as ctx:
            shipped = [ctx.call("a", jnp.sin, x), ctx.call("a", jnp.sin, y)]
            ctx.call("b", jnp.sin, x)
            [ref.fetch() for ref in shipped]
            came = [
                (record.named["message"], record.named["number"])
                for record in list(cluster.trace)[before:]
                if record.kind == "deliver" and record.worker == "a"
            ]
            frames = cluster.info()["b"]["frames_sent"] - frames
    answer = [("Acknowledge", 1), ("Primal", 0)]
    assert came == [*answer, *answer, ("Acknowledge", 1)]
    assert frames == 3
