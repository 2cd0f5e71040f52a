"""What nodes record of a run, and the one trace that main makes of it."""

import logging
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

import jdag
from jdag.errors import JdagError
from jdag.lab.retiming import retime
from jdag.report.operations import operations_of
from jdag.report.spans import spans_of
from jdag.runtime.trace import Trace
from tests.tools.error_texts import fails_with
from tests.tools.pipeline_cases import step
from tests.tools.rpc_nodes import cluster
from tests.unit.processes.test_node import gradient

MANY: dict[str, Any] = {"trace": True, "events_max": 100_000}
# When a value is given back, how many acknowledgements leave as one, and how often a
# worker is passive in a pass, time decides.
TIMED = ("Acknowledge", "Answer", "Discard", "Discarded", "ack")


def events(trace: Trace) -> Counter[Any]:
    """Kind, worker, path and function of all events that time does not decide."""
    found: Counter[Any] = Counter()
    for record in trace:
        said = record.named
        what = said.get("message", said.get("event", said.get("function")))
        if what not in TIMED and record.kind not in TIMED:
            found[record.kind, record.worker, said.get("path"), what] += 1
    return found


def simulated(run: Any, **settings: Any) -> Trace:
    with jdag.simulate(["a", "b", "c"], seed=0, **settings) as c:
        run(c)
        c.driver.settle()
        return c.trace


def real(run: Any, **settings: Any) -> Trace:
    with cluster(**MANY, **settings) as c:
        run(c)
        c.driver.settle()
        return c.driver.trace


def test_the_events_of_a_real_run_are_those_of_the_simulated_one():
    trace = real(gradient)
    assert events(trace) == events(simulated(gradient))
    assert trace.settings["missing"] == {}
    for record in trace:
        assert all(cause < record.index for cause in record.causes)
        assert record.causes or record.kind == "issue", record


def test_processes_record_too_and_compare_their_clocks_with_mains():
    with jdag.launch(["a", "b", "c"], allow=["tests"], trace=True) as c:
        gradient(c)
        node = c.driver
        node.settle()
        assert c.trace is c.trace, "nothing new, and yet another trace"
    trace = c.trace
    assert events(trace) == events(simulated(gradient))
    clocks = trace.settings["clocks"]
    true_ns = -node._began_ns  # The processes of a host share its monotonic clock.
    for worker, clock in clocks.items():
        assert abs(clock["offset_ns"] - true_ns) <= clock["error_ns"], worker
    for record in trace.of_kind("deliver"):
        sent = trace[record.causes[0]]
        error_ns = sum(clocks[one.worker]["error_ns"] for one in (sent, record))
        assert record.time_ns - sent.time_ns > -error_ns, record


def test_jobs_end_after_they_begin_and_one_at_a_time_runs_beside_the_loop():
    trace = real(lambda c: [gradient(c) for _ in range(4)])
    spans = spans_of(trace)
    for worker in ("a", "b", "c"):
        jobs = [job for job in spans.jobs if job.worker == worker]
        ends = [(job.end_ns, -1) for job in jobs]
        running = at_most = 0
        for _, change in sorted([*ends, *[(job.start_ns, 1) for job in jobs]]):
            running += change
            at_most = max(at_most, running)
        assert running == 0 and at_most <= 2, (worker, at_most)
    for record in trace.of_kind("finish"):
        start = trace[record.causes[0]]
        assert record.time_ns - start.time_ns == start.named["cost_ns"]
    assert len(operations_of(trace)) == len(spans.jobs) + 2 * len(spans.transfers)


def test_actions_of_a_schedule_are_in_the_trace_in_the_order_of_its_lists():
    schedule = jdag.schedules.one_f_one_b(
        stages=3, micro_batches=4, workers=("a", "b", "c")
    )
    trace = real(lambda c: step(c, schedule), schedule=schedule)
    jobs = spans_of(trace).jobs
    for worker, steps in schedule.lists.items():
        actions = [job for job in jobs if job.worker == worker and job.action]
        wanted = [str(action) for one in steps for action in one.parts]
        assert [job.action for job in actions] == wanted
        for one, later in pairwise(actions):
            assert one.end_ns <= later.start_ns


def test_the_part_of_a_lost_worker_is_said_to_be_missing(
    caplog: pytest.LogCaptureFixture,
):
    with cluster(**MANY) as c:
        gradient(c)
        c.nodes["c"].close()
        with pytest.raises(JdagError):
            gradient(c)
        trace = c.driver.trace
        assert trace.settings["missing"] == {"c": "it has left"}
        (crash,) = trace.of_kind("crash")
        assert "its part of the trace is missing" in crash.detail[0]
        assert (
            "trace of worker 'c' is incomplete after 0 records: it has left"
            in caplog.text
        )
    assert [one for one in spans_of(trace).jobs if one.worker == "c"] == []
    assert operations_of(trace)


def test_a_trace_ends_with_a_warning_at_events_max(caplog: pytest.LogCaptureFixture):
    with cluster(trace=True, events_max=20) as c, caplog.at_level(logging.WARNING):
        wanted = gradient(c)
        trace = c.driver.trace
        assert np.array_equal(gradient(c), wanted)
        c.driver.settle()
        assert c.driver.trace is trace, "it goes on"
    why = "recording stopped at events_max = 20 records"
    assert trace.settings["missing"] == dict.fromkeys("abc", why)
    assert f"the trace of worker 'b' is not complete: {why}" in caplog.text
    counts = Counter(record.worker for record in trace)
    assert all(20 <= counts[worker] < 40 for worker in "abc"), counts
    assert spans_of(trace) and operations_of(trace)


def test_without_a_trace_a_node_records_nothing():
    with cluster() as c:
        gradient(c)
        for node in c.nodes.values():
            assert node.trace is None and node._host.recorder is None
            assert all(one._sends is None for one in node.peers.connections.values())
    assert c.trace is None


def test_a_trace_of_processes_cannot_be_retimed():
    with fails_with(JdagError, "processes.network_is_no_model"):
        retime(real(gradient))
