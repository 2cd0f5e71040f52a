"""Crashes, restarts and unreachable peers, of which other workers are notified.

Inputs:  a call of `plan()` at the start of the run; `look(records)` after each trace
         record, if a crash is to happen at a record; `gave_up(end)` from links.
Outputs: the actions `crash`, `bury`, `restart` and `lost` on the timeline; the events
         Lost and Joined for engines.

Invariants: a worker is notified of each loss once. The state of a crashed worker is
discarded by the next event, because one of its own programs may be running when it
crashes. A worker that restarts has a new runtime, named by its incarnation, and all
workers are notified of the restart at the same time.
"""

from collections.abc import Iterator
from itertools import permutations, product

from jdag.engine.protocol import (
    Joined,
    Lost,
    Worker,
    incarnated,
    incarnation_of,
    named,
)
from jdag.runtime.recorder import NO_CAUSE
from jdag.runtime.worker_runtime import WorkerRuntime
from jdag.sim.environment import Environment
from jdag.sim.faults import Crash, Partition
from jdag.sim.jobs import SimJobs
from jdag.sim.link_end import LinkEnd, gives_up_ns, link_settings
from jdag.sim.programs import Programs
from jdag.sim.timeline import CRASH, EVENT
from jdag.sim.transport import SimTransport
from jdag.sim.untimed import PossibleStep, UntimedFault, UntimedTimeline

CRASHED, OUT_OF_REACH = "it crashed", "it is out of reach"


class Outages:
    """All losses of one run. `crashed` has the incarnations that have crashed."""

    def __init__(self, env: Environment, jobs: SimJobs, programs: Programs) -> None:
        self._env = env
        self._jobs = jobs
        self._programs = programs
        self.transport = SimTransport(env, self.gave_up)
        self.crashed: list[Worker] = []

    def plan(self) -> None:
        env = self._env
        for parting in self._partings(0):
            self._part(*parting)
        for crash in env.faults.crashes:
            if crash.at_ns is not None:
                env.timeline.push(crash.at_ns, CRASH, (self.crash, crash))
        if isinstance(env.timeline, UntimedTimeline):
            env.timeline.faults = self._possible
        if any([crash.at_index is not None for crash in env.faults.crashes]):
            env.recorder.watch(self.look)
            self.look(0)

    def _possible(self) -> list[UntimedFault]:
        env = self._env
        faults: list[UntimedFault] = []
        for name in env.workers:
            host = env.newest(name)
            if not host.alive:
                rejoin = (self.restart, host, NO_CAUSE)
                faults.append((PossibleStep("rejoin", name), rejoin))
            elif name != env.settings.main:
                crash = Crash(name, detect_ns=0, at_ns=env.timeline.now_ns)
                faults.append((PossibleStep("crash", name), (self.crash, crash)))
        return faults

    def _part(self, lost_ns: int, worker: str, peer: str) -> None:
        host, lost = self._env.newest(worker), self._env.newest(peer).worker
        action = (self.lost, host, lost, NO_CAUSE, OUT_OF_REACH)
        self._env.timeline.push(lost_ns, EVENT, action)

    def _partings(self, since_ns: int) -> Iterator[tuple[int, str, str]]:
        """Yield (time, worker, peer) for each loss that a partition causes.

        Two workers that exchange no messages would never detect a partition, and might
        wait indefinitely, each for a third worker. So two workers on different sides of
        a partition lose each other once it has lasted twice as long as a link's resends
        may take. A partition that began before `since_ns` counts from `since_ns`.
        """
        settings = self._env.settings
        for fault in settings.faults:
            if not isinstance(fault, Partition):
                continue
            network = settings.all_links
            for group, other_group in permutations(fault.groups, 2):
                for worker, peer in product(group, other_group):
                    models = network.model(worker, peer), network.model(peer, worker)
                    link = settings.link or link_settings(*models)
                    lost_ns = max(fault.from_ns, since_ns) + 2 * gives_up_ns(link)
                    if fault.until_ns is None or lost_ns < fault.until_ns:
                        yield lost_ns, worker, peer

    def look(self, records: int) -> None:
        """Start the crashes that are set to happen at this number of trace records."""
        for crash in self._env.faults.crashes:
            if crash.at_index == records:
                self.crash(crash)

    def crash(self, crash: Crash) -> None:
        env = self._env
        host, now_ns = env.newest(crash.worker), env.timeline.now_ns
        if not host.alive:
            return
        host.alive = False
        self.crashed.append(host.worker)
        trigger = "at_ns" if crash.at_index is None else "at_index"
        record = env.recorder.note("crash", host.worker, (trigger,), ())
        env.timeline.push(now_ns, CRASH, (self.bury, host))
        for peer in env.hosts.values():
            if peer.alive:
                action = (self.lost, peer, host.worker, record, CRASHED)
                env.timeline.push(now_ns + crash.detect_ns, EVENT, action)
        if crash.restart_ns is not None:
            restart_ns = now_ns + crash.restart_ns
            env.timeline.push(restart_ns, CRASH, (self.restart, host, record))

    def bury(self, host: WorkerRuntime) -> None:
        self._programs.kill(host.worker)
        host.clear()
        self._jobs.forget(host.worker)
        if isinstance(self._env.timeline, UntimedTimeline):
            self._env.timeline.bury(host.worker)

    def restart(self, former: WorkerRuntime, crashed: int) -> None:
        self.bury(former)  # The crash's own `bury` may run later at the same time.
        env, name = self._env, named(former.worker)
        host = env.restart(name)
        detail = (env.incarnations[name],)
        causes = () if crashed == NO_CAUSE else (crashed,)
        record = env.recorder.note("restart", host.worker, detail, causes)
        for peer in env.workers:
            if peer != name:
                self._meet(host, env.newest(peer), record)
                self._meet(env.newest(peer), host, record)
        for parting in self._partings(env.timeline.now_ns):
            if name in parting[1:]:
                self._part(*parting)

    def _meet(self, host: WorkerRuntime, peer: WorkerRuntime, record: int) -> None:
        """Notify a worker of a peer's newest incarnation, and of lost incarnations."""
        name, incarnation = named(peer.worker), incarnation_of(peer.worker)
        for former in range(incarnation):
            self.lost(host, incarnated(name, former), record, CRASHED)
        if incarnation and host.alive:
            host.handle(Joined(name, incarnation), (record,))
        if not peer.alive:
            self.lost(host, peer.worker, record, CRASHED)

    def gave_up(self, end: LinkEnd) -> None:
        """Worker and peer lose each other, and the peer notices `detect_ns` later."""
        env = self._env
        notified_ns = env.timeline.now_ns + env.settings.detect_ns
        action = (self.lost, env.hosts[end.peer], end.worker, end.record, OUT_OF_REACH)
        env.timeline.push(notified_ns, EVENT, action)
        self.lost(env.hosts[end.worker], end.peer, end.record, OUT_OF_REACH)

    def lost(self, host: WorkerRuntime, peer: Worker, record: int, why: str) -> None:
        if not host.alive or peer in host.lost:
            return
        self._env.lost[host.worker][peer] = why
        self.transport.close(host.worker, peer)
        host.handle(Lost(peer, why), () if record < 0 else (record,))
