"""Jobs of one node: short ones on the loop's thread, long ones on a job thread.

The event `Computed` of a job is emitted when its results are ready and stored.

A job is short if earlier runs of the same computation were short. It runs on the thread
that drives the loop, because passing it to another thread takes longer than most jobs.
All other jobs are long: first runs (which compile), functions that call back into
Python, and computations known to be long. They run on the job thread, one at a time, in
program order: forward before backward, then by pass, then by path. Jobs in the list of
a schedule run in the order of the list.

Invariants: a job begins when it is added, and reads the values that exist then. The
thread that holds the loop lock stores the results.
"""

import logging
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from jdag.compute.buffers import start_copies
from jdag.compute.configuration import with_local_settings
from jdag.compute.devices import has_accelerator
from jdag.compute.duals import is_array_type
from jdag.compute.machine import Work, blamed_name
from jdag.compute.pairs import typed_name
from jdag.engine.protocol import (
    Apply,
    CompileSegment,
    Computed,
    Fill,
    Forward,
    Job,
    Listed,
    RunSegment,
    Skip,
    Sum,
    Vjp,
    VjpWeights,
)
from jdag.engine.tables import StepState, TableRow
from jdag.processes.net.loop import Loop, clock_ns
from jdag.processes.node_trace import JobRequest, NodeRecording
from jdag.runtime.chooser import Chooser
from jdag.runtime.failures import failure_of
from jdag.runtime.ready import ReadyJobs
from jdag.runtime.recorder import NO_CAUSE
from jdag.runtime.worker_runtime import WorkerRuntime
from jdag.schedules.actions import ScheduleStep

_log = logging.getLogger(__name__)

SHORT_NS = 400_000
DELAY_NS = 50_000
KNOWN_MAX = 1_024  # Limit of known computations. Their keys keep executables alive.
RECENT_MAX = 256  # Stored durations per computation.
_RUNS = 2  # Runs on the job thread before the average duration is used.


class AverageDurations:
    __slots__ = ("_averages",)

    def __init__(self) -> None:
        self._averages: dict[Any, tuple[int, int]] = {}

    def is_short(self, kind: Any) -> bool:
        runs, took_ns = self._averages.get(kind, (0, 0))
        return runs >= _RUNS and took_ns < SHORT_NS

    def note(self, kind: Any, took_ns: int) -> None:
        runs, before_ns = self._averages.get(kind, (0, took_ns))
        if not runs and len(self._averages) >= KNOWN_MAX:
            del self._averages[next(iter(self._averages))]
        if runs == 1:
            before_ns = took_ns  # The first run compiled.
        elif runs:  # Limit the effect of a single delayed run.
            took_ns = min(took_ns, 2 * before_ns + DELAY_NS)
        mean_ns = (3 * before_ns + took_ns) >> 2
        self._averages[kind] = (runs + 1, mean_ns)


class RecentDurations:
    def __init__(self) -> None:
        self._ns: dict[tuple[Any, str], deque[int]] = {}

    def note(self, job: Job, took_ns: int) -> None:
        key: tuple[Any, str] = None, "sum"
        if isinstance(job, Forward | Vjp | VjpWeights):
            key = job.function, job.action
        elif not isinstance(job, Sum | Fill):
            return
        if key in self._ns or len(self._ns) < KNOWN_MAX:
            self._ns.setdefault(key, deque(maxlen=RECENT_MAX)).append(took_ns)

    def take(self) -> list[tuple[str, str, int, int]]:
        """Clear the durations. Return (function, action, count, median in ns) tuples.

        `function` is a name with the types of its inputs, or "" for a sum.
        """
        recent, self._ns = self._ns, {}
        return [
            (
                "" if function is None else typed_name(function),
                *(action, len(each), round(statistics.median(each))),
            )
            for (function, action), each in recent.items()
        ]


_Call = Callable[[], Any]


class _Item(NamedTuple):
    job: Job
    kind: Any
    work: Work
    request: JobRequest | None


class _Outcome(NamedTuple):
    result: Any
    error: BaseException | None
    began_ns: int
    ended_ns: int


