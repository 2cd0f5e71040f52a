"""Jobs of a node: what is short runs where the loop does, the rest beside it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from types import SimpleNamespace
from typing import Any, cast

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.avals import aval_of
from jdag.compute.machine import Machine
from jdag.compute.pairs import pair
from jdag.compute.pytrees import split
from jdag.engine.protocol import (
    Computed,
    ConstantKey,
    ContextId,
    Failure,
    Fill,
    Forward,
    Key,
    OutputKey,
    RunSegment,
    ScratchKey,
    Skip,
    Sum,
    Tag,
)
from jdag.engine.tables import TableRow
from jdag.processes.jobs import KNOWN_MAX, SHORT_NS, AverageDurations, Jobs
from jdag.processes.net.loop import Loop, clock_ns
from jdag.schedules import Action

CONTEXT = ContextId(0, 1, 0)
PATIENCE_NS = 60_000_000_000


def pair_of(fn: Any, *args: Any) -> Any:
    """The pair of a call on arrays, none tracked."""
    parts = split(args, {}, lambda value: False, 0)
    avals = tuple([aval_of(arg) for arg in args])
    return pair(fn, parts.template, avals, (False,) * len(args))


class Bench:
    """Jobs of one machine, and what was done in which thread."""

    def __init__(self, steps: Sequence[Action] = ()) -> None:
        self.machine = Machine("real")
        self.loop = Loop(self.run)
        self.over: list[tuple[int, Failure | None]] = []
        self.sent: list[Any] = []
        host: Any = SimpleNamespace(
            worker="a",
            machine=self.machine,
            journal=None,
            handle=self.done,
            driver=SimpleNamespace(send_out=self.send_out),
        )
        self.jobs = Jobs(host, self.loop, steps)

    def run(self) -> None:
        self.jobs.run()

    def send_out(self) -> None:
        self.sent += self.loop.unflushed
        self.loop.unflushed.clear()

    def done(self, event: Computed) -> None:
        self.over.append((event.job, event.failure))

    def put(self, name: Any, value: Any) -> Key:
        key = ConstantKey(CONTEXT, (name,), 0)
        self.machine.values.put(key, value)
        return key

    def forward(
        self,
        number: int,
        fn: Any,
        *args: Any,
        path: int = 0,
        tag: Tag | None = None,
    ) -> Key:
        keys = [self.put(f"{number}.{n}", arg) for n, arg in enumerate(args)]
        made = pair_of(fn, *args)
        output = OutputKey(CONTEXT, (number,), 0)
        where = (path or number,)
        self.jobs.add(
            Forward(number, CONTEXT, where, made, tuple(keys), (output,), None, tag)
        )
        return output

    def wait(self, count: int) -> None:
        due_ns = clock_ns() + PATIENCE_NS
        self.loop.soon(lambda: None)  # At the end of a turn what is due is done.
        self.loop.drive(lambda: len(self.over) >= count or clock_ns() > due_ns)
        assert len(self.over) == count, self.over

    def close(self) -> None:
        self.jobs.close()
        with self.loop:
            self.loop.close()


@pytest.fixture
def bench() -> Iterator[Bench]:
    with closing(Bench()) as made:
        yield made


def scaled(x: Any) -> Any:
    return 3.0 * x


def fails(x: Any) -> Any:
    raise ValueError("not with this")


def test_what_is_done_is_held_and_told_once(bench: Bench) -> None:
    outputs = [bench.forward(number, scaled, np.ones(3)) for number in (1, 2, 3)]
    bench.wait(3)
    assert sorted(number for number, _ in bench.over) == [1, 2, 3]
    for output in outputs:
        np.testing.assert_array_equal(bench.machine.values.get(output), 3 * np.ones(3))
    assert bench.jobs.idle


def test_what_was_short_several_times_is_done_by_who_drives(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "jdag.processes.jobs.SHORT_NS", 1 << 60
    )  # However busy this is.
    for number in range(1, 12):
        bench.forward(number, scaled, np.ones(3))
        due = bool(bench.jobs.due)
        bench.wait(number)
    assert due, "the last one was not known to be short"


def test_what_a_list_has_runs_in_its_order_and_the_rest_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("jdag.processes.jobs.SHORT_NS", 1 << 60)
    with closing(Bench([Action("F", 0, m) for m in (2, 0, 1)])) as bench:
        for number in (1, 2):  # From now on they are known to be short.
            bench.forward(number, scaled, np.ones(3))
            bench.wait(number)
        for micro_batch in (0, 1):
            tag = Tag(0, micro_batch, listed=True)
            bench.forward(10 + micro_batch, scaled, np.ones(3), tag=tag)
        bench.forward(3, scaled, np.ones(3))
        bench.wait(3)
        bench.forward(12, scaled, np.ones(3), tag=Tag(0, 2, listed=True))
        bench.wait(6)
        assert [number for number, _ in bench.over] == [1, 2, 3, 12, 10, 11]
        bench.forward(14, scaled, np.ones(3), tag=Tag(0, 0, listed=True))
        bench.jobs.skip(Skip(CONTEXT, Tag(0, 2), "FBIW"))
        bench.wait(7)


def test_a_short_row_runs_at_once_after_output_that_waits(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jdag.processes.jobs.SHORT_NS", 1 << 60)
    segment: Any = SimpleNamespace(function=Doubling())
    row, step = TableRow(4, segment, (0,)), cast(Any, "the step")
    assert bench.jobs.run_row(step, row, [3]) is False  # It may take long.
    for _ in range(2):
        bench.jobs._times.note(segment.function, 1)
    assert bench.jobs.run_row(step, row, [3]) == (6,)
    failure = bench.jobs.run_row(step, row, [None])
    assert isinstance(failure, Failure) and failure.error == "RemoteError"
    bench.loop.unflushed.append(segment)
    assert bench.jobs.run_row(step, row, [4]) == (8,)
    assert bench.sent == [segment]


class Doubling:
    """The function of a segment."""

    name = "doubling"

    def run(self, inputs: list[int]) -> tuple[int]:
        return (2 * inputs[0],)


def test_a_job_reads_what_was_there_when_it_was_added(bench: Bench) -> None:
    output = bench.forward(1, scaled, np.ones(3))
    for key in list(bench.machine.values._held):
        bench.machine.values.drop([key])
    bench.wait(1)
    np.testing.assert_array_equal(bench.machine.values.get(output), 3 * np.ones(3))


def test_what_raises_is_a_failure_of_its_job_alone(bench: Bench) -> None:
    added = [np.ones(3), np.ones(3)]
    keys = tuple(bench.put(f"s{n}", one) for n, one in enumerate([*added, np.ones(4)]))
    output = ScratchKey(CONTEXT, 9, 0)
    bench.jobs.add(Sum(9, CONTEXT, 1, (9,), keys, None, output))
    bench.forward(1, scaled, np.ones(3))
    bench.wait(2)
    failures = dict(bench.over)
    assert failures[1] is None
    assert failures[9] is not None and failures[9].worker == "a"
    assert output not in bench.machine.values


def test_long_jobs_are_done_in_the_order_of_the_program(bench: Bench) -> None:
    first = threading.Event()
    began = threading.Event()

    class Slow:
        name, device, may_raise, out_devices = "slow", None, True, None

        def forward(self, args: Any) -> Any:
            began.set()
            first.wait(60)
            return (jnp.ones(1),), None

    def add(number: int, path: int) -> None:
        output = OutputKey(CONTEXT, (number,), 0)
        bench.jobs.add(Forward(number, CONTEXT, (path,), Slow(), (), (output,), None))

    add(1, 1)
    assert began.wait(60)
    for number, path in ((2, 9), (3, 5), (4, 7)):
        add(number, path)
    first.set()
    bench.wait(4)
    assert [number for number, _ in bench.over] == [1, 3, 4, 2]


def test_after_close_nothing_is_told(bench: Bench) -> None:
    bench.forward(1, scaled, np.ones(3))
    bench.jobs.close()
    turned: list[None] = []
    threading.Event().wait(0.3)
    bench.loop.post(lambda: turned.append(None))
    bench.loop.drive(lambda: bool(turned))
    assert bench.over == []


def test_a_sum_and_a_fill_are_computed_too(bench: Bench) -> None:
    keys = tuple(bench.put(f"s{n}", np.full(3, n + 1.0)) for n in range(3))
    total = ScratchKey(CONTEXT, 1, 0)
    ones = ScratchKey(CONTEXT, 2, 0)
    aval = pair_of(scaled, np.ones(3)).out_avals[0]
    bench.jobs.add(Sum(1, CONTEXT, 1, (1,), keys, None, total))
    bench.jobs.add(Fill(2, CONTEXT, 1, (2,), aval, 1, ones))
    bench.wait(2)
    np.testing.assert_array_equal(bench.machine.values.get(total), np.full(3, 6.0))
    np.testing.assert_array_equal(bench.machine.values.get(ones), np.ones(3))


@pytest.mark.parametrize("as_job", [True, False])
def test_copies_of_what_a_row_sends_start_before_its_results_are_awaited(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, as_job: bool
) -> None:
    log: list[Any] = []
    outputs = (np.zeros(1), np.ones(1), np.full(1, 2.0))

    class Function:
        name, may_raise = "f", False

        def run(self, inputs: Any) -> Any:
            return outputs

    function = Function()
    row = TableRow(0, cast(Any, SimpleNamespace(function=function)), (), sent=(2, 1))
    monkeypatch.setattr("jdag.processes.jobs.start_copies", log.append)
    monkeypatch.setattr("jdag.processes.jobs._await", lambda made: log.append("wait"))
    for has_accelerator in (True, False):
        monkeypatch.setattr(
            "jdag.processes.jobs.has_accelerator", lambda has=has_accelerator: has
        )
        if as_job:
            job = RunSegment(
                *(1, CONTEXT, 1, (0,), function, [], (), (5, 6, 7), (), (0, 0)),
                sent=row.sent,
            )
            bench.jobs.add(job)
            bench.wait(1)
            bench.over.clear()
        else:
            monkeypatch.setattr(AverageDurations, "is_short", lambda *_: True)
            assert bench.jobs.run_row(cast(Any, None), row, []) is outputs
    assert log == [[outputs[2], outputs[1]], "wait", "wait"]


def test_times_are_believed_from_the_third_run_on_and_forget_the_first() -> None:
    times = AverageDurations()
    times.note("f", 100 * SHORT_NS)  # It compiled.
    assert not times.is_short("f")
    times.note("f", SHORT_NS // 10)
    assert times.is_short("f")
    for _ in range(9):
        times.note("f", 3 * SHORT_NS)
    assert not times.is_short("f")


def test_one_run_that_was_delayed_does_not_make_a_computation_long() -> None:
    times = AverageDurations()
    for took_ns in (100 * SHORT_NS, SHORT_NS // 20, 50 * SHORT_NS):
        times.note("f", took_ns)
    assert times.is_short("f")


def test_the_memory_of_times_is_bounded() -> None:
    times = AverageDurations()
    for number in range(KNOWN_MAX + 10):
        times.note(number, 1)
    assert len(times._averages) == KNOWN_MAX
