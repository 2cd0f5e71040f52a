"""One node's end of its connection with another node, over replaceable streams.

Events are passed to `handle` in order. `handle` must ignore events of a lost peer.

Invariants

1. Frames arrive once and in order, even if the stream is replaced. They are numbered
   over the whole life of the connection, and kept until the peer acknowledges them.
   Every frame carries an acknowledgement. A separate frame for an acknowledgement is
   sent after much data, after large data, or at the next liveness check.
2. The messages of one turn of the loop leave in one frame (`bundles`). Bundles and
   frames of steps tell how many messages of the peer were handled; other frames repeat
   the number of the last one.
3. Frames are not reordered, with one exception: a chunk of a large value is sent only
   when no other frame waits and little output is buffered. At most `WINDOW_BYTES` of
   chunks are unacknowledged.
4. Input is checked before it is used and before memory is allocated for it. A malformed
   frame yields `Failed`, after the events of earlier frames.
5. A chunk is read directly into the memory of its value. If a stream ends within a
   frame, the received part of the frame is discarded.
6. A peer with an open stream sends data or is pinged four times per deadline. If it
   does not reply to a ping, its helper process is queried. A peer without a sign of
   life for `SILENT` percent of the deadline yields `Failed`, so that waiting programs
   get an error before the deadline.
7. A lost connection sends nothing and returns no events.
"""

import json
import logging
import struct
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from typing import Any

from jdag.compute.buffers import Buffers
from jdag.engine.protocol import Message, StepFrame, incarnated
from jdag.errors import JdagError
from jdag.processes.net.bundles import Bundles
from jdag.processes.net.large_values import (
    FORGOTTEN,
    FREED,
    OFFERED,
    Assembler,
    BulkQueue,
    Parcel,
)
from jdag.processes.net.loop import READ, WRITE, Loop, clock_ns
from jdag.processes.net.pulse import Pulse
from jdag.processes.net.receiving import (
    PING,
    PONG,
    Broken,
    Exhausted,
    Failed,
    FrameCounters,
    FrameReader,
    PeerEvent,
)
from jdag.processes.net.shared_memory import BorrowedMemory, SharedMemoryPool
from jdag.processes.net.streams import Stream
from jdag.runtime.recorder import acknowledgement_fields, trace_fields
from jdag.runtime.stats import Sent
from jdag.wire.arrays import type_of
from jdag.wire.frames import FRAME_BYTES, FrameKind, pack_header
from jdag.wire.messages import STEP, Codec, blank

LAST_READS_MAX = 64
OUT_BYTES = 512 * 1024  # No chunk is added while more output than this is buffered.
_VIEWS_MAX = 64  # Maximum number of buffers per system call.
JOINED_BYTES = 2048  # Views that are smaller on average are copied into one.
FRAMES_MAX = 1 << 16  # Maximum number of unacknowledged frames.
# After this many bytes or frames, an acknowledgement is sent at once. After
# `LARGE_BYTES`, it is sent within ACK_DELAY_NS, as the peer keeps values until then.
ACK_BYTES, ACK_FRAMES = 1024 * 1024, 256
LARGE_BYTES, ACK_DELAY_NS = 64 * 1024, 20_000_000
SILENT = 90

_log = logging.getLogger(__name__)

Handle = Callable[["Connection", Sequence[PeerEvent]], None]
Sends = Callable[[str, tuple[Any, ...], tuple[int, int], tuple[int, ...]], None]


