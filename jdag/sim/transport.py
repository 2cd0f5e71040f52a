"""Transport of messages in virtual time: links over lanes, with faults.

Each pair of workers has two ends of an exactly-once link (`jdag.sim.reliable_link`).
What an end puts on the wire occupies its lane (`jdag.sim.network`), meets its verdict
(`jdag.sim.faults`) and comes out at the twin, as an action on the timeline.

Acknowledgements of one instant leave as one message, before any other to that worker,
or when all else of the instant is done. They do not where no time passes, nor where the
network has a control lane. There frames take that, and the values of a message take the
data lane. A frame is dropped, delayed and sent again with its values. A message whose
values have yet to arrive may be overtaken as between processes (`jdag.wire.order`).

Inputs:  `send(...)` of each message; the actions `acknowledge`, `frame`, `completed`
         and `timer` when they are due.
Outputs: from a frame, the messages that may be handed on now, in order, to the host;
         from a timer, the end of a link that has given up its peer, to `gave_up`.

Invariants: a parcel is handed on once and in order (with a control lane in the order of
`jdag.wire.order`), or its link is closed; a closed end sends and receives nothing; each
end has at most one timer that counts.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jdag.engine.protocol import (
    Acknowledge,
    Key,
    Message,
    Send,
    Worker,
    acknowledged_at_once,
    incarnated,
    named,
)
from jdag.runtime.recorder import NO_CAUSE, trace_fields
from jdag.runtime.stats import Sent
from jdag.runtime.worker_runtime import WorkerRuntime
from jdag.sim.digest import fingerprint
from jdag.sim.environment import Environment
from jdag.sim.network import Lane, LinkModel, Traffic
from jdag.sim.reliable_link import NEVER, Frame, Link, LinkSettings, SureLink
from jdag.sim.timeline import BEGIN, EVENT, TIMER
from jdag.sim.untimed import StepChooser, UntimedTimeline
from jdag.wire.frames import FRAME_BYTES
from jdag.wire.messages import size
from jdag.wire.order import Order

ACK_DELAY_NS = 1_000_000
RESEND_MAX = 10


class _Parcel(Struct, frozen=True):
    """One message with its values.

    `said` is what a trace tells of it, if there is one. `wire_bytes` travel in its
    frame, `value_bytes` on the data lane beside a control lane, where they have arrived
    at `whole_ns`. `record` is that of its send.
    """

    message: Message
    said: tuple[Any, ...]
    values: tuple[Any, ...]
    wire_bytes: int
    record: int
    value_bytes: int = 0
    whole_ns: int = 0


@lru_cache(1024)
def link_settings(there: LinkModel, back: LinkModel) -> LinkSettings:
    """Return timeouts for a pair of links: no resends without faults, prompt with."""
    trip_ns = there.flight_ns + there.jitter_ns + back.flight_ns + back.jitter_ns
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
    `heard` the last with a message that came. `data` is the lane of values where `out`
    is a control lane, and `order` that of the messages which arrived over it.
    """

    worker: Worker
    peer: Worker
    route: tuple[str, str]
    link: Link
    out: Lane
    back: Lane
    data: Lane | None = None
    order: Order = field(default_factory=Order)
    twin: "LinkEnd" = field(init=False)
    open: bool = True
    timer_ns: int = NEVER
    record: int = NO_CAUSE
    heard: int = NO_CAUSE
    payload_bytes: int = 0
    zero_bytes: int = 0  # Of zeros that were not sent.
    # Acknowledgements that leave as one, and their causes.
    waiting: list[tuple[Acknowledge, int]] = field(default_factory=list)

    def passed(self, record: int, value_bytes: int) -> None:
        """Note the trace record of the last frame that left here."""
        self.record = record
        self.out.passed(record)
        if value_bytes and self.data is not None:
            self.data.passed(record)


