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
from jdag.wire.frames import CHUNK, CHUNK_MAX_BYTES, FrameKind
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
    views: tuple[Any, ...]
    nbytes: int


def is_bulk(nbytes: int, inline_bytes: int) -> bool:
    """Whether a value follows in chunks; so many bytes are in its message already."""
    return nbytes >= BULK_BYTES or inline_bytes + nbytes > INLINE_BYTES


class _Outgoing:
    """Elements of one value that leave in chunks, or in a shared segment."""

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
        head = CHUNK.pack(self.number, self.sent)
        self.view += len(piece)
        self.sent += len(piece)
        if self.view == len(view):
            self.views.popleft()
            self.view = 0
        return Parcel(FrameKind.CHUNK, (head, piece), len(head) + len(piece))

    def copy(self) -> bool:
        """Copy the next piece to the segment; whether all is there."""
        assert self.segment is not None, self.number
        piece = self.views[0][self.sent : self.sent + COPY_BYTES]
        self.segment.write(self.sent, piece)
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
        self._numbers = 0
        self.values: deque[_Outgoing] = deque()
        self.chunks: deque[tuple[int, int]] = deque()
        self._chunk_bytes = 0

    def add(self, views: Sequence[memoryview]) -> None:
        """Have the elements of one more value leave."""
        self._numbers += 1
        value = _Outgoing(self._numbers, views)
        self.values.append(value)
        self.nbytes += value.nbytes

    def next(self, local: bool) -> Parcel | None:
        """The next frame; None if nothing may leave now.

        `local` tells whether the peer is where memory can be shared.
        """
        self.copying = False
        if not self.values or self._chunk_bytes >= WINDOW_BYTES:
            return None
        value = self.values[0]
        if not self._is_shared(value, local):
            parcel = value.cut()
            is_done = not value.views
        elif value.copy():
            parcel = self._lend(value)
            is_done = True
        else:
            self.copying = True
            return None
        if is_done:
            self.nbytes -= value.nbytes
            self.values.popleft()
        return parcel

    def numbered(self, sequence: int, parcel: Parcel) -> None:
        """A frame that `next` gave leaves under that number."""
        if parcel.kind is FrameKind.CHUNK:
            self.chunks.append((sequence, parcel.nbytes))
            self._chunk_bytes += parcel.nbytes

    def acknowledged(self, sequence: int) -> bool:
        """The peer has all frames up to a number; whether more may leave by that."""
        chunks, before = self.chunks, len(self.chunks)
        while chunks and chunks[0][0] <= sequence:
            self._chunk_bytes -= chunks.popleft()[1]
        return len(chunks) < before

    def clear(self) -> None:
        """Let nothing leave any more."""
        self.values.clear()
        self.chunks.clear()
        self.nbytes = 0

    def _is_shared(self, value: _Outgoing, local: bool) -> bool:
        fits = value.nbytes >= SEGMENT_BYTES_MIN and len(value.views) == 1
        if fits and local and value.segment is None and not value.sent:
            value.segment = self._pool.take(value.nbytes, clock_ns())
        return value.segment is not None

    def _lend(self, value: _Outgoing) -> Parcel:
        """All elements are in a segment: tell the peer."""
        assert value.segment is not None, value.number
        self._pool.lent(value.segment, clock_ns())
        numbers = value.number, value.segment.number, value.nbytes
        data = struct.pack("<cQQQ", LENT, *numbers)
        return Parcel(FrameKind.SEGMENT, (data,), len(data))


class Delivery(Struct):
    """A message from a peer with its values, of which `missing` are still to come.

    The values are in the order of `landing(message)`.
    """

    message: Any
    values: list[Any]
    missing: int = 0


class _Incoming:
    """A large value of which elements are still to come."""

    __slots__ = ("delivery", "got", "kind", "number", "slot", "view")

    def __init__(self, number: int, kind: Any, delivery: Delivery, slot: int) -> None:
        self.number = number
        self.kind = kind
        self.delivery = delivery
        self.slot = slot
        self.got = 0
        self.view: memoryview | None = None


class Assembler:
    """Puts the messages of one peer together with their values.

    Args:
        codec: reads messages.
        buffers: where large values are received.
        borrowed: the shared memory that the peer lends.
        value_bytes_max: the largest value that is taken.

    All methods raise ProtocolError where what came does not fit what was announced.
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
        self._numbers = 0
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
                self._numbers += 1
                self._incoming.append(_Incoming(self._numbers, kind, delivery, slot))
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

    def chunk_target(self, head: memoryview, nbytes: int) -> memoryview:
        """Where the `nbytes` elements of the next chunk belong; `head` is its header.

        Once they are there, `received` is to be called.
        """
        number, offset = CHUNK.unpack(head)
        incoming = self._expected(number, offset)
        if not 0 < nbytes <= incoming.kind.nbytes - incoming.got:
            raise ProtocolError(
                f"chunk of {nbytes} bytes for value {number}, of which"
                f" {incoming.kind.nbytes - incoming.got} are missing"
            )
        if incoming.view is None:
            incoming.view = self._buffers.aligned(incoming.kind.nbytes)
        return incoming.view[offset : offset + nbytes]

    def lent(self, number: int, segment: int, nbytes: int) -> Sequence[Delivery]:
        """The elements of a value are in a segment of shared memory."""
        incoming = self._expected(number, 0)
        if nbytes != incoming.kind.nbytes:
            raise ProtocolError(
                f"{nbytes} bytes in segment {segment} for a value of"
                f" {incoming.kind.nbytes}"
            )
        try:
            incoming.view = self._borrowed.borrow(segment, nbytes)
        except ConnectionError as error:
            raise ProtocolError(str(error)) from None
        return self.received(nbytes)

    def _expected(self, number: int, offset: int) -> _Incoming:
        """The value whose elements come next, if these are the ones."""
        incoming = self._incoming[0] if self._incoming else None
        if incoming is None or (number, offset) != (incoming.number, incoming.got):
            wanted = "none" if incoming is None else (incoming.number, incoming.got)
            raise ProtocolError(
                f"elements of value {number} at byte {offset}: expected is {wanted}"
            )
        return incoming

    def received(self, nbytes: int) -> Sequence[Delivery]:
        """So many more elements of the value whose turn it is are in place."""
        incoming = self._incoming[0]
        incoming.got += nbytes
        if incoming.got < incoming.kind.nbytes:
            return ()
        assert incoming.view is not None, incoming.number
        self._incoming.popleft()
        delivery = incoming.delivery
        delivery.values[incoming.slot] = landed(incoming.kind, incoming.view)
        delivery.missing -= 1
        return () if delivery.missing else self._order.completed(delivery)

    def clear(self) -> None:
        """Let go of everything that is not complete."""
        self._incoming.clear()
        self._order = Order()
