"""The receiving side of a connection: converts the bytes of its stream to events.

The invariants in `jdag.processes.net.connection` apply. Frames about shared memory are
passed to `borrowed` (the peer's segments) and `pool` (this node's segments).
"""

import json
import struct
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jdag.compute.buffers import Buffers
from jdag.engine.protocol import Acknowledged
from jdag.errors import ProtocolError
from jdag.processes.net.large_values import (
    FORGOTTEN,
    FREED,
    LENT,
    OFFERED,
    Assembler,
    Delivery,
    Parcel,
)
from jdag.processes.net.loop import clock_ns
from jdag.processes.net.shared_memory import BorrowedMemory, SharedMemoryPool
from jdag.processes.net.streams import Stream
from jdag.wire.frames import (
    FRAME_BYTES,
    HEADER,
    LENGTH_BITS,
    LENGTH_MASK,
    FrameKind,
    Header,
    unpack_header,
)

BUFFER_BYTES = 256 * 1024
READS_MAX = 16  # Reads per loop iteration; other connections must be read too.
DIGEST_BYTES = 32
PING, PONG = b"?", b"!"


class ReceivedDefinition(NamedTuple):
    """An exported function. Later messages refer to it by its digest."""

    digest: bytes
    data: bytes


class ReceivedAcknowledgement(NamedTuple):
    """What the header of a frame acknowledges.

    `number` is that of the frame's first message, or minus the count of empty bundles.
    """

    message: Acknowledged
    number: int


class Control(NamedTuple):
    """A control frame, decoded from JSON: a query, a reply or a notice of a node."""

    content: Any


class Broken(NamedTuple):
    """The stream ended. The connection may adopt a new stream."""

    why: str


class Failed(NamedTuple):
    """The peer was silent or broke the protocol, and must be treated as lost."""

    why: str


class Exhausted(NamedTuple):
    """This node has no memory for the peer's data."""

    why: str


PeerEvent = (
    Delivery | ReceivedAcknowledgement | ReceivedDefinition | Control
    | Broken | Failed | Exhausted
)  # fmt: skip


class FrameCounters:
    """The frame numbers of a connection. They continue when its stream is replaced.

    Frames are numbered from 1. A stream delivers all frames in order, so frames are
    resent only over a new stream.
    """

    __slots__ = ("acknowledged", "received", "sent", "unacknowledged")

    def __init__(self) -> None:
        self.sent = self.received = self.acknowledged = 0  # Last frame numbers.
        self.unacknowledged: deque[Parcel] = deque()

    def acknowledge(self, last: int) -> None:
        if not self.acknowledged <= last <= self.sent:
            raise ProtocolError(
                f"the peer acknowledged frames up to number {last}; expected a number "
                f"from {self.acknowledged} to {self.sent}"
            )
        for _ in range(last - self.acknowledged):
            self.unacknowledged.popleft()
        self.acknowledged = last


