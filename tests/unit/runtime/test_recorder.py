"""What a recorder writes to a trace, and what it remembers until then."""

from collections import Counter, defaultdict
from typing import Any

import jax.numpy as jnp
import optax
import pytest

import jdag
from jdag import simulate
from jdag.engine.protocol import ACKNOWLEDGED
from jdag.sim import Crash, DeviceModel, LinkModel
from tests.tools.face_cases import ONES, total


def beside(ctx, w, x):
    ctx.call("c", jnp.cos, x)  # Nobody uses it.
    return ctx.call("c", total, ctx.call("b", jnp.multiply, w, x), x)


@pytest.mark.parametrize("trace", [True, False])
def test_nothing_is_remembered_of_what_is_over(trace: bool):
    with simulate(["a", "b", "c"], seed=0, trace=trace) as cluster:
        w = cluster.put("b", ONES)
        with cluster.context() as ctx:
            out = ctx.call("c", total, ctx.call("b", jnp.sin, w), w)
            ctx.backward(out)
            (gradient,) = ctx.gradient([w])
            gradient.fetch()
        optimizer = jdag.Optimizer(optax.sgd(0.1), [w])
        step = jdag.compile(beside, cluster, optimizer=optimizer)
        for _ in range(3):
            step(w, ONES)
        cluster.drop([w])
        del w, out, gradient, step
        with cluster.context():
            pass  # The plan goes with the next use.
        cluster.driver.settle()
        recorder: Any = cluster.driver._env.recorder
        remembered = {name: of for name, of in vars(recorder).items() if name[0] == "_"}
        assert bool(remembered) == trace  # Else there is nothing to remember it in.
        for held in remembered.values():
            assert not any(held.values() if isinstance(held, defaultdict) else held)


def test_a_row_of_a_step_is_caused_by_what_made_the_leaves_that_it_reads():
    with simulate(["a", "b"], seed=0) as cluster:
        w = cluster.put("b", ONES)
        optimizer = jdag.Optimizer(optax.sgd(0.1), [w])
        step = jdag.compile(lambda ctx, w: ctx.call("b", total, w), cluster, optimizer)
        step(w)
        cluster.update(jnp.sin, w)
        step(w)
        step(w)
    assert cluster.trace is not None
    jobs = {
        record.index: record.named["job"] for record in cluster.trace.of_kind("finish")
    }
    causes = [
        [jobs[cause] for cause in record.causes if cause in jobs]
        for record in cluster.trace.of_kind("start")
        if record.named["job"] == "runsegment"
    ]
    row, sin = "runsegment", "forward"  # Each step has a gradient and an update.
    assert causes == [[], [row], [sin], [row, sin], [row], [row, row]]


def test_every_record_names_causes_that_came_before_it():
    network, devices = LinkModel(latency_ns=10), DeviceModel(forward_ns=100)
    settings: Any = {"network": network, "devices": devices}
    crash = Crash("b", detect_ns=5, at_ns=500, restart_ns=500)
    with simulate(["a", "b", "c"], seed=0, faults=[crash], **settings) as cluster:
        while cluster.now_ns < 1_500:
            with cluster.context() as ctx:
                ctx.call("c", total, ctx.call("a", jnp.sin, ONES)).fetch()
        assert cluster.trace is not None
        records = list(cluster.trace)
    kinds = dict.fromkeys(record.kind for record in records)
    wanted = ["issue", "send", "deliver", "start", "finish", "resume", "lost", "joined"]
    assert [kind for kind in wanted if kind not in kinds] == []
    for record in records:
        assert all(cause < record.index for cause in record.causes)
        began = record.kind in ("crash", "issue")
        assert began or record.causes, record


def test_the_delivered_acknowledgements_count_all_that_is_acknowledged():
    network = LinkModel(latency_ns=10)
    with simulate(["a", "b", "c"], seed=0, network=network) as cluster:
        w = cluster.put("b", ONES)
        with cluster.context() as ctx:
            y = ctx.call("b", jnp.sin, w)
            ctx.on_cotangent(y, jnp.negative)
            ctx.backward(ctx.call("c", total, y, w))
        cluster.driver.settle()
        assert cluster.trace is not None
        records = list(cluster.trace)
    names = {kind.__name__ for kind in ACKNOWLEDGED}
    sent: Counter[Any] = Counter()
    counted: Counter[Any] = Counter()
    for record in records:
        if record.kind in ("send", "deliver"):
            peer, name, _, number, *_ = record.detail
            if record.kind == "send" and name in names:
                sent[record.worker, peer] += 1
            if record.kind == "deliver" and name == "Acknowledge":
                counted[record.worker, peer] += number
    assert counted == sent == {("a", "b"): 4, ("a", "c"): 1}
