"""Runs of processes that are repeated in the order of their journals.

The driver is the simulator (`jdag.sim.simulation`) without time, links and choices. An
input is handled when it is next in its worker's journal (`jdag.runtime.journal`) and
available: its message has been sent, its job requested, or its program has reached it.
Any interleaving of workers gives the same run, since engines share nothing.

Inputs:  the journals of all workers; events of programs (`ProgramPort`).
Outputs: the effects and gradients of the recorded run, or the first deviation: worker,
         position in the journal, the expected and the actual input.
Invariants: a program whose event is not next in the journal waits. Before a program
goes on, all available inputs are handled, such as the loss of a worker.
"""

from collections import Counter
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from jdag.compute.machine import Machine
from jdag.engine.protocol import (
    ACKNOWLEDGED,
    Acknowledged,
    Alarm,
    Event,
    Job,
    Joined,
    Key,
    Lost,
    Message,
    Send,
    incarnation_of,
    named,
)
from jdag.errors import JournalsEnd, ReplayError
from jdag.runtime.journal import FULL, Entries, Input, entry
from jdag.runtime.recorder import NO_CAUSE
from jdag.runtime.waiters import Cancel
from jdag.runtime.worker_runtime import ProgramPort, RunProgram, WorkerRuntime
from jdag.sim.settings import SimSettings
from jdag.sim.simulation import NO_WAITER, Simulation

_Action = tuple[Any, ...]  # A function and its arguments, for the timeline.


class _Worker:
    """A worker whose inputs are compared with its journal by `note`.

    `early` has the events of programs that wait for their turn, `alarms` those of
    alarms; for each waiter, the line of the event and the action that handles it.
    """

    def __init__(self, host: WorkerRuntime, journal: Entries, deviates: Any) -> None:
        self.host = host
        host.journal = self  # type: ignore[assignment]
        self.lines, self.end = journal.lines, journal.end
        self.position = 0
        self.jobs: dict[int, Job] = {}
        self.early: dict[int, tuple[str, _Action]] = {}
        self.alarms: dict[int, tuple[str, _Action]] = {}
        number = incarnation_of(host.worker)
        self.incarnations = {named(host.worker): number} if number else {}
        self._deviates = deviates

    @property
    def line(self) -> str:
        return self.lines[self.position] if self.position < len(self.lines) else ""

    def note(self, noted: Input) -> None:
        if (actual := entry(*noted)) != self.line:
            raise self._deviates(self, actual)
        self.position += 1