class FrameReader:
    def __init__(
        self,
        worker: str,
        numbers: FrameCounters,
        assembler: Assembler,
        buffers: Buffers,
        pool: SharedMemoryPool,
        borrowed: BorrowedMemory,
    ) -> None:
        self._worker = worker
        self.nbytes = 0  # Payload bytes of all numbered frames received.
        self.handled = 0  # Messages of `ACKNOWLEDGED` that the peer has handled.
        self._empty = 0  # Empty bundles received.
        self.pinged = False  # Whether the peer waits for a sign of life.
        self.paused = False  # Set by a control frame until `read` is called again.
        self.more = False  # Whether input may exist that the poller does not report.
        self._numbers = numbers
        self.assembler = assembler
        self._decoders: dict[int, Callable[[bytes], Sequence[Delivery]]] = {
            FrameKind.MESSAGE: assembler.bundle,
            FrameKind.STEP: assembler.step,
        }
        self._buffers = buffers
        self._pool = pool
        self._borrowed = borrowed
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._end = 0
        # A frame that is read in place: its missing part, then its header and payload.
        self._direct: memoryview | None = None
        self._direct_frame: tuple[Header, memoryview] | None = None

    def interrupt(self) -> None:
        self.paused = False
        self._end = 0
        self._direct = self._direct_frame = None

    def clear(self) -> None:
        """Free all memory. `read` must not be called afterwards."""
        self.interrupt()
        self._buffer = memoryview(b"")
        self.assembler.clear()

    def read(self, stream: Stream, events: list[PeerEvent]) -> bool:
        """Read available frames, up to a limit; return whether any bytes arrived.

        The limit lets other connections be read too. Reading pauses after a control
        frame, because the frame may announce a worker that the next frame names.
        """
        heard = False
        self.more = True
        if self.paused:
            self.paused = False
            self._parse(stream, events)
        for _ in range(READS_MAX):
            if self.paused:
                break
            room = self._buffer[self._end :] if self._direct is None else self._direct
            try:
                got = stream.recv_into(room)
            except BlockingIOError:
                self.more = False
                break
            heard = True
            if self._direct is None:
                self._end += got
                self._parse(stream, events)
            else:
                self._direct = room[got:]
                if self._direct_frame is not None and got == len(room):
                    header, target = self._direct_frame
                    self._direct = self._direct_frame = None
                    self._take(header, target, stream, events)
            if got < len(room) and not (stream.buffered and stream.pending()):
                self.more = self.paused
                break
        return heard

    def _parse(self, stream: Stream, events: list[PeerEvent]) -> None:
        """Handle complete frames. An incomplete large frame will be read in place."""
        buffer, start, end = self._buffer, 0, self._end
        numbers = self._numbers
        while end - start >= FRAME_BYTES and not self.paused:
            sequence, acknowledged, handled, rest = HEADER.unpack_from(buffer, start)
            body, length = start + FRAME_BYTES, rest & LENGTH_MASK
            decode = self._decoders.get(rest >> LENGTH_BITS)
            fits = length <= end - body and sequence == numbers.received + 1
            if fits and decode is not None:  # A complete bundle or step frame.
                start = body + length
                if acknowledged > numbers.acknowledged:
                    numbers.acknowledge(acknowledged)
                numbers.received = sequence
                self.nbytes += length
                if handled != self.handled:
                    events.append(self._acknowledge(handled, length))
                events += decode(bytes(buffer[body:start]))
                continue
            header = unpack_header(buffer, start)
            sequence, _, length, kind, _ = header
            if sequence and sequence != self._numbers.received + 1:
                raise ProtocolError(
                    f"received frame number {sequence}; expected number "
                    f"{self._numbers.received + 1}"
                )
            is_chunk = kind is FrameKind.CHUNK
            if end - body >= length:
                start = body + length
                payload = buffer[body:start]
                if is_chunk:
                    target = self.assembler.target(length)
                    target[:] = payload
                    payload = target
                self._take(header, payload, stream, events)
            elif is_chunk or FRAME_BYTES + length > BUFFER_BYTES:
                take = self.assembler.target if is_chunk else self._buffers.aligned
                target = take(length)
                target[: end - body] = buffer[body:end]
                self._direct = target[end - body :]
                self._direct_frame = header, target
                self._end = 0
                return
            else:
                break
        self._end = end - start
        if start < end:
            buffer[: self._end] = bytes(buffer[start:end])

    def _take(
        self,
        header: Header,
        payload: memoryview,
        stream: Stream,
        events: list[PeerEvent],
    ) -> None:
        """Handle a complete frame. The payload of a chunk is already in place."""
        sequence, acknowledged, length, kind, handled = header
        numbers = self._numbers
        if acknowledged > numbers.acknowledged:
            numbers.acknowledge(acknowledged)
        if sequence:
            numbers.received = sequence
            self.nbytes += length
        if handled != self.handled:
            events.append(self._acknowledge(handled, length))
        if kind in self._decoders:
            events += self._decoders[kind](bytes(payload))
        elif kind is FrameKind.CHUNK:
            events += self.assembler.received(len(payload))
        elif kind is FrameKind.DEFINE:
            digest, data = payload[:DIGEST_BYTES], payload[DIGEST_BYTES:]
            events.append(ReceivedDefinition(bytes(digest), bytes(data)))
        elif kind is FrameKind.ASIDE:
            events.append(Control(json.loads(bytes(payload))))
            self.paused = True
        elif kind is FrameKind.SEGMENT:
            self._segment(bytes(payload), events)
        elif bytes(payload[:1]) == OFFERED:
            self._offered(bytes(payload), stream)
        elif bytes(payload) == PING:
            self.pinged = True

    def _acknowledge(self, handled: int, length: int) -> ReceivedAcknowledgement:
        count, self.handled = handled - self.handled, handled
        if count < 0:
            raise ProtocolError(
                f"the peer had handled {handled - count} messages, and now {handled}"
            )
        number = self.assembler.messages + 1
        if not length:
            self._empty += 1
            number = -self._empty
        return ReceivedAcknowledgement(Acknowledged(self._worker, count), number)

    def _segment(self, payload: bytes, events: list[PeerEvent]) -> None:
        kind, numbers = payload[:1], payload[1:]
        if kind == LENT:
            events += self.assembler.lent(*struct.unpack("<QQ", numbers))
            return
        (segment,) = struct.unpack("<Q", numbers)
        if kind == FREED:
            self._pool.freed(segment, clock_ns())
        else:
            assert kind == FORGOTTEN, kind
            self._borrowed.forget(segment)

    def _offered(self, payload: bytes, stream: Stream) -> None:
        """Map a new shared memory segment, whose descriptor came with this frame."""
        if len(payload) != 16:
            raise ProtocolError(
                f"an offer of shared memory has {len(payload)} bytes; expected 16"
            )
        number = int.from_bytes(payload[1:8], "little")
        nbytes = int.from_bytes(payload[8:], "little")
        try:
            self._borrowed.offered(number, nbytes, stream.take_segment())
        except ConnectionError as error:
            raise ProtocolError(str(error)) from None
        except OSError as error:
            self._borrowed.refused(error)
