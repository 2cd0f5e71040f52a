"""The driver that repeats a run of processes, in the order of their journals.

All workers are in this process, as in simulation; without time or a network. An input
is handled when it is the next one in its worker's journal (`jdag.runtime.journal`) and
is there: its message has been sent, its job asked for, its program has come so far. Any
other order of workers gives the same run, as no engine sees another's.

Inputs:  the journals of all workers; what programs tell (`ProgramPort`).
Outputs: the same effects and gradients as those of the processes; or the first event
         that deviates: worker, place in its journal, what was expected, what there is.
Invariants: messages that are not acknowledgements are numbered as they were sent;
acknowledgements are taken from those that a worker has sent, as many as had arrived as
one. A program that is early waits; main drives while it waits.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from greenlet import GreenletExit, getcurrent

from jdag.compute.machine import Machine, Work, blamed_name
from jdag.engine import Engine
from jdag.engine.graph_snapshot import GraphSnapshot
from jdag.engine.protocol import (
    Acknowledge,
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
    Path,
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
from jdag.runtime.waiters import Cancel, Waiters
from jdag.runtime.worker_runtime import (
    ProgramPort,
    RunProgram,
    WorkerRuntime,
    run_and_report,
)
from jdag.sim.programs import Programs

_Values = tuple[Any, ...]
_Owed = tuple[ContextId | None, Path]  # What an acknowledgement is of.


class _Worker:
    """One worker: its host, its journal and how far that has been followed."""

    def __init__(self, host: WorkerRuntime, journal: Entries) -> None:
        self.host = host
        self.incarnations: dict[str, int] = {}
        if now := incarnation_of(host.worker):
            self.incarnations[named(host.worker)] = now
        self.lines = journal.lines
        self.end = journal.end
        self.at = 0
        self.jobs: dict[int, tuple[Job, Work | BaseException]] = {}
        self.alarms: dict[int, Event] = {}
        # Of the programs that are early: what each would tell, by the waiter for that.
        self.early: dict[int, str] = {}
        # By sender: the ranks that its messages may have, by their numbers. One that
        # overtook others, which never came whole, may be any of so many.
        self.ranks: dict[str, dict[int, range]] = {}
        numbers: dict[str, list[tuple[int, bool]]] = defaultdict(list)
        for line in journal.lines:
            if line[0] == "m":
                _, sender, text, *_ = line.split(" ", 3)
                numbers[sender].append((int(text), _is_acknowledgement(line)))
        for sender, of in numbers.items():
            self.ranks[sender], rank = {}, 0
            for before, (number, is_acknowledgement) in enumerate(sorted(of), 1):
                if not is_acknowledgement:
                    least, rank = rank, rank + 1
                    self.ranks[sender][number] = range(least, rank + number - before)

    @property
    def line(self) -> str:
        """The next input; "" after the last one."""
        return self.lines[self.at] if self.at < len(self.lines) else ""

    @property
    def is_over(self) -> bool:
        """Whether its journal has no more, and no last line: it was lost then."""
        return not self.end and self.at == len(self.lines)


class Replaying:
    """A cluster that repeats a run from its journals.

    `say` is called with the number of inputs when all have been handled.

    Raises:
        ReplayError: from whatever is told or waits once the run deviates from them.
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
        self.now_ns = 0  # How many inputs have been handled.
        self._run_program = run_program
        self._waiters = Waiters()
        self._journals = journals
        self._all = {name: self._made(name) for name in workers}
        home = self._all[workers[0]]
        self.port = ProgramPort(home.host)
        self._home = home
        self._programs = Programs(self.port)
        self._soon: deque[Callable[[], object]] = deque()
        # By sender and receiver; None once it has arrived.
        self._sent: dict[tuple[str, str], list[tuple[Message, _Values] | None]]
        self._sent = defaultdict(list)
        self._owed: dict[tuple[str, str, str], deque[_Owed]] = defaultdict(deque)
        self._closed = False
        self._deviation: ReplayError | None = None

    def _made(self, worker: str) -> _Worker:
        engine = Engine(named(worker), self.workers, incarnation_of(worker))
        given: Any = {"driver": self, "waiters": self._waiters, "lost": {}}
        host = WorkerRuntime(worker, engine, Machine("real"), **given)
        return _Worker(host, self._journals[worker])

    # ------------------------------------------------------------------ what users see

    @property
    def current(self) -> ProgramPort:
        """The port of the program that runs right now."""
        return self._programs.current

    @property
    def incarnations(self) -> dict[str, int]:
        """Of workers that joined again, as far as the worker of this program knows."""
        return self._all[self.current.worker].incarnations

    def info(self) -> dict[str, dict[str, Any]]:
        """For each worker, what its last incarnation holds."""
        lost = self._home.host.lost
        return {
            named(worker): info(one.host, Sent(), 0, lost=worker in lost)
            for worker, one in self._all.items()
        }

    def graph(self, context: ContextId) -> dict[str, GraphSnapshot]:
        """The graph of a context as it is now."""
        drawn = {w: one.host.engine.graph(context) for w, one in self._all.items()}
        return {w: drawing for w, drawing in drawn.items() if drawing is not None}

    def settle(self) -> None:
        """Go on until nothing can happen before a program tells more."""
        self._drive(lambda: False, or_raise=False)

    def close(self) -> None:
        """Handle the rest of all journals; say how many inputs were repeated.

        Raises:
            ReplayError: some input in them does not come.
        """
        if self._closed:
            return
        self.settle()
        self._closed = True
        left = [one for one in self._all.values() if one.line]
        hosts = [one.host for one in self._all.values()]
        try:
            if self._deviation is not None or left:
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

    # ------------------------------------------------ what programs do: `ProgramPort`

    def tell(
        self, port: ProgramPort, event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None:
        """Have an engine handle an event of a program, when that is its turn."""
        one, text = self._all[port.worker], entry(event)
        self._check_open()
        if self._programs.hub is None:
            one.early[0] = text
            self._drive(lambda: one.line == text)
            del one.early[0]
        elif one.line != text:
            turn = self._waiters.number()
            one.early[turn] = text
            try:
                self._programs.park(turn)
            finally:
                del one.early[turn]
        self._took(one)
        try:
            port.host.tell(port, event, values)
        finally:
            self._go_on()

    def wait(self, port: ProgramPort, waiter: int) -> tuple[Any, int]:
        """Block the caller; return what the waiter was given."""
        given = self._waiters.given
        if waiter not in given:
            self._check_open()
            if self._programs.hub is not None:
                self._programs.park(waiter)
            else:
                self._drive(lambda: waiter in given)
                self._go_on()
        return given[waiter]

    def _go_on(self) -> None:
        """Handle all that comes before main tells more: it may have seen a loss."""
        if self._programs.hub is None:
            self.settle()

    def until(self, holds: Callable[[], bool], within_ns: int) -> bool:
        """Return whether this holds before main tells more."""
        self._check_open()
        self._go_on()
        return holds()

    def rejoined(self, worker: str, former: int, within_ns: int) -> bool:
        """Return whether a later incarnation has joined before main tells more."""
        return self.until(lambda: self.incarnations.get(worker, 0) > former, within_ns)

    def _check_open(self) -> None:
        if self._closed:
            raise JdagError("this cluster is closed; make another one")

    def _took(self, one: _Worker) -> None:
        one.at += 1
        self.now_ns += 1

    # ------------------------------------------------------------------ the journals

    def _drive(self, done: Callable[[], bool], *, or_raise: bool = True) -> None:
        """Carry out what may happen until `done`; on main's greenlet."""
        assert self._programs.hub is None, done
        self._programs.hub = getcurrent()
        try:
            while not done():  # Bounded by the journals.
                if self._soon:
                    self._soon.popleft()()
                elif not any(map(self._next, self._all.values())):
                    if or_raise:
                        raise self._deviates()
                    return
        finally:
            self._programs.hub = None

    def _next(self, one: _Worker) -> bool:
        """Handle the next input of a worker, if it is there."""
        kind, _, rest = one.line.partition(" ")
        if not kind:
            return False
        if kind == "p":
            return self._tells(one)
        event: Any = None
        if kind == "m":
            return self._message(one, *rest.split(" ", 2))
        if kind == "j":
            number = int(rest.partition(" ")[0])
            if number not in one.jobs:
                return False
            event = self._computed(one, number)
            if entry(event) != one.line:
                raise self._deviates(one, entry(event))
        elif kind == "l":
            why = "it was lost when this run was recorded"
            one.host.lost[rest] = why  # type: ignore[index]
            event = Lost(rest, why)
        else:
            event = self._joined(one, rest)
        self._took(one)
        one.host.handle(event)
        return True

    def _joined(self, one: _Worker, worker: str) -> Joined:
        """Begin an incarnation, with whichever worker hears of it first."""
        if worker not in self._all:
            self._all[worker] = self._made(worker)
        name, number = named(worker), incarnation_of(worker)
        one.incarnations[name] = number
        return Joined(name, number)

    def _tells(self, one: _Worker) -> bool:
        for turn, text in one.early.items():
            if turn and text == one.line:
                self._programs.wake(one.host, turn)
                return True
        for waiter, event in one.alarms.items():
            if entry(event) == one.line:
                del one.alarms[waiter]
                self._took(one)
                one.host.handle(event)
                return True
        return False

    def _message(self, one: _Worker, sender: str, number: str, said: str) -> bool:
        here = one.host.worker
        message: Message
        values: _Values = ()
        if _is_acknowledgement(one.line):
            _, context, _, count = said.split(" ", 3)
            owed = self._owed[sender, here, context]
            paths = int(count.strip("(,)"))
            if len(owed) < paths:
                return False
            first = [owed.popleft() for _ in range(paths)]
            message = Acknowledge(first[0][0], tuple([path for _, path in first]))
        else:
            sent, found = self._sent[sender, here], ""
            ranks = one.ranks[sender][int(number)]
            for rank in ranks:
                if rank >= len(sent):
                    return False
                if (sending := sent[rank]) is not None:
                    told = entry(Arrived(sender, sending[0]), (int(number),))
                    if told == one.line:
                        break
                    found = found or told
            else:
                raise self._deviates(one, found)
            message, values = sending
            sent[rank] = None
        self._took(one)
        one.host.arrived(sender, message, values)
        return True

    def _computed(self, one: _Worker, number: int) -> Computed:
        job, work = one.jobs.pop(number)
        error = work if isinstance(work, BaseException) else None
        if isinstance(work, Work):
            try:
                one.host.machine.hold(job, work, work.compute())
            except (Exception, SystemExit) as raised:  # Of a user's function.
                error = raised
        if error is None:
            return Computed(number, None)
        failure = failure_of(error, one.host.worker, job.path, blamed_name(job))
        return Computed(number, failure)

    @property
    def is_cut(self) -> bool:
        """Whether a journal that ended at `journal_bytes` has been followed so far."""
        return any(one.end == FULL and not one.line for one in self._all.values())

    def _deviates(self, one: _Worker | None = None, found: str = "") -> ReplayError:
        """The error that names the first event that is not as in the journals."""
        if self._deviation is None:
            if one is None and self.is_cut:
                said = f"the journals end here, at journal_bytes: {self.now_ns} events "
                self._deviation = JournalsEnd(f"{said}were repeated")
            else:
                self._deviation = ReplayError(self._why(one, found))
        return self._deviation

    def _why(self, one: _Worker | None, found: str) -> str:
        others = [other for other in self._all.values() if not other.is_over]
        waiting = [other for other in others if other.line or other.early]
        if one is None:
            # Programs that deviate come before workers that wait for them, messages
            # before their acknowledgements.
            waiting.sort(key=lambda o: (not o.early, _is_acknowledgement(o.line)))
            one = waiting[0] if waiting else self._home
            found = next(iter(one.early.values()), "nothing that could be that")
        over = "".join(
            f"; the journal of worker {name!r} has no last line after event {other.at}:"
            " it was lost then, or that is truncated"
            for name, other in self._all.items()
            if other.is_over
        )
        return (
            f"the run deviates from its journal on worker {one.host.worker!r} at event"
            f" {one.at + 1}: expected {one.line or 'no more'!r}, found {found!r}{over}"
        )

    # ----------------------------------------------------------------- what engines ask

    def transmit(
        self,
        host: WorkerRuntime,
        send: Send,
        message: Message,
        values: tuple[tuple[Key, ...], _Values],
        cause: int,
    ) -> None:
        """Keep a message until it is the turn of its arrival."""
        if send.to in host.lost:
            return
        if isinstance(message, Acknowledge):
            context = str(message.context or "-")
            owed = self._owed[host.worker, send.to, context]
            owed += [(message.context, path) for path in message.paths]
        else:
            self._sent[host.worker, send.to].append((message, values[1]))

    def compute(self, host: WorkerRuntime, job: Job, cause: int) -> None:
        """Begin a job; it is computed when it is the turn of its end."""
        work: Work | BaseException
        try:
            work = host.machine.begin(job)
        except Exception as error:  # As on a process.
            work = error
        self._all[host.worker].jobs[job.id] = job, work

    def skip(self, host: WorkerRuntime, skip: Skip | Listed) -> None:
        """Do nothing: jobs end in the order of the journal."""

    def spawn(self, host: WorkerRuntime, spawn: Spawn, cause: int) -> None:
        """Start a program."""
        port = ProgramPort(host)
        body = partial(self._program, port, spawn)
        self._soon.append(partial(self._programs.start, port, body))

    def _program(self, port: ProgramPort, spawn: Spawn) -> None:
        passed = run_and_report(self._run_program, port, spawn, GreenletExit)
        if passed is not None:
            raise passed  # What `run_and_report` lets pass is for the main program.

    def alarm(self, host: WorkerRuntime, alarm: Alarm, cause: int) -> Cancel:
        """Have an alarm go off only where the journal says so."""
        alarms = self._all[host.worker].alarms
        alarms[alarm.waiter] = alarm.event
        return partial(alarms.pop, alarm.waiter, None)

    def wake(self, host: WorkerRuntime, waiter: int) -> None:
        """Let a program go on."""
        if waiter in self._programs.parked:
            self._soon.append(partial(self._programs.wake, host, waiter))


def _is_acknowledgement(line: str) -> bool:
    return f" {Acknowledge.__name__} " in line