class Jobs:
    """Runs the computations of one node.

    Reports each job and each row of a plan that ended to `host`, with the loop lock
    held.
    """

    def __init__(
        self,
        host: WorkerRuntime,
        loop: Loop,
        steps: Sequence[ScheduleStep] = (),
        recording: NodeRecording | None = None,
    ) -> None:
        self.busy_ns = 0
        self.computing: dict[int, None] = {}  # Threads inside a user's function.
        self._worker = worker = host.worker
        self._machine = host.machine
        self._loop = loop
        self._handle = host.handle
        driver: Any = host.driver  # A `Node`.
        self.send_out: Callable[[], None] = driver.send_out
        # A schedule orders rows, and a trace or a journal has their starts and ends.
        self.rows_are_jobs = bool(steps or recording or host.journal)
        self.recent = RecentDurations()
        self._times = AverageDurations()
        self._recording = recording
        self.due: deque[_Call] = deque()  # Short jobs and rows that `run` will run.
        self._long = ReadyJobs(Chooser(), worker, steps)
        self._under_way = 0
        self._changed = threading.Condition()
        self._open = True
        self._thread: threading.Thread | None = None
        self.under_settings = with_local_settings()

    @property
    def idle(self) -> bool:
        """Whether no job runs or can start. Jobs delayed by a schedule do not count."""
        if self.due:
            return False
        with self._changed:
            waiting = len(self._long)
            return self._under_way == waiting and not (waiting and self._long.choices())

    @property
    def waits_for(self) -> str:
        with self._changed:
            return self._long.waits_for

    @property
    def stalled(self) -> str:
        """The next action in a schedule's list if added jobs wait for it, else ""."""
        with self._changed:
            return self._long.stalled

    @property
    def is_computing(self) -> bool:
        return threading.get_ident() in self.computing

    def add(self, job: Job, cause: int = NO_CAUSE) -> None:
        """Begin a job. `cause` is the trace record of the event that requested it."""
        kind, request = _kind(job), None
        if self._recording is not None:
            request = self._recording.requested(job, cause)
        try:
            work = self._machine.begin(job)
        except Exception as error:  # A message named values that this worker lacks.
            _log.exception("%s cannot begin on %s", type(job).__name__, self._worker)
            item = _Item(job, kind, Work(lambda: None, None), request)
            outcome = _Outcome(None, error, clock_ns(), clock_ns())
            self._loop.soon(partial(self._finish, item, outcome, False))
            return
        item = _Item(job, kind, work, request)
        short = kind is not None and self._times.is_short(kind)
        if short and not self._long.lists(job):
            self.due.append(partial(self._run_item, item))
            self._loop.dirty = True
            return
        self._under_way += 1
        with self._changed:
            self._long.add(job, item)
            if self._thread is None:
                name = f"jobs of {self._worker}"
                run = partial(self.under_settings, self._work)
                self._thread = threading.Thread(target=run, name=name, daemon=True)
                self._thread.start()
            self._changed.notify()

    def skip(self, skip: Skip | Listed) -> None:
        with self._changed:
            self._long.skip(skip)
            self._changed.notify()

    def run(self) -> None:
        """Run the short jobs that are queued now, but not jobs that they add."""
        for _ in range(len(self.due)):
            if not self.due:
                return
            self.due.popleft()()

    def _run_item(self, item: _Item) -> None:
        self._finish(item, self._outcome(item), False)

    def _outcome(self, item: _Item) -> _Outcome:
        sent = item.job.sent if item.job.__class__ is RunSegment else ()
        outcome = self._computed(item.work.compute, (), item.kind, sent)
        self.recent.note(item.job, outcome.ended_ns - outcome.began_ns)
        return outcome

    def run_row(self, step: StepState, row: TableRow, inputs: list[Any]) -> Any:
        """Run a short row of a plan, as `StepDriver.run`, after output that waits."""
        assert row.segment is not None
        function = row.segment.function
        if not self._times.is_short(function):
            return False
        if self._loop.unflushed:
            self.send_out()
        run = function.run
        result, error, _, _ = self._computed(run, (inputs,), function, row.sent)
        if error is None:
            return result
        return failure_of(error, self._worker, (), function.name)

    def close(self) -> None:
        """Start no more jobs, and drop the results of running jobs."""
        self.due.clear()
        with self._changed:
            self._open = False
            self._long.clear()
            self._changed.notify()

    def _computed(
        self,
        compute: Callable[..., Any],
        args: Any,
        kind: Any,
        sent: Sequence[int] = (),
    ) -> _Outcome:
        began_ns = clock_ns()
        self.computing[threading.get_ident()] = None
        result = error = None
        try:
            result = compute(*args)
            if sent and has_accelerator():
                start_copies([result[index] for index in sent])
            _await(result)
        except BaseException as raised:
            # Any error in a user's function becomes the job's result, even SystemExit.
            # Otherwise the programs that wait for this job would never return.
            error = raised
        finally:
            del self.computing[threading.get_ident()]
        ended_ns = clock_ns()
        self.busy_ns += ended_ns - began_ns
        if kind is not None:
            self._times.note(kind, ended_ns - began_ns)
        return _Outcome(result, error, began_ns, ended_ns)

    def _finish(self, item: _Item, outcome: _Outcome, on_thread: bool) -> None:
        job, _, work, request = item
        result, error, *took_ns = outcome
        failure = None
        if error is None:
            self._machine.hold(job, work, result)
        else:
            failure = failure_of(error, self._worker, job.path, blamed_name(job))
        if self._recording is not None:
            self._recording.ran(job, request, took_ns, on_thread)
        self._handle(Computed(job.id, failure))

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._open and not (items := self._long.take()):
                    self._changed.wait()
                if not self._open:
                    return
            for item in items:
                self._loop.post(partial(self._finish_long, item, self._outcome(item)))
                del item
            del items

    def _finish_long(self, item: _Item, outcome: _Outcome) -> None:
        if self._open:
            self._under_way -= 1
            self._finish(item, outcome, True)


def _kind(job: Job) -> Any:
    """Return the key of a job's average duration, or None if it is unpredictable."""
    match job:
        case Forward() | Vjp():
            return None if job.function.may_raise else (job.function, type(job))
        case RunSegment():
            return None if job.function.may_raise else job.function
        case Apply() | CompileSegment():
            return None
        case _:
            aval = getattr(job, "aval", None)
            return (type(job), aval, len(getattr(job, "addends", ())))


def _await(result: Any) -> None:
    items = [result]
    for item in items:  # The loop extends the list.
        if is_array_type(item.__class__):
            item.block_until_ready()
        elif isinstance(item, tuple):
            items += item
        elif hasattr(item, "keeps"):
            items += item.keeps
