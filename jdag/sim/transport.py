"""Transport of messages in virtual time: links over lanes, with faults.

Each pair of workers has two ends of one exactly-once link (`jdag.wire.link`). What an
end puts on the wire occupies its lane (`jdag.sim.network`), meets its verdict
(`jdag.sim.faults`) and comes out at the twin, as an action on the timeline.

Inputs:  `send(...)` of each message; the actions `frame` and `timer` when they are due.
Outputs: from a frame, the messages that may be handed on now, in order, to the host;
         from a timer, the end of a link that has given up its peer, to `gave_up`.

Invariants: a parcel is handed on once and in order, or its link is closed; a closed end
sends and receives nothing; each end has at most one timer that counts.
"""

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jdag.compute.digest import fingerprint
from jdag.engine.protocol import Key, Message, Send, Worker, incarnated, named
from jdag.runtime.host import Host
from jdag.runtime.recorder import NO_CAUSE, said
from jdag.runtime.stats import Sent
from jdag.sim.environment import Environment
from jdag.sim.network import Lane, LinkModel, Traffic
from jdag.sim.timeline import EVENT, TIMER
from jdag.wire.link import FRAME_BYTES, NEVER, Frame, Link, LinkSettings
from jdag.wire.messages import size

ACK_DELAY_NS = 1_000_000
RESEND_MAX = 10

# (message, values, wire_bytes, the record of its send): a tuple, as one is made for
# each message.
Parcel = tuple[Message, tuple[Any, ...], int, int]


def link_settings(there: LinkModel, back: LinkModel) -> LinkSettings:
    """Return timeouts for a pair of links: no resends without faults, prompt with."""
    trip_ns = there.latency_ns + there.jitter_ns + back.latency_ns + back.jitter_ns
    return LinkSettings(
        resend_ns=4 * ACK_DELAY_NS + 2 * trip_ns,
        resend_max=RESEND_MAX,
        ack_delay_ns=ACK_DELAY_NS,
    )


def gives_up_ns(settings: LinkSettings) -> int:
    """How long a link retries until it gives up its peer, latencies not counted."""
    waits = [1 << tries for tries in range(settings.resend_max + 1)]
    return settings.resend_ns * sum(min(w, settings.backoff_max) for w in waits)


@dataclass(slots=True, eq=False)
class LinkEnd:
    """One worker's end of its link to a peer; `twin` is the peer's end of it.

    Each incarnation of a worker has its own; `route` are the names of the two, `out`
    and `back` the lanes from and to here. `record` is the last frame that left here,
    `heard` the last with a message that came.
    """

    worker: Worker
    peer: Worker
    route: tuple[str, str]
    link: Link
    out: Lane
    back: Lane
    twin: "LinkEnd" = field(init=False)
    open: bool = True
    timer_ns: int = NEVER
    record: int = NO_CAUSE
    heard: int = NO_CAUSE
    payload_bytes: int = 0
    zero_bytes: int = 0  # Of zeros that were not sent.


