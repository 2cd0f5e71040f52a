"""Large values of a connection: cut into chunks at one end, put together at the other.

A value of `BULK_BYTES` or more, and what would make its message longer than
`INLINE_BYTES`, follows its message (`is_bulk`): in chunks, or in shared memory
(`jdag.rpc.shared_memory`). All other values are inside of the message.

Inputs:  `BulkQueue`: the elements of values that are to leave. `Assembler`: the payload
         of each message; the elements of large values, in the order of these.
Outputs: `BulkQueue`: frames. `Assembler`: deliveries whose turn it is, whole.
Invariants: at most `WINDOW_BYTES` of chunks are unacknowledged; a value takes memory
when its first element comes, and no more than its type announced and `value_bytes_max`
allows; elements come in order and once; a delivery is given out once, when all its
values are there; `jdag.wire.order` says which deliveries may overtake others.
"""

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from jdag.compute.buffers import Buffers, landed
from jdag.engine.protocol import landing
from jdag.errors import ProtocolError
from jdag.rpc.loop import clock_ns
from jdag.rpc.shared_memory import (
    SEGMENT_BYTES_MIN,
    BorrowedMemory,
    Segment,
    SharedMemoryPool,
)
from jdag.wire.frames import CHUNK_MAX_BYTES, FrameKind
from jdag.wire.messages import Codec
from jdag.wire.order import Order

BULK_BYTES = 256 * 1024
INLINE_BYTES = 1024 * 1024  # So many bytes of a message's values stay in it.
WINDOW_BYTES = 4 * 1024 * 1024
COPY_BYTES = 2 * 1024 * 1024  # Copied to shared memory in one turn of the loop.
# Of a segment: its elements are those of a value; it may be written again; its number
# means nothing any more; and, in a frame without number, a new one with its descriptor.
LENT, FREED, FORGOTTEN, OFFERED = b"l", b"f", b"g", b"o"


class Parcel(Struct):
    """What a frame carries: its kind and bytes, which live until acknowledged."""

    kind: FrameKind
    views: Sequence[Any]
    nbytes: int


def is_bulk(nbytes: int, inline_bytes: int) -> bool:
    """Whether a value follows its message, which has so many bytes in it already."""
    return nbytes >= BULK_BYTES or inline_bytes + nbytes > INLINE_BYTES


class _Outgoing(Struct):
    """Elements of one value that leave in chunks, or in a shared segment."""

    views: deque[memoryview]
    nbytes: int
    sent: int = 0
    cut_bytes: int = 0  # Of the first view, that have left.
    segment: Segment | None = None

    def cut(self) -> Parcel:
        """The next chunk."""
        view = self.views[0]
        piece = view[self.cut_bytes : self.cut_bytes + CHUNK_MAX_BYTES]
        self.cut_bytes += len(piece)
        self.sent += len(piece)
        if self.cut_bytes == len(view):
            self.views.popleft()
            self.cut_bytes = 0
        return Parcel(FrameKind.CHUNK, (piece,), len(piece))

    def copy(self, segment: Segment) -> bool:
        """Copy the next piece to a segment; whether all is there."""
        piece = self.views[0][self.sent : self.sent + COPY_BYTES]
        segment.write(self.sent, piece)
        self.sent += len(piece)
        return self.sent == self.nbytes


class BulkQueue:
    """Large values that are to leave, one after the other; `pool` may carry them.

    `values` are those that have not all left; `chunks` the numbers and sizes of frames
    that are unacknowledged.
    """

    def __init__(self, pool: SharedMemoryPool) -> None:
        self.nbytes = 0  # Of values that have not all left.
        self.copying = False  # Whether there is more to copy, in another turn.
        self._pool = pool
        self.values: deque[_Outgoing] = deque()
        self.chunks: deque[tuple[int, int]] = deque()
        self._chunk_bytes = 0

    def add(self, views: Sequence[memoryview]) -> None:
        """Have the elements of one more value leave."""
        nbytes = sum([len(view) for view in views])
        self.values.append(_Outgoing(deque(views), nbytes))
        self.nbytes += nbytes

    def next(self, local: bool) -> Parcel | None:
        """The next frame; None if nothing may leave now.

        `local` tells whether the peer is where memory can be shared.
        """
        self.copying = False
        if not self.values or self._chunk_bytes >= WINDOW_BYTES:
            return None
        value = self.values[0]
        fits = value.nbytes >= SEGMENT_BYTES_MIN and len(value.views) == 1
        if fits and local and value.segment is None and not value.sent:
            value.segment = self._pool.take(value.nbytes, clock_ns())
        segment = value.segment
        if segment is None:
            parcel = value.cut()
        elif value.copy(segment):
            self._pool.lent(segment, clock_ns())
            data = struct.pack("<cQQ", LENT, segment.number, value.nbytes)
            parcel = Parcel(FrameKind.SEGMENT, (data,), len(data))
        else:
            self.copying = True
            return None
        if value.sent == value.nbytes:
            self.nbytes -= value.nbytes
            self.values.popleft()
        return parcel

    def numbered(self, sequence: int, parcel: Parcel) -> None:
        """A frame that `next` gave leaves under that number."""
        if parcel.kind is FrameKind.CHUNK:
            self.chunks.append((sequence, parcel.nbytes))
            self._chunk_bytes += parcel.nbytes

    def acknowledged(self, sequence: int) -> None:
        """The peer has all frames up to a number."""
        while self.chunks and self.chunks[0][0] <= sequence:
            self._chunk_bytes -= self.chunks.popleft()[1]

    def clear(self) -> None:
        """Let nothing leave any more."""
        self.values.clear()
        self.chunks.clear()
        self.nbytes = 0


