"""The driver in virtual time: carries out the effects of all engines in one process.

Each worker has one engine, machine and device; links connect them, and all share one
timeline. Programs send events to engines through their `ProgramPort` and block there.
User code takes no virtual time, except `call_ns` of its device for each call. Effects
of an engine are carried out in their order: a message is sent at once
(`jdag.sim.transport`), a job waits for its device (`jdag.sim.jobs`), and a program
whose result has arrived is resumed by a separate event (`jdag.sim.programs`), so that
no user code runs between two effects.

The chooser makes all choices (`jdag.runtime.chooser`); the recorder gets all events
(`jdag.runtime.recorder`).

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
from jdag.runtime.trace import Trace
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

# A graph consists of many small, long-lived tuples and few reference cycles. With
# Python's default thresholds, cycle collection took half of a long run.
GARBAGE_MIN, YOUNG_MIN = 50_000, 50


class CycleCollector:
    """Raises the thresholds of Python's cycle collector while simulations are open."""

    def __init__(self) -> None:
        self._open = 0
        self._thresholds = gc.get_threshold()

    def opened(self, simulation: object) -> Callable[[], object]:
        """Count an open simulation. Return the function to call when it is closed."""
        if not self._open:
            self._thresholds = gc.get_threshold()
            gc.set_threshold(GARBAGE_MIN, YOUNG_MIN, self._thresholds[2])
        self._open += 1
        return finalize(simulation, self._closed)

    def _closed(self) -> None:
        self._open -= 1
        if not self._open:
            gc.set_threshold(*self._thresholds)


COLLECTOR = CycleCollector()

NO_WAITER = -1


