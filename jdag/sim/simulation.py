"""The virtual-time driver: what engines ask for, carried out in one process.

One engine, machine and device a worker; links between them; one timeline. Programs tell
engines events through their `Port` and block there; user code takes no virtual time. Of
an engine's effects, in their order: a message leaves at once (`jdag.sim.carriage`); a
job waits for its device (`jdag.sim.jobs`) and is computed when it starts, though its
engine is told only when its time is over; what a program waits for wakes it
(`jdag.sim.programs`) as an event of its own, so that no user code runs in between.

What is to happen is on the timeline as a tuple: its kind, the `Host` or `End` where it
happens, and what else it takes. The method of that name carries it out.

Invariants: a run is a function of its arguments and the seed; a worker that crashed is
told nothing any more, and its engine, values, jobs and programs are gone before
anything else happens (`jdag.sim.outages`).
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Any

from greenlet import GreenletExit

from jdag.compute.digest import fingerprint
from jdag.engine.drawing import Drawing
from jdag.engine.functions import name_of
from jdag.engine.vocabulary import (
    Alarm,
    Arrived,
    Computed,
    ContextId,
    Event,
    Job,
    Key,
    Message,
    Send,
    Spawn,
    landing,
    named,
)
from jdag.errors import JdagError
from jdag.runtime.host import Host as Worker
from jdag.runtime.host import Port, RunProgram, run_program
from jdag.runtime.trace import Trace
from jdag.runtime.waiters import Cancel, Waiters
from jdag.sim import plan
from jdag.sim.carriage import EVENT, Carriage, End, Parcel
from jdag.sim.chooser import checked
from jdag.sim.chooser import policy as policy_named
from jdag.sim.devices import Device, Devices, Task, models
from jdag.sim.faults import Fault, Faults
from jdag.sim.host import Host, made_hosts
from jdag.sim.jobs import Jobs
from jdag.sim.network import LinkModel, Network
from jdag.sim.notes import PLACE, event_detail, note_nothing
from jdag.sim.outages import OUT_OF_REACH, Outages
from jdag.sim.programs import Programs
from jdag.sim.timeline import Timeline
from jdag.wire.link import FRAME_BYTES, Frame, LinkSettings
from jdag.wire.messages import size

DETECT_NS = 1_000_000
EVENTS_MAX = 100_000_000

# A graph is many small tuples that live long. Python looks for cycles whenever 700 more
# objects are alive, which took half of the time of a long run; there are few cycles.
GARBAGE_MIN = 50_000

_KINDS = ("frame", "timer", "begin", "finish", "alarm", "wake", "spawn")
_OUTAGES = ("lost", "crash", "bury", "restart")
_NOBODY = -1  # No waiter has this number.


class Simulation:
    """A cluster in virtual time.

    Args:
        workers: their names, in the order that numbers them.
        seed: makes the one source of chance.
        home: the worker where the main program runs, which is whoever uses `port`.
        network: what joins the workers; None is free and immediate.
        faults: what goes wrong; home cannot crash.
        devices: what jobs cost, for all or by worker; None is nothing.
        values: "real" or "abstract".
        policy: the name of the order in which ready jobs run.
        run_program: runs a program that an engine asked for; it says how it ended.
        link: when links wait, repeat and give up; None suits each pair's latencies.
        detect_ns: so much later a worker hears that a peer has given it up.
        events_max: bounds what may happen in the whole run.
        trace: whether a trace is kept.

    Raises:
        ScenarioError: names a setting that is unusable, its value and what is allowed.
    """

    def __init__(  # noqa: PLR0913 - each is an option of its own, by keyword.
        self,
        workers: Sequence[str],
        *,
        seed: int,
        home: str,
        run_program: RunProgram,
        network: Network | LinkModel | None = None,
        faults: Sequence[Fault] = (),
        devices: Devices = None,
        values: str = "real",
        policy: str = "path",
        link: LinkSettings | None = None,
        detect_ns: int = DETECT_NS,
        events_max: int = EVENTS_MAX,
        trace: bool = True,
    ) -> None:
        self.workers = plan.checked_workers(workers, home, seed)
        faults = plan.checked_faults(faults)
        plan.check_run(link, events_max, trace)
        plan.check_crashes(faults, home, trace)
        self.seed = seed
        self.trace = Trace() if trace else None
        self._timeline = Timeline(events_max)
        self._faults = Faults(faults, self.workers)
        self._add = (
            note_nothing if self.trace is None else self.trace.at(self._timeline)
        )
        by_index = any(crash.at_index is not None for crash in self._faults.crashes)
        self._note = self._note_and_look if by_index else self._add
        self._detect_ns = plan.checked_ns("detect_ns", detect_ns)
        self._chooser = policy_named(policy)
        self._jobs = Jobs(self._timeline, self._note)
        self._programs = Programs()
        self._run_program = run_program
        self._carriage = Carriage(
            self.workers,
            network=plan.network_of(network),
            faults=self._faults,
            settings=link,
            timeline=self._timeline,
            rng=Random(seed),
            note=self._note,
        )
        self._waiters = Waiters()
        hosts_of = partial(made_hosts, driver=self, waiters=self._waiters)
        kinds = models(devices, self.workers)
        self._hosts = hosts_of(kinds, values, self._chooser, self._faults)
        self._closed = False
        self._counted: dict[str, dict[str, int | bool]] | None = None
        self.port = Port(self._hosts[home])
        self._happens: dict[str, Callable[..., None]] = {
            kind: getattr(self, f"_{kind}") for kind in _KINDS
        }
        self._outages = Outages(
            self._hosts,
            faults=self._faults,
            partings=partial(plan.partings, faults, plan.network_of(network), link),
            timeline=self._timeline,
            carriage=self._carriage,
            programs=self._programs,
            note=self._note,
        )
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
        ends: dict[str, list[End]] = {name: [] for name in self.workers}
        for worker in self._hosts:
            ends[named(worker)] += self._carriage.ends(worker)
        return {
            name: self._outages.newest(name).info(ends[name]) for name in self.workers
        }

    @property
    def incarnations(self) -> dict[str, int]:
        """Of the workers that have joined anew, how often they have."""
        return self._outages.incarnations

    def settle(self) -> None:
        """Let everything happen that is still to happen, such as acknowledgements."""
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
        self._carriage.clear(self._timeline)

    # -------------------------------------------------------- what programs do: `Port`

    def tell(self, port: Port, event: Event, values: Sequence[tuple[Key, Any]]) -> None:
        """Have an engine handle an event of a program; see `Port.tell`."""
        self._check_open()
        host = port.host
        if not host.alive:
            return  # A program that has not yet noticed that its worker crashed.
        host.tell(port, event, values, self._note_event(host, event, port.cause))

    def _note_event(self, host: Worker, event: Event, cause: int) -> int:
        causes = () if cause < 0 else (cause,)
        return self._note("issue", host.worker, event_detail(event), causes)

    def wait(self, port: Port, waiter: int) -> tuple[Any, int]:
        """Block whoever calls this; return what the waiter was given and its record."""
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
        return self._timeline.take(tied[checked(self._chooser, index, len(tied))])

    # ----------------------------------------------------------------- what engines ask

    def transmit(
        self,
        host: Worker,
        send: Send,
        message: Message,
        values: tuple[tuple[Key, ...], tuple[Any, ...]],
        cause: int,
    ) -> None:
        """Send a message; see `jdag.runtime.host.Driver`."""
        keys, arrays = values
        prints: tuple[int, ...] = ()
        causes: tuple[int, ...] = (cause,)
        end = self._carriage.end(host.worker, send.to)
        if keys:
            if self.trace is not None:
                prints = tuple(map(fingerprint, arrays))
            data = [host.made.get(key, cause) for key in keys]
            causes = tuple(dict.fromkeys((cause, *data)))
        payload_bytes, wire_bytes = size(message, arrays)
        end.payload_bytes += payload_bytes
        end.zero_bytes += sum([zero.nbytes for zero in send.zeros])
        kind = message.__class__
        said = (kind.__name__, *PLACE[kind](message))
        sizes = (payload_bytes, wire_bytes + FRAME_BYTES, prints)
        self._carriage.send(end, message, arrays, said, sizes, causes)

    def compute(self, host: Worker, job: Job, cause: int) -> None:
        """Have a device compute a job."""
        self._jobs.add(self._hosts[host.worker], job, cause)

    def spawn(self, host: Worker, spawn: Spawn, cause: int) -> None:
        """Start a program, as an event of its own."""
        detail = (*PLACE[Spawn](spawn), name_of(spawn.function))
        spawned = self._note("spawn", host.worker, detail, (cause,))
        self._soon(("spawn", host, spawn, spawned))

    def alarm(self, host: Worker, alarm: Alarm, cause: int) -> Cancel:
        """Have an engine handle the event of an alarm when it is due."""
        action = ("alarm", host, alarm.event, cause)
        entry = self._timeline.push(self.now_ns + alarm.after_ns, EVENT, action)
        return partial(self._timeline.cancel, entry)

    def resumed(self, host: Worker, waiter: int, what: str, cause: int) -> int:
        """Note that what a program waits for is here."""
        return self._note("resume", host.worker, (waiter, what), (cause,))

    def wake(self, host: Worker, waiter: int) -> None:
        """Let a program go on, as an event of its own."""
        if self._programs.is_parked(waiter):
            self._soon(("wake", host, waiter))

    def _soon(self, action: tuple[Any, ...]) -> None:
        self._timeline.push(self._timeline.now_ns, EVENT, action)

    # --------------------------------------------------------------------- what happens

    def _frame(self, end: End, frame: Frame, sent: int) -> None:
        """A frame comes out at `end`."""
        host = self._hosts[end.worker]
        if not host.alive:
            return
        carriage = self._carriage
        for parcel in carriage.receive(end, frame, sent):
            self._deliver(host, end.peer, parcel, sent)
        carriage.watch(end)  # After the answers: an acknowledgement rides on them.

    def _deliver(self, host: Host, sender: str, parcel: Parcel, record: int) -> None:
        if not host.alive:
            return  # It crashed over the parcel before.
        message, values, said, _, sent = parcel
        causes = (sent,) if sent == record else (sent, record)
        record = self._note("deliver", host.worker, (sender, *said), causes)
        if values:
            host.hold(tuple(zip(landing(message), values, strict=True)), record)
        if host.alive:
            host.handle(Arrived(sender, message), record)

    def _timer(self, end: End) -> None:
        """The timer of an end of a link is due."""
        host = self._hosts[end.worker]
        if host.alive and self._carriage.tick(end):
            peer = self._hosts[end.peer]
            at_ns = self.now_ns + self._detect_ns
            action = ("lost", peer, end.worker, end.record, OUT_OF_REACH)
            self._timeline.push(at_ns, EVENT, action)
            self._outages.lost(host, end.peer, end.record, OUT_OF_REACH)

    def _begin(self, host: Host, device: Device) -> None:
        """A device may choose its next job, which is computed at once."""
        task = self._jobs.begin(host, device)
        if task is not None:
            self._finish(host, task)

    def _finish(self, host: Host, task: Task) -> None:
        """A job's time is over."""
        if not host.alive:
            return
        record = self._jobs.finish(host, task)
        if host.alive:
            host.handle(Computed(task.job.id, task.failure), record)
            self._jobs.call(host, task.device)

    def _alarm(self, host: Host, event: Event, record: int) -> None:
        """The time that an engine set itself is over."""
        if host.alive:
            host.handle(event, self._note_event(host, event, record))

    def _wake(self, host: Host, waiter: int) -> None:
        """A program goes on: what it waited for is here."""
        assert host.alive or not self._programs.is_parked(waiter), waiter
        self._programs.wake(waiter)

    def _spawn(self, host: Host, spawn: Spawn, record: int) -> None:
        """A program begins."""
        if host.alive:
            port = Port(host, record)
            self._programs.start(port, partial(self._program, port, spawn))

    # ------------------------------------------------------------------------- records

    def _note_and_look(
        self, kind: str, worker: str, detail: tuple[Any, ...], causes: tuple[int, ...]
    ) -> int:
        """Note a record, and see whether a crash waits for there being so many."""
        record = self._add(kind, worker, detail, causes)
        self._outages.look(record + 1)
        return record
