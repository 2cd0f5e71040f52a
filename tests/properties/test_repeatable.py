"""Whole runs: one seed, one digest; each record's time follows from its causes."""

import os
import subprocess
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag import program, sim, simulate
from jdag.api.cluster import Cluster
from jdag.runtime.trace import Trace, TraceRecord
from jdag.scenario import load
from jdag.scenario.run_scenario import run_scenario
from tests import ROOT
from tests.tools.compute_cases import no_new_arrays
from tests.tools.face_cases import total

WORKERS = ("a", "b", "c", "d")
DEVICES = sim.DeviceModel(forward_ns=1_000, backward_ns=2_000, sum_ns=100)
NETWORK = sim.Network(
    sim.LinkModel(latency_ns=500, bandwidth_bytes_per_s=20_000_000),
    {("a", "b"): sim.LinkModel(latency_ns=50_000)},
)
ROUGH: dict[str, Any] = {
    "network": sim.LinkModel(latency_ns=500, jitter_ns=300),
    "faults": (
        sim.Drop(0.1),
        sim.Duplicate(0.1, 1_000),
        sim.Delay(0.1, 10, 5_000),
        sim.Slow("c", 1.5),
    ),
    "devices": DEVICES,
}


def layer(w, x):
    return jnp.tanh(w * x)


@program
def branch(ctx, w, x):
    parts = [ctx.call("b", layer, w, x * (n + 1.0)) for n in range(3)]
    whole = ctx.call("d", total, *parts)
    if np.asarray(whole.fetch()) > 0 and ctx.here == "b":
        return [whole, *ctx.call("c", branch, w, x / 2)]
    return [whole]


def train(cluster: Cluster, x: Any) -> list[Any]:
    w, v = cluster.put("b", jnp.ones(4)), cluster.put("c", jnp.full(4, 0.5))
    seen = []
    for step in range(2):
        with cluster.context() as ctx:
            losses = ctx.call("b", branch, w, x * (step + 1.0))
            mixed = ctx.call("d", total, *(ctx.call("c", layer, v, o) for o in losses))
            ctx.backward(mixed, retain_graph=True)
            ctx.backward(mixed)
            gradients = [ctx.gradient(leaf).fetch() for leaf in (w, v)]
            seen += [mixed.fetch(), *gradients]
    return seen


X = jnp.linspace(0.1, 0.9, 4)


def bits(values: list[Any]) -> list[bytes]:
    return [np.asarray(value).tobytes() for value in values]


def run(seed: int, x: Any = X, **settings: Any) -> tuple[Trace, list[bytes]]:
    with simulate(WORKERS, seed=seed, **settings) as cluster:
        values = bits(train(cluster, x))
        trace: Trace = cluster.trace
        return trace, values


def test_one_seed_is_one_digest_and_every_seed_is_one_result():
    first, values = run(1, **ROUGH)
    again, _ = run(1, **ROUGH)
    assert first.digest == again.digest
    others = [run(seed, **ROUGH) for seed in range(2, 8)]
    assert len({trace.digest for trace, _ in others}) == 6
    assert [each for _, each in others] == [values] * 6
    calm, calm_values = run(1)
    assert calm_values == values
    assert [r.kind for r in calm.of_kind("resend", "drop", "duplicate", "delay")] == []
    assert {r.kind for r in first} >= {"resend", "drop", "duplicate", "delay"}