class Connection:
    """This node's end of its connection with one incarnation of another node.

    `handle` receives the events. `sends` is called for each message and each empty
    bundle that is sent. Its arguments are the peer, the trace fields, the bytes of
    values with the total bytes, and the causes in the trace. `buffers` provides memory
    for large received values. The owner passes each delivery to `order.handing` just
    before it is handled; `handled` are the trace records of those since the last flush.
    """

    def __init__(  # noqa: PLR0913 - keyword options.
        self,
        name: str,
        incarnation: int,
        *,
        loop: Loop,
        codec: Codec,
        buffers: Buffers,
        deadline_ns: int,
        value_bytes_max: int,
        handle: Handle,
        sends: Sends | None = None,
    ) -> None:
        self.name, self.incarnation = name, incarnation
        self.worker = incarnated(name, incarnation)
        self.lost = False
        self.stream: Stream | None = None
        self.numbers = FrameCounters()
        self.sent = Sent()
        self.allowed: tuple[str, ...] = ()  # Modules that the peer allows.
        self.waiting_bytes = 0  # Bytes of buffered output, without large values.
        self.adopted_ns = clock_ns()
        self._loop = loop
        self._codec = codec
        self._handle = handle
        self._sends = sends
        self._flushing = False  # Whether the loop will call `flush`.
        self._waits_to_write = False
        self._send_error: OSError | None = None  # If set, the stream cannot send.
        self._defined: dict[bytes, None] = {}  # Digests of functions sent to the peer.
        self._queue: deque[Parcel] = deque()  # Frames without a number yet.
        self._out: deque[Any] = deque()  # Bytes for the stream.
        self._told = 0  # Handled messages, according to the last numbered frame.
        self.handled: list[int] = []
        self._pool = SharedMemoryPool(name, partial(loop.post, self._has_more))
        self.bulk = BulkQueue(self._pool)
        self._borrowed = BorrowedMemory(
            name, lambda number: loop.post(partial(self.about_segment, FREED, number))
        )
        assembler = Assembler(codec, buffers, self._borrowed, value_bytes_max)
        self.order = assembler.order
        self.bundles = Bundles(self.order, self.bulk, self._put)
        self.reader = FrameReader(
            self.worker, self.numbers, assembler, buffers, self._pool, self._borrowed
        )
        self._acknowledged = 0  # Number of the last acknowledged received frame.
        self._acknowledged_bytes = 0  # Bytes received up to that frame's end.
        self._acknowledges_soon = False
        self.heard_ns = self.adopted_ns
        self.pulse: Pulse | None = None  # Queries the peer's helper process.
        self._deadline_ns = deadline_ns
        self._look_ns = self.heard_ns + deadline_ns // 4
        self._timer = loop.at(self._look_ns, self._look)

    def __repr__(self) -> str:
        return f"Connection({self.name}, incarnation {self.incarnation})"

    def adopt(self, stream: Stream, received: int) -> None:
        """Use a new stream. `received` is the number of frames received by the peer."""
        self.drop_stream()
        numbers = self.numbers
        numbers.acknowledge(received)
        self.sent.resends += len(numbers.unacknowledged)
        for sequence, parcel in enumerate(numbers.unacknowledged, received + 1):
            self._put(parcel, sequence)
        self.bulk.acknowledged(received)
        self.stream = stream
        self.adopted_ns = clock_ns()
        self._loop.register(stream.fileno(), self.ready)
        self._pure(PING)  # A successful connect does not prove that the peer is alive.

    def lose(self, last: dict[str, Any]) -> None:
        """End the connection. Send `last` in a last frame if that does not block."""
        self.control(last)
        self.lost = True
        self.flush()
        self.drop_stream()
        self._timer.cancel()
        self._queue.clear()
        self.numbers.unacknowledged.clear()
        self.waiting_bytes = 0
        self.bulk.clear()
        self.reader.clear()
        self._borrowed.close()
        self._pool.close()
        if self.pulse is not None:
            self.pulse.close()

    def drop_stream(self) -> None:
        stream, self.stream = self.stream, None
        if stream is not None:
            self._loop.unregister(stream.fileno())
            stream.close()
        self._out.clear()
        self.waiting_bytes = sum([FRAME_BYTES + p.nbytes for p in self._queue])
        self.reader.interrupt()
        self._waits_to_write, self._send_error = False, None

    def _break(self, why: object) -> None:
        self.drop_stream()
        if not self.lost:
            self._handle(self, [Broken(str(why))])

    @property
    def idle(self) -> bool:
        waiting = self.bundles.open or self._queue or self._out or self.bulk.values
        is_told = self.bundles.told == self.order.handled
        return is_told and not waiting and self.reader.assembler.is_complete

    def send(
        self, message: Message, values: Sequence[Any], causes: tuple[int, ...] = ()
    ) -> None:
        """Send a message. `causes` are the trace records that caused it.

        Raises ProtocolError if the message cannot be encoded.
        """
        if self.lost:
            return
        kinds = list(map(type_of, values)) if values else []
        sizes = [kind.nbytes for kind in kinds]
        value_bytes = sum(sizes)
        if message.__class__ is StepFrame:
            head = STEP.pack(message.number, message.base)
            head += self._codec.encode(blank(message), kinds)
            self.step(head, sizes, values, value_bytes)
            header_bytes = FRAME_BYTES
        else:
            head = self._codec.encode(message, kinds)
            header_bytes = self.bundles.add(head, sizes, values)
            self.sent.messages += 1
            self.sent.payload_bytes += value_bytes
            if not self._flushing:
                self._has_more()
        if self._sends is not None:
            nbytes = value_bytes, header_bytes + len(head) + value_bytes
            self._sends(self.worker, trace_fields(message), nbytes, causes)

    def step(
        self, data: bytes, sizes: Sequence[int], values: Sequence[Any], nbytes: int
    ) -> None:
        """Send a step frame: numbers and head, then values of these sizes.

        If there are no sizes, `data` has the values already. They have `nbytes` bytes.
        """
        if self.lost:
            return
        views: Sequence[Any] = (data,)
        length = len(data)
        if sizes:
            inline, inline_bytes = self.bulk.split(sizes, values)
            views, length = (data, *inline), length + inline_bytes
        self.sent.payload_bytes += nbytes
        self.sent.messages += 1
        self.bundles.told = self.order.handled
        self._add(FrameKind.STEP, views, length)

    def define(self, digest: bytes, data: bytes) -> None:
        """Send a function once. Call this before messages that refer to its digest."""
        if digest not in self._defined:
            self._defined[digest] = None
            self._add(FrameKind.DEFINE, (digest, data), len(digest) + len(data))

    def control(self, content: dict[str, Any]) -> None:
        data = json.dumps(content).encode()
        self._add(FrameKind.ASIDE, (data,), len(data))

    def about_segment(self, kind: bytes, number: int) -> None:
        data = struct.pack("<cQ", kind, number)
        self._add(FrameKind.SEGMENT, (data,), len(data))

    def _pure(self, payload: bytes = b"") -> None:
        self._put(Parcel(FrameKind.PURE, (payload,), len(payload), self._told), 0)
        self._has_more()

    def _has_more(self) -> None:
        if not self._flushing:
            self._flushing = True
            self._loop.unflushed.append(self)

    def _add(self, kind: FrameKind, views: Sequence[Any], nbytes: int) -> None:
        if self.lost:
            return
        if self.bundles.open is not None:
            self.bundles.close()
        self._put(Parcel(kind, views, nbytes, self.bundles.told))
        if not self._flushing:
            self._has_more()

    def _put(self, parcel: Parcel, sequence: int = -1) -> int:
        """Number a frame, or let it wait in the queue. `sequence` is a given number."""
        numbers = self.numbers
        if sequence < 0:
            count, sequence = len(numbers.unacknowledged), numbers.sent + 1
            full = len(self._out) >= _VIEWS_MAX or count >= FRAMES_MAX
            if full or self._queue or self.stream is None:
                self._queue.append(parcel)
                self.waiting_bytes += FRAME_BYTES + parcel.nbytes
                return sequence
        if sequence > numbers.sent:
            numbers.sent, self._told = sequence, parcel.handled
            numbers.unacknowledged.append(parcel)
        views, nbytes = parcel.views, FRAME_BYTES + parcel.nbytes
        self._acknowledged = received = numbers.received
        self._acknowledged_bytes = self.reader.nbytes
        head = pack_header(
            sequence, received, parcel.nbytes, parcel.kind, parcel.handled
        )
        self.waiting_bytes += nbytes
        sent = self.sent
        sent.bytes += nbytes
        sent.frames += 1
        if nbytes <= JOINED_BYTES * len(views):
            self._out.append(b"".join((head, *views)))
        else:
            self._out.append(head)
            self._out.extend(views)
        return sequence

    def flush(self) -> None:
        if not self.lost and (count := self.bundles.flush()) and self._sends:
            fields, causes = acknowledgement_fields(count), tuple(self.handled)
            self._sends(self.worker, fields, (0, FRAME_BYTES), causes)
        self.handled.clear()
        self._flushing = False
        stream = self.stream
        if stream is None or self._waits_to_write or self._send_error is not None:
            return
        out = self._out
        try:
            if self._pool.created:
                self._offer_on(stream)
            while True:  # Bounded: each iteration consumes output.
                if self._queue or self.bulk.values:
                    self._fill()
                if not out:
                    break
                count = stream.send(list(islice(out, _VIEWS_MAX)))
                self.waiting_bytes -= count
                while count:  # Bounded by the views passed to `send`.
                    view = out[0]
                    if count < len(view):
                        out[0] = memoryview(view)[count:]
                        break
                    count -= len(view)
                    out.popleft()
                if self._pool.created:
                    self._offer_on(stream)
            if stream.buffered:
                stream.flush()
            if self.bulk.copying:
                self._has_more()
        except BlockingIOError:
            self._wait_to_write(True)
        except (ConnectionError, OSError) as error:
            self._send_error = error  # A flush handles no events itself.
            self._loop.soon(partial(self._hear_out, stream, error))

    def _fill(self) -> None:
        bulk, queue, numbers = self.bulk, self._queue, self.numbers
        local = self.stream is not None and self.stream.local
        while len(self._out) < _VIEWS_MAX and len(numbers.unacknowledged) < FRAMES_MAX:
            if queue:
                parcel = queue.popleft()
                self.waiting_bytes -= FRAME_BYTES + parcel.nbytes  # `_put` adds them.
                self._put(parcel, numbers.sent + 1)
            elif self.waiting_bytes < OUT_BYTES and (cut := bulk.next(local)):
                cut.handled = self._told
                bulk.numbered(self._put(cut, numbers.sent + 1), cut)
            else:
                break

    def _wait_to_write(self, waits: bool) -> None:
        assert self.stream is not None, self
        self._waits_to_write = waits
        self._loop.watch(self.stream.fileno(), READ | WRITE if waits else READ)

    def _hear_out(self, stream: Stream, error: OSError) -> None:
        """Read the peer's last frames. They may explain why it closed the stream."""
        for _ in range(LAST_READS_MAX):
            if self.lost or self.stream is not stream:
                return
            if self.ready(READ):
                self._loop.soon(partial(self._hear_out, stream, error))  # Reads more.
                return
        self._break(error)

    def _offer_on(self, stream: Stream) -> None:
        """Offer new segments of shared memory to a local peer, between two frames."""
        created = self._pool.created
        while created and stream.local and not self._out:
            segment = created[0]
            payload = OFFERED + segment.number.to_bytes(7, "little")
            payload += segment.nbytes.to_bytes(8, "little")
            received = self.numbers.received
            nbytes, told = len(payload), self._told
            frame = pack_header(0, received, nbytes, FrameKind.PURE, told) + payload
            try:
                sent = stream.send_segment([memoryview(frame)], segment.descriptor)
            except (ConnectionError, BlockingIOError):
                raise
            except OSError as error:  # Arrays will use the socket instead.
                _log.info("%s: cannot offer shared memory: %s", self, error)
                sent = len(frame)
            self._pool.offered(clock_ns())
            if sent < len(frame):
                self._out.append(frame[sent:])
                self.waiting_bytes += len(frame) - sent

    def ready(self, mask: int) -> bool:
        """Read from or write to a ready stream. Return whether there were events."""
        if mask & WRITE and self._waits_to_write:
            self._wait_to_write(False)
            self._has_more()
        stream, reader = self.stream, self.reader
        if stream is None or not mask & ~WRITE:
            return False
        events: list[PeerEvent] = []
        try:
            if reader.read(stream, events):
                self.heard_ns = clock_ns()
        except JdagError as error:  # A malformed frame or message.
            events.append(Failed(f"it broke the protocol: {error}"))
        except MemoryError as error:  # An error of this node, not of the peer.
            events.append(Exhausted(f"it has no memory for a received value: {error}"))
        except (ConnectionError, OSError) as error:
            self.drop_stream()
            events.append(Broken(str(error)))
        except Exception as error:
            _log.exception("%s: its input cannot be read", self)
            events.append(Failed(f"it broke the protocol: {error!r}"))
        else:
            if reader.pinged:
                reader.pinged = False
                self._pure(PONG)
            if self.bulk.chunks:
                self.bulk.acknowledged(self.numbers.acknowledged)
            large = reader.nbytes - self._acknowledged_bytes
            frames = self.numbers.received - self._acknowledged
            if large >= ACK_BYTES or frames >= ACK_FRAMES:
                self._pure()
            elif large >= LARGE_BYTES and not self._acknowledges_soon:
                self._acknowledges_soon = True
                self._loop.at(self.heard_ns + ACK_DELAY_NS, self._send_acknowledgement)
            if reader.more:
                self._loop.soon(partial(self.ready, READ))
        if events:
            self._handle(self, events)
        told = self.bundles.told == self.order.handled
        if self._queue or self.bulk.values or not told:
            self._has_more()
        return bool(events)

    def _send_acknowledgement(self) -> None:
        self._acknowledges_soon = False
        if self.stream is not None and self._acknowledged < self.numbers.received:
            self._pure()

    def silent_ns(self, now_ns: int) -> int:
        if self.pulse is not None:
            self.heard_ns = max(self.heard_ns, self.pulse.heard_ns())
        return now_ns - self.heard_ns

    def _look(self) -> None:
        """Check liveness: ping a silent peer, or report it as failed."""
        now_ns, quarter_ns = clock_ns(), self._deadline_ns // 4
        if now_ns - self._look_ns >= quarter_ns:
            # This node was stalled, and its input may contain signs of life.
            self.heard_ns = max(self.heard_ns, now_ns - 2 * quarter_ns)
        limit_ns = self._deadline_ns * SILENT // 100
        if now_ns - self.heard_ns >= limit_ns:
            self.ready(READ)  # There may be unread input.
        silent_ns = self.silent_ns(now_ns)
        if silent_ns >= limit_ns:
            why = f"it gave no sign of life for {silent_ns / 1e9:.1f} s"
            self._handle(self, [Failed(why)])
        if self.lost:
            return
        self._send_acknowledgement()
        if silent_ns >= quarter_ns and self.stream is not None:
            self._pure(PING)
        if self.pulse is not None:
            self.pulse.look(now_ns, self.heard_ns, quarter_ns)
        self._borrowed.release_deleted()
        for number in self._pool.sweep(now_ns):
            self.about_segment(FORGOTTEN, number)
        next_ns = min((silent_ns // quarter_ns + 1) * quarter_ns, limit_ns)
        self._look_ns = max(self.heard_ns + next_ns, now_ns + 1)
        self._timer = self._loop.at(self._look_ns, self._look)
