"""Transport of messages in virtual time: reliable links over lanes, with faults.

Each pair of workers has two ends of a reliable link (`jdag.sim.reliable_link`). A frame
that an end sends occupies its lane (`jdag.sim.network`), is subject to faults
(`jdag.sim.faults`) and arrives at the other end by an action on the timeline.

The messages that a worker sends to a peer during one action of the timeline leave in
one frame, a bundle, when the action ends. A bundle tells how many messages of
`ACKNOWLEDGED` of the peer had been handled when its first message was sent; if more are
handled later in the action, another frame follows. In untimed runs each message has
a frame of its own.

With a control lane, frames take that lane, and the values of a message take the data
lane. A frame is dropped, delayed and resent together with its values. Messages may
overtake a message whose values have not arrived, as between processes
(`jdag.wire.order`).

Inputs:  a call of `send(...)` for each message; the actions `flush`, `frame`,
         `completed` and `timer` at their times.
Outputs: the messages that a frame makes deliverable, in order, for the host; the end of
         a link that gives up its peer, for `gave_up`.

Invariants: a message is delivered once and in order (with a control lane, in the order
of `jdag.wire.order`), or its link is closed; a closed end neither sends nor receives;
each end has at most one valid timer.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from jdag.engine.protocol import (
    ACKNOWLEDGED,
    Acknowledged,
    Key,
    Message,
    Send,
    Worker,
    incarnated,
    named,
)
from jdag.runtime.recorder import NO_CAUSE, acknowledgement_fields, trace_fields
from jdag.runtime.stats import Sent
from jdag.runtime.worker_runtime import WorkerRuntime
from jdag.sim.digest import fingerprint
from jdag.sim.environment import Environment
from jdag.sim.link_end import LinkEnd, SimBundle, SimItem, Unsent, link_settings
from jdag.sim.network import Lane, Traffic
from jdag.sim.reliable_link import NEVER, Frame, Link, SureLink
from jdag.sim.timeline import EVENT, TIMER
from jdag.sim.untimed import StepChooser
from jdag.wire.frames import FRAME_BYTES, MESSAGE_BYTES
from jdag.wire.messages import size


class SimTransport:
    """All links of one run. An end that gives up its peer is passed to `gave_up`."""

    def __init__(self, env: Environment, gave_up: Callable[[LinkEnd], None]) -> None:
        self._gave_up = gave_up
        self._hosts = env.hosts
        self._incarnations = env.incarnations
        self._network = env.settings.all_links
        self._traffic = Traffic(self._network, env.workers)
        chooser = env.chooser
        # A chooser orders messages one by one.
        self._bundles = not chooser.untimed
        self._faults = env.faults
        self._has_frame_faults = env.faults.on_frames
        is_sure = isinstance(chooser, StepChooser) and chooser.is_sure
        self._link = SureLink if is_sure and not self._has_frame_faults else Link
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
            messages=sum([end.messages for end in ends]),
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
        if send.zeros:
            end.zero_bytes += sum([zero.nbytes for zero in send.zeros])
        causes = self._recorder.causes(worker, cause, keys) if keys else (cause,)
        handled = end.order.handled
        if end.unsent and end.opened != handled:
            self._close_bundle(end)
        end.opened = handled
        end.unsent.append((message, arrays, causes))
        if not end.leaves:
            self._leave(end)

    def _leave(self, end: LinkEnd) -> None:
        self._timeline.after.append((self.flush, end))
        end.leaves = True

    def flush(self, end: LinkEnd) -> None:
        """Send what the end has for its peer after an action of the timeline."""
        end.leaves = False
        if end.host.alive:
            if end.unsent:
                self._close_bundle(end)
            if end.told != end.order.handled and end.host.alive:
                self._send(end, (), end.order.handled)
        if end.handled:
            end.handled.clear()

    def _close_bundle(self, end: LinkEnd) -> None:
        unsent, end.unsent = end.unsent, []
        if self._bundles:
            self._send(end, unsent, end.opened)
            return
        for message in unsent:
            # The values of a message may arrive later than its frame's header.
            if message[1] and end.told != end.opened:
                self._send(end, (), end.opened)
            self._send(end, (message,), end.opened)

    def _send(self, end: LinkEnd, unsent: Sequence[Unsent], handled: int) -> None:
        """Send a frame with these messages."""
        value_bytes, wire_bytes, sizes = 0, FRAME_BYTES, []
        for message, arrays, _ in unsent:
            sizes.append(nbytes := size(message, arrays))
            value_bytes += nbytes[0]
            wire_bytes += nbytes[1] + MESSAGE_BYTES
        end.payload_bytes += value_bytes
        count, end.told = handled - end.told, handled
        if not end.open:
            for _, _, causes in unsent:
                self._recorder.note("drop", end.worker, (end.peer, "lost"), causes)
            return
        end.messages += len(unsent)
        link, lane, now_ns = end.link, end.out, self._timeline.now_ns
        if end.data is not None:
            wire_bytes -= value_bytes
        arrival_ns = lane.transmit(wire_bytes, now_ns, self._chooser)
        if unsent:
            items = self._items(end, unsent, sizes, arrival_ns)
            fields, record = items[0].fields, items[0].record
        else:
            items, fields = (), acknowledgement_fields(count)
            detail = (end.peer, *fields, 0, wire_bytes, ())
            before = dict.fromkeys((*end.handled, *lane.before(now_ns, end.record)))
            record = self._recorder.note("send", end.worker, detail, tuple(before))
            end.passed(record, 0)
        bundle = SimBundle(handled, items, wire_bytes, fields, record)
        frame = link.send(bundle, now_ns, arrival_ns - now_ns)
        if self._has_frame_faults:
            self._deliver(end, frame, arrival_ns)
        else:
            action = (self.frame, end.twin, frame, record)
            self._timeline.push(arrival_ns, EVENT, action)
        if link.deadline_ns < end.timer_ns:
            self._arm(end)

    def _items(
        self,
        end: LinkEnd,
        unsent: Sequence[Unsent],
        sizes: Sequence[tuple[int, int]],
        arrival_ns: int,
    ) -> tuple[SimItem, ...]:
        """Record a frame's messages. Send their values on the data lane, if any."""
        recorder, lane, data = self._recorder, end.out, end.data
        is_traced = recorder.trace is not None
        waits = lane.start_ns > self._timeline.now_ns or lane.held
        items, overhead_bytes = [], FRAME_BYTES + MESSAGE_BYTES
        for (message, arrays, origins), nbytes in zip(unsent, sizes, strict=True):
            causes = origins
            value_bytes, whole_ns = nbytes[0] if data is not None else 0, arrival_ns
            if value_bytes or waits:
                whole_ns, before = self._waits(end, value_bytes, arrival_ns)
                causes += tuple(before)
            fields: tuple[Any, ...] = ()
            record = NO_CAUSE
            if is_traced:
                fields = trace_fields(message)
                prints = tuple(map(fingerprint, arrays)) if arrays else ()
                wire_bytes = nbytes[1] + overhead_bytes
                detail = (end.peer, *fields, nbytes[0], wire_bytes, prints)
                record = recorder.note("send", end.worker, detail, causes)
                if data is not None and value_bytes:
                    data.passed(record)
            items.append(
                SimItem(message, fields, arrays, record, value_bytes, whole_ns)
            )
            overhead_bytes = MESSAGE_BYTES
            if not end.host.alive:
                break  # It crashed at this record.
        end.passed(record, 0)
        return tuple(items)

    def frame(self, end: LinkEnd, frame: Frame, sent: int) -> None:
        link = end.link
        if not (end.host.alive and end.open):
            return
        before = link.duplicates
        bundles: tuple[SimBundle, ...] = link.receive(frame, self._timeline.now_ns)
        if frame.sequence:
            end.heard = sent
            if link.duplicates != before:
                detail = (end.peer, "link")
                self._recorder.note("duplicate", end.worker, detail, (sent,))
            for bundle in bundles:
                self._receive(end, bundle, sent)
        # After delivery, since replies carry the acknowledgement.
        if link.deadline_ns < end.timer_ns:
            self._arm(end)

    def _receive(self, end: LinkEnd, bundle: SimBundle, sent: int) -> None:
        count, end.acknowledged = bundle.handled - end.acknowledged, bundle.handled
        if count and end.host.alive:
            record = bundle.record
            causes = (record,) if record == sent else (record, sent)
            end.host.handle(Acknowledged(end.peer, count), causes)
        if end.data is None:
            self._hand_on(end, bundle.items, sent)
        else:
            self._split(end, bundle.items, sent)

    def _hand_on(self, end: LinkEnd, items: Sequence[SimItem], sent: int) -> None:
        host = end.host
        for item in items:
            if not host.alive:
                return  # The message before caused a crash.
            record, message = item.record, item.message
            causes = (record,) if record == sent else (record, sent)
            if message.__class__ not in ACKNOWLEDGED:
                host.arrived(end.peer, message, item.values, causes, item.fields)
                continue
            end.order.handing(item)
            record = host.arrived(end.peer, message, item.values, causes, item.fields)
            end.handled.append(record)
            if not end.leaves:
                self._leave(end)

    def _split(self, end: LinkEnd, items: Sequence[SimItem], sent: int) -> None:
        now_ns = self._timeline.now_ns
        for item in items:
            whole_ns = item.whole_ns
            self._hand_on(end, end.order.arrived(item, whole_ns <= now_ns), sent)
            if whole_ns > now_ns:
                self._timeline.push(whole_ns, EVENT, (self.completed, end, item))

    def completed(self, end: LinkEnd, item: SimItem) -> None:
        if end.host.alive and end.open:
            self._hand_on(end, end.order.completed(item), item.record)

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
            bundle: SimBundle = frame.payload
            wire_bytes = bundle.wire_bytes
            value_bytes = sum([item.value_bytes for item in bundle.items])
            kind, causes = "resend", [bundle.record]
            detail: tuple[Any, ...] = (end.peer, *bundle.fields, wire_bytes)
        else:
            wire_bytes = FRAME_BYTES
            kind, causes = "ack", [end.heard]
            detail = (end.peer, wire_bytes)
        now_ns = self._timeline.now_ns
        arrival_ns = end.out.transmit(wire_bytes, now_ns, self._chooser)
        whole_ns, before = self._waits(end, value_bytes, arrival_ns)
        causes += [record for record in before if record not in causes]
        if value_bytes:
            frame = _whole_at(frame, [whole_ns] * len(bundle.items))
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
                times = [item.whole_ns + extra_ns for item in frame.payload.items]
                late = _whole_at(frame, times)
            else:
                late = frame
            action = (self.frame, end.twin, late, record)
            timeline.push(arrival_ns + extra_ns, EVENT, action)


def _whole_at(frame: Frame, times: Sequence[int]) -> Frame:
    bundle: SimBundle = frame.payload
    pairs = zip(bundle.items, times, strict=True)
    items = tuple([replace(item, whole_ns=whole_ns) for item, whole_ns in pairs])
    return replace(frame, payload=replace(bundle, items=items))