class SimTransport:
    """All links of one run; `gave_up` is called with an end that gives up its peer."""

    def __init__(self, env: Environment, gave_up: Callable[[LinkEnd], None]) -> None:
        self._gave_up = gave_up
        self._hosts = env.hosts
        self._incarnations = env.incarnations
        self._network = env.settings.all_links
        self._traffic = Traffic(self._network, env.workers)
        # Beside a control lane each leaves at once, as when depends on nothing else; so
        # too where time does not pass, as it may arrive as late as any.
        chooser = env.chooser
        self._joins = self._network.control_lane is None and not chooser.untimed
        self._faults = env.faults
        self._has_frame_faults = env.faults.on_frames
        is_sure = isinstance(chooser, StepChooser) and chooser.is_sure
        self._link = SureLink if is_sure and not self._has_frame_faults else Link
        if isinstance(env.timeline, UntimedTimeline):
            env.timeline.join = self.join
        self._settings = env.settings.link
        self._timeline = env.timeline
        self._chooser = env.chooser
        self._recorder = env.recorder
        self._ends: dict[Worker, dict[Worker, LinkEnd]] = defaultdict(dict)

    def sent(self, name: str) -> Sent:
        """Return the counts of all incarnations of a worker."""
        numbers = range(self._incarnations.get(name, 0) + 1)
        ends = [e for n in numbers for e in self._ends[incarnated(name, n)].values()]
        lanes = [*{end.route: end.out for end in ends}.values()]
        data = {end.route: end.data for end in ends}.values()
        lanes += [lane for lane in data if lane is not None]
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
            data: tuple[Lane | None, Lane | None] = None, None
            if self._network.control_lane is not None:
                data, control = (out, into), self._traffic.control
                out, into = control(*there), control(*back)
            link, other = self._link(peer, settings), self._link(worker, settings)
            end = LinkEnd(worker, peer, there, link, out, into, data[0])
            twin = LinkEnd(peer, worker, back, other, into, out, data[1])
            end.twin, twin.twin = twin, end
            self._ends[worker][peer], self._ends[peer][worker] = end, twin
        return end

    def close(self, worker: Worker, peer: Worker) -> None:
        """Close the link to a peer: nothing is sent or received any more."""
        self._end(worker, peer).open = False

    def clear(self) -> None:
        """Drop all links, with what is on its way."""
        for ends in self._ends.values():
            for end in ends.values():
                del end.twin  # So that no cycle is left.
        self._ends.clear()
        del self._gave_up

    def send(
        self,
        host: WorkerRuntime,
        send: Send,
        message: Message,
        values: tuple[tuple[Key, ...], tuple[Any, ...]],
        cause: int,
    ) -> None:
        """Send a message of a worker with values, for `worker_runtime.Driver`."""
        worker, (keys, arrays) = host.worker, values
        end = self._ends[worker].get(send.to) or self._end(worker, send.to)
        if self._joins:
            if message.__class__ is Acknowledge:
                if not end.waiting:
                    now_ns = self._timeline.now_ns
                    self._timeline.push(now_ns, BEGIN, (self.acknowledge, end))
                end.waiting.append((message, cause))
                return
            if end.waiting:
                self.acknowledge(end)
        if send.zeros:
            end.zero_bytes += sum([zero.nbytes for zero in send.zeros])
        causes = self._recorder.causes(worker, cause, keys) if keys else (cause,)
        self._send(end, message, arrays, causes)

    def acknowledge(self, end: LinkEnd) -> None:
        """Send the acknowledgements that wait at an end, as few messages."""
        waiting, end.waiting = end.waiting, []
        if not self._hosts[end.worker].alive:
            return
        causes = tuple(dict.fromkeys([cause for _, cause in waiting]))
        for message in acknowledged_at_once([message for message, _ in waiting]):
            self._send(end, message, (), causes)

    def _send(
        self,
        end: LinkEnd,
        message: Message,
        arrays: tuple[Any, ...],
        causes: tuple[int, ...],
    ) -> None:
        recorder, timeline, worker = self._recorder, self._timeline, end.worker
        payload_bytes, frame_bytes = size(message, arrays)
        wire_bytes = frame_bytes = frame_bytes + FRAME_BYTES
        end.payload_bytes += payload_bytes
        if not end.open:
            recorder.note("drop", worker, (end.peer, "lost"), causes)
            return
        link, now_ns, value_bytes = end.link, timeline.now_ns, 0
        if end.data is not None:
            value_bytes = payload_bytes
            frame_bytes -= value_bytes
        arrival_ns, whole_ns, before = self._transmit(end, frame_bytes, value_bytes)
        if before:
            causes = (*causes, *before)
        what: tuple[Any, ...] = ()
        record = NO_CAUSE
        if recorder.trace is not None:
            what, prints = trace_fields(message), tuple(map(fingerprint, arrays))
            detail = (end.peer, *what, payload_bytes, wire_bytes, prints)
            record = recorder.note("send", worker, detail, causes)
            end.passed(record, value_bytes)
        parcel = _Parcel(
            message, what, arrays, frame_bytes, record, value_bytes, whole_ns
        )
        frame = link.send(parcel, now_ns, arrival_ns - now_ns)
        if self._has_frame_faults:
            self._deliver(end, frame, arrival_ns)
        else:
            timeline.push(arrival_ns, EVENT, (self.frame, end.twin, frame, record))
        if link.deadline_ns < end.timer_ns:
            self._arm(end)

    def frame(self, end: LinkEnd, frame: Frame, sent: int) -> None:
        """Receive a frame at an end; its host handles the messages now in order."""
        link = end.link
        if not (self._hosts[end.worker].alive and end.open):
            return
        before = link.duplicates
        parcels: tuple[_Parcel, ...] = link.receive(frame, self._timeline.now_ns)
        if frame.sequence:
            end.heard = sent
            if link.duplicates != before:
                detail = (end.peer, "link")
                self._recorder.note("duplicate", end.worker, detail, (sent,))
            if end.data is None:
                self._hand_on(end, parcels, sent)
            else:
                self._split(end, parcels, sent)
        # After the answers, as an acknowledgement rides on them.
        if link.deadline_ns < end.timer_ns:
            self._arm(end)

    def _hand_on(self, end: LinkEnd, parcels: Sequence[_Parcel], sent: int) -> None:
        host = self._hosts[end.worker]
        for parcel in parcels:
            if host.alive:  # It may have crashed over the message before.
                record = parcel.record
                causes = (record,) if record == sent else (record, sent)
                message = parcel.message
                host.arrived(end.peer, message, parcel.values, causes, parcel.said)

    def join(self, actions: Sequence[tuple[Any, LinkEnd, Frame, int]]) -> None:
        """Receive frames with acknowledgements as if these had left as one message."""
        parcels: list[_Parcel] = []
        end = actions[0][1]
        if not end.open:
            return
        for _, _, frame, end.heard in actions:
            parcels += end.link.receive(frame, self._timeline.now_ns)
        messages: list[Any] = [parcel.message for parcel in parcels]
        if all([message.__class__ is Acknowledge for message in messages]):
            causes = tuple([parcel.record for parcel in parcels])
            for message in acknowledged_at_once(messages):
                self._hosts[end.worker].arrived(end.peer, message, (), causes)
        else:  # A gap in the frames was filled, and let others pass.
            self._hand_on(end, parcels, end.heard)
        if end.link.deadline_ns < end.timer_ns:
            self._arm(end)

    def _split(self, end: LinkEnd, parcels: Sequence[_Parcel], sent: int) -> None:
        """Hand on messages that came over a control lane, as their values allow."""
        now_ns = self._timeline.now_ns
        for parcel in parcels:
            whole_ns = parcel.whole_ns
            self._hand_on(end, end.order.arrived(parcel, whole_ns <= now_ns), sent)
            if whole_ns > now_ns:
                self._timeline.push(whole_ns, EVENT, (self.completed, end, parcel))

    def completed(self, end: LinkEnd, parcel: _Parcel) -> None:
        """Receive the last of a message's values at an end."""
        if self._hosts[end.worker].alive and end.open:
            self._hand_on(end, end.order.completed(parcel), parcel.record)

    def _transmit(
        self, end: LinkEnd, frame_bytes: int, value_bytes: int
    ) -> tuple[int, int, list[int]]:
        """Send a frame and its values: when each arrives, and what they waited for."""
        lane, now_ns, chooser = end.out, self._timeline.now_ns, self._chooser
        whole_ns = arrival_ns = lane.transmit(frame_bytes, now_ns, chooser)
        before: list[int] = []
        if lane.start_ns > now_ns or lane.held:
            before = lane.before(now_ns, end.record)
        data = end.data
        if data is not None and value_bytes:
            whole_ns = data.transmit(value_bytes, now_ns, chooser)
            if data.start_ns > now_ns or data.held:
                before += data.before(now_ns, data.record)
        return arrival_ns, whole_ns, before

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
        value_bytes = 0
        if frame.sequence:
            parcel: _Parcel = frame.payload
            wire_bytes, value_bytes = parcel.wire_bytes, parcel.value_bytes
            kind, causes = "resend", [parcel.record]
            detail: tuple[Any, ...] = (end.peer, *parcel.said, wire_bytes)
        else:
            wire_bytes = FRAME_BYTES
            kind, causes = "ack", [end.heard]
            detail = (end.peer, wire_bytes)
        arrival_ns, whole_ns, before = self._transmit(end, wire_bytes, value_bytes)
        causes += [record for record in before if record not in causes]
        if value_bytes:
            frame = replace(frame, payload=replace(parcel, whole_ns=whole_ns))
        record = self._recorder.note(kind, end.worker, detail, tuple(causes))
        end.passed(record, value_bytes)
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
            if extra_ns and end.data is not None and frame.sequence:
                whole_ns = frame.payload.whole_ns + extra_ns
                payload = replace(frame.payload, whole_ns=whole_ns)
                late = replace(frame, payload=payload)
            else:
                late = frame
            action = (self.frame, end.twin, late, record)
            timeline.push(arrival_ns + extra_ns, EVENT, action)