class Simulation:
    """The driver of a simulated cluster.

    `run_program` runs a program that an engine requested, and returns its outcome.
    `look` is called with each event of a program, and with the program's worker.
    """

    def __init__(
        self,
        settings: SimSettings,
        run_program: RunProgram,
        look: Callable[[Event, Worker], None] = lambda event, worker: None,
    ) -> None:
        self._env = env = Environment(settings, self)
        self.workers = env.workers
        self.seed = settings.seed
        self.incarnations = env.incarnations
        self.port = ProgramPort(env.hosts[settings.main])
        self._run_program = run_program
        self._look = look
        self._timeline = env.timeline
        self._results = env.waiters.results
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

    # ------------------------------------------------------------ what the cluster uses

    @property
    def current(self) -> ProgramPort:
        return self._programs.current

    @property
    def now_ns(self) -> int:
        return self._timeline.now_ns

    @property
    def trace(self) -> Trace | None:
        """The trace so far, with what the main program has sent."""
        self._timeline.end_action()
        return self._env.recorder.trace

    @property
    def crashed(self) -> bool:
        return bool(self._outages.crashed)

    def info(self) -> dict[str, dict[str, Any]]:
        """Return each worker's counters. A crashed worker's messages still count."""
        self._timeline.end_action()
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
        return self._jobs.functions

    def settle(self) -> None:
        """Run all remaining events, so that all acknowledgements have arrived."""
        _ = self.current  # Raises on another thread.
        self._loop(NO_WAITER, self._results)

    def graph(self, context: ContextId) -> dict[str, GraphSnapshot]:
        engines = {worker: host.engine for worker, host in self._env.hosts.items()}
        graphs = {w: engine and engine.graph(context) for w, engine in engines.items()}
        return {worker: graph for worker, graph in graphs.items() if graph is not None}

    def close(self) -> None:
        if self._closed:
            return
        if self._programs.hub is not None:
            raise JdagError("only the main program may close the cluster")
        self._timeline.end_action()
        hosts = self._env.hosts.values()
        for host in hosts:
            host.alive = False
        self._programs.kill(None)
        self._closed = True
        self._collect_again()
        closed: Any = _Closed()
        for host in hosts:
            host.clear()
            host.driver = closed  # This and the calls below break reference cycles.
        self._env.driver = closed
        del self._run_program
        self._env.waiters.clear()
        self._jobs.forget(None)
        self._counted = self.info()
        self._timeline.clear()
        self._outages.transport.clear()
        named = any([model.functions for model in self._jobs.models.values()])
        if named and self.functions and not sys.exception():  # Errors end a run early.
            check_costs(self._jobs.models, self.functions)

    # ------------------------------------------------ calls of programs: `ProgramPort`

    def tell(
        self, port: ProgramPort, event: Event, values: Sequence[tuple[Key, Any]]
    ) -> None:
        self._look(event, port.worker)
        if self._jobs.calls_take_time and event.__class__ is Issued:
            self._spend(port, self._jobs.models[named(port.worker)].call_ns)
        if port.host.alive:  # Otherwise the program will be ended soon.
            port.host.tell(port, event, values)

    def _spend(self, port: ProgramPort, ns: int) -> None:
        if ns and port.host.alive:
            waiter = port.waiter()
            self._timeline.push(self.now_ns + ns, EVENT, (self._spent, port, waiter))
            self.wait(port, waiter)
            del self._results[waiter]

    def _spent(self, port: ProgramPort, waiter: int) -> None:
        self._results[waiter] = None, port.cause
        self.wake(port.host, waiter)

    def wait(self, port: ProgramPort, waiter: int) -> tuple[Any, int]:
        """Block until `waiter` has a result. Return the result and its trace record."""
        if waiter not in self._results:
            if not port.host.alive:
                raise GreenletExit
            if self._programs.hub is not None:
                self._programs.park(waiter)
            else:
                self._loop(waiter, self._results)
        return self._results[waiter]

    def until(self, holds: Callable[[], bool], within_ns: int) -> bool:
        due_ns = self.now_ns + within_ns
        entry = self._timeline.push(due_ns, EVENT, (_pass, self.port.host))
        if not holds():
            self._loop(NO_WAITER, _When(lambda: holds() or self.now_ns >= due_ns))
        self._timeline.cancel(entry)
        return holds()

    def rejoined(self, worker: str, former: int, within_ns: int) -> bool:
        return self.until(lambda: self.incarnations.get(worker, 0) > former, within_ns)

    def _loop(self, waiter: int, results: Container[int]) -> None:
        assert self._programs.hub is None, waiter
        self._programs.hub = getcurrent()
        try:
            self._timeline.run(self._env.chooser, results, waiter)
        finally:
            self._programs.hub = None
        if waiter not in results and waiter != NO_WAITER:
            waits = self._env.waiters.waiting(self._programs.frame)
            why = stuck_wait_text(waits, self._jobs.stalled)
            raise JdagError(f"at {self.now_ns} ns no event is left, and {why}")

    # ------------------------------------------------------------- effects of engines

    def spawn(self, host: WorkerRuntime, spawn: Spawn, cause: int) -> None:
        self._soon((self._spawn, host, spawn, cause))

    def alarm(self, host: WorkerRuntime, alarm: Alarm, cause: int) -> Cancel:
        action = (self._alarm, host, alarm.event, cause)
        entry = self._timeline.push(self.now_ns + alarm.after_ns, EVENT, action)
        return partial(self._timeline.cancel, entry)

    def wake(self, host: WorkerRuntime, waiter: int) -> None:
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
        self._timeline.programs.append(spawn.function)
        passed = run_and_report(self._run_program, port, spawn, GreenletExit)
        if passed is not None:
            raise passed  # Interrupts, which end the main program.


class _When:
    def __init__(self, holds: Callable[[], bool]) -> None:
        self._holds = holds

    def __contains__(self, waiter: object) -> bool:
        return self._holds()


def _pass(host: WorkerRuntime) -> None: ...


class _Closed:
    """The driver of a closed cluster's workers. It refuses all calls of programs."""

    def tell(self, *arguments: object) -> None:
        raise JdagError("this cluster is closed; make another one")

    wait = tell
