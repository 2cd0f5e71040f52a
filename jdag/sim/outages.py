"""Workers that stop, come back or are out of reach, and who is told of it when.

Told:  `plan()` when the run begins; `look(records)` with each record of the trace, if a
       crash waits for one; the actions "crash", "bury", "restart" and "lost" when they
       are due.
Gives: those actions to the timeline; Lost and Joined to engines.

Invariants: a worker is told of each loss once; one that crashed is cleared away by the
next event, as a program of its own may be what runs when it does; one that joins anew
is another host, under the name of its incarnation, and all hear of it at once.
"""

from collections.abc import Callable, Iterable, Iterator

from jdag.engine.vocabulary import (
    Joined,
    Lost,
    Worker,
    incarnated,
    incarnation_of,
    named,
)
from jdag.runtime.trace import Note
from jdag.sim.carriage import CRASH, EVENT, Carriage
from jdag.sim.faults import Crash, Faults
from jdag.sim.host import Host
from jdag.sim.programs import Programs
from jdag.sim.timeline import Timeline

NEVER = -2  # No record has this index; -1 is "none".
CRASHED, OUT_OF_REACH = "it crashed", "it is out of reach"

# When who will notice that whom is out of reach, of those who try since a time.
Partings = Callable[[int], Iterator[tuple[int, str, str]]]


class Outages:
    """All losses of one run; `hosts` are of all incarnations."""

    __slots__ = (
        *("_carriage", "_crash_index", "_faults", "_note", "_partings"),
        *("_programs", "_timeline", "_workers", "hosts", "incarnations"),
    )

    def __init__(
        self,
        hosts: dict[Worker, Host],
        *,
        faults: Faults,
        partings: Partings,
        timeline: Timeline,
        carriage: Carriage,
        programs: Programs,
        note: Note,
    ) -> None:
        self.hosts = hosts
        self.incarnations: dict[str, int] = {}
        self._workers = tuple(hosts)
        self._faults = faults
        self._partings = partings
        self._timeline = timeline
        self._carriage = carriage
        self._programs = programs
        self._note = note
        self._crash_index = NEVER

    def newest(self, name: str) -> Host:
        """The incarnation of a worker that was started last."""
        return self.hosts[incarnated(name, self.incarnations.get(name, 0))]

    def plan(self) -> None:
        """Note what is to happen when."""
        self._plan(self._partings(0))
        for crash in self._faults.crashes:
            if crash.at_ns is not None:
                self._timeline.push(crash.at_ns, CRASH, ("crash", crash))
        self._crash_index = self._faults.next_index(0, NEVER)
        self.look(0)

    def _plan(self, partings: Iterable[tuple[int, str, str]]) -> None:
        for at_ns, worker, peer in partings:
            lost = self.newest(peer).worker
            action = ("lost", self.newest(worker), lost, -1, OUT_OF_REACH)
            self._timeline.push(at_ns, EVENT, action)

    def look(self, records: int) -> None:
        """The trace has so many records: is there a crash that waits for that?"""
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
        record = self._note("crash", host.worker, (why,), ())
        timeline.push(timeline.now_ns, CRASH, ("bury", host))
        for other in self.hosts.values():
            if other.alive:
                action = ("lost", other, host.worker, record, CRASHED)
                timeline.push(timeline.now_ns + crash.detect_ns, EVENT, action)
        if crash.restart_ns is not None:
            at_ns = timeline.now_ns + crash.restart_ns
            timeline.push(at_ns, CRASH, ("restart", host, record))

    def bury(self, host: Host) -> None:
        """Clear away what a crashed worker held."""
        self._programs.kill(host.worker)
        host.clear()

    def restart(self, former: Host, crashed: int) -> None:
        """A worker that crashed joins anew."""
        self.bury(former)  # At the same time either may come first.
        host = former.again(self._workers)
        name = named(host.worker)
        self.incarnations[name] = incarnation = incarnation_of(host.worker)
        self.hosts[host.worker] = host
        self._carriage.joined(host.worker)
        record = self._note("restart", host.worker, (incarnation,), (crashed,))
        for other in self._workers:
            if other != name:
                self._meet(host, self.newest(other), record)
                self._meet(self.newest(other), host, record)
        partings = self._partings(self._timeline.now_ns)
        self._plan(parting for parting in partings if name in parting[1:])

    def _meet(self, host: Host, peer: Host, record: int) -> None:
        """Tell a worker which incarnation of a peer there is, and whether it lives."""
        name, incarnation = named(peer.worker), incarnation_of(peer.worker)
        for former in range(incarnation):
            self.lost(host, incarnated(name, former), record, CRASHED)
        if incarnation and host.alive:
            joined = self._note("joined", host.worker, (peer.worker,), (record,))
            if host.alive:
                host.handle(Joined(name, incarnation), joined)
        if not peer.alive:
            self.lost(host, peer.worker, record, CRASHED)

    def lost(self, host: Host, peer: Worker, record: int, why: str) -> None:
        """A worker is told that a peer is gone."""
        if not host.alive or peer in host.lost:
            return
        host.lost[peer] = why
        self._carriage.close(host.worker, peer)
        causes = () if record < 0 else (record,)
        record = self._note("lost", host.worker, (peer,), causes)
        if host.alive:
            host.handle(Lost(peer, why), record)
