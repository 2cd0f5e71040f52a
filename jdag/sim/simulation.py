"""The driver in virtual time: effects of all engines are carried out in one process.

One engine, machine and device a worker; links between them; one timeline. Programs tell
engines events through their `ProgramPort` and block there; user code takes no virtual
time, but `call_ns` of its device for each call. Of an engine's effects, in their order:
a message leaves at once (`jdag.sim.transport`); a job waits for its device
(`jdag.sim.jobs`); what a program waits for wakes it (`jdag.sim.programs`) as an event
of its own, so that no user code runs in between.

All choices are the chooser's (`jdag.runtime.chooser`); all that happens goes to the
recorder (`jdag.runtime.recorder`).

Invariants: a run is a function of its settings, chooser and programs. A crashed worker
receives nothing; its engine, values, jobs and programs are discarded before the next
event (`jdag.sim.outages`).
"""

import gc
import sys
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Any
from weakref import finalize

from greenlet import GreenletExit, getcurrent

from jdag.engine.graph_snapshot import GraphSnapshot
from jdag.engine.protocol import (
    Alarm,
    ContextId,
    Event,
    Issued,
    Key,
    Spawn,
    Worker,
    named,
)
from jdag.errors import JdagError
from jdag.runtime.stats import info
from jdag.runtime.waiters import Cancel, stuck_wait_text
from jdag.runtime.worker_runtime import (
    ProgramPort,
    RunProgram,
    WorkerRuntime,
    run_and_report,
)
from jdag.sim.devices import check_costs
from jdag.sim.environment import Environment
from jdag.sim.jobs import SimJobs
from jdag.sim.outages import Outages
from jdag.sim.programs import Programs
from jdag.sim.settings import SimSettings
from jdag.sim.timeline import EVENT

# A graph is many small tuples that live long. Python looks for cycles whenever 700 more
# objects are alive, which took half of the time of a long run; there are few cycles.
GARBAGE_MIN = 50_000


class CycleCollector:
    """Python's collector of cycles; it looks less often while simulations are open."""

    def __init__(self) -> None:
        self._open = 0
        self._thresholds = gc.get_threshold()

    def opened(self, simulation: object) -> Callable[[], object]:
        """One more is open; return what says, once, that it is not."""
        if not self._open:
            self._thresholds = gc.get_threshold()
            gc.set_threshold(GARBAGE_MIN, *self._thresholds[1:])
        self._open += 1
        return finalize(simulation, self._closed)

    def _closed(self) -> None:
        self._open -= 1
        if not self._open:
            gc.set_threshold(*self._thresholds)


COLLECTOR = CycleCollector()

_NOBODY = -1  # No waiter has this number.


