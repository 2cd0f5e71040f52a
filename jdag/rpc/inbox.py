"""What one node hears from another: bytes become frames, and these messages.

Told:  `read(stream)` when there is something to read.
Gives: to its `Sink`: `arrived` for each message that is whole and whose turn it is,
       `defined`, `told`, `pinged`, `freed`.

Large frames are read where they belong: elements of bulk into the memory that the array
will have, which is taken when the first of them comes. Everything is checked before it
is believed; what is not as it has to be raises, and whoever reads gives the peer up.

Invariants: the link sees frames in order and once; of a message's values none is handed
on before it is whole; a stream that ended in the middle of a frame leaves no trace.
"""

import json
import struct
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol

from jdag.compute.buffers import Buffers, landed
from jdag.engine.vocabulary import Message
from jdag.errors import ProtocolError
from jdag.rpc.loop import clock_ns
from jdag.rpc.outbox import FORGOTTEN, FREED, LENT, OFFERED, is_bulk
from jdag.rpc.segments import Borrowed
from jdag.rpc.streams import Stream
from jdag.wire.frames import (
    CHUNK_HEADER_BYTES,
    FrameKind,
    unpack_chunk,
    unpack_header,
)
from jdag.wire.link import FRAME_BYTES, Frame, Link
from jdag.wire.messages import Codec
from jdag.wire.order import Order

BUFFER_BYTES = 256 * 1024
READS_MAX = 16  # In one turn, so that others get theirs.
DIGEST_BYTES = 32
PING = b"?"


class Sink(Protocol):
    """Who is told what comes."""

    def arrived(self, message: Message, values: Sequence[Any]) -> None:
        """A message is here, with its values in the order of `landing(message)`."""

    def defined(self, digest: bytes, data: bytes) -> None:
        """The peer will call a function of this digest."""

    def told(self, what: dict[str, Any]) -> None:
        """The peer's node asks or tells something beside the engines."""

    def pinged(self) -> None:
        """The peer wants a sign of life."""

    def freed(self, segment: int) -> None:
        """The peer needs a segment of shared memory no more."""


class Arriving:
    """A message that has come, and its values, some of which may be on their way."""

    __slots__ = ("message", "missing", "values")

    def __init__(self, message: Message, values: list[Any], missing: int) -> None:
        self.message = message
        self.values = values
        self.missing = missing


class Incoming:
    """Elements of one value that come in chunks; memory is taken with the first."""

    __slots__ = ("got", "kind", "number", "of", "place", "view")

    def __init__(self, number: int, kind: Any, of: Arriving, place: int) -> None:
        self.number = number
        self.kind = kind
        self.of = of
        self.place = place
        self.got = 0
        self.view: memoryview | None = None


