"""Time that does not pass: the order of all that may happen is the chooser's.

A step is one thing that may happen next: the frame at the head of a link is delivered,
a device computes a ready job, a program begins or goes on, a worker learns of a loss;
and faults, as far as the chooser has a budget for them. Acknowledgements at the head of
a link may also come as one message; the step is that of the last of these. What no
engine sees is no step, but for what faults do to frames: that a job begins before it
ends (a crash comes before or after it), what links tell each other, what is for a lost
worker. What has to come later (timers) waits until no step is left.

Inputs:  as those of `jdag.sim.timeline`; `faults()`, which workers may crash or rejoin;
         `join(actions)`, which receives acknowledgements as one message.
Outputs: each step that was picked, carried out.

Invariants: what a link carries is delivered in its order, as engines could not see
another; a device runs one job at a time; a run is a function of what was picked. Each
step is asked for, also where there is no other.
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
    """One thing that may happen next.

    `worker` is where; the engine of no other takes part. `of` says what it is about: a
    peer, a job, a program. `number` is that of a frame on its link, and `message` the
    kind and path of what it carries; `device` is that of a job, "" for the default one.
    """

    kind: str
    worker: str
    of: str = ""
    number: int = 0
    message: tuple[str, tuple[int, ...]] = ("", ())
    device: str = ""

    @property
    def chain(self) -> "Chain":
        """What it is the next of: a link, a device, a program, or a kind of fault."""
        if self.kind == "deliver":
            return ("link", self.of, self.worker)
        if self.kind == "compute":
            return ("device", self.worker, self.device)
        if self.kind in ("spawn", "wake", "main"):
            return ("program", self.worker, self.of)
        return (self.kind, self.worker, self.of)

    def __str__(self) -> str:
        if self.number:
            name, path = self.message
            what = " ".join(filter(None, [name, ".".join(map(str, path))]))
            return f"{self.kind} {self.of} -> {self.worker} ({self.number}: {what})"
        where = f"{self.worker}/{self.device}" if self.device else self.worker
        return " ".join(filter(None, [self.kind, self.of, "on", where]))


_MAIN = "main"
_SOON = (EVENT, BEGIN)
Chain = tuple[str, ...]
# The sequence, which is unique; the step; among those that wait, the index of the job
# that it computes, or of the last frame that it delivers; the entry, which only main
# has not; and the chain.
_Due = tuple[int, PossibleStep, int, Entry, Chain]
UntimedFault = tuple[PossibleStep, tuple[Any, ...]]


class StepChooser(Chooser):
    """Has the order of all steps picked by a function of those that may happen now.

    Args:
        pick: returns the index of one of the steps it is given.
        budget: how many faults there may be, by kind: "crash", "rejoin", "drop",
            "duplicate".
        what: what an index is called that is none of a step.

    Attributes:
        steps: those there were at each pick.
        choices: the index of the one that was picked.
        reached: phase and event of what came to engines about contexts.
        failed: what picking raised first.
    """

    picks_jobs = untimed = True

    def __init__(
        self,
        pick: Callable[[tuple[PossibleStep, ...]], int],
        budget: Iterable[tuple[str, int]] = (),
        what: str = "pick",
    ) -> None:
        super().__init__()
        self._pick = pick
        self._what = what
        self.budget = dict(budget)
        self.job = 0
        self.steps: list[tuple[PossibleStep, ...]] = []
        self.choices: list[int] = []
        self.reached: dict[Situation, None] = {}
        self.failed: Exception | None = None

    @property
    def is_sure(self) -> bool:
        """Whether no fault can befall the run."""
        return not any(self.budget.values())

    def pick_step(self, steps: tuple[PossibleStep, ...]) -> int:
        """The index of the step to happen next."""
        try:
            index = checked_index(self._pick(steps), len(steps), self._what)
        except Exception as error:
            self.failed = self.failed or error
            raise
        self.steps.append(steps)
        self.choices.append(index)
        return index

    def watch(self, engine: Any) -> None:
        """Note what comes to an engine, before it is handled."""
        handle, situations, reached = engine.handle, engine.situations, self.reached

        def watched(event: Any) -> Any:
            for situation in situations(event):
                reached[situation] = None
            return handle(event)

        engine.handle = watched

    def pick_job(self, worker: str, ready: Any) -> int:
        """The job of the step that was picked."""
        del worker, ready
        return self.job


class UntimedTimeline(SimTimeline):
    """A timeline on which what is due now happens in the order that is picked."""

    __slots__ = ("_chains", "_gone", "_heads", "_main", "_wakes", "faults", "join")

    def __init__(self, events_max: int, home: str) -> None:
        super().__init__(events_max)
        self._main: _Due = (0, PossibleStep(_MAIN, home), 0, [], ())
        # By chain, what is due now, in its order; and the first of each, as queued.
        self._chains: dict[Chain, deque[_Due]] = {}
        self._heads: list[_Due] = []
        self._wakes: Counter[str] = Counter()  # By worker.
        self._gone: set[str] = set()  # Workers that are lost.
        self.faults: Callable[[], list[UntimedFault]] = list
        self.join: Callable[[list[tuple[Any, ...]]], object] = list

    def push(self, time_ns: int, priority: int, action: tuple[Any, ...]) -> Entry:
        """Queue `action`; see `SimTimeline.push`."""
        if time_ns > self.now_ns or priority not in _SOON:
            return super().push(time_ns, priority, action)
        kind, at = action[0].__name__.lstrip("_"), action[1]
        if at.worker in self._gone or kind == "finish":
            return super().push(time_ns, CRASH, action)  # Before any step.
        if kind == "frame":
            number, parcel = action[2].sequence, action[2].payload
            if parcel is None:
                return super().push(time_ns, CRASH, action)
            chain: Chain = ("link", at.peer, at.worker)
            said = _said_of(parcel.message)
            fields = ("deliver", at.worker, at.peer, number, said, "")
            step = tuple.__new__(
                PossibleStep, fields
            )  # A third of the time of `PossibleStep(...)`.
        else:
            step = self._step(kind, at.worker, action)
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
        if kind == "begin":  # And end: it takes no time.
            return PossibleStep("compute", worker, device=action[2].device or "")
        if kind == "spawn":
            return PossibleStep(
                kind, worker, f"{action[2].context}/{_dotted(action[2].path)}"
            )
        if kind == "wake":  # Waiters are numbered over all workers.
            self._wakes[worker] += 1
            return PossibleStep(kind, worker, str(self._wakes[worker]))
        return PossibleStep(kind, worker, str(action[2]))

    def run(self, chooser: Any, given: Container[int], waiter: int) -> None:
        """Carry out steps until main goes on, or none is left.

        Main may go on once `waiter` is given something; other steps may come first.
        """
        heap = self._heap
        while True:  # Bounded by events_max.
            if heap and heap[0][TIME] == self.now_ns and heap[0][PRIORITY] == CRASH:
                self._carry_out(heappop(heap))
                continue
            found = self._enabled(waiter in given)
            if not found:
                if not heap:
                    return
                self._carry_out(heappop(heap))
                continue
            steps = [due[1] for due in found]
            faults: list[UntimedFault] = []
            if chooser.budget:
                faults = self._faults(chooser)
                steps += [step for step, _ in faults]
            index = chooser.pick_step(tuple(steps))
            if index >= len(found):
                step, action = faults[index - len(found)]
                chooser.budget[step.kind] -= 1
                action[0](*action[1:])
                continue
            _, step, number, entry, chain = found[index]
            if not entry:
                return
            chooser.job = number
            if number and step.kind == "deliver":
                frames = [self._take(chain) for _ in range(number + 1)]
                self.join([frame[ACTION] for frame in frames])
                continue
            self._take(chain)
            self._carry_out(entry)

    def _carry_out(self, entry: Entry) -> None:
        action = entry[ACTION]
        if action is not None:
            entry[ACTION] = None
            self.now_ns = entry[TIME]
            action[0](*action[1:])

    def _enabled(self, main: bool) -> list[_Due]:
        """What may happen next, in the order in which it was queued; main first."""
        found = [self._main] if main else []
        for due in self._heads:
            if due[1].kind == "compute":
                found += self._jobs(due)
            else:
                found.append(due)
                if due[1].message[0] == "Acknowledge":
                    found += self._joined(due)
        return found

    def _joined(self, due: _Due) -> list[_Due]:
        """What is due if acknowledgements at the head of a link come as one message."""
        sequence, last, _, entry, chain = due
        found: list[_Due] = []
        context = entry[ACTION][2].payload.message.context
        for number, (_, step, _, other, _) in enumerate(self._chains[chain]):
            message = other[ACTION][2].payload.message
            if step.message != last.message or message.context != context:
                break
            if step != last:  # Not the same one that comes twice.
                found.append((sequence, step, number, entry, chain))
            last = step
        return found

    def _jobs(self, due: _Due) -> list[_Due]:
        """For each job that a device may compute, what is due."""
        sequence, step, _, entry, chain = due
        ready = entry[ACTION][2].ready.choices()
        names = [_said(job.__class__.__name__, job.phase, job.path) for job in ready]
        worker, device = step.worker, step.device
        return [
            (sequence, _computing(worker, of, device), index, entry, chain)
            for index, of in enumerate(_distinct(names))
        ]

    def _faults(self, chooser: Any) -> list[UntimedFault]:
        left = [kind for kind, number in chooser.budget.items() if number > 0]
        if not left:
            return []
        found = [fault for fault in self.faults() if fault[0].kind in left]
        for kind in ("drop", "duplicate"):
            for queue in self._chains.values() if kind in left else ():
                step = queue[0][1]
                if step.kind == "deliver":
                    fault = step._replace(kind=kind)
                    found.append((fault, (self._befall, kind, queue[0])))
        return found

    def _befall(self, kind: str, due: _Due) -> None:
        """Lose the frame at the head of a link, or have it come twice."""
        if kind == "drop":
            self._take(due[4])
        else:  # At once: what else is on the link is up to another worker.
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
        """Drop what is for a worker that is lost."""
        self._gone.add(worker)
        for chain, queue in [*self._chains.items()]:
            if queue[0][1].worker == worker:
                self._heads.remove(queue[0])
                del self._chains[chain]

    def clear(self) -> None:
        """Drop all queued actions."""
        super().clear()
        self.faults = self.join = list
        self._chains.clear()
        self._heads.clear()


@lru_cache(4096)
def _computing(worker: str, of: str, device: str) -> PossibleStep:
    """The step of a job, which is ready at many picks."""
    return PossibleStep("compute", worker, of, device=device)


def _said_of(message: Any) -> tuple[str, tuple[int, ...]]:
    return message.__class__.__name__, getattr(message, "path", ())


@lru_cache(4096)
def _said(kind: str, phase: int, path: tuple[int, ...]) -> str:
    """The name of a job; of one that is ready it is asked for at each pick."""
    return f"{kind} {phase}:{_dotted(path)}"


def _dotted(path: tuple[int, ...]) -> str:
    return ".".join(map(str, path))


def _distinct(names: list[str]) -> list[str]:
    """The names, of which equal ones (jobs of two contexts, say) are numbered."""
    if len(set(names)) == len(names):
        return names
    counts: Counter[str] = Counter()
    for number, name in enumerate(names):
        counts[name] += 1
        names[number] = f"{name} ({counts[name]})" if counts[name] > 1 else name
    return names
