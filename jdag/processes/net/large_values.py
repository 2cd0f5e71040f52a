"""Large values of a connection, sent in chunks or through shared memory.

A value of `BULK_BYTES` or more, or one that would bring its message above
`INLINE_BYTES`, follows its message (`is_bulk`) in chunks or in shared memory
(`jdag.processes.net.shared_memory`). All other values are part of the message.

Invariants: at most `WINDOW_BYTES` of chunks are unacknowledged. A value takes memory
when its first element arrives, and no more than its announced type and
`value_bytes_max` allow. Elements arrive in order and once. A delivery is released once,
when all its values have arrived; `jdag.wire.order` defines which deliveries may
overtake others.
"""

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from jdag.compute.buffers import Buffers, landed
from jdag.engine.protocol import landing
from jdag.errors import ProtocolError
from jdag.processes.net.loop import clock_ns
from jdag.processes.net.shared_memory import (
    SEGMENT_BYTES_MIN,
    BorrowedMemory,
    SharedMemoryPool,
    SharedSegment,
)
from jdag.wire.frames import CHUNK_MAX_BYTES, FrameKind
from jdag.wire.messages import Codec
from jdag.wire.order import Order

BULK_BYTES = 256 * 1024
INLINE_BYTES = 1024 * 1024  # Limit for the values inside one message.
WINDOW_BYTES = 4 * 1024 * 1024
COPY_BYTES = 2 * 1024 * 1024  # Copied to shared memory in one turn of the loop.
# Segment frames. Lent: the segment holds a value. Freed: it may be written again.
# Forgotten: its number is void. Offered (unnumbered): a new segment, with descriptor.
LENT, FREED, FORGOTTEN, OFFERED = b"l", b"f", b"g", b"o"


class Parcel(Struct):
    """Kind and content of a frame; the views stay alive until it is acknowledged."""

    kind: FrameKind
    views: Sequence[Any]
    nbytes: int


def is_bulk(nbytes: int, inline_bytes: int) -> bool:
    """Whether a value follows its message, which already holds `inline_bytes`."""
    return nbytes >= BULK_BYTES or inline_bytes + nbytes > INLINE_BYTES


class _Outgoing(Struct):
    views: deque[memoryview]
    nbytes: int
    sent: int = 0
    cut_bytes: int = 0  # Bytes of the first view that were cut off already.
    segment: SharedSegment | None = None

    def cut(self) -> Parcel:
        view = self.views[0]
        piece = view[self.cut_bytes : self.cut_bytes + CHUNK_MAX_BYTES]
        self.cut_bytes += len(piece)
        self.sent += len(piece)
        if self.cut_bytes == len(view):
            self.views.popleft()
            self.cut_bytes = 0
        return Parcel(FrameKind.CHUNK, (piece,), len(piece))

    def copy(self, segment: SharedSegment) -> bool:
        """Copy the next piece to a segment; return whether the value is complete."""
        piece = self.views[0][self.sent : self.sent + COPY_BYTES]
        segment.write(self.sent, piece)
        self.sent += len(piece)
        return self.sent == self.nbytes


class BulkQueue:
    """Queue of large outgoing values, sent one after the other.

    `pool` provides shared memory. `values` are those not fully sent; `chunks` are the
    numbers and sizes of unacknowledged chunk frames.
    """

    def __init__(self, pool: SharedMemoryPool) -> None:
        self.nbytes = 0  # Of `values`.
        self.copying = False  # Whether the next turn has more to copy.
        self._pool = pool
        self.values: deque[_Outgoing] = deque()
        self.chunks: deque[tuple[int, int]] = deque()
        self._chunk_bytes = 0

    def add(self, views: Sequence[memoryview]) -> None:
        """Queue the elements of one more value."""
        nbytes = sum([len(view) for view in views])
        self.values.append(_Outgoing(deque(views), nbytes))
        self.nbytes += nbytes

    def next(self, local: bool) -> Parcel | None:
        """Return the next frame, or None if nothing may be sent now.

        `local`: whether the peer can share memory with this process.
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
        """Record the number under which a frame from `next` is sent."""
        if parcel.kind is FrameKind.CHUNK:
            self.chunks.append((sequence, parcel.nbytes))
            self._chunk_bytes += parcel.nbytes

    def acknowledged(self, sequence: int) -> None:
        """Record that the peer has all frames up to `sequence`."""
        while self.chunks and self.chunks[0][0] <= sequence:
            self._chunk_bytes -= self.chunks.popleft()[1]

    def clear(self) -> None:
        """Drop everything that is queued."""
        self.values.clear()
        self.chunks.clear()
        self.nbytes = 0


class Delivery(Struct):
    """A message from a peer with its values, `missing` of which have not arrived.

    The values are in the order of `landing(message)`. It is the peer's message with
    this number.
    """

    message: Any
    values: list[Any]
    number: int
    missing: int = 0


class _Incoming(Struct):
    kind: Any
    delivery: Delivery
    slot: int
    got: int = 0
    view: memoryview | None = None


class Assembler:
    """Combines the messages of one peer with their values.

    Values larger than `value_bytes_max` are rejected. All methods raise ProtocolError
    if the data received do not match what was announced.
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
        self.messages = 0  # That came.

    @property
    def whole(self) -> bool:
        """Whether all that came has come with its values."""
        return not self._incoming

    def message(self, payload: bytes) -> Sequence[Delivery]:
        """Take a message with its inline values; return the deliveries now complete."""
        message, kinds, offset = self._codec.decode(payload)
        if len(kinds) != len(landing(message)):
            raise ProtocolError(
                f"a {type(message).__name__} with {len(kinds)} values, not"
                f" {len(landing(message))}"
            )
        values: list[Any] = []
        self.messages = number = self.messages + 1
        delivery = Delivery(message, values, number)
        if kinds:
            offset = self._take_values(delivery, kinds, payload, offset)
        if offset != len(payload):
            raise ProtocolError(f"a message has {len(payload) - offset} bytes too many")
        if not self._incoming:  # All earlier deliveries are complete.
            return (delivery,)
        return self._order.arrived(delivery, not delivery.missing)

    def _take_values(
        self, delivery: Delivery, kinds: Sequence[Any], payload: bytes, offset: int
    ) -> int:
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
        """Return the memory for the next elements; once filled, call `received`."""
        incoming = self._incoming[0] if self._incoming else None
        missing = 0 if incoming is None else incoming.kind.nbytes - incoming.got
        if incoming is None or not 0 < nbytes <= missing:
            raise ProtocolError(
                f"a chunk of {nbytes} bytes for a value with {missing} bytes missing"
            )
        if incoming.view is None:
            incoming.view = self._buffers.aligned(incoming.kind.nbytes)
        return incoming.view[incoming.got : incoming.got + nbytes]

    def lent(self, segment: int, nbytes: int) -> Sequence[Delivery]:
        """Take the next value from a segment of shared memory."""
        incoming = self._incoming[0] if self._incoming else None
        if incoming is None or incoming.got or nbytes != incoming.kind.nbytes:
            raise ProtocolError(
                f"{nbytes} bytes in segment {segment} belong to no value"
            )
        try:
            incoming.view = self._borrowed.borrow(segment, nbytes)
        except ConnectionError as error:
            raise ProtocolError(str(error)) from None
        return self.received(nbytes)

    def received(self, nbytes: int) -> Sequence[Delivery]:
        """Record that `nbytes` more elements of the current value are in place."""
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
        """Drop everything that is incomplete."""
        self._incoming.clear()
        self._order = Order()
