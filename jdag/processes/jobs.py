"""Jobs of one node: short ones on the loop, long ones on a separate thread.

Each job yields `Computed`, when its results are ready and held.

A job is short if earlier runs of the same computation were. It runs on the thread that
drives the loop, as handing it to another thread would cost more than most jobs take.
Jobs that were never run (which compile), that call back into Python, or that are known
to be long, run on the thread one at a time, in the order of the program: forward before
backward, then by pass, then by path. So do those that a schedule lists, in its order.

Invariants: a job begins when it is added, so it reads the values of that moment. Values
are held by the thread that has the loop lock. Done means ready.
"""

import logging
import statistics
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from jdag.compute.configuration import carried
from jdag.compute.duals import is_array
from jdag.compute.machine import Machine, Work, blamed_name
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
from jdag.processes.net.loop import Loop, clock_ns
from jdag.processes.node_trace import JobRequest, NodeRecording
from jdag.runtime.chooser import Chooser
from jdag.runtime.failures import failure_of
from jdag.runtime.ready import ReadyJobs
from jdag.runtime.recorder import NO_CAUSE
from jdag.schedules.actions import ScheduleStep

_log = logging.getLogger(__name__)

SHORT_NS = 400_000
DELAY_NS = 50_000
KNOWN_MAX = 1_024  # Each keeps its executables alive.
RECENT_MAX = 256  # Durations of one computation that are kept.
_RUNS = 2  # Runs on the thread before the time of a computation is trusted.

_Tell = Callable[[Computed], object]


class Times:
    """Recent durations of computations, by kind; bounded."""

    __slots__ = ("_known",)

    def __init__(self) -> None:
        self._known: dict[Any, tuple[int, int]] = {}

    def is_short(self, kind: Any) -> bool:
        """Whether this computation is known to be short."""
        runs, took_ns = self._known.get(kind, (0, 0))
        return runs >= _RUNS and took_ns < SHORT_NS

    def note(self, kind: Any, took_ns: int) -> None:
        """Record a duration, in a decaying average."""
        runs, before_ns = self._known.get(kind, (0, took_ns))
        if not runs and len(self._known) >= KNOWN_MAX:
            del self._known[next(iter(self._known))]
        if runs == 1:
            before_ns = took_ns  # The first run compiled.
        elif runs:  # Limit the effect of a single delayed run.
            took_ns = min(took_ns, 2 * before_ns + DELAY_NS)
        mean_ns = (3 * before_ns + took_ns) >> 2
        self._known[kind] = (runs + 1, mean_ns)


class Recent:
    """The last durations of jobs, by function and action."""

    def __init__(self) -> None:
        self._ns: dict[tuple[Any, str], deque[int]] = {}

    def note(self, job: Job, took_ns: int) -> None:
        """Record a duration."""
        key: tuple[Any, str] = None, "sum"
        if isinstance(job, Forward | Vjp | VjpWeights):
            key = job.function, job.action
        elif not isinstance(job, Sum | Fill):
            return
        if key in self._ns or len(self._ns) < KNOWN_MAX:
            self._ns.setdefault(key, deque(maxlen=RECENT_MAX)).append(took_ns)

    def take(self) -> list[tuple[str, str, int, int]]:
        """Forget all, and return (function, action, how many, median in ns) of each.

        The function is its name with the types of its inputs, "" for a sum.
        """
        found, self._ns = self._ns, {}
        return [
            (
                "" if function is None else typed_name(function),
                *(action, len(each), round(statistics.median(each))),
            )
            for (function, action), each in found.items()
        ]


class _Item(NamedTuple):
    job: Job
    kind: Any
    work: Work
    asked: JobRequest | None


class _Outcome(NamedTuple):
    made: Any
    error: BaseException | None
    began_ns: int
    ended_ns: int