class Replaying(Simulation):
    """The driver of a cluster that repeats a run.

    After a deviation from the journals, its methods raise ReplayError. When all inputs
    have been handled, `say` is called with their number.
    """

    def __init__(
        self,
        workers: Sequence[str],
        journals: dict[str, Entries],
        run_program: RunProgram,
        say: Callable[[int], object] = lambda inputs: None,
    ) -> None:
        self._journals = journals
        self._workers: dict[str, _Worker] = {}
        super().__init__(SimSettings(workers, seed=0, trace=False), run_program)
        self._say = say
        self._deviation: ReplayError | None = None
        # Messages by sender, receiver and number; the number of messages of each pair.
        self._sent: dict[tuple[str, str, int], _Action] = {}
        self._numbers: Counter[tuple[str, str]] = Counter()
        # By sender and receiver, the handled messages that are to be acknowledged.
        self._owed: Counter[tuple[str, str]] = Counter()
        self._starts: list[_Action] = []  # Programs that are to start or to go on.
        self.transmit, self.compute = self._keep, self._request
        self._outages.crashed = self.port.host.lost  # type: ignore[assignment]
        for worker in self.workers:
            self._add(worker)

    def _add(self, worker: str) -> None:
        host, journal = self._env.hosts[worker], self._journals[worker]
        self._workers[worker] = _Worker(host, journal, self._deviates)

    # ----------------------------------------- what the cluster and its programs use

    @property
    def now_ns(self) -> int:
        """Number of inputs handled."""
        return sum([worker.position for worker in self._workers.values()])

    @property
    def incarnations(self) -> dict[str, int]:
        """Newest incarnations of restarted workers that the caller's worker knows."""
        return self._workers[self.current.worker].incarnations

    @incarnations.setter
    def incarnations(self, _: dict[str, int]) -> None: ...  # Those of the simulator.

    def until(self, holds: Callable[[], bool], within_ns: int) -> bool:
        """Return whether `holds()` is true before the main program's next event."""
        self.settle()
        return holds()

    def close(self) -> None:
        """Handle the remaining inputs. Raise ReplayError if an input does not occur."""
        if self._closed:
            return
        try:
            with suppress(JournalsEnd):
                self.settle()
                if any([worker.line for worker in self._workers.values()]):
                    raise self._deviates()
            self._say(self.now_ns)
        finally:
            super().close()

    def tell(
        self, port: ProgramPort, event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None:
        """Pass a program's event to the engine once it is next in the journal."""
        early, turn = self._workers[port.worker].early, port.waiter()
        early[turn] = entry(event), (self._spent, port, turn)
        try:
            self.wait(port, turn)
            del self._results[turn]
            super().tell(port, event, values)
        finally:
            early.pop(turn, None)
            if self._programs.hub is None:
                self.settle()

    def _soon(self, action: _Action) -> None:
        self._starts.append(action)

    def _loop(self, waiter: int, results: Container[int]) -> None:
        """Handle all available inputs. Raise ReplayError if `waiter` has no result."""
        while self._deviation is None and (action := self._next()):
            super()._soon(action)
            super()._loop(NO_WAITER, ())
        if self._deviation or not (waiter == NO_WAITER or waiter in results):
            raise self._deviates()

    # ------------------------------------------------------------------ the journals

    def _next(self) -> _Action | None:
        """Return the action of an input or, if none is available, of a program."""
        for worker in self._workers.values():
            if action := self._input(worker, worker.host):
                return action
        for action in self._starts:  # Of a program that has seen all recorded losses.
            if self._workers[action[1].worker].line[:1] in "p":
                self._starts.remove(action)
                return action
        return None

    def _input(self, worker: _Worker, host: WorkerRuntime) -> _Action | None:
        """Return the action of a worker's next input, if it is available."""
        kind, word, number = (*worker.line.split(" "), "", "")[:3]
        match kind:
            case "p":
                for events in (worker.early, worker.alarms):
                    for waiter, (text, action) in events.items():
                        if text == worker.line:
                            del events[waiter]
                            return action
            case "j":
                if job := worker.jobs.pop(int(word), None):
                    return self._jobs.compute, host, job, NO_CAUSE
            case "m":
                if sent := self._sent.pop((word, host.worker, int(number)), None):
                    self._owed[word, host.worker] += sent[0].__class__ in ACKNOWLEDGED
                    return WorkerRuntime.arrived, host, word, *sent, (int(number),)
            case "a":
                count, pair = int(number), (host.worker, word)
                if self._owed[pair] >= count:
                    self._owed[pair] -= count
                    return WorkerRuntime.handle, host, Acknowledged(word, count)
            case "l":
                why = "it was lost when this run was recorded"
                self._env.lost[host.worker][word] = why
                return WorkerRuntime.handle, host, Lost(word, why)
            case "J":
                name, incarnation = named(word), incarnation_of(word)
                if word not in self._workers:
                    self._env.start(name, incarnation, Machine("real"))
                    self._env.incarnations[name] = incarnation
                    self._add(word)
                worker.incarnations[name] = incarnation
                return WorkerRuntime.handle, host, Joined(name, incarnation)
        return None

    @property
    def is_cut(self) -> bool:
        """Whether a journal that ended at `journal_bytes` has been repeated."""
        return any([w.end == FULL and not w.line for w in self._workers.values()])

    def _deviates(self, worker: _Worker | None = None, actual: str = "") -> ReplayError:
        if self._deviation is None:
            if worker is None and self.is_cut:
                text = f"the journals end here, at journal_bytes: {self.now_ns} events "
                self._deviation = JournalsEnd(f"{text}were repeated")
            else:
                self._deviation = ReplayError(self._why(worker, actual))
        return self._deviation

    def _why(self, worker: _Worker | None, actual: str) -> str:
        workers = self._workers
        if worker is None:
            # Report programs that deviate rather than workers that wait for them, and
            # messages rather than their acknowledgements. Lost workers do not wait.
            waiting = [w for w in workers.values() if w.line or (w.end and w.early)]
            waiting.sort(key=lambda w: (not w.early, w.line[:1] == "a"))
            worker = waiting[0] if waiting else workers[self.port.worker]
            actual, _ = next(iter(worker.early.values()), ("no such input", ()))
        lost = "".join(
            f"; the journal of worker {name!r} has no last line after event"
            f" {each.position}: the worker was lost then, or the file is truncated"
            for name, each in workers.items()
            if not (each.line or each.end)
        )
        return (
            f"the run deviates from its journal on worker {worker.host.worker!r} at"
            f" event {worker.position + 1}: expected {worker.line or 'no more'!r},"
            f" found {actual!r}{lost}"
        )

    # ------------------------------------------------------------- effects of engines

    def _keep(
        self, host: WorkerRuntime, send: Send, message: Message, values: Any, cause: int
    ) -> None:
        pair = host.worker, send.to
        self._numbers[pair] += 1
        self._sent[*pair, self._numbers[pair]] = message, values[1]

    def _request(self, host: WorkerRuntime, job: Job, cause: int) -> None:
        self._workers[host.worker].jobs[job.id] = job

    def alarm(self, host: WorkerRuntime, alarm: Alarm, cause: int) -> Cancel:
        alarms = self._workers[host.worker].alarms
        alarms[alarm.waiter] = entry(alarm.event), (self._alarm, host, alarm.event, 0)
        return partial(alarms.pop, alarm.waiter, None)