class Delivery(Struct):
    """A message from a peer with its values, of which `missing` are still to come.

    The values are in the order of `landing(message)`.
    """

    message: Any
    values: list[Any]
    missing: int = 0


class _Incoming(Struct):
    """A large value of which elements are still to come."""

    kind: Any
    delivery: Delivery
    slot: int
    got: int = 0
    view: memoryview | None = None


class Assembler:
    """Puts the messages of one peer together with their values.

    No value of more than `value_bytes_max` is taken. All methods raise ProtocolError
    where what came does not fit what was announced.
    """

    def __init__(
        self,
        codec: Codec,
        buffers: Buffers,
        borrowed: BorrowedMemory,
        value_bytes_max: int,
    ) -> None:
        self._codec = codec
        self._buffers = buffers
        self._borrowed = borrowed
        self._value_bytes_max = value_bytes_max
        self._incoming: deque[_Incoming] = deque()
        self._order: Order = Order()

    def message(self, payload: bytes) -> Sequence[Delivery]:
        """A message came, with its small values."""
        message, kinds, offset = self._codec.decode(payload)
        if len(kinds) != len(landing(message)):
            raise ProtocolError(
                f"a {type(message).__name__} with {len(kinds)} values, not"
                f" {len(landing(message))}"
            )
        values: list[Any] = []
        delivery = Delivery(message, values)
        if kinds:
            offset = self._take_values(delivery, kinds, payload, offset)
        if offset != len(payload):
            raise ProtocolError(f"{len(payload) - offset} bytes are left of a message")
        if not self._incoming:  # Then nothing is held: all before it were whole.
            return (delivery,)
        return self._order.arrived(delivery, not delivery.missing)

    def _take_values(
        self, delivery: Delivery, kinds: Sequence[Any], payload: bytes, offset: int
    ) -> int:
        """Take the values that are in the payload; return where they end."""
        view, first, values = memoryview(payload), offset, delivery.values
        for slot, kind in enumerate(kinds):
            nbytes = kind.array_nbytes
            if nbytes > self._value_bytes_max:
                raise ProtocolError(
                    f"a value of {nbytes} bytes: at most {self._value_bytes_max} are "
                    "taken"
                )
            if kind.dual:
                nbytes = kind.nbytes
            if is_bulk(nbytes, offset - first):
                self._incoming.append(_Incoming(kind, delivery, slot))
                delivery.missing += 1
                values.append(None)
                continue
            if offset + nbytes > len(payload):
                raise ProtocolError(
                    f"{len(payload) - offset} bytes are left for a value of {nbytes}"
                )
            values.append(landed(kind, view[offset : offset + nbytes]))
            offset += nbytes
        return offset

    def target(self, nbytes: int) -> memoryview:
        """Where the next elements belong; when they are there, call `received`."""
        incoming = self._incoming[0] if self._incoming else None
        missing = 0 if incoming is None else incoming.kind.nbytes - incoming.got
        if incoming is None or not 0 < nbytes <= missing:
            raise ProtocolError(
                f"chunk of {nbytes} bytes of a value, of which {missing} are missing"
            )
        if incoming.view is None:
            incoming.view = self._buffers.aligned(incoming.kind.nbytes)
        return incoming.view[incoming.got : incoming.got + nbytes]

    def lent(self, segment: int, nbytes: int) -> Sequence[Delivery]:
        """The elements of the next value are in a segment of shared memory."""
        incoming = self._incoming[0] if self._incoming else None
        if incoming is None or incoming.got or nbytes != incoming.kind.nbytes:
            raise ProtocolError(f"{nbytes} bytes in segment {segment} are of no value")
        try:
            incoming.view = self._borrowed.borrow(segment, nbytes)
        except ConnectionError as error:
            raise ProtocolError(str(error)) from None
        return self.received(nbytes)

    def received(self, nbytes: int) -> Sequence[Delivery]:
        """So many more elements of the value whose turn it is are in place."""
        incoming = self._incoming[0]
        incoming.got += nbytes
        if incoming.got < incoming.kind.nbytes:
            return ()
        assert incoming.view is not None, incoming.kind
        self._incoming.popleft()
        delivery = incoming.delivery
        delivery.values[incoming.slot] = landed(incoming.kind, incoming.view)
        delivery.missing -= 1
        return () if delivery.missing else self._order.completed(delivery)

    def clear(self) -> None:
        """Let go of everything that is not complete."""
        self._incoming.clear()
        self._order = Order()