class Jobs:
    """What one node computes; `tell` is called with the loop lock held."""

    def __init__(
        self,
        worker: str,
        machine: Machine,
        loop: Loop,
        tell: _Tell,
        steps: Sequence[ScheduleStep] = (),
        recording: NodeRecording | None = None,
    ) -> None:
        self.busy_ns = 0
        self.computing: dict[int, None] = {}  # Threads that run a user's function.
        self._worker = worker
        self._machine = machine
        self._loop = loop
        self._tell = tell
        self.recent = Recent()
        self._times = Times()
        self._recording = recording
        self.due: deque[_Item] = deque()  # What `run` does.
        self._long = ReadyJobs(Chooser(), worker, steps)
        self._under_way = 0
        self._changed = threading.Condition()
        self._open = True
        self._thread: threading.Thread | None = None
        self.under_settings = carried()  # What threads of the node run.

    @property
    def idle(self) -> bool:
        """Whether nothing is being computed, or could be: a list may hold jobs back."""
        if self.due:
            return False
        with self._changed:
            held = len(self._long)
            return self._under_way == held and not (held and self._long.choices())

    @property
    def waits_for(self) -> str:
        """The action for which the worker's list waits; "" for none."""
        with self._changed:
            return self._long.waits_for

    @property
    def stalled(self) -> str:
        """What the worker's list waits for while jobs of it are ready; "" for none."""
        with self._changed:
            return self._long.stalled

    @property
    def is_computing(self) -> bool:
        """Whether this thread is in the middle of a user's function."""
        return threading.get_ident() in self.computing

    def add(self, job: Job, cause: int = NO_CAUSE) -> None:
        """Begin a job; `cause` is the record of what asked for it."""
        kind, asked = _kind(job), None
        if self._recording is not None:
            asked = self._recording.asked(job, cause)
        try:
            work = self._machine.begin(job)
        except Exception as error:  # A message named values that are not here.
            _log.exception("%s cannot begin on %s", type(job).__name__, self._worker)
            item = _Item(job, kind, Work(lambda: None, None), asked)
            outcome = _Outcome(None, error, clock_ns(), clock_ns())
            self._loop.soon(partial(self._finish, item, outcome, False))
            return
        item = _Item(job, kind, work, asked)
        short = kind is not None and self._times.is_short(kind)
        if short and not self._long.lists(job):
            self.due.append(item)
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
        """Wait no more for jobs that will not come."""
        with self._changed:
            self._long.skip(skip)
            self._changed.notify()

    def run(self) -> None:
        """Run the short jobs that are due; jobs that they cause run later."""
        for _ in range(len(self.due)):
            if not self.due:
                return
            item = self.due.popleft()
            self._finish(item, self._computed(item), False)

    def close(self) -> None:
        """Begin no more jobs; the results of running ones are dropped."""
        self.due.clear()
        with self._changed:
            self._open = False
            self._long.clear()
            self._changed.notify()

    def _computed(self, item: _Item) -> _Outcome:
        began_ns = clock_ns()
        self.computing[threading.get_ident()] = None
        made = error = None
        try:
            made = item.work.compute()
            _await(made)
        except BaseException as raised:
            # Whatever a user's function raises is a result, even SystemExit: what waits
            # for this job would wait for ever.
            error = raised
        finally:
            del self.computing[threading.get_ident()]
        ended_ns = clock_ns()
        self.busy_ns += ended_ns - began_ns
        self.recent.note(item.job, ended_ns - began_ns)
        if item.kind is not None:
            self._times.note(item.kind, ended_ns - began_ns)
        return _Outcome(made, error, began_ns, ended_ns)

    def _finish(self, item: _Item, outcome: _Outcome, beside: bool) -> None:
        job, _, work, asked = item
        made, error, *took_ns = outcome
        failure = None
        if error is None:
            self._machine.hold(job, work, made)
        else:
            failure = failure_of(error, self._worker, job.path, blamed_name(job))
        if self._recording is not None:
            self._recording.ran(job, asked, took_ns, beside)
        self._tell(Computed(job.id, failure))

    def _work(self) -> None:
        while True:
            with self._changed:
                while self._open and not (found := self._long.take()):
                    self._changed.wait()
                if not self._open:
                    return
            for item in found:
                self._loop.post(partial(self._over, item, self._computed(item)))
                del item
            del found

    def _over(self, item: _Item, outcome: _Outcome) -> None:
        if self._open:
            self._under_way -= 1
            self._finish(item, outcome, True)


def _kind(job: Job) -> Any:
    """Return the key of a computation; None if its duration is unpredictable."""
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


def _await(made: Any) -> None:
    """Block until all arrays, including residuals, are ready."""
    for one in made if isinstance(made, tuple) else (made,):
        if is_array(one):
            one.block_until_ready()
        elif isinstance(one, tuple):
            _await(one)
        elif hasattr(one, "keeps"):
            _await(one.keeps)
