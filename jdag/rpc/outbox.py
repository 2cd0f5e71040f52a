"""What one node has to say to another, as frames in the order in which they leave.

Small frames go before bulk: the elements of large values leave the message (`is_bulk`)
and follow in chunks, one value after the other, at most `WINDOW_BYTES` of them
unacknowledged, so that what is small waits for no more than what a socket holds. Where
memory can be shared (`jdag.rpc.segments`), elements are copied there, a piece a turn,
and only where they are is said.

Told:  `send`, `define`, `aside`, `pure`; `acknowledged` when the link knows more;
       `again` when a stream was remade.
Gives: `fill`, and then `views` for the stream, which says by `taken` what it took.

Invariants: a frame gets its number when it is queued for the stream, so that numbers
are in the order of bytes; chunks are cut only when there is room for them, so that what
waits is arrays that live anyway.
"""

import json
import struct
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from jdag.compute.buffers import parts
from jdag.engine.vocabulary import Message
from jdag.rpc.loop import clock_ns
from jdag.rpc.segments import SEGMENT_BYTES_MIN, Segment, Segments
from jdag.wire.arrays import type_of
from jdag.wire.frames import CHUNK_MAX_BYTES, FrameKind, pack_chunk, pack_header
from jdag.wire.link import FRAME_BYTES, Link
from jdag.wire.messages import Codec

BULK_BYTES = 256 * 1024
INLINE_BYTES = 1024 * 1024  # So many of a message's values stay in it.
WINDOW_BYTES = 4 * 1024 * 1024
OUT_BYTES = 512 * 1024  # No more bulk is cut while so much waits for the socket.
VIEWS_MAX = 64  # In one call of the system.
JOINED_BYTES = 2048  # What is smaller is copied together, to be one view.
FRAMES_MAX = 1 << 16  # Unacknowledged at once.
COPY_BYTES = 2 * 1024 * 1024  # To shared memory, in one turn.
# Of a segment: its elements are those of a value; it may be written again; its number
# means nothing any more; and, beside the link, with its descriptor, a new one.
LENT, FREED, FORGOTTEN, OFFERED = b"l", b"f", b"g", b"o"


class Parcel(NamedTuple):
    """What a frame carries: its kind and bytes, which live until acknowledged."""

    kind: FrameKind
    views: tuple[Any, ...]
    nbytes: int


class Outgoing:
    """Elements of one value that leave in chunks."""

    __slots__ = ("nbytes", "number", "segment", "sent", "view", "views")

    def __init__(self, number: int, views: Sequence[memoryview]) -> None:
        self.number = number
        self.nbytes = sum([len(view) for view in views])
        self.segment: Segment | None = None
        self.views = deque(views)
        self.view = 0  # Bytes of the first view that have left.
        self.sent = 0

    def cut(self) -> Parcel:
        """The next chunk."""
        view = self.views[0]
        piece = view[self.view : self.view + CHUNK_MAX_BYTES]
        head = pack_chunk(self.number, self.sent)
        self.view += len(piece)
        self.sent += len(piece)
        if self.view == len(view):
            self.views.popleft()
            self.view = 0
        return Parcel(FrameKind.CHUNK, (head, piece), len(head) + len(piece))

    def copy(self) -> bool:
        """Copy the next piece to the segment; whether all is there."""
        assert self.segment is not None, self.number
        view = self.views[0]
        piece = view[self.sent : self.sent + COPY_BYTES]
        self.segment.write(self.sent, piece)
        self.sent += len(piece)
        return self.sent == self.nbytes


def is_bulk(nbytes: int, inline_bytes: int) -> bool:
    """Whether a value follows in chunks; so many bytes are in its message already."""
    return nbytes >= BULK_BYTES or inline_bytes + nbytes > INLINE_BYTES