class Simulation:
    """A cluster in virtual time.

    Args:
        settings: what the run is a function of.
        run_program: runs a program that an engine asked for; it says how it ended.
        look: called with each event of a program, and the program's worker.

    Raises:
        ScenarioError: names a setting that is unusable, its value and what is allowed.
    """

    def __init__(
        self,
        settings: SimSettings,
        run_program: RunProgram,
        look: Callable[[Event, Worker], None] = lambda event, here: None,
    ) -> None:
        self._env = env = Environment(settings, self)
        self.workers = env.workers
        self.seed = settings.seed
        self.trace = env.recorder.trace
        # Of the workers that have joined anew, how often they have.
        self.incarnations = env.incarnations
        self.port = ProgramPort(env.hosts[settings.main])
        self._run_program = run_program
        self._look = look
        self._timeline = env.timeline
        self._given = env.waiters.given
        self._programs = Programs(self.port)
        self._jobs = SimJobs(env)
        self._outages = Outages(env, self._jobs, self._programs)
        self.compute = self._jobs.compute
        self.skip = self._jobs.skip
        self.transmit = self._outages.transport.send
        self._closed = False
        self._counted: dict[str, dict[str, Any]] | None = None
        self._outages.plan()
        self._collect_again = COLLECTOR.opened(self)

    # ------------------------------------------------------------------ what users see

    @property
    def current(self) -> ProgramPort:
        """The port of the program that runs right now; see `Programs.current`."""
        return self._programs.current

    @property
    def now_ns(self) -> int:
        """The virtual time."""
        return self._timeline.now_ns

    @property
    def crashed(self) -> bool:
        """Whether a worker has crashed so far."""
        return bool(self._outages.crashed)

    def info(self) -> dict[str, dict[str, Any]]:
        """For each worker, what it holds and what it has sent and computed so far.

        A worker that crashed holds nothing; what it did before still counts.
        """
        return self._counted or {
            name: info(
                (host := self._env.newest(name)),
                self._outages.transport.sent(name),
                self._jobs.busy_ns[name],
                lost=host.worker in self._outages.crashed,
                waits_for=self._jobs.waits_for(host.worker),
            )
            for name in self.workers
        }

    @property
    def functions(self) -> list[tuple[str, str, str]]:
        """What ran so far: worker, name, and name with the types of inputs."""
        return self._jobs.functions

    def settle(self) -> None:
        """Run until nothing is left to happen, such as acknowledgements."""
        _ = self.current  # Raises on another thread.
        self._loop(_NOBODY, self._given)

    def graph(self, context: ContextId) -> dict[str, GraphSnapshot]:
        """The graph of a context as it is now: what each worker has of it."""
        engines = {worker: host.engine for worker, host in self._env.hosts.items()}
        drawn = {w: engine and engine.graph(context) for w, engine in engines.items()}
        return {w: drawing for w, drawing in drawn.items() if drawing is not None}

    def close(self) -> None:
        """End all programs and release everything but counts.

        Raises:
            JdagError: called by a program on a worker.
        """
        if self._closed:
            return
        if self._programs.hub is not None:
            raise JdagError("only the main program may close the cluster")
        hosts = self._env.hosts.values()
        for host in hosts:
            host.alive = False
        self._programs.kill(None)
        self._closed = True
        self._collect_again()
        over: Any = _Closed()
        for host in hosts:
            host.clear()
            host.driver = over  # So that no cycle is left, here and below.
        self._env.driver = over
        del self._run_program
        self._env.waiters.clear()
        self._jobs.forget(None)
        self._counted = self.info()
        self._timeline.clear()
        self._outages.transport.clear()
        if self.functions and sys.exception() is None:  # Else it went no further.
            check_costs(self._jobs.models, self.functions)

    # ------------------------------------------------ what programs do: `ProgramPort`

    def tell(
        self, port: ProgramPort, event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None:
        """Have an engine handle an event of a program; see `ProgramPort.tell`."""
        self._look(event, port.worker)
        if event.__class__ is Issued:
            self._spend(port, self._jobs.models[named(port.worker)].call_ns)
        if port.host.alive:  # Else its program has not noticed yet that it crashed.
            port.host.tell(port, event, values)

    def _spend(self, port: ProgramPort, ns: int) -> None:
        """Have a program take some time."""
        if ns and port.host.alive:
            waiter = port.waiter()
            self._timeline.push(self.now_ns + ns, EVENT, (self._spent, port, waiter))
            self.wait(port, waiter)
            del self._given[waiter]

    def _spent(self, port: ProgramPort, waiter: int) -> None:
        self._given[waiter] = None, port.cause
        self.wake(port.host, waiter)

    def wait(self, port: ProgramPort, waiter: int) -> tuple[Any, int]:
        """Block the caller; return what the waiter was given, and its record."""
        if waiter not in self._given:
            if not port.host.alive:
                raise GreenletExit
            if self._programs.hub is not None:
                self._programs.park(waiter)
            else:
                self._loop(waiter, self._given)
        return self._given[waiter]

    def until(self, holds: Callable[[], bool], within_ns: int) -> bool:
        """Let time pass until this holds, or is over; return which it is."""
        due_ns = self.now_ns + within_ns
        entry = self._timeline.push(due_ns, EVENT, (_pass, self.port.host))
        if not holds():
            reached = _When(lambda: holds() or self.now_ns >= due_ns)
            self._loop(_NOBODY, reached)
        self._timeline.cancel(entry)
        return holds()

    def rejoined(self, worker: str, former: int, within_ns: int) -> bool:
        """Wait until a later incarnation of a worker has joined; False: it has not."""
        joined = self.incarnations.get
        return self.until(lambda: joined(worker, 0) > former, within_ns)

    def _loop(self, waiter: int, given: Container[int]) -> None:
        """Carry out what happens next until `waiter` is given something."""
        assert self._programs.hub is None, waiter
        self._programs.hub = getcurrent()
        try:
            self._timeline.run(self._env.chooser, given, waiter)
        finally:
            self._programs.hub = None
        if waiter not in given and waiter != _NOBODY:
            waits = self._env.waiters.waiting(self._programs.frame)
            why = stuck_wait_text(waits, self._jobs.stalled)
            raise JdagError(f"at {self.now_ns} ns no event is left, and {why}")

    # ----------------------------------------------------------------- what engines ask

    def spawn(self, host: WorkerRuntime, spawn: Spawn, cause: int) -> None:
        """Start a program, as an event of its own."""
        self._soon((self._spawn, host, spawn, cause))

    def alarm(self, host: WorkerRuntime, alarm: Alarm, cause: int) -> Cancel:
        """Have an engine handle the event of an alarm when it is due."""
        action = (self._alarm, host, alarm.event, cause)
        entry = self._timeline.push(self.now_ns + alarm.after_ns, EVENT, action)
        return partial(self._timeline.cancel, entry)

    def wake(self, host: WorkerRuntime, waiter: int) -> None:
        """Let a program go on, as an event of its own."""
        if waiter in self._programs.parked:
            self._soon((self._programs.wake, host, waiter))

    def _soon(self, action: tuple[Any, ...]) -> None:
        self._timeline.push(self._timeline.now_ns, EVENT, action)

    def _alarm(self, host: WorkerRuntime, event: Event, record: int) -> None:
        if host.alive:
            host.handle(event, (record,))

    def _spawn(self, host: WorkerRuntime, spawn: Spawn, record: int) -> None:
        if host.alive:
            port = ProgramPort(host, record)
            self._programs.start(port, partial(self._program, port, spawn))

    def _program(self, port: ProgramPort, spawn: Spawn) -> None:
        """What a program's greenlet runs."""
        self._timeline.programs.append(spawn.function)
        passed = run_and_report(self._run_program, port, spawn, GreenletExit)
        if passed is not None:
            raise passed  # What `run_and_report` lets pass is for the main program.


class _When:
    """What a waiter is given as soon as this holds."""

    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds

    def __contains__(self, waiter: object) -> bool:
        return self._holds()


def _pass(host: WorkerRuntime) -> None:
    """Nothing happens."""


class _Closed:
    """The driver of the hosts of a closed cluster, which programs ask in vain."""

    def tell(self, *asked: object) -> None:
        """Refuse it."""
        raise JdagError("this cluster is closed; make another one")

    wait = tell
