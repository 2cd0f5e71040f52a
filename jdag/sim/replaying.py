"""The driver that repeats a run of processes in the order of their journals.

All workers are in this process, as in simulation, without time or a network. An input
is handled when it is next in its worker's journal (`jdag.runtime.journal`) and
available: its message has been sent, its job started, or its program has reached it.
Any interleaving of workers gives the same run, since engines share nothing.

Inputs:  the journals of all workers; events of programs (`ProgramPort`).
Outputs: the effects and gradients of the recorded run, or the first event that
         deviates: its worker, the position in the journal, the expected and the actual
         input.
Invariants: messages are numbered in order of sending. A program whose event is not yet
next in the journal waits. While main waits, its greenlet handles the inputs.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from greenlet import GreenletExit, getcurrent

from jdag.compute.machine import Machine, Work, blamed_name
from jdag.engine import Engine
from jdag.engine.graph_snapshot import GraphSnapshot
from jdag.engine.protocol import (
    ACKNOWLEDGED,
    Acknowledged,
    Alarm,
    Arrived,
    Computed,
    ContextId,
    Event,
    Job,
    Joined,
    Key,
    Listed,
    Lost,
    Message,
    Send,
    Skip,
    Spawn,
    incarnation_of,
    named,
)
from jdag.errors import JdagError, JournalsEnd, ReplayError
from jdag.runtime.failures import failure_of
from jdag.runtime.journal import FULL, Entries, entry
from jdag.runtime.stats import Sent, info
from jdag.runtime.step_values import StepValues
from jdag.runtime.waiters import Cancel, Waiters
from jdag.runtime.worker_runtime import (
    ProgramPort,
    RunProgram,
    WorkerRuntime,
    run_and_report,
)
from jdag.sim.programs import Programs

_Values = tuple[Any, ...]
_ARRIVED: tuple[Any, _Values] = (None, ())


class _Worker:
    def __init__(self, host: WorkerRuntime, journal: Entries) -> None:
        self.host = host
        self.incarnations: dict[str, int] = {}
        if incarnation := incarnation_of(host.worker):
            self.incarnations[named(host.worker)] = incarnation
        self.lines = journal.lines
        self.end = journal.end
        self.position = 0
        self.jobs: dict[int, tuple[Job, Work | BaseException]] = {}
        self.alarms: dict[int, Event] = {}
        # The event of each program that waits for its turn, by waiter; 0: main's.
        self.early: dict[int, str] = {}

    @property
    def line(self) -> str:
        return self.lines[self.position] if self.position < len(self.lines) else ""

    @property
    def is_over(self) -> bool:
        """Whether the journal ends here without a last line, as of a lost worker."""
        return not self.end and self.position == len(self.lines)


class Replaying:
    """The driver of a cluster that repeats a run.

    After a deviation from the journals, its methods raise ReplayError. When all inputs
    have been handled, `say` is called with their number.
    """

    trace = None

    def __init__(
        self,
        workers: Sequence[str],
        journals: dict[str, Entries],
        run_program: RunProgram,
        say: Callable[[int], object] = lambda inputs: None,
    ) -> None:
        self._say = say
        self.workers = tuple(workers)
        self.now_ns = 0  # Number of inputs handled.
        self._run_program = run_program
        self._waiters = Waiters()
        self._journals = journals
        self._workers = {name: self._new_worker(name) for name in workers}
        self._home = self._workers[workers[0]]
        self.port = ProgramPort(self._home.host)
        self._programs = Programs(self.port)
        self._soon: deque[Callable[[], object]] = deque()
        # By sender and receiver, the messages in order of sending.
        self._sent: dict[tuple[str, str], list[tuple[Any, _Values]]]
        self._sent = defaultdict(list)
        # By sender and receiver, the number of handled messages of ACKNOWLEDGED whose
        # acknowledgement has not arrived.
        self._owed: Counter[tuple[str, str]] = Counter()
        self._closed = False
        self._deviation: ReplayError | None = None

    def _new_worker(self, worker: str) -> _Worker:
        engine = Engine(named(worker), self.workers, incarnation_of(worker))
        shared: Any = {"driver": self, "waiters": self._waiters, "lost": {}}
        machine = Machine("real")
        engine.drive(StepValues(machine))
        host = WorkerRuntime(worker, engine, machine, **shared)
        return _Worker(host, self._journals[worker])

    # ------------------------------------------------------------ what the cluster uses

    @property
    def current(self) -> ProgramPort:
        return self._programs.current

    @property
    def incarnations(self) -> dict[str, int]:
        """Newest incarnations of restarted workers that the caller's worker knows."""
        return self._workers[self.current.worker].incarnations

    def info(self) -> dict[str, dict[str, Any]]:
        """Return the counters of each worker's last incarnation."""
        lost = self._home.host.lost
        return {
            named(name): info(replayed.host, Sent(), 0, lost=name in lost)
            for name, replayed in self._workers.items()
        }

    def graph(self, context: ContextId) -> dict[str, GraphSnapshot]:
        hosts = {name: worker.host for name, worker in self._workers.items()}
        graphs = {name: host.engine.graph(context) for name, host in hosts.items()}
        return {name: graph for name, graph in graphs.items() if graph is not None}

    def settle(self) -> None:
        """Handle all inputs that precede the next event of a program."""
        self._drive(lambda: False, or_raise=False)

    def close(self) -> None:
        """Handle the remaining inputs. Raise ReplayError if an input does not occur."""
        if self._closed:
            return
        self.settle()
        self._closed = True
        is_unfinished = any(worker.line for worker in self._workers.values())
        hosts = [worker.host for worker in self._workers.values()]
        try:
            if self._deviation is not None or is_unfinished:
                error = self._deviates()
                if not isinstance(error, JournalsEnd):
                    raise error
            self._say(self.now_ns)
        finally:
            for host in hosts:
                host.alive = False
            self._programs.kill(None)
            for host in hosts:
                host.clear()

    # ------------------------------------------------ calls of programs: `ProgramPort`

    def tell(
        self, port: ProgramPort, event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None:
        """Pass a program's event to the engine once it is next in the journal."""
        worker, text = self._workers[port.worker], entry(event)
        self._check_open()
        if self._programs.hub is None:
            worker.early[0] = text
            self._drive(lambda: worker.line == text)
            del worker.early[0]
        elif worker.line != text:
            turn = self._waiters.number()
            worker.early[turn] = text
            try:
                self._programs.park(turn)
            finally:
                del worker.early[turn]
        self._advance(worker)
        try:
            port.host.tell(port, event, values)
        finally:
            self._go_on()

    def wait(self, port: ProgramPort, waiter: int) -> tuple[Any, int]:
        results = self._waiters.results
        if waiter not in results:
            self._check_open()
            if self._programs.hub is not None:
                self._programs.park(waiter)
            else:
                self._drive(lambda: waiter in results)
                self._go_on()
        return results[waiter]

    def _go_on(self) -> None:
        """Handle inputs, such as the loss of a worker, up to main's next event."""
        if self._programs.hub is None:
            self.settle()

    def until(self, holds: Callable[[], bool], within_ns: int) -> bool:
        """Return whether `holds()` is true before the main program's next event."""
        self._check_open()
        self._go_on()
        return holds()

    def rejoined(self, worker: str, former: int, within_ns: int) -> bool:
        return self.until(lambda: self.incarnations.get(worker, 0) > former, within_ns)

    def _check_open(self) -> None:
        if self._closed:
            raise JdagError("this cluster is closed; make another one")

    def _advance(self, worker: _Worker) -> None:
        worker.position += 1
        self.now_ns += 1

    # ------------------------------------------------------------------ the journals

    def _drive(self, done: Callable[[], bool], *, or_raise: bool = True) -> None:
        """Handle inputs until `done()` is true. Runs on the main program's greenlet."""
        assert self._programs.hub is None, done
        self._programs.hub = getcurrent()
        try:
            while not done():  # Bounded by the journals.
                if self._soon:
                    self._soon.popleft()()
                elif not any(map(self._next, self._workers.values())):
                    if or_raise:
                        raise self._deviates()
                    return
        finally:
            self._programs.hub = None

    def _next(self, worker: _Worker) -> bool:
        """Handle the next input of a worker, if it is available."""
        kind, _, rest = worker.line.partition(" ")
        if not kind:
            return False
        if kind == "p":
            return self._tells(worker)
        event: Any = None
        if kind == "m":
            return self._message(worker, *rest.split(" ", 1))
        if kind == "j":
            number = int(rest.partition(" ")[0])
            if number not in worker.jobs:
                return False
            event = self._computed(worker, number)
            if entry(event) != worker.line:
                raise self._deviates(worker, entry(event))
        elif kind == "a":
            sender, count = rest.split(" ")
            owed = self._owed
            if owed[worker.host.worker, sender] < int(count):
                return False
            owed[worker.host.worker, sender] -= int(count)
            event = Acknowledged(sender, int(count))
        elif kind == "l":
            why = "it was lost when this run was recorded"
            worker.host.lost[rest] = why  # type: ignore[index]
            event = Lost(rest, why)
        else:
            event = self._joined(worker, rest)
        self._advance(worker)
        worker.host.handle(event)
        return True

    def _joined(self, worker: _Worker, joining: str) -> Joined:
        if joining not in self._workers:
            self._workers[joining] = self._new_worker(joining)
        name, number = named(joining), incarnation_of(joining)
        worker.incarnations[name] = number
        return Joined(name, number)

    def _tells(self, worker: _Worker) -> bool:
        for turn, text in worker.early.items():
            if turn and text == worker.line:
                self._programs.wake(worker.host, turn)
                return True
        for waiter, event in worker.alarms.items():
            if entry(event) == worker.line:
                del worker.alarms[waiter]
                self._advance(worker)
                worker.host.handle(event)
                return True
        return False

    def _message(self, worker: _Worker, sender: str, text: str) -> bool:
        receiver, number = worker.host.worker, int(text.partition(" ")[0])
        sent = self._sent[sender, receiver]
        if number > len(sent):
            return False
        message, values = sent[number - 1]
        arrival = entry(Arrived(sender, message), (number,))
        if arrival != worker.line:
            raise self._deviates(worker, arrival)
        sent[number - 1] = _ARRIVED
        self._advance(worker)
        self._owed[sender, receiver] += message.__class__ in ACKNOWLEDGED
        worker.host.arrived(sender, message, values)
        return True

    def _computed(self, worker: _Worker, number: int) -> Computed:
        job, work = worker.jobs.pop(number)
        error = work if isinstance(work, BaseException) else None
        if isinstance(work, Work):
            try:
                worker.host.machine.hold(job, work, work.compute())
            except (Exception, SystemExit) as raised:  # From a user's function.
                error = raised
        if error is None:
            return Computed(number, None)
        failure = failure_of(error, worker.host.worker, job.path, blamed_name(job))
        return Computed(number, failure)

    @property
    def is_cut(self) -> bool:
        """Whether a journal that ended at `journal_bytes` has been repeated."""
        workers = self._workers.values()
        return any(worker.end == FULL and not worker.line for worker in workers)

    def _deviates(self, worker: _Worker | None = None, actual: str = "") -> ReplayError:
        if self._deviation is None:
            if worker is None and self.is_cut:
                text = f"the journals end here, at journal_bytes: {self.now_ns} events "
                self._deviation = JournalsEnd(f"{text}were repeated")
            else:
                self._deviation = ReplayError(self._why(worker, actual))
        return self._deviation

    def _why(self, worker: _Worker | None, actual: str) -> str:
        unfinished = [each for each in self._workers.values() if not each.is_over]
        waiting = [each for each in unfinished if each.line or each.early]
        if worker is None:
            # Report programs that deviate rather than workers that wait for them, and
            # messages rather than their acknowledgements.
            waiting.sort(key=lambda w: (not w.early, w.line[:1] == "a"))
            worker = waiting[0] if waiting else self._home
            actual = next(iter(worker.early.values()), "no such input")
        lost = "".join(
            f"; the journal of worker {name!r} has no last line after event"
            f" {each.position}: the worker was lost then, or the file is truncated"
            for name, each in self._workers.items()
            if each.is_over
        )
        return (
            f"the run deviates from its journal on worker {worker.host.worker!r} at"
            f" event {worker.position + 1}: expected {worker.line or 'no more'!r},"
            f" found {actual!r}{lost}"
        )

    # ------------------------------------------------------------- effects of engines

    def transmit(
        self,
        host: WorkerRuntime,
        send: Send,
        message: Message,
        values: tuple[tuple[Key, ...], _Values],
        cause: int,
    ) -> None:
        """Keep a message until the receiver's journal has its arrival as next input."""
        if send.to in host.lost:
            return
        self._sent[host.worker, send.to].append((message, values[1]))

    def compute(self, host: WorkerRuntime, job: Job, cause: int) -> None:
        """Start a job. It is computed when the journal has its end as next input."""
        work: Work | BaseException
        try:
            work = host.machine.begin(job)
        except Exception as error:  # Reported at the job's end, as by processes.
            work = error
        self._workers[host.worker].jobs[job.id] = job, work

    def skip(self, host: WorkerRuntime, skip: Skip | Listed) -> None:
        """Do nothing: the journal determines the order in which jobs end."""

    def spawn(self, host: WorkerRuntime, spawn: Spawn, cause: int) -> None:
        port = ProgramPort(host)
        body = partial(self._program, port, spawn)
        self._soon.append(partial(self._programs.start, port, body))

    def _program(self, port: ProgramPort, spawn: Spawn) -> None:
        passed = run_and_report(self._run_program, port, spawn, GreenletExit)
        if passed is not None:
            raise passed  # Interrupts, which end the main program.

    def alarm(self, host: WorkerRuntime, alarm: Alarm, cause: int) -> Cancel:
        alarms = self._workers[host.worker].alarms
        alarms[alarm.waiter] = alarm.event
        return partial(alarms.pop, alarm.waiter, None)

    def wake(self, host: WorkerRuntime, waiter: int) -> None:
        if waiter in self._programs.parked:
            self._soon.append(partial(self._programs.wake, host, waiter))