def test_another_process_under_another_hash_seed_has_the_same_digest():
    code = (
        "import sys, jax; jax.config.update('jax_enable_x64', True);"
        "from tests.properties.test_repeatable import ROUGH, run;"
        "sys.exit(run(5, **ROUGH)[0].digest)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == run(5, **ROUGH)[0].digest


def test_one_bit_of_one_payload_changes_the_digest():
    flipped = np.array(X)
    flipped.view(np.uint64)[2] ^= np.uint64(1)
    first, other = run(1), run(1, jnp.asarray(flipped))
    assert first[0].digest != other[0].digest
    kinds = [
        [(r.kind, r.worker, r.time_ns) for r in trace] for trace, _ in (first, other)
    ]
    assert kinds[0] == kinds[1]  # Nothing else tells them apart.


def frames_of(trace: Trace) -> dict[int, int]:
    """By record, the first send of the frame of a send that is not the first."""
    return {
        record.causes[0]: record.causes[1]
        for record in trace.of_kind("deliver")
        if len(record.causes) == 2 and trace[record.causes[1]].kind == "send"
    }


def arrives_ns(
    trace: Trace, record: TraceRecord, left_ns: dict[int, int], rest_bytes: int = 0
) -> int:
    peer, size = record.named["destination"], record.named["wire_bytes"] + rest_bytes
    model = NETWORK.model(record.worker, peer)
    before = [left_ns.get(cause, 0) for cause in record.causes]
    left_ns[record.index] = max(record.time_ns, *before) + model.transfer_ns(size)
    return left_ns[record.index] + model.latency_ns


def test_the_time_of_every_record_follows_from_those_of_its_causes():
    trace, _ = run(3, network=NETWORK, devices=DEVICES)
    ready_ns: dict[int, int] = {}  # When others may begin because of this record.
    left_ns: dict[int, int] = {}
    frames = frames_of(trace)
    rest_bytes: Counter[int] = Counter()  # By the first send of a frame.
    for member, first in frames.items():
        rest_bytes[first] += trace[member].named["wire_bytes"]
    for record in trace:
        assert all(0 <= cause < record.index for cause in record.causes)
        assert len(dict.fromkeys(record.causes)) == len(record.causes)
        ready_ns[record.index] = record.time_ns
        if record.kind == "ack":
            arrives_ns(trace, record, left_ns)
            continue
        # A frame before it on its link holds up when it leaves, not when it is sent.
        waited = [
            ready_ns[cause]
            for cause in record.causes
            if record.kind != "send" or trace[cause].kind not in ("send", "ack")
        ]
        began_ns = max(waited, default=0)
        if record.kind == "finish":
            began_ns += record.named["cost_ns"]
        assert record.time_ns == began_ns, record
        if record.index in frames:
            left_ns[record.index] = left_ns[frames[record.index]]
        elif record.kind == "send":
            rest = rest_bytes[record.index]
            ready_ns[record.index] = arrives_ns(trace, record, left_ns, rest)
    assert frames
    kinds = {record.kind for record in trace}
    assert {"issue", "send", "deliver", "start", "finish", "spawn", "resume"} <= kinds
    assert left_ns and any(
        trace[cause].kind in ("send", "ack")
        for record in trace.of_kind("send")
        for cause in record.causes
    )


def test_what_a_job_reads_is_among_its_causes():
    trace, _ = run(3, devices=DEVICES)
    starts = [r for r in trace.of_kind("start") if r.named["job"] == "vjp"]
    finished = {
        (r.worker, r.named["context"], r.named["path"]): r.index
        for r in trace.of_kind("finish")
        if r.named["job"] == "forward"
    }
    assert starts
    for start in starts:
        forward = finished[start.worker, start.named["context"], start.named["path"]]
        assert forward in start.causes  # The residuals.
    delivers = {r.index: r for r in trace.of_kind("deliver")}
    for start in trace.of_kind("start"):
        if start.named["function"].endswith(":total"):
            primals = [
                delivers[cause].named["path"]
                for cause in start.causes
                if cause in delivers and delivers[cause].named["message"] == "Primal"
            ]
            assert start.named["job"] == "vjp" or start.named["path"] in primals


def test_abstract_runs_make_no_arrays_and_send_the_same_messages():
    def summed(cluster: Cluster, x: Any) -> list[tuple[Any, ...]]:
        w = cluster.put("b", x)
        with cluster.context() as ctx:
            parts = [ctx.call(worker, layer, w, 2.0) for worker in ("b", "c", "d") * 4]
            ctx.backward(ctx.call("a", total, *parts))
        trace: Trace = cluster.trace
        return [
            (*r.detail[:-1], r.time_ns) if r.kind == "send" else (r.detail, r.time_ns)
            for r in trace
        ]

    settings: Any = {"network": NETWORK, "devices": DEVICES, "seed": 1}
    with simulate(WORKERS, **settings) as cluster:
        real = summed(cluster, X)
        peaks = {worker: each["bytes_peak"] for worker, each in cluster.info().items()}
    with simulate(WORKERS, values="abstract", **settings) as cluster:
        with no_new_arrays():
            assert summed(cluster, jax.ShapeDtypeStruct(X.shape, X.dtype)) == real
        assert peaks["c"] <= cluster.info()["c"]["bytes_peak"] <= 2 * peaks["c"]


FOLDER = ROOT / "scenarios"
# `data_parallel_digits` needs several devices; `digits` is 264 steps of one program.
LONG = ("data_parallel_digits", "digits")
NAMES = [path.stem for path in sorted(FOLDER.glob("*.toml")) if path.stem not in LONG]


def digest(name: str) -> str:
    answer = run_scenario(load(FOLDER / f"{name}.toml"), lambda *_: None)
    answer.cluster.close()
    return str(answer.figures.get("digest") or answer.cluster.trace.digest)


@pytest.mark.second
def test_each_scenario_has_one_digest_whatever_ran_before_it():
    """Here each runs after those before it, and elsewhere after those behind it."""
    backwards = [
        sys.executable,
        "-m",
        "tests.properties.test_repeatable",
        *reversed(NAMES),
    ]
    environment = {**os.environ, "JAX_ENABLE_X64": "1"}
    with subprocess.Popen(
        backwards, stdout=subprocess.PIPE, text=True, env=environment
    ) as other:
        digests = [digest(name) for name in NAMES]
        said, _ = other.communicate(timeout=300)
    assert len(NAMES) == 24 and len(dict.fromkeys(digests)) == 24
    assert said.split()[::-1] == digests


if __name__ == "__main__":
    for scenario in sys.argv[1:]:
        print(digest(scenario), flush=True)
