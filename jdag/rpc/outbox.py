"""What one node has to say to another, as frames in the order in which they leave.

Small frames go before bulk: the elements of large values leave the message (`is_bulk`)
and follow in chunks, one value after the other, at most `WINDOW_BYTES` of them
unacknowledged, so that what is small waits for no more than what a socket holds.

Told:  `send`, `define`, `aside`, `pure`; `acknowledged` when the link knows more;
       `again` when a stream was remade.
Gives: `fill`, and then `views` for the stream, which says by `taken` what it took.

Invariants: a frame gets its number when it is queued for the stream, so that numbers
are in the order of bytes; chunks are cut only when there is room for them, so that what
waits is arrays that live anyway.
"""

import json
from collections import deque
from collections.abc import Sequence
from itertools import islice
from typing import Any, NamedTuple

from jdag.compute.buffers import parts
from jdag.engine.vocabulary import Message
from jdag.rpc.loop import clock_ns
from jdag.wire.arrays import type_of
from jdag.wire.frames import FrameKind, pack_chunk, pack_header
from jdag.wire.link import FRAME_BYTES, Link
from jdag.wire.messages import Codec

BULK_BYTES = 256 * 1024
INLINE_BYTES = 1024 * 1024  # So many of a message's values stay in it.
CHUNK_BYTES = 256 * 1024
WINDOW_BYTES = 4 * 1024 * 1024
OUT_BYTES = 512 * 1024  # No more bulk is cut while so much waits for the socket.
VIEWS_MAX = 64  # In one call of the system.
JOINED_BYTES = 2048  # What is smaller is copied together, to be one view.
FRAMES_MAX = 1 << 16  # Unacknowledged at once.


class Parcel(NamedTuple):
    """What a frame carries: its kind and bytes, which live until acknowledged."""

    kind: FrameKind
    views: tuple[Any, ...]
    nbytes: int


class Outgoing:
    """Elements of one value that leave in chunks."""

    __slots__ = ("number", "offset", "sent", "view", "views")

    def __init__(self, number: int, views: Sequence[memoryview]) -> None:
        self.number = number
        self.views = deque(views)
        self.view = 0  # Bytes of the first view that have left.
        self.sent = 0

    def cut(self) -> Parcel:
        """The next chunk."""
        view = self.views[0]
        piece = view[self.view : self.view + CHUNK_BYTES]
        head = pack_chunk(self.number, self.sent)
        self.view += len(piece)
        self.sent += len(piece)
        if self.view == len(view):
            self.views.popleft()
            self.view = 0
        return Parcel(FrameKind.CHUNK, (head, piece), len(head) + len(piece))


def is_bulk(nbytes: int, inline_bytes: int) -> bool:
    """Whether a value follows in chunks; so many bytes are in its message already."""
    return nbytes >= BULK_BYTES or inline_bytes + nbytes > INLINE_BYTES


class Outbox:
    """What waits to leave for one peer; `link` numbers it."""

    def __init__(self, link: Link, codec: Codec) -> None:
        self.payload_bytes = self.bytes_sent = self.frames_sent = 0
        self.messages_sent = self.resends = 0
        self.unsaid_bytes = 0  # Of chunks that came, since an acknowledgement left.
        self._link = link
        self._codec = codec
        self._urgent: deque[Parcel] = deque()
        self._bulk: deque[Outgoing] = deque()
        self._bulk_number = 0
        self._chunks: deque[tuple[int, int]] = deque()  # Unacknowledged: number, bytes.
        self._chunk_bytes = 0
        self._out: deque[Any] = deque()
        self._out_bytes = 0

    @property
    def waiting(self) -> int:
        """How many bytes, roughly, wait to leave; bulk is not counted."""
        return self._out_bytes + 256 * len(self._urgent)

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
            else:
                views += [piece for piece in pieces if piece]
                inline_bytes += nbytes
            self.payload_bytes += nbytes
        self.messages_sent += 1
        length = len(head) + inline_bytes
        self._urgent.append(Parcel(FrameKind.MESSAGE, tuple(views), length))

    def define(self, digest: bytes, data: bytes) -> None:
        """Send a function that messages after this one name by its digest."""
        views = (digest, data)
        self._urgent.append(Parcel(FrameKind.DEFINE, views, len(digest) + len(data)))

    def aside(self, what: dict[str, Any]) -> None:
        """Tell the peer's node something."""
        data = json.dumps(what).encode()
        self._urgent.append(Parcel(FrameKind.ASIDE, (data,), len(data)))

    def pure(self, payload: bytes = b"") -> None:
        """Send a frame that carries no message: it is not numbered."""
        self._put(
            0, Parcel(FrameKind.PURE, (payload,) if payload else (), len(payload))
        )

    def acknowledged(self) -> bool:
        """The link was told more; whether there is room for more bulk now."""
        chunks, acknowledged = self._chunks, self._link.acknowledged
        before = len(chunks)
        while chunks and chunks[0][0] <= acknowledged:
            self._chunk_bytes -= chunks.popleft()[1]
        return len(chunks) < before

    def unsend(self) -> None:
        """The stream is gone, and what was queued for it."""
        self._out.clear()
        self._out_bytes = 0

    def again(self, received: int) -> None:
        """A stream was remade: queue what the peer, with so much, has not got."""
        self.unsend()
        for frame in self._link.resume(received, clock_ns()):
            self.resends += 1
            self._put(frame.sequence, frame.payload)
        self.acknowledged()

    def clear(self) -> None:
        """Say nothing any more."""
        self.unsend()
        self._urgent.clear()
        self._bulk.clear()
        self._chunks.clear()

    def fill(self) -> bool:
        """Queue what may leave now; whether there is anything for the stream."""
        urgent, link = self._urgent, self._link
        now_ns = clock_ns() if urgent or self._bulk else 0
        while urgent and len(self._out) < VIEWS_MAX:
            if link.sent - link.acknowledged >= FRAMES_MAX:
                break
            parcel = urgent.popleft()
            self._put(link.send(parcel, now_ns).sequence, parcel)
        while (
            not urgent
            and self._bulk
            and self._out_bytes < OUT_BYTES
            and self._chunk_bytes < WINDOW_BYTES
        ):
            parcel = self._bulk[0].cut()
            if not self._bulk[0].views:
                self._bulk.popleft()
            sequence = link.send(parcel, now_ns).sequence
            self._chunks.append((sequence, parcel.nbytes))
            self._chunk_bytes += parcel.nbytes
            self._put(sequence, parcel)
        return bool(self._out)

    def _put(self, sequence: int, parcel: Parcel) -> None:
        """Queue a frame for the stream."""
        self.unsaid_bytes = 0
        head = pack_header(sequence, self._link.received, parcel.nbytes, parcel.kind)
        nbytes = FRAME_BYTES + parcel.nbytes
        self._out_bytes += nbytes
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
        self._out_bytes -= nbytes
        while nbytes:  # Bounded by the views that were given.
            view = out[0]
            if nbytes < len(view):
                out[0] = memoryview(view)[nbytes:]
                break
            nbytes -= len(view)
            out.popleft()