class SimTransport:
    """All links of one run; `gave_up` is called with an end that gives up its peer."""

    def __init__(self, env: Environment, gave_up: Callable[[LinkEnd], None]) -> None:
        self._gave_up = gave_up
        self._hosts = env.hosts
        self._incarnations = env.incarnations
        self._network = env.settings.all_links
        self._traffic = Traffic(self._network, env.workers)
        self._faults = env.faults
        self._has_frame_faults = env.faults.on_frames
        self._settings = env.settings.link
        self._timeline = env.timeline
        self._chooser = env.chooser
        self._recorder = env.recorder
        self._ends: dict[Worker, dict[Worker, LinkEnd]] = defaultdict(dict)

    def sent(self, name: str) -> Sent:
        """Return the counts of all incarnations of a worker."""
        numbers = range(self._incarnations.get(name, 0) + 1)
        ends = [e for n in numbers for e in self._ends[incarnated(name, n)].values()]
        lanes = {end.route: end.out for end in ends}.values()
        return Sent(
            messages=sum([end.link.sent for end in ends]),
            payload_bytes=sum([end.payload_bytes for end in ends]),
            zero_bytes=sum([end.zero_bytes for end in ends]),
            bytes=sum([lane.bytes for lane in lanes]),
            frames=sum([lane.frames for lane in lanes]),
            resends=sum([end.link.resent for end in ends]),
            duplicates=sum([end.link.duplicates for end in ends]),
        )

    def _end(self, worker: Worker, peer: Worker) -> LinkEnd:
        """One worker's end of its link to a peer."""
        end = self._ends[worker].get(peer)
        if end is None:
            model, lane = self._network.model, self._traffic.lane
            there = named(worker), named(peer)
            back = there[1], there[0]
            settings = self._settings or link_settings(model(*there), model(*back))
            out, into = lane(*there), lane(*back)
            end = LinkEnd(worker, peer, there, Link(peer, settings), out, into)
            twin = LinkEnd(peer, worker, back, Link(worker, settings), into, out)
            end.twin, twin.twin = twin, end
            self._ends[worker][peer], self._ends[peer][worker] = end, twin
        return end

    def close(self, worker: Worker, peer: Worker) -> None:
        """Close the link to a peer: nothing is sent or received any more."""
        self._end(worker, peer).open = False

    def clear(self) -> None:
        """Drop all links, with what is on its way."""
        self._ends.clear()

    def send(
        self,
        host: Host,
        send: Send,
        message: Message,
        values: tuple[tuple[Key, ...], tuple[Any, ...]],
        cause: int,
    ) -> None:
        """Send a message of a worker with values; see `jdag.runtime.host.Driver`."""
        recorder, now_ns, worker = self._recorder, self._timeline.now_ns, host.worker
        keys, arrays = values
        end = self._ends[worker].get(send.to) or self._end(worker, send.to)
        causes = recorder.causes(worker, cause, keys) if keys else (cause,)
        payload_bytes, wire_bytes = size(message, arrays)
        wire_bytes += FRAME_BYTES
        end.payload_bytes += payload_bytes
        end.zero_bytes += sum([zero.nbytes for zero in send.zeros])
        if not end.open:
            recorder.note("drop", worker, (end.peer, "lost"), causes)
            return
        lane, link = end.out, end.link
        arrival_ns = lane.transmit(wire_bytes, now_ns, self._chooser)
        if lane.start_ns > now_ns or lane.held:
            causes = (*causes, *_before(end, now_ns))
        prints: tuple[int, ...] = ()
        if arrays and recorder.trace is not None:
            prints = tuple(map(fingerprint, arrays))
        detail = (end.peer, *said(message), payload_bytes, wire_bytes, prints)
        end.record = record = recorder.note("send", worker, detail, causes)
        if lane.out is not None:
            lane.passed(record)
        parcel: Parcel = (message, arrays, wire_bytes, record)
        frame = link.send(parcel, now_ns, arrival_ns - now_ns)
        if self._has_frame_faults:
            self._deliver(end, frame, arrival_ns)
        else:
            action = (self.frame, end.twin, frame, record)
            self._timeline.push(arrival_ns, EVENT, action)
        if link.deadline_ns < end.timer_ns:
            self._arm(end)

    def frame(self, end: LinkEnd, frame: Frame, sent: int) -> None:
        """Receive a frame at an end; its host handles the messages now in order."""
        host, link = self._hosts[end.worker], end.link
        if not host.alive:
            return
        if not end.open:
            return
        before = link.duplicates
        parcels: tuple[Parcel, ...] = link.receive(frame, self._timeline.now_ns)
        if frame.sequence:
            end.heard = sent
            if link.duplicates != before:
                detail = (end.peer, "link")
                self._recorder.note("duplicate", end.worker, detail, (sent,))
        for message, values, _, record in parcels:
            if host.alive:  # It may have crashed over the message before.
                causes = (record,) if record == sent else (record, sent)
                host.arrived(end.peer, message, values, causes)
        # After the answers, as an acknowledgement rides on them.
        if link.deadline_ns < end.timer_ns:
            self._arm(end)

    def _arm(self, end: LinkEnd) -> None:
        if end.open:
            end.timer_ns = at_ns = max(end.link.deadline_ns, self._timeline.now_ns)
            self._timeline.push(at_ns, TIMER, (self.timer, end))

    def timer(self, end: LinkEnd) -> None:
        """Handle a timer of this end that is due."""
        now_ns, link = self._timeline.now_ns, end.link
        if not self._hosts[end.worker].alive or not end.open or end.timer_ns != now_ns:
            return  # Closed since, or armed anew for an earlier time.
        end.timer_ns = NEVER
        if link.deadline_ns <= now_ns:
            busy_until_ns = max(end.out.drained_ns, end.back.drained_ns)
            for frame in link.tick(now_ns, busy_until_ns):
                self._again(end, frame)
            if link.lost:
                self._gave_up(end)
                return
        if link.deadline_ns < NEVER:
            self._arm(end)

    def _again(self, end: LinkEnd, frame: Frame) -> None:
        """Send a frame without a new message: a resend or an acknowledgement."""
        now_ns = self._timeline.now_ns
        lane = end.out
        if frame.sequence:
            message, _, wire_bytes, sent = frame.payload
            kind, causes = "resend", [sent]
            detail: tuple[Any, ...] = (end.peer, *said(message), wire_bytes)
        else:
            wire_bytes = FRAME_BYTES
            kind, causes = "ack", [end.heard]
            detail = (end.peer, wire_bytes)
        arrival_ns = lane.transmit(wire_bytes, now_ns, self._chooser)
        if lane.start_ns > now_ns or lane.held:
            before = _before(end, now_ns)
            causes += [record for record in before if record not in causes]
        end.record = self._recorder.note(kind, end.worker, detail, tuple(causes))
        lane.passed(end.record)
        self._deliver(end, frame, arrival_ns)

    def _deliver(self, end: LinkEnd, frame: Frame, arrival_ns: int) -> None:
        """Schedule the arrivals of a sent frame, according to its verdict."""
        timeline, note, record = self._timeline, self._recorder.note, end.record
        now_ns = timeline.now_ns
        verdict = self._faults.verdict(*end.route, now_ns, self._chooser)
        copies, causes = verdict.copies, verdict.causes
        if not copies:
            note("drop", end.worker, (end.peer, causes[-1]), (record,))
            return
        if copies[0]:
            note("delay", end.worker, (end.peer, copies[0]), (record,))
        for _ in copies[1:]:
            note("duplicate", end.worker, (end.peer, "fault"), (record,))
        for extra_ns in copies:
            action = (self.frame, end.twin, frame, record)
            timeline.push(arrival_ns + extra_ns, EVENT, action)


def _before(end: LinkEnd, now_ns: int) -> list[int]:
    """Return the frames that the last one waited for, on its link or at a port."""
    lane = end.out
    found = []
    if lane.start_ns > now_ns:
        found.append(end.record if lane.out is None else lane.out.record)
    if lane.held and lane.into is not None:
        found.append(lane.into.record)
    return [record for record in dict.fromkeys(found) if record >= 0]
