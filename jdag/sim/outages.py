"""Workers that stop, come back or are out of reach, and when others learn of it.

Inputs:  `plan()` when the run begins; `look(records)` with each record of the trace, if
         a crash waits for one; the actions "crash", "bury", "restart" and "lost" when
         they are due.
Outputs: those actions to the timeline; Lost and Joined to engines.

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
from jdag.runtime.recorder import Recorder
from jdag.sim.faults import Crash, Faults, Partition
from jdag.sim.host import SimHost
from jdag.sim.programs import Programs
from jdag.sim.settings import SimSettings
from jdag.sim.timeline import Timeline
from jdag.sim.transport import CRASH, EVENT, SimTransport, gives_up_ns, link_settings

NEVER = -2  # No record has this index; -1 is "none".
CRASHED, OUT_OF_REACH = "it crashed", "it is out of reach"


class Outages:
    """All losses of one run; `hosts` are of all incarnations."""

    __slots__ = (
        *("_crash_index", "_faults", "_programs", "_recorder", "_settings"),
        *("_timeline", "_transport", "hosts", "incarnations"),
    )

    def __init__(
        self,
        hosts: dict[Worker, SimHost],
        settings: SimSettings,
        *,
        faults: Faults,
        timeline: Timeline,
        transport: SimTransport,
        programs: Programs,
        recorder: Recorder,
    ) -> None:
        self.hosts = hosts
        self.incarnations: dict[str, int] = {}
        self._settings = settings
        self._faults = faults
        self._timeline = timeline
        self._transport = transport
        self._programs = programs
        self._recorder = recorder
        self._crash_index = NEVER

    def newest(self, name: str) -> SimHost:
        """The incarnation of a worker that was started last."""
        return self.hosts[incarnated(name, self.incarnations.get(name, 0))]

    def plan(self) -> None:
        """Schedule what is to happen."""
        for parting in self._partings(0):
            self._part(*parting)
        for crash in self._faults.crashes:
            if crash.at_ns is not None:
                self._timeline.push(crash.at_ns, CRASH, ("crash", crash))
        self._crash_index = self._faults.next_index(0, NEVER)
        if self._crash_index != NEVER:
            self._recorder.watch(self.look)
        self.look(0)

    def _part(self, at_ns: int, worker: str, peer: str) -> None:
        lost = self.newest(peer).worker
        action = ("lost", self.newest(worker), lost, -1, OUT_OF_REACH)
        self._timeline.push(at_ns, EVENT, action)

    def _partings(self, since_ns: int) -> Iterator[tuple[int, str, str]]:
        """Yield (time, worker, peer): the worker will notice a peer out of reach.

        Of those who try since a time. A partition that lasts twice as long as a link
        tries parts each pair across it, as keepalives would: two that have nothing to
        say might else wait for ever, each for what the other waits for from a third.
        """
        network = self._settings.all_links
        for fault in self._settings.faults:
            if not isinstance(fault, Partition):
                continue
            for here, there in permutations(fault.groups, 2):
                for worker, peer in product(here, there):
                    models = network.model(worker, peer), network.model(peer, worker)
                    settings = self._settings.link or link_settings(*models)
                    from_ns = max(fault.from_ns, since_ns)
                    at_ns = from_ns + 2 * gives_up_ns(settings)
                    if fault.until_ns is None or at_ns < fault.until_ns:
                        yield at_ns, worker, peer

    def look(self, records: int) -> None:
        """Begin a crash that waits for the trace to have so many records."""
        if records == self._crash_index:
            self._crash_index = self._faults.next_index(records + 1, NEVER)
            for crash in self._faults.crash_at_index(records):
                self.crash(crash)

    def crash(self, crash: Crash) -> None:
        """A crash is due: its worker is dead from here on, if it was not already."""
        host, timeline = self.newest(crash.worker), self._timeline
        if not host.alive:
            return
        host.alive = False
        host.crashed = True
        why = "at_ns" if crash.at_index is None else "at_index"
        record = self._recorder.note("crash", host.worker, (why,), ())
        timeline.push(timeline.now_ns, CRASH, ("bury", host))
        for other in self.hosts.values():
            if other.alive:
                action = ("lost", other, host.worker, record, CRASHED)
                timeline.push(timeline.now_ns + crash.detect_ns, EVENT, action)
        if crash.restart_ns is not None:
            at_ns = timeline.now_ns + crash.restart_ns
            timeline.push(at_ns, CRASH, ("restart", host, record))

    def bury(self, host: SimHost) -> None:
        """Clear away what a crashed worker held."""
        self._programs.kill(host.worker)
        host.clear()

    def restart(self, former: SimHost, crashed: int) -> None:
        """A worker that crashed joins anew."""
        self.bury(former)  # At the same time either may come first.
        names = self._settings.workers
        host = former.again(names)
        name = named(host.worker)
        self.incarnations[name] = incarnation = incarnation_of(host.worker)
        self.hosts[host.worker] = host
        self._transport.joined(host.worker)
        detail, causes = (incarnation,), (crashed,)
        record = self._recorder.note("restart", host.worker, detail, causes)
        for other in names:
            if other != name:
                self._meet(host, self.newest(other), record)
                self._meet(self.newest(other), host, record)
        for parting in self._partings(self._timeline.now_ns):
            if name in parting[1:]:
                self._part(*parting)

    def _meet(self, host: SimHost, peer: SimHost, record: int) -> None:
        """Tell a worker the current incarnation of a peer, and whether it is alive."""
        name, incarnation = named(peer.worker), incarnation_of(peer.worker)
        for former in range(incarnation):
            self.lost(host, incarnated(name, former), record, CRASHED)
        if incarnation and host.alive:
            host.handle(Joined(name, incarnation), (record,))
        if not peer.alive:
            self.lost(host, peer.worker, record, CRASHED)

    def lost(self, host: SimHost, peer: Worker, record: int, why: str) -> None:
        """A worker learns that a peer is lost."""
        if not host.alive or peer in host.lost:
            return
        host.lost[peer] = why
        self._transport.close(host.worker, peer)
        host.handle(Lost(peer, why), () if record < 0 else (record,))