class Outbox:
    """What waits to leave for one peer; `link` numbers it, `segments` may carry it."""

    def __init__(self, link: Link, codec: Codec, segments: Segments) -> None:
        self.local = False  # Whether the peer is where memory can be shared.
        self.copying = False  # Whether there is more to copy, in another turn.
        self.payload_bytes = self.bytes_sent = self.frames_sent = 0
        self.messages_sent = self.resends = 0
        self.bulk_bytes = 0  # Of values that have not all left.
        self.waiting = 0  # Bytes of all else that waits to leave.
        self._link = link
        self._codec = codec
        self._segments = segments
        self._urgent: deque[Parcel] = deque()
        self._bulk: deque[Outgoing] = deque()
        self._bulk_number = 0
        self._chunks: deque[tuple[int, int]] = deque()  # Unacknowledged: number, bytes.
        self._chunk_bytes = 0
        self._out: deque[Any] = deque()

    @property
    def queued(self) -> bool:
        """Whether bytes of a frame wait for the stream."""
        return bool(self._out)

    @property
    def empty(self) -> bool:
        """Whether there is nothing that could leave."""
        return not (self._urgent or self._bulk or self._out)

    def send(self, message: Message, values: Sequence[Any]) -> None:
        """Send a message with its values.

        Raises:
            ProtocolError: it has in it what cannot travel.
        """
        described = [(type_of(value), parts(value)) for value in values]
        head = self._codec.encode_with(message, [kind for kind, _ in described])
        views: list[Any] = [head]
        inline_bytes = 0
        for kind, pieces in described:
            nbytes = kind.nbytes
            if is_bulk(nbytes, inline_bytes):
                self._bulk_number += 1
                self._bulk.append(Outgoing(self._bulk_number, pieces))
                self.bulk_bytes += nbytes
            else:
                views += [piece for piece in pieces if piece]
                inline_bytes += nbytes
            self.payload_bytes += nbytes
        self.messages_sent += 1
        length = len(head) + inline_bytes
        self._wait(FrameKind.MESSAGE, tuple(views), length)

    def define(self, digest: bytes, data: bytes) -> None:
        """Send a function that messages after this one name by its digest."""
        self._wait(FrameKind.DEFINE, (digest, data), len(digest) + len(data))

    def aside(self, what: dict[str, Any]) -> None:
        """Tell the peer's node something."""
        data = json.dumps(what).encode()
        self._wait(FrameKind.ASIDE, (data,), len(data))

    def about_segment(self, what: bytes, *numbers: int) -> None:
        """Say something of shared memory; see `jdag.wire.frames`."""
        data = what + struct.pack(f"<{len(numbers)}Q", *numbers)
        self._wait(FrameKind.SEGMENT, (data,), len(data))

    def _wait(self, kind: FrameKind, views: tuple[Any, ...], nbytes: int) -> None:
        """Let a frame wait until it may have a number."""
        self.waiting += FRAME_BYTES + nbytes
        self._urgent.append(Parcel(kind, views, nbytes))

    def pure(self, payload: bytes = b"") -> None:
        """Send a frame that carries no message: it is not numbered."""
        self._put(
            0, Parcel(FrameKind.PURE, (payload,) if payload else (), len(payload))
        )

    def bare(self, payload: bytes) -> bytes:
        """The bytes of a frame that is not queued, and not numbered."""
        received = self._link.received
        return pack_header(0, received, len(payload), FrameKind.PURE) + payload

    def rest(self, data: bytes) -> None:
        """Queue what the stream did not take of a bare frame."""
        if data:
            self._out.append(data)
            self.waiting += len(data)

    def acknowledged(self) -> bool:
        """The link was told more; whether there may be room for more now."""
        chunks, acknowledged = self._chunks, self._link.acknowledged
        before = len(chunks)
        while chunks and chunks[0][0] <= acknowledged:
            self._chunk_bytes -= chunks.popleft()[1]
        return bool(self._urgent) or len(chunks) < before

    def unsend(self) -> None:
        """The stream is gone, and what was queued for it."""
        self._out.clear()
        self.waiting = sum([FRAME_BYTES + one.nbytes for one in self._urgent])

    def again(self, received: int) -> None:
        """A stream was remade: queue what the peer, with so much, has not got."""
        self.unsend()
        for frame in self._link.resume(received, clock_ns()):
            self.resends += 1
            self._put(frame.sequence, frame.payload)
        self.acknowledged()

    def clear(self) -> None:
        """Say nothing any more."""
        self._urgent.clear()
        self.unsend()
        self._bulk.clear()
        self.bulk_bytes = 0
        self._chunks.clear()

    def fill(self) -> bool:
        """Queue what may leave now; whether there is anything for the stream."""
        urgent, link = self._urgent, self._link
        now_ns = clock_ns() if urgent or self._bulk else 0
        while urgent and len(self._out) < VIEWS_MAX:
            if link.sent - link.acknowledged >= FRAMES_MAX:
                break
            parcel = urgent.popleft()
            self.waiting -= FRAME_BYTES + parcel.nbytes  # It waits on, for the stream.
            self._put(link.send(parcel, now_ns).sequence, parcel)
        self.copying = False
        while (
            not urgent
            and self._bulk
            and self.waiting < OUT_BYTES
            and self._chunk_bytes < WINDOW_BYTES
        ):
            if self._shares(self._bulk[0], now_ns):
                if self._bulk[0].copy():
                    self.bulk_bytes -= self._bulk[0].nbytes
                    self._lend(self._bulk.popleft(), now_ns)
                    continue
                self.copying = True
                break
            parcel = self._bulk[0].cut()
            if not self._bulk[0].views:
                self.bulk_bytes -= self._bulk.popleft().nbytes
            sequence = link.send(parcel, now_ns).sequence
            self._chunks.append((sequence, parcel.nbytes))
            self._chunk_bytes += parcel.nbytes
            self._put(sequence, parcel)
        return bool(self._out)

    def _shares(self, bulk: Outgoing, now_ns: int) -> bool:
        """Whether these elements go by shared memory."""
        fits = bulk.nbytes >= SEGMENT_BYTES_MIN and len(bulk.views) == 1
        if fits and self.local and bulk.segment is None and not bulk.sent:
            bulk.segment = self._segments.take(bulk.nbytes, now_ns)
        return bulk.segment is not None

    def _lend(self, bulk: Outgoing, now_ns: int) -> None:
        """All elements are in a segment: say so."""
        assert bulk.segment is not None, bulk.number
        self._segments.lent(bulk.segment, now_ns)
        data = struct.pack("<cQQQ", LENT, bulk.number, bulk.segment.number, bulk.nbytes)
        parcel = Parcel(FrameKind.SEGMENT, (data,), len(data))
        self._put(self._link.send(parcel, now_ns).sequence, parcel)

    def _put(self, sequence: int, parcel: Parcel) -> None:
        """Queue a frame for the stream."""
        head = pack_header(sequence, self._link.received, parcel.nbytes, parcel.kind)
        nbytes = FRAME_BYTES + parcel.nbytes
        self.waiting += nbytes
        self.bytes_sent += nbytes
        self.frames_sent += 1
        if nbytes <= JOINED_BYTES:
            self._out.append(b"".join((head, *parcel.views)))
        else:
            self._out.append(head)
            self._out.extend(parcel.views)

    def views(self) -> list[Any]:
        """The bytes that are to leave next, as far as one call takes them."""
        return list(islice(self._out, VIEWS_MAX))

    def taken(self, nbytes: int) -> None:
        """The stream took so many bytes of `views`."""
        out = self._out
        self.waiting -= nbytes
        while nbytes:  # Bounded by the views that were given.
            view = out[0]
            if nbytes < len(view):
                out[0] = memoryview(view)[nbytes:]
                break
            nbytes -= len(view)
            out.popleft()