class Inbox:
    """What comes from one peer; `link` counts it."""

    def __init__(
        self,
        link: Link,
        codec: Codec,
        sink: Sink,
        buffers: Buffers,
        borrowed: Borrowed,
        value_bytes_max: int,
    ) -> None:
        self.messages = 0
        self.chunk_bytes = 0  # Of elements that came, ever.
        self._link = link
        self._codec = codec
        self._sink = sink
        self._buffers = buffers
        self._borrowed = borrowed
        self._stream: Stream | None = None  # That is being read.
        self._value_bytes_max = value_bytes_max
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._end = 0
        self._direct: memoryview | None = None
        self._direct_frame: tuple[Any, ...] = ()
        self._incoming: deque[Incoming] = deque()
        self._incoming_number = 0
        self._order: Order[Arriving] = Order()
        self._open = True

    def interrupt(self) -> None:
        """The stream ended: what of a frame was here is not worth anything."""
        self._start = self._end = 0
        self._direct, self._direct_frame = None, ()

    def clear(self) -> None:
        """Hear nothing any more."""
        self.interrupt()
        self._open = False
        self._buffer = memoryview(b"")
        self._incoming.clear()
        self._borrowed.close()
        self._order = Order()
        self._buffer = memoryview(b"")

    def read(self, stream: Stream) -> bool:
        """Read what is there, but not so much that others would have to wait long.

        Returns whether there was anything.

        Raises:
            ConnectionError: the stream ended.
            ProtocolError: what came is no frame, or no message.
        """
        self._stream = stream
        heard = False
        for _ in range(READS_MAX):
            try:
                if self._direct is not None:
                    wanted = len(self._direct)
                    got = stream.recv_into(self._direct)
                    self._take_direct(got)
                else:
                    room = self._buffer[self._end :]
                    wanted = len(room)
                    got = stream.recv_into(room)
                    self._end += got
                    self._parse()
            except BlockingIOError:
                break
            heard = True
            if not self._open or (got < wanted and not stream.pending()):
                break
        return heard

    def _parse(self) -> None:
        """Take the frames that are whole; read the rest of a large one in place."""
        buffer = self._buffer
        while self._end - self._start >= FRAME_BYTES and self._open:
            start = self._start
            head = buffer[start : start + FRAME_BYTES]
            sequence, acknowledged, length, kind = unpack_header(head)
            body, have = start + FRAME_BYTES, self._end - start - FRAME_BYTES
            if have >= length:
                self._start = body + length
                self._frame(sequence, acknowledged, kind, buffer[body : body + length])
                continue
            if kind is FrameKind.CHUNK and have >= CHUNK_HEADER_BYTES:
                self._begin_chunk(sequence, acknowledged, length, body)
                return
            if FRAME_BYTES + length > BUFFER_BYTES:
                # What is announced takes memory as it comes.
                whole = self._buffers.aligned(length)
                whole[:have] = buffer[body : self._end]
                self._direct = whole[have:]
                self._direct_frame = (sequence, acknowledged, kind, whole)
                self._start = self._end = 0
                return
            break
        if self._start:
            rest = bytes(buffer[self._start : self._end])
            buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)

    def _begin_chunk(
        self, sequence: int, acknowledged: int, length: int, body: int
    ) -> None:
        """Part of a chunk is here: have the rest read to where it belongs."""
        elements = body + CHUNK_HEADER_BYTES
        here = self._buffer[elements : self._end]
        to = self._place_of_chunk(sequence, self._buffer[body:elements], length)
        to[: len(here)] = here
        self._direct = to[len(here) :]
        self._direct_frame = (sequence, acknowledged, FrameKind.CHUNK, to)
        self._start = self._end = 0

    def _take_direct(self, got: int) -> None:
        assert self._direct is not None, self
        self._direct = self._direct[got:]
        if not len(self._direct):
            sequence, acknowledged, kind, whole = self._direct_frame
            self._direct, self._direct_frame = None, ()
            if kind is FrameKind.CHUNK:
                self._count(sequence, acknowledged, kind)
                self._chunk_done(len(whole))
            else:
                self._frame(sequence, acknowledged, kind, whole)

    def _place_of_chunk(
        self, sequence: int, head: memoryview, length: int
    ) -> memoryview:
        """Where the elements of a chunk belong, if it is the one that has to come."""
        number, offset = unpack_chunk(head)
        nbytes = length - CHUNK_HEADER_BYTES
        incoming = self._wanted(number, offset)
        if not 0 < nbytes <= incoming.kind.nbytes - incoming.got:
            raise ProtocolError(
                f"chunk of {nbytes} bytes for value {number}, of which"
                f" {incoming.kind.nbytes - incoming.got} are missing"
            )
        if sequence != self._link.received + 1:
            raise ProtocolError(f"frame {sequence} after {self._link.received}")
        if incoming.view is None:
            incoming.view = self._buffers.aligned(incoming.kind.nbytes)
        return incoming.view[offset : offset + nbytes]

    def _wanted(self, number: int, offset: int) -> Incoming:
        """The value whose elements come now, if these are of it, and the next."""
        incoming = self._incoming[0] if self._incoming else None
        if incoming is None or (number, offset) != (incoming.number, incoming.got):
            wanted = "none" if incoming is None else (incoming.number, incoming.got)
            raise ProtocolError(
                f"elements of value {number} at byte {offset}: expected is {wanted}"
            )
        return incoming

    def _chunk_done(self, nbytes: int) -> None:
        self.chunk_bytes += nbytes
        self._got(self._incoming[0], nbytes)

    def _got(self, incoming: Incoming, nbytes: int) -> None:
        incoming.got += nbytes
        if incoming.got < incoming.kind.nbytes:
            return
        assert incoming.view is not None, incoming.number
        self._incoming.popleft()
        arriving = incoming.of
        arriving.values[incoming.place] = landed(incoming.kind, incoming.view)
        arriving.missing -= 1
        if not arriving.missing:
            self._hand_on(self._order.completed(arriving))

    def _count(self, sequence: int, acknowledged: int, kind: FrameKind) -> None:
        """Let the link see a frame: it is the next one, or a pure one."""
        link = self._link
        if sequence and sequence != link.received + 1:
            raise ProtocolError(f"frame {sequence} after {link.received}")
        link.receive(Frame(sequence, acknowledged, kind), clock_ns())

    def _frame(
        self, sequence: int, acknowledged: int, kind: FrameKind, payload: memoryview
    ) -> None:
        """A whole frame is here."""
        if kind is FrameKind.CHUNK:
            if len(payload) <= CHUNK_HEADER_BYTES:
                raise ProtocolError(f"a chunk of {len(payload)} bytes has no elements")
            head = payload[:CHUNK_HEADER_BYTES]
            to = self._place_of_chunk(sequence, head, len(payload))
            to[:] = payload[CHUNK_HEADER_BYTES:]
            self._count(sequence, acknowledged, kind)
            self._chunk_done(len(to))
            return
        self._count(sequence, acknowledged, kind)
        if kind is FrameKind.MESSAGE:
            self._message(bytes(payload))
        elif kind is FrameKind.DEFINE:
            digest, data = payload[:DIGEST_BYTES], payload[DIGEST_BYTES:]
            self._sink.defined(bytes(digest), bytes(data))
        elif kind is FrameKind.ASIDE:
            self._sink.told(_aside(bytes(payload)))
        elif kind is FrameKind.SEGMENT:
            self._segment(bytes(payload))
        elif bytes(payload[:1]) == OFFERED:
            self._offered(bytes(payload))
        elif bytes(payload) == PING:
            self._sink.pinged()

    def _segment(self, payload: bytes) -> None:
        """Something is said of shared memory."""
        what = payload[:1]
        if what == LENT and len(payload) == 25:
            number, segment, nbytes = struct.unpack("<QQQ", payload[1:])
            incoming = self._wanted(number, 0)
            if nbytes != incoming.kind.nbytes:
                raise ProtocolError(
                    f"{nbytes} bytes in segment {segment} for a value of"
                    f" {incoming.kind.nbytes}"
                )
            try:
                incoming.view = self._borrowed.borrow(segment, nbytes)
            except ConnectionError as error:
                raise ProtocolError(str(error)) from None
            self._got(incoming, nbytes)
        elif what in (FREED, FORGOTTEN) and len(payload) == 9:
            (segment,) = struct.unpack("<Q", payload[1:])
            tell = self._sink.freed if what == FREED else self._borrowed.forget
            tell(segment)
        else:
            raise ProtocolError(f"nothing of a segment is said by {payload!r}")

    def _offered(self, payload: bytes) -> None:
        """A new segment, whose descriptor came with these bytes."""
        if len(payload) != 16 or self._stream is None:
            raise ProtocolError(f"no segment is offered by {payload!r}")
        number = int.from_bytes(payload[1:8], "little")
        nbytes = int.from_bytes(payload[8:], "little")
        try:
            descriptor = self._stream.take_segment()
            self._borrowed.offered(number, nbytes, descriptor)
        except ConnectionError as error:
            raise ProtocolError(str(error)) from None
        except OSError as error:
            self._borrowed.refused(error)

    def _message(self, payload: bytes) -> None:
        message, kinds, offset = self._codec.decode_with(payload)
        values: list[Any] = []
        arriving = Arriving(message, values, 0)
        view, first = memoryview(payload), offset
        for place, kind in enumerate(kinds):
            nbytes = kind.nbytes
            if kind.array_nbytes > self._value_bytes_max:
                raise ProtocolError(
                    f"a value of {kind.array_nbytes} bytes: at most "
                    f"{self._value_bytes_max} are taken"
                )
            if is_bulk(nbytes, offset - first):
                self._incoming_number += 1
                number = self._incoming_number
                self._incoming.append(Incoming(number, kind, arriving, place))
                arriving.missing += 1
                values.append(None)
            else:
                if offset + nbytes > len(payload):
                    raise ProtocolError(
                        f"{len(payload) - offset} bytes are left for a value of"
                        f" {nbytes}"
                    )
                values.append(landed(kind, view[offset : offset + nbytes]))
                offset += nbytes
        if offset != len(payload):
            raise ProtocolError(f"{len(payload) - offset} bytes are left of a message")
        self.messages += 1
        self._hand_on(self._order.arrived(arriving, not arriving.missing))

    def _hand_on(self, ready: Sequence[Arriving]) -> None:
        for arriving in ready:
            if self._open:
                self._sink.arrived(arriving.message, arriving.values)


def _aside(data: bytes) -> dict[str, Any]:
    try:
        what = json.loads(data)
    except ValueError as error:
        raise ProtocolError(f"an aside that is no JSON: {error}") from None
    if not isinstance(what, dict):
        raise ProtocolError(f"an aside that is no object: {what!r}")
    return what
