"""The driver in virtual time: effects of all engines are carried out in one process.

One engine, machine and device a worker; links between them; one timeline. Programs tell
engines events through their `Port` and block there; user code takes no virtual time. Of
an engine's effects, in their order: a message leaves at once (`jdag.sim.transport`); a
job waits for its device (`jdag.sim.devices`) and is computed when it starts, though its
engine is told only when its time is over; what a program waits for wakes it
(`jdag.sim.programs`) as an event of its own, so that no user code runs in between.

What is to happen is on the timeline as a tuple: its kind, the `SimHost` or `LinkEnd`
where it happens, and what else it takes. `_happens` names what carries it out.

All choices are the chooser's (`jdag.runtime.chooser`); all that happens goes to the
recorder (`jdag.runtime.recorder`).

Invariants: a run is a function of its settings, chooser and programs; a worker that
crashed receives nothing any more, and its engine, values, jobs and programs are gone
before anything else happens (`jdag.sim.outages`).
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from greenlet import GreenletExit

from jdag.compute.machine import job_name
from jdag.engine.drawing import Drawing
from jdag.engine.protocol import (
    Alarm,
    Computed,
    ContextId,
    Event,
    Job,
    Key,
    Spawn,
    named,
)
from jdag.errors import JdagError
from jdag.runtime.chooser import Chooser, checked
from jdag.runtime.failures import failure_of
from jdag.runtime.host import Host as Worker
from jdag.runtime.host import Port, RunProgram, run_program
from jdag.runtime.recorder import Recorder
from jdag.runtime.trace import Trace
from jdag.runtime.waiters import Cancel, Waiters
from jdag.sim.devices import Device, Task
from jdag.sim.faults import Faults
from jdag.sim.host import SimHost, made_hosts
from jdag.sim.outages import OUT_OF_REACH, Outages
from jdag.sim.programs import Programs
from jdag.sim.settings import SimSettings
from jdag.sim.timeline import Timeline
from jdag.sim.transport import BEGIN, EVENT, LinkEnd, SimTransport

# A graph is many small tuples that live long. Python looks for cycles whenever 700 more
# objects are alive, which took half of the time of a long run; there are few cycles.
GARBAGE_MIN = 50_000

_KINDS = ("timer", "begin", "finish", "alarm", "wake", "spawn")
_OUTAGES = ("lost", "crash", "bury", "restart")
_NOBODY = -1  # No waiter has this number.


class Simulation:
    """A cluster in virtual time.

    Args:
        settings: what the run is a function of.
        run_program: runs a program that an engine asked for; it says how it ended.

    Raises:
        ScenarioError: names a setting that is unusable, its value and what is allowed.
    """

    def __init__(self, settings: SimSettings, run_program: RunProgram) -> None:
        self.workers = tuple(settings.workers)
        self.seed = settings.seed
        self.trace = Trace() if settings.trace else None
        self._detect_ns = settings.detect_ns
        self._run_program = run_program
        chooser = settings.chooser or Chooser(settings.seed, settings.policy)
        self._chooser = chooser
        self._timeline = timeline = Timeline(settings.events_max)
        self._recorder = recorder = Recorder(self.trace, timeline)
        self._programs = Programs()
        self._waiters = Waiters()
        faults = Faults(settings.faults, self.workers)
        self._hosts = made_hosts(
            settings,
            chooser,
            faults,
            driver=self,
            waiters=self._waiters,
            recorder=recorder,
        )
        self._transport = SimTransport(
            self._hosts,
            settings.all_links,
            settings.link,
            faults=faults,
            timeline=timeline,
            chooser=chooser,
            recorder=recorder,
        )
        self.transmit = self._transport.send
        self._outages = Outages(
            self._hosts,
            settings,
            faults=faults,
            timeline=timeline,
            transport=self._transport,
            programs=self._programs,
            recorder=recorder,
        )
        self._closed = False
        self._counted: dict[str, dict[str, int | bool]] | None = None
        self.port = Port(self._hosts[settings.home])
        self._happens: dict[str, Callable[..., None]] = {
            kind: getattr(self, f"_{kind}") for kind in _KINDS
        }
        self._happens["frame"] = self._transport.frame
        for kind in _OUTAGES:
            self._happens[kind] = getattr(self._outages, kind)
        self._outages.plan()

    # ------------------------------------------------------------------ what users see

    @property
    def current(self) -> Port:
        """The port of the program that runs right now."""
        return self._programs.current or self.port

    @property
    def now_ns(self) -> int:
        """The virtual time."""
        return self._timeline.now_ns

    def info(self) -> dict[str, dict[str, int | bool]]:
        """For each worker, what it holds and what it has sent and computed so far."""
        if self._counted is not None:
            return self._counted
        ends: dict[str, list[LinkEnd]] = {name: [] for name in self.workers}
        for worker in self._hosts:
            ends[named(worker)] += self._transport.ends(worker)
        return {
            name: self._outages.newest(name).info(ends[name]) for name in self.workers
        }

    @property
    def incarnations(self) -> dict[str, int]:
        """Of the workers that have joined anew, how often they have."""
        return self._outages.incarnations

    def settle(self) -> None:
        """Run until nothing is left to happen, such as acknowledgements."""
        self._loop(_NOBODY)

    def graph(self, context: ContextId) -> dict[str, Drawing]:
        """The graph of a context as it is now: what each worker has of it."""
        living = {w: h.engine for w, h in self._hosts.items() if h.engine is not None}
        drawn = {w: engine.graph(context) for w, engine in living.items()}
        return {w: drawing for w, drawing in drawn.items() if drawing is not None}

    def close(self) -> None:
        """End all programs and let go of everything; what was counted stays.

        Raises:
            JdagError: asked by what runs on a worker.
        """
        if self._closed:
            return
        self._programs.check_outside()
        for host in self._hosts.values():
            host.alive = False
        self._programs.kill(None)
        self._closed = True
        for host in self._hosts.values():
            host.clear()
        self._waiters.clear()
        self._counted = self.info()
        now_ns, self._timeline = self.now_ns, Timeline(0)
        self._timeline.now_ns = now_ns
        self._transport.clear(self._timeline)

    # -------------------------------------------------------- what programs do: `Port`

    def tell(self, port: Port, event: Event, values: Sequence[tuple[Key, Any]]) -> None:
        """Have an engine handle an event of a program; see `Port.tell`."""
        self._check_open()
        if port.host.alive:  # Else its program has not noticed yet that it crashed.
            port.host.tell(port, event, values)

    def wait(self, port: Port, waiter: int) -> tuple[Any, int]:
        """Block the caller; return what the waiter was given, and its record."""
        given = self._waiters.given
        if waiter not in given:
            self._check_open()
            if not port.host.alive:
                raise GreenletExit
            if self._programs.looping:
                self._programs.park(waiter)
            else:
                self._loop(waiter)
        return given[waiter]

    def _check_open(self) -> None:
        if self._closed:
            raise JdagError("this cluster is closed; make another one")
        self._programs.check_not_hub()

    def _program(self, port: Port, spawn: Spawn) -> None:
        """What a program's greenlet runs."""
        self._timeline.programs.append(spawn.function)
        passed = run_program(self._run_program, port, spawn, GreenletExit)
        if passed is not None:
            raise passed  # What `run_program` lets pass is for the main program.

    # ------------------------------------------------------------------------ the loop

    def _loop(self, waiter: int) -> None:
        """Carry out what happens next until `waiter` is given something."""
        thresholds = gc.get_threshold()
        given, programs = self._waiters.given, self._programs
        take = self._picked if self._chooser.picks_events else self._timeline.pop
        happens = self._happens
        programs.enter()
        gc.set_threshold(GARBAGE_MIN, *thresholds[1:])
        try:
            while waiter not in given:  # Bounded by the timeline's events_max.
                action = take()
                if action is None:
                    if waiter == _NOBODY:
                        return
                    raise JdagError(
                        f"at {self.now_ns} ns nothing is left to happen, and there wait"
                        f" {self._waiters}; no engine will ever resume them"
                    )
                happens[action[0]](*action[1:])
        finally:
            gc.set_threshold(*thresholds)
            programs.leave()

    def _picked(self) -> Any:
        """The action that the chooser wants, of those that could be next."""
        tied = self._timeline.tied()
        if not tied:
            return None
        seen = tuple((entry[-1][0], entry[-1][1].worker) for entry in tied)
        index = self._chooser.pick_event(seen)
        return self._timeline.take(tied[checked(index, len(tied))])

    # ----------------------------------------------------------------- what engines ask

    def compute(self, host: Worker, job: Job, cause: int) -> None:
        """Have a device compute a job."""
        here = self._hosts[host.worker]
        device = here.on(here.machine.device_of(job))
        device.add(job, cause, self._timeline.now_ns)
        self._call(here, device)

    def _call(self, host: SimHost, device: Device) -> None:
        """Let an idle device choose, once all that happens now has happened."""
        if device.wanting:
            device.called = True
            self._timeline.push(self._timeline.now_ns, BEGIN, ("begin", host, device))

    def spawn(self, host: Worker, spawn: Spawn, cause: int) -> None:
        """Start a program, as an event of its own."""
        self._soon(("spawn", host, spawn, cause))

    def alarm(self, host: Worker, alarm: Alarm, cause: int) -> Cancel:
        """Have an engine handle the event of an alarm when it is due."""
        action = ("alarm", host, alarm.event, cause)
        entry = self._timeline.push(self.now_ns + alarm.after_ns, EVENT, action)
        return partial(self._timeline.cancel, entry)

    def wake(self, host: Worker, waiter: int) -> None:
        """Let a program go on, as an event of its own."""
        if self._programs.is_parked(waiter):
            self._soon(("wake", host, waiter))

    def _soon(self, action: tuple[Any, ...]) -> None:
        self._timeline.push(self._timeline.now_ns, EVENT, action)

    # --------------------------------------------------------------------- what happens

    def _timer(self, end: LinkEnd) -> None:
        """The timer of an end of a link is due."""
        host = self._hosts[end.worker]
        if host.alive and self._transport.tick(end):
            peer = self._hosts[end.peer]
            at_ns = self.now_ns + self._detect_ns
            action = ("lost", peer, end.worker, end.record, OUT_OF_REACH)
            self._timeline.push(at_ns, EVENT, action)
            self._outages.lost(host, end.peer, end.record, OUT_OF_REACH)

    def _begin(self, host: SimHost, device: Device) -> None:
        """A device may choose its next job, which is computed at once.

        The values that it makes are held from now on, but nobody knows until it ends.
        """
        device.called = False
        task = device.begin(self._timeline.now_ns) if host.alive else None
        if task is None:
            return
        asked, behind = task.asked, task.behind
        self._recorder.started(
            host.worker, task.job, task.cost_ns, asked=asked, behind=behind
        )
        if not host.alive:
            return
        self._compute(host, task)
        if task.cost_ns:
            self._finish_later(host, task)
        else:
            self._finish(host, task)

    def _compute(self, host: SimHost, task: Task) -> None:
        job = task.job
        try:
            error: BaseException | None = host.machine.run(job)
        except BaseException as interrupt:
            # It is main's to know, but who waits for this job must not wait for ever.
            task.failure = failure_of(interrupt, host.worker, job.path, job_name(job))
            self._finish_later(host, task)
            raise
        if error is not None:
            task.failure = failure_of(error, host.worker, job.path, job_name(job))

    def _finish_later(self, host: SimHost, task: Task) -> None:
        at_ns = self._timeline.now_ns + task.cost_ns
        self._timeline.push(at_ns, EVENT, ("finish", host, task))

    def _finish(self, host: SimHost, task: Task) -> None:
        """A job's time is over."""
        if host.alive:
            device = task.device
            device.end()
            device.finish = host.handle(Computed(task.job.id, task.failure))
            if host.alive:
                self._call(host, device)

    def _alarm(self, host: SimHost, event: Event, record: int) -> None:
        """An alarm of an engine is due."""
        if host.alive:
            host.handle(event, (record,))

    def _wake(self, host: SimHost, waiter: int) -> None:
        """A program goes on with what it waited for."""
        assert host.alive or not self._programs.is_parked(waiter), waiter
        self._programs.wake(waiter)

    def _spawn(self, host: SimHost, spawn: Spawn, record: int) -> None:
        """A program begins."""
        if host.alive:
            port = Port(host, record)
            self._programs.start(port, partial(self._program, port, spawn))
