"""Receiving side of a connection: bytes from its stream become events.

The invariants are those of `jdag.processes.net.connection`. Frames about shared memory
go to `borrowed` (the peer's) and `pool` (this node's).
"""

import json
import struct
from collections import deque
from typing import Any, NamedTuple

from jdag.compute.buffers import Buffers
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
from jdag.wire.frames import FRAME_BYTES, FrameKind, Header, unpack_header

BUFFER_BYTES = 256 * 1024
READS_MAX = 16  # In one turn, so that other connections get theirs.
DIGEST_BYTES = 32
PING, PONG = b"?", b"!"


class ReceivedDefinition(NamedTuple):
    """A function that later messages call by this digest."""

    digest: bytes
    data: bytes


class Control(NamedTuple):
    """A control frame: what the peer's node asks or tells beside the engines."""

    what: Any  # JSON.


class Broken(NamedTuple):
    """The stream ended; another one may be adopted."""

    why: str


class Failed(NamedTuple):
    """The peer was silent, or broke the protocol: it is to be given up."""

    why: str


class Exhausted(NamedTuple):
    """This node has no memory for what the peer sent."""

    why: str


PeerEvent = Delivery | ReceivedDefinition | Control | Broken | Failed | Exhausted


class FrameCounters:
    """The numbers of a connection's frames, which outlive its streams.

    Frames are numbered from 1. A stream keeps their order and loses none, so only over
    a new one is anything sent again.
    """

    __slots__ = ("acknowledged", "received", "sent", "unacknowledged")

    def __init__(self) -> None:
        self.sent = self.received = self.acknowledged = 0  # The last frame of each.
        self.unacknowledged: deque[Parcel] = deque()

    def acknowledge(self, last: int) -> None:
        """Record that the peer has all frames up to `last`; may raise ProtocolError."""
        if not self.acknowledged <= last <= self.sent:
            raise ProtocolError(
                f"frames up to {last} are acknowledged; {self.sent} was the last that "
                f"was sent, and {self.acknowledged} acknowledged before"
            )
        for _ in range(last - self.acknowledged):
            self.unacknowledged.popleft()
        self.acknowledged = last


class FrameReader:
    """Reads the frames of one connection; `numbers` counts them."""

    def __init__(
        self,
        numbers: FrameCounters,
        assembler: Assembler,
        buffers: Buffers,
        pool: SharedMemoryPool,
        borrowed: BorrowedMemory,
    ) -> None:
        self.nbytes = 0  # Of the payloads of numbered frames that came, ever.
        self.pinged = False  # Whether the peer wants a sign of life.
        self.paused = False  # After a control frame, until `read` is called again.
        self.more = False  # Whether there may be more that the poller does not see.
        self._numbers = numbers
        self.assembler = assembler
        self._buffers = buffers
        self._pool = pool
        self._borrowed = borrowed
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._end = 0
        # The rest of a frame that is read in place; and its header and payload.
        self._direct: memoryview | None = None
        self._direct_frame: tuple[Header, memoryview] | None = None

    def interrupt(self) -> None:
        """Drop incomplete frames."""
        self.paused = False
        self._end = 0
        self._direct = self._direct_frame = None

    def clear(self) -> None:
        """Free all memory; nothing may be read afterwards."""
        self.interrupt()
        self._buffer = memoryview(b"")
        self.assembler.clear()

    def read(self, stream: Stream, events: list[PeerEvent]) -> bool:
        """Read available frames, bounded so that other connections get their turn.

        Reading pauses after a control frame, which may announce a worker that the next
        frame names. Returns whether any bytes arrived.

        Raises:
            ConnectionError: the stream ended.
            ProtocolError: a frame or message is malformed.
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
                    header, whole = self._direct_frame
                    self._direct = self._direct_frame = None
                    self._take(header, whole, stream, events)
            if got < len(room) and not (stream.buffered and stream.pending()):
                self.more = self.paused
                break
        return heard

    def _parse(self, stream: Stream, events: list[PeerEvent]) -> None:
        """Take the frames that are whole; read the rest of a large one in place."""
        buffer, start, end = self._buffer, 0, self._end
        while end - start >= FRAME_BYTES and not self.paused:
            header = unpack_header(buffer, start)
            sequence, _, length, kind = header
            if sequence and sequence != self._numbers.received + 1:
                raise ProtocolError(f"frame {sequence} after {self._numbers.received}")
            body = start + FRAME_BYTES
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
                # What is announced takes memory as it comes.
                take = self.assembler.target if is_chunk else self._buffers.aligned
                whole = take(length)
                whole[: end - body] = buffer[body:end]
                self._direct = whole[end - body :]
                self._direct_frame = header, whole
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
        """Handle a complete frame; the payload of a chunk is in place already."""
        sequence, acknowledged, length, kind = header
        numbers = self._numbers
        if acknowledged > numbers.acknowledged:
            numbers.acknowledge(acknowledged)
        if sequence:
            numbers.received = sequence
            self.nbytes += length
        if kind is FrameKind.MESSAGE:
            events += self.assembler.message(bytes(payload))
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

    def _segment(self, payload: bytes, events: list[PeerEvent]) -> None:
        what, numbers = payload[:1], payload[1:]
        if what == LENT:
            events += self.assembler.lent(*struct.unpack("<QQ", numbers))
            return
        (segment,) = struct.unpack("<Q", numbers)
        if what == FREED:
            self._pool.freed(segment, clock_ns())
        else:
            assert what == FORGOTTEN, what
            self._borrowed.forget(segment)

    def _offered(self, payload: bytes, stream: Stream) -> None:
        """Take a new segment, whose descriptor came with this frame."""
        if len(payload) != 16:
            raise ProtocolError(f"{payload!r} offers no segment")
        number = int.from_bytes(payload[1:8], "little")
        nbytes = int.from_bytes(payload[8:], "little")
        try:
            self._borrowed.offered(number, nbytes, stream.take_segment())
        except ConnectionError as error:
            raise ProtocolError(str(error)) from None
        except OSError as error:
            self._borrowed.refused(error)
