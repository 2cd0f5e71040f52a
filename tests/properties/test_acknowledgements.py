"""Acknowledgements of one moment leave as one message."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.engine.protocol import Acknowledge, ContextId, acknowledged_at_once

ONE, TWO = ContextId(0, 1, 0), ContextId(0, 2, 0)


def test_messages_of_one_context_in_a_row_become_one():
    given = [Acknowledge(ONE, ((1,),)), Acknowledge(ONE, ((2,), (3,)))]
    assert acknowledged_at_once(given) == [Acknowledge(ONE, ((1,), (2,), (3,)))]
    given.append(Acknowledge(TWO, ((1,),)))
    given.append(Acknowledge(ONE, ((4,),)))
    assert acknowledged_at_once(given) == [
        Acknowledge(ONE, ((1,), (2,), (3,))),
        Acknowledge(TWO, ((1,),)),
        Acknowledge(ONE, ((4,),)),
    ]
    assert acknowledged_at_once(given[:1]) == given[:1]


def sent_by_b(network):
    with jdag.simulate(["a", "b"], seed=0, network=network) as cluster:
        x = cluster.put("b", np.ones(3, np.float32))
        cluster.driver.settle()
        before = len(cluster.trace)
        with cluster.context() as ctx:
            found = ctx.call("b", jnp.sin, ctx.call("b", jnp.sin, x))
            ctx.call("a", jnp.sum, found).fetch()
            cluster.driver.settle()
            return [
                record.named["message"]
                for record in cluster.trace.of_kind("send")
                if record.worker == "b" and record.index >= before
            ]


LINK = jdag.sim.LinkModel(latency_ns=1_000)


def test_those_of_one_instant_leave_together_ahead_of_what_follows():
    assert sent_by_b(LINK) == ["Acknowledge", "Primal"]


@pytest.mark.parametrize("lane", [True, jdag.sim.LinkModel(latency_ns=500)])
def test_beside_a_control_lane_each_leaves_at_once(lane):
    sent = sent_by_b(jdag.sim.Network(LINK, control_lane=lane))
    assert sent.count("Acknowledge") == 3


def test_those_of_different_instants_stay_apart():
    slow = jdag.sim.LinkModel(latency_ns=1_000, bandwidth_bytes_per_s=1_000_000)
    assert sent_by_b(slow).count("Acknowledge") == 3


def test_they_leave_before_an_answer_of_the_same_instant():
    with jdag.simulate(["a", "b"], seed=0, network=LINK) as cluster:
        cluster.put("b", np.ones(3, np.float32)).fetch()
        sends = cluster.trace.of_kind("send")
        sent = [record.named["message"] for record in sends if record.worker == "b"]
    assert sent == ["Acknowledge", "Reading"]
