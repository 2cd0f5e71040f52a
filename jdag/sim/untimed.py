"""Untimed runs: a chooser orders all events, and no time passes.

A step is an event that may happen next: the frame at the head of a link is delivered, a
device computes a ready job, a program starts or resumes, a worker is notified of a
loss, or a fault within the chooser's budget happens. Events that are invisible to
engines are not steps: ends of jobs, acknowledgements of links, frames for a lost
worker. Faults on frames are invisible too, but they are steps. Events of a later time,
such as timers, wait until no step is left.

Inputs:  the inputs of `jdag.sim.timeline`; `faults()`, which returns the crashes and
         rejoins that may happen.
Outputs: the execution of each picked step.

Invariants: a link delivers in order, since another order is invisible to engines; a
device runs one job at a time; a run is a function of the picks. The chooser picks even
if there is only one step.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Container, Iterable
from functools import lru_cache
from heapq import heappop
from typing import Any, NamedTuple

from jdag.engine.phases import Situation
from jdag.runtime.chooser import Chooser, checked_index
from jdag.sim.timeline import (
    ACTION,
    BEGIN,
    CRASH,
    EVENT,
    PRIORITY,
    TIME,
    Entry,
    SimTimeline,
)


class PossibleStep(NamedTuple):
    """An event that may happen next.

    Attributes:
        kind: "deliver", "compute", "spawn", "wake", "main", "lost", "alarm", ..., or a
            fault.
        worker: the worker on which it happens. Only this worker's engine takes part.
        detail: the peer, job or program of the event.
        number: sequence number of the frame on its link.
        message: kind and path of the message in the frame.
        device: device of the job; "" for the default device.
    """

    kind: str
    worker: str
    detail: str = ""
    number: int = 0
    message: tuple[str, tuple[int, ...]] = ("", ())
    device: str = ""

    @property
    def chain(self) -> "Chain":
        """The link, device, program or kind of fault to which this step belongs."""
        if self.kind == "deliver":
            return ("link", self.detail, self.worker)
        if self.kind == "compute":
            return ("device", self.worker, self.device)
        if self.kind in ("spawn", "wake", "main"):
            return ("program", self.worker, self.detail)
        return (self.kind, self.worker, self.detail)

    def __str__(self) -> str:
        if self.number:
            name, path = self.message
            label = " ".join(filter(None, [name, ".".join(map(str, path))]))
            label = f"({self.number}: {label})"
            return f"{self.kind} {self.detail} -> {self.worker} {label}"
        place = f"{self.worker}/{self.device}" if self.device else self.worker
        return " ".join(filter(None, [self.kind, self.detail, "on", place]))


_SOON = (EVENT, BEGIN)
_ACKNOWLEDGE: tuple[str, tuple[int, ...]] = ("Acknowledge", ())
Chain = tuple[str, ...]
# (sequence, step, index, entry, chain). The sequence is unique. The index selects the
# ready job to compute. The main program's entry is empty.
_Due = tuple[int, PossibleStep, int, Entry, Chain]
UntimedFault = tuple[PossibleStep, tuple[Any, ...]]


class StepChooser(Chooser):
    """A chooser whose `pick` returns the index of the next step, in an untimed run.

    `budget` has the largest number of faults of each kind: "crash", "rejoin", "drop",
    "duplicate". After the run, `steps` has the possible steps at each pick, `choices`
    the picked indices, `reached` the phases of engines in which each kind of event
    occurred, and `failed` the first error of `pick`.
    """

    picks_jobs = untimed = True

    def __init__(
        self,
        pick: Callable[[tuple[PossibleStep, ...]], int],
        budget: Iterable[tuple[str, int]] = (),
        index_name: str = "pick",
    ) -> None:
        super().__init__()
        self._pick = pick
        self._index_name = index_name
        self.budget = dict(budget)
        self.job = 0
        self.steps: list[tuple[PossibleStep, ...]] = []
        self.choices: list[int] = []
        self.reached: dict[Situation, None] = {}
        self.failed: Exception | None = None

    @property
    def is_sure(self) -> bool:
        return not any(self.budget.values())

    def pick_step(self, steps: tuple[PossibleStep, ...]) -> int:
        try:
            index = checked_index(self._pick(steps), len(steps), self._index_name)
        except Exception as error:
            self.failed = self.failed or error
            raise
        self.steps.append(steps)
        self.choices.append(index)
        return index

    def watch(self, engine: Any) -> None:
        handle, situations, reached = engine.handle, engine.situations, self.reached

        def watched(event: Any) -> Any:
            for situation in situations(event):
                reached[situation] = None
            return handle(event)

        engine.handle = watched

    def pick_job(self, worker: str, ready: Any) -> int:
        del worker, ready
        return self.job


class UntimedTimeline(SimTimeline):
    """A timeline on which the chooser picks the next of all events that are due."""

    __slots__ = ("_chains", "_heads", "_lost", "_main", "_wakes", "faults")

    def __init__(self, events_max: int, home: str) -> None:
        super().__init__(events_max)
        self._main: _Due = (0, PossibleStep("main", home), 0, [], ())
        # The steps of each chain, in order; and each chain's first step, in order of
        # queueing.
        self._chains: dict[Chain, deque[_Due]] = {}
        self._heads: list[_Due] = []
        self._wakes: Counter[str] = Counter()  # Number of wakes by worker.
        self._lost: set[str] = set()  # Lost workers.
        self.faults: Callable[[], list[UntimedFault]] = list

    def push(self, time_ns: int, priority: int, action: tuple[Any, ...]) -> Entry:
        if time_ns > self.now_ns or priority not in _SOON:
            return super().push(time_ns, priority, action)
        kind, owner = action[0].__name__.lstrip("_"), action[1]
        if owner.worker in self._lost or kind == "finish":
            return super().push(time_ns, CRASH, action)  # Before any step.
        if kind == "frame":
            number, bundle = action[2].sequence, action[2].payload
            if bundle is None:
                return super().push(time_ns, CRASH, action)
            chain: Chain = ("link", owner.peer, owner.worker)
            message = _ACKNOWLEDGE
            if bundle.items:
                content = bundle.items[0].message
                message = type(content).__name__, getattr(content, "path", ())
            fields = ("deliver", owner.worker, owner.peer, number, message, "")
            # This takes a third of the time of `PossibleStep(...)`.
            step = tuple.__new__(PossibleStep, fields)
        else:
            step = self._step(kind, owner.worker, action)
            chain = step.chain
        if self._pushed >= self.events_max:
            raise self._too_many()
        self._pushed = sequence = self._pushed + 1
        entry = [time_ns, priority, sequence, action]
        due = (sequence, step, 0, entry, chain)
        queue = self._chains.get(chain)
        if queue is None:
            self._chains[chain] = deque((due,))
            self._heads.append(due)
        else:
            queue.append(due)
        return entry

    def _step(self, kind: str, worker: str, action: tuple[Any, ...]) -> PossibleStep:
        if kind == "begin":  # The job also ends in this step.
            return PossibleStep("compute", worker, device=action[2].device or "")
        if kind == "spawn":
            program = f"{action[2].context}/{_dotted(action[2].path)}"
            return PossibleStep(kind, worker, program)
        if kind == "wake":  # The numbers of waiters depend on other workers.
            self._wakes[worker] += 1
            return PossibleStep(kind, worker, str(self._wakes[worker]))
        return PossibleStep(kind, worker, str(action[2]))

    def run(self, chooser: Any, results: Container[int], waiter: int) -> None:
        """Execute steps until the main program's step is picked.

        That step is possible once `waiter` is in `results`.
        """
        heap = self._heap
        while True:  # Bounded by events_max.
            self.end_action()
            if heap and heap[0][TIME] == self.now_ns and heap[0][PRIORITY] == CRASH:
                self._carry_out(heappop(heap))
                continue
            enabled = self._enabled(waiter in results)
            if not enabled:
                if not heap:
                    return
                self._carry_out(heappop(heap))
                continue
            steps = tuple([due[1] for due in enabled])
            faults: list[UntimedFault] = []
            if chooser.budget:
                faults = self._faults(chooser)
                steps += tuple([step for step, _ in faults])
            index = chooser.pick_step(steps)
            if index >= len(enabled):
                step, action = faults[index - len(enabled)]
                chooser.budget[step.kind] -= 1
                action[0](*action[1:])
                continue
            _, step, number, entry, chain = enabled[index]
            if not entry:
                return
            chooser.job = number
            self._take(chain)
            self._carry_out(entry)

    def _carry_out(self, entry: Entry) -> None:
        action = entry[ACTION]
        if action is not None:
            entry[ACTION] = None
            self.now_ns = entry[TIME]
            action[0](*action[1:])

    def _enabled(self, main: bool) -> list[_Due]:
        """Return the possible steps as queued. If `main`, main's step is the first."""
        enabled = [self._main] if main else []
        for due in self._heads:
            if due[1].kind == "compute":
                enabled += self._jobs(due)
            else:
                enabled.append(due)
        return enabled

    def _jobs(self, due: _Due) -> list[_Due]:
        sequence, step, _, entry, chain = due
        ready = entry[ACTION][2].ready.choices()
        labels = [_job_label(type(job).__name__, job.phase, job.path) for job in ready]
        worker, device = step.worker, step.device
        return [
            (sequence, _computing(worker, label, device), index, entry, chain)
            for index, label in enumerate(_distinct(labels))
        ]

    def _faults(self, chooser: Any) -> list[UntimedFault]:
        kinds = [kind for kind, number in chooser.budget.items() if number > 0]
        if not kinds:
            return []
        faults = [fault for fault in self.faults() if fault[0].kind in kinds]
        for kind in ("drop", "duplicate"):
            for queue in self._chains.values() if kind in kinds else ():
                step = queue[0][1]
                if step.kind == "deliver":
                    fault = step._replace(kind=kind)
                    faults.append((fault, (self._befall, kind, queue[0])))
        return faults

    def _befall(self, kind: str, due: _Due) -> None:
        if kind == "drop":
            self._take(due[4])
        else:  # The copy comes next: later frames depend on the sender's steps.
            self._pushed += 1
            _, step, job, entry, chain = due
            self._chains[chain].insert(1, (self._pushed, step, job, [*entry], chain))

    def _take(self, chain: Chain) -> Entry:
        queue = self._chains[chain]
        due = queue.popleft()
        self._heads.remove(due)
        if queue:
            insort(self._heads, queue[0])
        else:
            del self._chains[chain]
        return due[3]

    def bury(self, worker: str) -> None:
        self._lost.add(worker)
        for chain, queue in [*self._chains.items()]:
            if queue[0][1].worker == worker:
                self._heads.remove(queue[0])
                del self._chains[chain]

    def clear(self) -> None:
        super().clear()
        self.faults = list
        self._chains.clear()
        self._heads.clear()


@lru_cache(4096)
def _computing(worker: str, label: str, device: str) -> PossibleStep:
    """Return the step that computes a job. Cached: a job is ready at many picks."""
    return PossibleStep("compute", worker, label, device=device)


@lru_cache(4096)
def _job_label(kind: str, phase: int, path: tuple[int, ...]) -> str:
    return f"{kind} {phase}:{_dotted(path)}"


def _dotted(path: tuple[int, ...]) -> str:
    return ".".join(map(str, path))


def _distinct(labels: list[str]) -> list[str]:
    """Add numbers to equal labels, such as labels of equal jobs of two contexts."""
    if len(set(labels)) == len(labels):
        return labels
    counts: Counter[str] = Counter()
    for number, label in enumerate(labels):
        counts[label] += 1
        labels[number] = f"{label} ({counts[label]})" if counts[label] > 1 else label
    return labels
