"""How messages travel in virtual time: links over lanes, with faults.

Each pair of workers has two ends of one exactly-once link (`jdag.wire.link`). What an
end puts on the wire occupies its lane (`jdag.sim.network`), meets its verdict
(`jdag.sim.faults`) and comes out at the twin, as an action on the timeline.

Inputs:  `send(...)` of each message; the actions "frame" and "timer" when they are due.
Outputs: from a frame, the messages that may be handed on now, in order, to the host;
         from a timer, whether the link has given up.

Invariants: a parcel is handed on once and in order, or its link is closed; a closed end
sends and receives nothing; each end has at most one timer that counts.
"""

from collections.abc import Mapping
from typing import Any

from jdag.compute.digest import fingerprint
from jdag.engine.protocol import Key, Message, Send, named
from jdag.runtime.chooser import Chooser
from jdag.runtime.host import Host
from jdag.runtime.recorder import Recorder, said
from jdag.sim.faults import Faults
from jdag.sim.network import Lane, LinkModel, Network, Traffic
from jdag.sim.timeline import Timeline
from jdag.wire.link import FRAME_BYTES, Frame, Link, LinkSettings
from jdag.wire.messages import size

# At one time: crashes first, then what happens, then devices choose among all that is
# ready by then, and timers last, so that acknowledgements can still ride on answers.
CRASH, EVENT, BEGIN, TIMER = range(4)

ACK_DELAY_NS = 1_000_000
RESEND_MAX = 10

# (message, values, wire_bytes, the record of its send): a tuple, as one is made for
# each message.
Parcel = tuple[Message, tuple[Any, ...], int, int]


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


class LinkEnd:
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

    twin: "LinkEnd"

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


class SimTransport:
    """All links of one run.

    Args:
        hosts: by worker; a worker that joins anew is added, under its new name.
        network: what joins them.
        settings: of all links; None: each pair has its own `link_settings`.
        faults: what befalls frames.
        timeline: of the run, as are the chooser and the recorder.
        chooser: picks jitter and the outcomes of faults.
        recorder: is told what becomes of messages.
    """

    def __init__(
        self,
        hosts: Mapping[str, Host],
        network: Network,
        settings: LinkSettings | None,
        *,
        faults: Faults,
        timeline: Timeline,
        chooser: Chooser,
        recorder: Recorder,
    ) -> None:
        self._hosts = hosts
        self._network = network
        self._traffic = Traffic(network, tuple(hosts))
        self._faults = faults
        self._has_frame_faults = faults.on_frames
        self._settings = settings
        self._timeline = timeline
        self._chooser = chooser
        self._recorder = recorder
        self._ends: dict[str, dict[str, LinkEnd]] = {worker: {} for worker in hosts}

    def joined(self, worker: str) -> None:
        """An incarnation of a worker takes part from now on, with links of its own."""
        self._ends[worker] = {}

    def ends(self, worker: str) -> tuple[LinkEnd, ...]:
        """The ends of one worker that were ever used."""
        return tuple(self._ends[worker].values())

    def end(self, worker: str, peer: str) -> LinkEnd:
        """One worker's end of its link to a peer."""
        end = self._ends[worker].get(peer)
        if end is None:
            model, lane = self._network.model, self._traffic.lane
            route = there, back = named(worker), named(peer)
            settings = self._settings or link_settings(
                model(*route), model(back, there)
            )
            lanes = lane(*route), lane(back, there)
            end = LinkEnd(worker, peer, Link(peer, settings), *lanes)
            end.twin = LinkEnd(peer, worker, Link(worker, settings), *reversed(lanes))
            end.twin.twin = end
            self._ends[worker][peer], self._ends[peer][worker] = end, end.twin
        return end

    def close(self, worker: str, peer: str) -> None:
        """Close the link to a peer: nothing is sent or received any more."""
        self.end(worker, peer).open = False

    def clear(self, timeline: Timeline) -> None:
        """Drop all that is on its way."""
        self._timeline = timeline
        self._ends = {worker: {} for worker in self._ends}

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
        end = self._ends[worker].get(send.to) or self.end(worker, send.to)
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
            action = ("frame", end.twin, frame, record)
            self._timeline.push(arrival_ns, EVENT, action)
        deadline_ns = link.deadline_ns
        if end.timer_ns is None or (
            deadline_ns is not None and deadline_ns < end.timer_ns
        ):
            self.watch(end)

    def frame(self, end: LinkEnd, frame: Frame, sent: int) -> None:
        """A frame comes out at an end, whose host handles what may be handed on."""
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
        deadline_ns, armed_ns = link.deadline_ns, end.timer_ns
        if deadline_ns is not None and (armed_ns is None or deadline_ns < armed_ns):
            self.watch(end)

    def watch(self, end: LinkEnd) -> None:
        """Arm the timer of an end, if it is due earlier than one that is armed."""
        deadline_ns = end.link.deadline_ns
        if deadline_ns is None or not end.open:
            return
        if end.timer_ns is None or deadline_ns < end.timer_ns:
            timeline = self._timeline
            end.timer_ns = at_ns = max(deadline_ns, timeline.now_ns)
            timeline.push(at_ns, TIMER, ("timer", end))

    def tick(self, end: LinkEnd) -> bool:
        """A timer of this end is due; return whether the link has given up its peer."""
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

    def _again(self, end: LinkEnd, frame: Frame) -> None:
        """A frame that carries no new message: a resend or an acknowledgement."""
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
        """Schedule the arrivals of a frame that has left, as faults decide."""
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
            action = ("frame", end.twin, frame, record)
            timeline.push(arrival_ns + extra_ns, EVENT, action)


def _before(end: LinkEnd, now_ns: int) -> list[int]:
    """The frames that the last one had to wait for: of its link, or of a port."""
    lane = end.out
    found = []
    if lane.start_ns > now_ns:
        found.append(end.record if lane.out is None else lane.out.record)
    if lane.held and lane.into is not None:
        found.append(lane.into.record)
    return [record for record in dict.fromkeys(found) if record >= 0]
