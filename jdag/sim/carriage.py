"""How messages travel in virtual time: links over lanes, tormented by faults.

Each pair of workers has two ends of one exactly-once link (`jdag.wire.link`). What an
end puts on the wire occupies its lane (`jdag.sim.network`), meets its verdict
(`jdag.sim.faults`) and comes out at the twin, as an action on the timeline.

Told:  `send(...)` for each message; the actions "frame" and "timer" when they are due.
Gives: from a frame, the parcels that may be handed on now, in order; from a timer,
       whether the link has given up.

Invariants: a parcel is handed on once and in order, or its link is closed; a closed end
takes and gives nothing; each end has at most one timer that counts.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

from jdag.engine.vocabulary import named
from jdag.runtime.trace import Note
from jdag.sim.faults import Faults
from jdag.sim.network import Lane, LinkModel, Network, Traffic
from jdag.sim.timeline import Timeline
from jdag.wire.link import ACK_BYTES, Frame, Link, LinkSettings

# At one time: crashes first, then what happens, then devices choose among all that is
# ready by then, and timers last, so that acknowledgements can still ride on answers.
CRASH, EVENT, BEGIN, TIMER = range(4)

ACK_DELAY_NS = 1_000_000
RESEND_MAX = 10

# What the trace says of a message: kind, context, pass, path.
Said = tuple[str, str, int, tuple[int, ...]]
# (message, values, what is said of it, wire_bytes, the record of its send): a tuple, as
# one is made for each message.
Parcel = tuple[Any, tuple[Any, ...], Said, int, int]


def link_settings(there: LinkModel, back: LinkModel) -> LinkSettings:
    """Waits that suit a pair of links: no resend while all is well, and soon if not."""
    trip_ns = there.latency_ns + there.jitter_ns + back.latency_ns + back.jitter_ns
    return LinkSettings(
        resend_ns=4 * ACK_DELAY_NS + 2 * trip_ns,
        resend_max=RESEND_MAX,
        ack_delay_ns=ACK_DELAY_NS,
    )


def gives_up_ns(settings: LinkSettings) -> int:
    """How long a link tries in vain until it gives up its peer, flights not counted."""
    waits = [1 << tries for tries in range(settings.resend_max + 1)]
    return settings.resend_ns * sum(min(w, settings.backoff_max) for w in waits)


class End:
    """One worker's end of its link to a peer; `twin` is the peer's end of it.

    Each incarnation of a worker has its own; `route` are the names of the two, `out`
    and `back` the lanes from and to here. `record` is the last frame that left here,
    `heard` the last with a message that came; `payload_bytes`, and `zero_bytes` of what
    went unsaid, are for the driver to count in.
    """

    __slots__ = (
        "back",
        "heard",
        "link",
        "open",
        "out",
        "payload_bytes",
        "peer",
        "record",
        "route",
        "timer_ns",
        "twin",
        "worker",
        "zero_bytes",
    )

    twin: "End"

    def __init__(
        self, worker: str, peer: str, link: Link, out: Lane, back: Lane
    ) -> None:
        self.worker = worker
        self.peer = peer
        self.route = (named(worker), named(peer))
        self.link = link
        self.out = out
        self.back = back
        self.open = True
        self.timer_ns: int | None = None
        self.record = self.heard = -1
        self.payload_bytes = 0
        self.zero_bytes = 0


class Carriage:
    """All links of one run. `settings` None: each pair has its own `link_settings`."""

    def __init__(
        self,
        workers: Sequence[str],
        *,
        network: Network,
        faults: Faults,
        settings: LinkSettings | None,
        timeline: Timeline,
        rng: Random,
        note: Note,
    ) -> None:
        self._network = network
        self._traffic = Traffic(network, workers)
        self._faults = faults
        self._tormented = faults.on_frames
        self._settings = settings
        self._timeline = timeline
        self._rng = rng
        self._note = note
        self._ends: dict[str, dict[str, End]] = {worker: {} for worker in workers}

    def joined(self, worker: str) -> None:
        """An incarnation of a worker takes part from now on, with links of its own."""
        self._ends[worker] = {}

    def ends(self, worker: str) -> tuple[End, ...]:
        """The ends of one worker that were ever used."""
        return tuple(self._ends[worker].values())

    def end(self, worker: str, peer: str) -> End:
        """One worker's end of its link to a peer."""
        end = self._ends[worker].get(peer)
        if end is None:
            model, lane = self._network.model, self._traffic.lane
            route = there, back = named(worker), named(peer)
            settings = self._settings or link_settings(
                model(*route), model(back, there)
            )
            lanes = lane(*route), lane(back, there)
            end = End(worker, peer, Link(peer, settings), *lanes)
            end.twin = End(peer, worker, Link(worker, settings), *reversed(lanes))
            end.twin.twin = end
            self._ends[worker][peer], self._ends[peer][worker] = end, end.twin
        return end

    def close(self, worker: str, peer: str) -> None:
        """This worker is done with that peer: nothing is taken or given any more."""
        self.end(worker, peer).open = False

    def clear(self, timeline: Timeline) -> None:
        """Let go of all that is on its way, which stands on another timeline."""
        self._timeline = timeline
        self._ends = {worker: {} for worker in self._ends}

    def send(
        self,
        end: End,
        message: Any,
        values: tuple[Any, ...],
        said: Said,
        sizes: tuple[int, int, tuple[int, ...]],
        causes: tuple[int, ...],
    ) -> None:
        """A message leaves for the peer.

        `sizes` are the bytes of its values, those of its frame, and fingerprints.
        """
        if not end.open:
            self._note("drop", end.worker, (end.peer, "lost"), causes)
            return
        now_ns = self._timeline.now_ns
        lane, link = end.out, end.link
        wire_bytes = sizes[1]
        arrival_ns = lane.transmit(wire_bytes, now_ns, self._rng)
        if lane.start_ns > now_ns or lane.held:
            causes = (*causes, *_before(end, now_ns))
        detail = (end.peer, *said, *sizes)
        end.record = record = self._note("send", end.worker, detail, causes)
        lane.passed(record)
        parcel: Parcel = (message, values, said, wire_bytes, record)
        frame = link.send(parcel, now_ns, arrival_ns - now_ns)
        if self._tormented:
            self._torment(end, frame, arrival_ns)
        else:
            action = ("frame", end.twin, frame, record)
            self._timeline.push(arrival_ns, EVENT, action)
        deadline_ns = link.deadline_ns
        if end.timer_ns is None or (
            deadline_ns is not None and deadline_ns < end.timer_ns
        ):
            self.watch(end)

    def receive(self, end: End, frame: Frame, record: int) -> tuple[Parcel, ...]:
        """A frame came out here; what may be handed on. Afterwards call `watch`."""
        if not end.open:
            return ()
        link = end.link
        if not frame.sequence:
            link.receive(frame, self._timeline.now_ns)
            return ()
        end.heard = record
        before = link.duplicates
        parcels: tuple[Parcel, ...] = link.receive(frame, self._timeline.now_ns)
        if link.duplicates != before:
            self._note("duplicate", end.worker, (end.peer, "link"), (record,))
        return parcels

    def watch(self, end: End) -> None:
        """Arm the timer of an end, if it is due earlier than one that is armed."""
        deadline_ns = end.link.deadline_ns
        if deadline_ns is None or not end.open:
            return
        if end.timer_ns is None or deadline_ns < end.timer_ns:
            timeline = self._timeline
            end.timer_ns = at_ns = max(deadline_ns, timeline.now_ns)
            timeline.push(at_ns, TIMER, ("timer", end))

    def tick(self, end: End) -> bool:
        """A timer of this end came; whether the link has given up its peer."""
        now_ns = self._timeline.now_ns
        if not end.open or end.timer_ns != now_ns:
            return False  # Closed since, or armed anew for an earlier time.
        end.timer_ns = None
        link = end.link
        if link.deadline_ns is not None and link.deadline_ns <= now_ns:
            busy_until_ns = max(end.out.drained_ns, end.back.drained_ns)
            for frame in link.tick(now_ns, busy_until_ns):
                self._again(end, frame)
            if link.lost:
                return True
        self.watch(end)
        return False

    def _again(self, end: End, frame: Frame) -> None:
        """A frame that carries no new message: a resend or an acknowledgement."""
        now_ns = self._timeline.now_ns
        lane = end.out
        if frame.sequence:
            _, _, said, wire_bytes, sent = frame.payload
            kind, causes = "resend", [sent]
            detail: tuple[Any, ...] = (end.peer, *said, wire_bytes)
        else:
            wire_bytes = ACK_BYTES
            kind, causes = "ack", [end.heard]
            detail = (end.peer, wire_bytes)
        arrival_ns = lane.transmit(wire_bytes, now_ns, self._rng)
        if lane.start_ns > now_ns or lane.held:
            before = _before(end, now_ns)
            causes += [record for record in before if record not in causes]
        end.record = self._note(kind, end.worker, detail, tuple(causes))
        lane.passed(end.record)
        self._torment(end, frame, arrival_ns)

    def _torment(self, end: End, frame: Frame, arrival_ns: int) -> None:
        """Let a frame that has left meet its verdict."""
        timeline, note, record = self._timeline, self._note, end.record
        now_ns = timeline.now_ns
        verdict = self._faults.verdict(*end.route, now_ns, self._rng)
        copies, causes = verdict.copies, verdict.causes
        if not copies:
            note("drop", end.worker, (end.peer, causes[-1]), (record,))
            return
        if copies[0]:
            note("delay", end.worker, (end.peer, copies[0]), (record,))
        for _ in copies[1:]:
            note("duplicate", end.worker, (end.peer, "fault"), (record,))
        for extra_ns in copies:
            action = ("frame", end.twin, frame, record)
            timeline.push(arrival_ns + extra_ns, EVENT, action)


def _before(end: End, now_ns: int) -> list[int]:
    """The frames that the last one had to wait for: of its link, or of a port."""
    lane = end.out
    found = []
    if lane.start_ns > now_ns:
        found.append(end.record if lane.out is None else lane.out.record)
    if lane.held and lane.into is not None:
        found.append(lane.into.record)
    return [record for record in dict.fromkeys(found) if record >= 0]
