"""What a connection receives: bytes from its stream become events.

Inputs:  `read`: what the stream has now; `interrupt`: the stream ended.
Outputs: events, appended to a list in order; `pinged`; what the peer says of shared
         memory is passed to `borrowed` (its own) and `pool` (this node's).
Invariants: the link sees each numbered frame once and in order; a frame is checked
before it is used or takes memory; a stream that ended within a frame leaves no trace of
that frame.
"""

import json
import struct
from typing import Any, NamedTuple

from jdag.compute.buffers import Buffers
from jdag.errors import ProtocolError
from jdag.rpc.bulk import FORGOTTEN, FREED, LENT, OFFERED, Assembler, Delivery
from jdag.rpc.loop import clock_ns
from jdag.rpc.shared_memory import BorrowedMemory, SharedMemoryPool
from jdag.rpc.streams import Stream
from jdag.wire.frames import CHUNK, FrameKind, Header, unpack_header
from jdag.wire.link import FRAME_BYTES, Frame, Link

BUFFER_BYTES = 256 * 1024
READS_MAX = 16  # In one turn, so that other connections get theirs.
DIGEST_BYTES = 32
PING, PONG = b"?", b"!"


class Definition(NamedTuple):
    """The peer will call a function of this digest."""

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


Event = Delivery | Definition | Control | Broken | Failed | Exhausted


class FrameReader:
    """Reads the frames of one connection; `link` counts them."""

    def __init__(
        self,
        link: Link,
        assembler: Assembler,
        buffers: Buffers,
        pool: SharedMemoryPool,
        borrowed: BorrowedMemory,
    ) -> None:
        self.messages = 0
        self.chunk_bytes = 0  # Of elements that came, ever.
        self.pinged = False  # Whether the peer wants a sign of life.
        self.paused = False  # After a control frame, until `read` is called again.
        self.more = False  # Whether there may be more that the poller does not see.
        self._link = link
        self._assembler = assembler
        self._buffers = buffers
        self._pool = pool
        self._borrowed = borrowed
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        # The rest of a frame that is read in place; and its header and payload.
        self._direct: memoryview | None = None
        self._direct_frame: tuple[Header, memoryview] | None = None

    def interrupt(self) -> None:
        """Forget what is here of frames that were not taken."""
        self.paused = False
        self._start = self._end = 0
        self._direct = self._direct_frame = None

    def clear(self) -> None:
        """Let go of all memory; nothing is read any more."""
        self.interrupt()
        self._buffer = memoryview(b"")
        self._assembler.clear()

    def read(self, stream: Stream, events: list[Event]) -> bool:
        """Read what is there, but not so much that others would have to wait long.

        Reading pauses after a control frame, as it may tell of a worker that the next
        frame names. Returns whether there was anything.

        Raises:
            ConnectionError: the stream ended.
            ProtocolError: what came is no frame, or no message.
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
            if got < len(room) and not stream.pending():
                self.more = self.paused
                break
        return heard

    def _parse(self, stream: Stream, events: list[Event]) -> None:
        """Take the frames that are whole; read the rest of a large one in place."""
        buffer, link, end = self._buffer, self._link, self._end
        while end - self._start >= FRAME_BYTES and not self.paused:
            body = self._start + FRAME_BYTES
            header = unpack_header(buffer[self._start : body])
            sequence, _, length, kind = header
            if sequence and sequence != link.received + 1:
                raise ProtocolError(f"frame {sequence} after {link.received}")
            elements = body + CHUNK.size
            if end - body >= length:
                self._start = body + length
                payload = buffer[body : self._start]
                if kind is FrameKind.CHUNK:
                    payload = self._chunk(payload, payload[CHUNK.size :], length)
                self._take(header, payload, stream, events)
            elif kind is FrameKind.CHUNK and end >= elements:
                target = self._chunk(buffer[body:elements], b"", length)
                self._read_in_place(header, target, buffer[elements:end])
                return
            elif FRAME_BYTES + length > BUFFER_BYTES:
                # What is announced takes memory as it comes.
                whole = self._buffers.aligned(length)
                self._read_in_place(header, whole, buffer[body:end])
                return
            else:
                break
        rest = bytes(buffer[self._start : end])
        buffer[: len(rest)] = rest
        self._start, self._end = 0, len(rest)

    def _chunk(
        self, head: memoryview, elements: memoryview | bytes, length: int
    ) -> memoryview:
        """Return where the elements of a chunk belong, with those that are here."""
        head = head[: CHUNK.size]
        target = self._assembler.chunk_target(head, length - CHUNK.size)
        target[: len(elements)] = elements
        return target

    def _read_in_place(
        self, header: Header, whole: memoryview, here: memoryview
    ) -> None:
        whole[: len(here)] = here
        self._direct = whole[len(here) :]
        self._direct_frame = header, whole
        self._start = self._end = 0

    def _take(
        self, header: Header, payload: memoryview, stream: Stream, events: list[Event]
    ) -> None:
        """A frame is whole; the payload of a chunk are its elements, in place."""
        sequence, acknowledged, _, kind = header
        self._link.receive(Frame(sequence, acknowledged), clock_ns())
        if kind is FrameKind.MESSAGE:
            self.messages += 1
            events += self._assembler.message(bytes(payload))
        elif kind is FrameKind.CHUNK:
            self.chunk_bytes += len(payload)
            events += self._assembler.received(len(payload))
        elif kind is FrameKind.DEFINE:
            digest, data = payload[:DIGEST_BYTES], payload[DIGEST_BYTES:]
            events.append(Definition(bytes(digest), bytes(data)))
        elif kind is FrameKind.ASIDE:
            events.append(Control(json.loads(bytes(payload))))
            self.paused = True
        elif kind is FrameKind.SEGMENT:
            self._segment(bytes(payload), events)
        elif bytes(payload[:1]) == OFFERED:
            self._offered(bytes(payload), stream)
        elif bytes(payload) == PING:
            self.pinged = True

    def _segment(self, payload: bytes, events: list[Event]) -> None:
        """The peer says something of shared memory."""
        what = payload[:1]
        if what == LENT and len(payload) == 25:
            number, segment, nbytes = struct.unpack("<QQQ", payload[1:])
            events += self._assembler.lent(number, segment, nbytes)
        elif what in (FREED, FORGOTTEN) and len(payload) == 9:
            (segment,) = struct.unpack("<Q", payload[1:])
            if what == FREED:
                self._pool.freed(segment, clock_ns())
            else:
                self._borrowed.forget(segment)
        else:
            raise ProtocolError(f"{payload!r} is no frame about shared memory")

    def _offered(self, payload: bytes, stream: Stream) -> None:
        """A new segment, whose descriptor came with these bytes."""
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
