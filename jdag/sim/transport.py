"""Transport of messages in virtual time: reliable links over lanes, with faults.

Each pair of workers has two ends of a reliable link (`jdag.sim.reliable_link`). A frame
that an end sends occupies its lane (`jdag.sim.network`), is subject to faults
(`jdag.sim.faults`) and arrives at the other end by an action on the timeline.

The acknowledgements that a worker sends to a peer at the same time are sent as one
message: before any other message to that peer, or after all other events of that time.
In untimed runs, or if the network has a control lane, they are sent one by one. With a
control lane, frames take that lane, and the values of a message take the data lane. A
frame is dropped, delayed and resent together with its values. Messages may overtake a
message whose values have not arrived, as between processes (`jdag.wire.order`).

Inputs:  a call of `send(...)` for each message; the actions `acknowledge`, `frame`,
         `completed` and `timer` at their times.
Outputs: the messages that a frame makes deliverable, in order, for the host; the end of
         a link that gives up its peer, for `gave_up`.

Invariants: a message is delivered once and in order (with a control lane, in the order
of `jdag.wire.order`), or its link is closed; a closed end neither sends nor receives;
each end has at most one valid timer.
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

    `fields` describe the message in a trace, and are () without a trace. `wire_bytes`
    is the size of its frame. With a control lane, `value_bytes` is the size of its
    values on the data lane, which have all arrived at `whole_ns`. `record` is the trace
    record of its send.
    """

    message: Message
    fields: tuple[Any, ...]
    values: tuple[Any, ...]
    wire_bytes: int
    record: int
    value_bytes: int = 0
    whole_ns: int = 0


@lru_cache(1024)
def link_settings(forth: LinkModel, back: LinkModel) -> LinkSettings:
    """Return timeouts for a pair of links. Without faults, no frame is resent."""
    trip_ns = forth.flight_ns + forth.jitter_ns + back.flight_ns + back.jitter_ns
    return LinkSettings(
        resend_ns=4 * ACK_DELAY_NS + 2 * trip_ns,
        resend_max=RESEND_MAX,
        ack_delay_ns=ACK_DELAY_NS,
    )


def gives_up_ns(settings: LinkSettings) -> int:
    """Return the time in ns (without latencies) until a link gives up its peer."""
    waits = [1 << tries for tries in range(settings.resend_max + 1)]
    return settings.resend_ns * sum(min(w, settings.backoff_max) for w in waits)


@dataclass(slots=True, eq=False)
class LinkEnd:
    """One worker's end of its link to a peer. Each incarnation has ends of its own.

    `route` has the names of worker and peer. `out` is the lane from this worker to the
    peer, and `back` the lane from the peer. If `out` is a control lane, `data` is the
    lane of values, and `order` holds messages that have arrived but must wait. `record`
    is the trace record of the last frame sent, `heard` that of the last one received.
    """

    host: WorkerRuntime
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
    zero_bytes: int = 0  # Total size of arrays of zeros, which are not sent.
    # Acknowledgements that will be sent as one message, each with its cause.
    waiting: list[tuple[Acknowledge, int]] = field(default_factory=list)

    def passed(self, record: int, value_bytes: int) -> None:
        self.record = record
        self.out.passed(record)
        if value_bytes and self.data is not None:
            self.data.passed(record)


