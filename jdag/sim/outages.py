"""Workers that stop, come back or are out of reach, and when others learn of it.

Inputs:  `plan()` when the run begins; `look(records)` with each record of the trace, if
         a crash waits for one; `gave_up(end)` of links.
Outputs: the actions `crash`, `bury`, `restart` and `lost` to the timeline; Lost and
         Joined to engines.

Invariants: a worker learns of each loss once. A crashed worker is cleared away by the
next event, since one of its own programs may be running when it crashes. A worker that
joins again is another host, named by its incarnation, and all learn of it at once.
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
from jdag.sim.programs import Programs
from jdag.sim.timeline import CRASH, EVENT
from jdag.sim.transport import LinkEnd, SimTransport, gives_up_ns, link_settings
from jdag.sim.untimed import PossibleStep, UntimedFault, UntimedTimeline

CRASHED, OUT_OF_REACH = "it crashed", "it is out of reach"


class Outages:
    """All losses of one run; `crashed` are the incarnations that have crashed."""

    def __init__(self, env: Environment, jobs: SimJobs, programs: Programs) -> None:
        self._env = env
        self._jobs = jobs
        self._programs = programs
        self.transport = SimTransport(env, self.gave_up)
        self.crashed: list[Worker] = []

    def plan(self) -> None:
        """Schedule crashes and losses by partition."""
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
        """The crashes, and the returns of crashed workers, that may happen now."""
        env = self._env
        found: list[UntimedFault] = []
        for name in env.workers:
            host = env.newest(name)
            if not host.alive:
                rejoin = (self.restart, host, NO_CAUSE)
                found.append((PossibleStep("rejoin", name), rejoin))
            elif name != env.settings.main:
                crash = Crash(name, detect_ns=0, at_ns=env.timeline.now_ns)
                found.append((PossibleStep("crash", name), (self.crash, crash)))
        return found

    def _part(self, at_ns: int, worker: str, peer: str) -> None:
        host, lost = self._env.newest(worker), self._env.newest(peer).worker
        action = (self.lost, host, lost, NO_CAUSE, OUT_OF_REACH)
        self._env.timeline.push(at_ns, EVENT, action)

    def _partings(self, since_ns: int) -> Iterator[tuple[int, str, str]]:
        """Yield (time, worker, peer) when a worker notices a peer out of reach.

        A partition that lasts twice as long as a link's retries separates every pair
        across it, as keepalives would. Otherwise two workers with no messages for each
        other might wait for ever, each for a third. `since_ns` bounds the start.
        """
        settings = self._env.settings
        for fault in settings.faults:
            if not isinstance(fault, Partition):
                continue
            network = settings.all_links
            for here, there in permutations(fault.groups, 2):
                for worker, peer in product(here, there):
                    models = network.model(worker, peer), network.model(peer, worker)
                    link = settings.link or link_settings(*models)
                    at_ns = max(fault.from_ns, since_ns) + 2 * gives_up_ns(link)
                    if fault.until_ns is None or at_ns < fault.until_ns:
                        yield at_ns, worker, peer

    def look(self, records: int) -> None:
        """Begin the crashes due at this number of trace records."""
        for crash in self._env.faults.crashes:
            if crash.at_index == records:
                self.crash(crash)

    def crash(self, crash: Crash) -> None:
        """Carry out a crash, unless its worker is dead already."""
        env = self._env
        host, now_ns = env.newest(crash.worker), env.timeline.now_ns
        if not host.alive:
            return
        host.alive = False
        self.crashed.append(host.worker)
        why = "at_ns" if crash.at_index is None else "at_index"
        record = env.recorder.note("crash", host.worker, (why,), ())
        env.timeline.push(now_ns, CRASH, (self.bury, host))
        for other in env.hosts.values():
            if other.alive:
                action = (self.lost, other, host.worker, record, CRASHED)
                env.timeline.push(now_ns + crash.detect_ns, EVENT, action)
        if crash.restart_ns is not None:
            at_ns = now_ns + crash.restart_ns
            env.timeline.push(at_ns, CRASH, (self.restart, host, record))

    def bury(self, host: WorkerRuntime) -> None:
        """Discard the state of a crashed worker."""
        self._programs.kill(host.worker)
        host.clear()
        self._jobs.forget(host.worker)
        if isinstance(self._env.timeline, UntimedTimeline):
            self._env.timeline.bury(host.worker)

    def restart(self, former: WorkerRuntime, crashed: int) -> None:
        """Let a crashed worker join again."""
        self.bury(former)  # At equal times `bury` and `restart` come in any order.
        env, name = self._env, named(former.worker)
        host = env.restart(name)
        detail = (env.incarnations[name],)
        causes = () if crashed == NO_CAUSE else (crashed,)
        record = env.recorder.note("restart", host.worker, detail, causes)
        for other in env.workers:
            if other != name:
                self._meet(host, env.newest(other), record)
                self._meet(env.newest(other), host, record)
        for parting in self._partings(env.timeline.now_ns):
            if name in parting[1:]:
                self._part(*parting)

    def _meet(self, host: WorkerRuntime, peer: WorkerRuntime, record: int) -> None:
        """Tell a worker the current incarnation of a peer, and whether it is alive."""
        name, incarnation = named(peer.worker), incarnation_of(peer.worker)
        for former in range(incarnation):
            self.lost(host, incarnated(name, former), record, CRASHED)
        if incarnation and host.alive:
            host.handle(Joined(name, incarnation), (record,))
        if not peer.alive:
            self.lost(host, peer.worker, record, CRASHED)

    def gave_up(self, end: LinkEnd) -> None:
        """A worker has given up a peer; the peer is notified after `detect_ns`."""
        env = self._env
        at_ns = env.timeline.now_ns + env.settings.detect_ns
        peer = env.hosts[end.peer]
        action = (self.lost, peer, end.worker, end.record, OUT_OF_REACH)
        env.timeline.push(at_ns, EVENT, action)
        self.lost(env.hosts[end.worker], end.peer, end.record, OUT_OF_REACH)

    def lost(self, host: WorkerRuntime, peer: Worker, record: int, why: str) -> None:
        """Notify a worker that a peer is lost."""
        if not host.alive or peer in host.lost:
            return
        self._env.lost[host.worker][peer] = why
        self.transport.close(host.worker, peer)
        host.handle(Lost(peer, why), () if record < 0 else (record,))