class SimTransport:
    """All links of one run. An end that gives up its peer is passed to `gave_up`."""

    def __init__(self, env: Environment, gave_up: Callable[[LinkEnd], None]) -> None:
        self._gave_up = gave_up
        self._hosts = env.hosts
        self._incarnations = env.incarnations
        self._network = env.settings.all_links
        self._traffic = Traffic(self._network, env.workers)
        # On a control lane no other frame changes an acknowledgement's time, so each is
        # sent at once. In untimed runs the chooser may join them on arrival.
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
        """Return the traffic counters of a worker, summed over all its incarnations."""
        numbers = range(self._incarnations.get(name, 0) + 1)
        ends = [
            end for n in numbers for end in self._ends[incarnated(name, n)].values()
        ]
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
        end = self._ends[worker].get(peer)
        if end is None:
            model, lane = self._network.model, self._traffic.lane
            route = named(worker), named(peer)
            back = route[1], route[0]
            settings = self._settings or link_settings(model(*route), model(*back))
            out, into = lane(*route), lane(*back)
            data: tuple[Lane | None, Lane | None] = None, None
            if self._network.control_lane is not None:
                data, control = (out, into), self._traffic.control
                out, into = control(*route), control(*back)
            link, twin_link = self._link(peer, settings), self._link(worker, settings)
            host, twin_host = self._hosts[worker], self._hosts[peer]
            end = LinkEnd(host, worker, peer, route, link, out, into, data[0])
            twin = LinkEnd(twin_host, peer, worker, back, twin_link, into, out, data[1])
            end.twin, twin.twin = twin, end
            self._ends[worker][peer], self._ends[peer][worker] = end, twin
        return end

    def close(self, worker: Worker, peer: Worker) -> None:
        self._end(worker, peer).open = False

    def clear(self) -> None:
        for ends in self._ends.values():
            for end in ends.values():
                del end.twin  # Breaks the reference cycle.
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
        waiting, end.waiting = end.waiting, []
        if not end.host.alive:
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
        link, lane, now_ns, value_bytes = end.link, end.out, timeline.now_ns, 0
        if end.data is not None:
            value_bytes = payload_bytes
            frame_bytes -= value_bytes
        whole_ns = arrival_ns = lane.transmit(frame_bytes, now_ns, self._chooser)
        if value_bytes or lane.start_ns > now_ns or lane.held:
            whole_ns, before = self._waits(end, value_bytes, arrival_ns)
            causes = (*causes, *before)
        fields: tuple[Any, ...] = ()
        record = NO_CAUSE
        if recorder.trace is not None:
            fields = trace_fields(message)
            fingerprints = tuple(map(fingerprint, arrays)) if arrays else ()
            detail = (end.peer, *fields, payload_bytes, wire_bytes, fingerprints)
            record = recorder.note("send", worker, detail, causes)
            end.record = lane.record = record
            if lane.ports or value_bytes:
                end.passed(record, value_bytes)
        parcel = _Parcel(
            message, fields, arrays, frame_bytes, record, value_bytes, whole_ns
        )
        frame = link.send(parcel, now_ns, arrival_ns - now_ns)
        if self._has_frame_faults:
            self._deliver(end, frame, arrival_ns)
        else:
            timeline.push(arrival_ns, EVENT, (self.frame, end.twin, frame, record))
        if link.deadline_ns < end.timer_ns:
            self._arm(end)

    def frame(self, end: LinkEnd, frame: Frame, sent: int) -> None:
        link = end.link
        if not (end.host.alive and end.open):
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
        # After delivery, since replies carry the acknowledgement.
        if link.deadline_ns < end.timer_ns:
            self._arm(end)

    def _hand_on(self, end: LinkEnd, parcels: Sequence[_Parcel], sent: int) -> None:
        host = end.host
        for parcel in parcels:
            if host.alive:  # The message before may have caused a crash.
                record = parcel.record
                causes = (record,) if record == sent else (record, sent)
                message = parcel.message
                host.arrived(end.peer, message, parcel.values, causes, parcel.fields)

    def join(self, actions: Sequence[tuple[Any, LinkEnd, Frame, int]]) -> None:
        """Receive several acknowledgements as if they had been sent as one message."""
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
                end.host.arrived(end.peer, message, (), causes)
        else:  # A frame filled a gap, so other messages became deliverable too.
            self._hand_on(end, parcels, end.heard)
        if end.link.deadline_ns < end.timer_ns:
            self._arm(end)

    def _split(self, end: LinkEnd, parcels: Sequence[_Parcel], sent: int) -> None:
        now_ns = self._timeline.now_ns
        for parcel in parcels:
            whole_ns = parcel.whole_ns
            self._hand_on(end, end.order.arrived(parcel, whole_ns <= now_ns), sent)
            if whole_ns > now_ns:
                self._timeline.push(whole_ns, EVENT, (self.completed, end, parcel))

    def completed(self, end: LinkEnd, parcel: _Parcel) -> None:
        if end.host.alive and end.open:
            self._hand_on(end, end.order.completed(parcel), parcel.record)

    def _waits(
        self, end: LinkEnd, value_bytes: int, arrival_ns: int
    ) -> tuple[int, list[int]]:
        """Send a frame's values. Return when they arrive, and what both waited for."""
        now_ns, data = self._timeline.now_ns, end.data
        before = end.out.before(now_ns, end.record)
        if data is not None and value_bytes:
            arrival_ns = data.transmit(value_bytes, now_ns, self._chooser)
            before += data.before(now_ns, data.record)
        return arrival_ns, before

    def _arm(self, end: LinkEnd) -> None:
        if end.open:
            end.timer_ns = due_ns = max(end.link.deadline_ns, self._timeline.now_ns)
            self._timeline.push(due_ns, TIMER, (self.timer, end))

    def timer(self, end: LinkEnd) -> None:
        now_ns, link = self._timeline.now_ns, end.link
        if not end.host.alive or not end.open or end.timer_ns != now_ns:
            return  # The end was closed, or has an earlier timer.
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
            detail: tuple[Any, ...] = (end.peer, *parcel.fields, wire_bytes)
        else:
            wire_bytes = FRAME_BYTES
            kind, causes = "ack", [end.heard]
            detail = (end.peer, wire_bytes)
        now_ns = self._timeline.now_ns
        arrival_ns = end.out.transmit(wire_bytes, now_ns, self._chooser)
        whole_ns, before = self._waits(end, value_bytes, arrival_ns)
        causes += [record for record in before if record not in causes]
        if value_bytes:
            frame = replace(frame, payload=replace(parcel, whole_ns=whole_ns))
        record = self._recorder.note(kind, end.worker, detail, tuple(causes))
        end.passed(record, value_bytes)
        self._deliver(end, frame, arrival_ns)

    def _deliver(self, end: LinkEnd, frame: Frame, arrival_ns: int) -> None:
        timeline, note, record = self._timeline, self._recorder.note, end.record
        verdict = self._faults.verdict(*end.route, timeline.now_ns, self._chooser)
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
                late = replace(frame, payload=replace(frame.payload, whole_ns=whole_ns))
            else:
                late = frame
            action = (self.frame, end.twin, late, record)
            timeline.push(arrival_ns + extra_ns, EVENT, action)
