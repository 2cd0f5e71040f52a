"""Large values of a connection, sent in chunks or through shared memory.

A value is sent after its message if it has `BULK_BYTES` or more, or if the message
would otherwise exceed `INLINE_BYTES` (see `is_bulk`). Such a value is sent in chunks or
in shared memory (`jdag.processes.net.shared_memory`). All other values are inside of
the message.

Invariants: at most `WINDOW_BYTES` of chunks are unacknowledged. Memory for a value is
allocated when its first element arrives; its size is limited by the announced type and
by `value_bytes_max`. Elements arrive in order and once. A delivery is passed on once,
when all its values have arrived. `jdag.wire.order` defines which deliveries may be
passed on before earlier ones.
"""

import struct
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from jdag.compute.buffers import (
    ArrayLayout,
    Buffers,
    array_over,
    layout_of,
    parts,
)
from jdag.engine.protocol import LANDING, StepFrame
from jdag.errors import ProtocolError
from jdag.processes.net.loop import clock_ns
from jdag.processes.net.shared_memory import (
    SEGMENT_BYTES_MIN,
    BorrowedMemory,
    SharedMemoryPool,
    SharedSegment,
)
from jdag.wire.frames import CHUNK_MAX_BYTES, MESSAGE_BYTES, FrameKind
from jdag.wire.messages import COPIED_BYTES, STEP, Codec
from jdag.wire.order import Order
from jdag.wire.trees import COUNT_BYTES

BULK_BYTES = 256 * 1024
INLINE_BYTES = 1024 * 1024  # Maximum total size of the values inside a message.
HEADS_MAX = 4096  # Number of decoded heads of step frames that are kept.
WINDOW_BYTES = 4 * 1024 * 1024
COPY_BYTES = 2 * 1024 * 1024  # Bytes copied to shared memory per loop iteration.
# Frames about segments of shared memory. Lent: the segment holds a value. Freed: the
# segment may be written again. Forgotten: the number of the segment is invalid. Offered
# (a frame without a number): there is a new segment, whose descriptor is attached.
LENT, FREED, FORGOTTEN, OFFERED = b"l", b"f", b"g", b"o"


class Parcel(Struct):
    """The kind and content of a frame, kept until the frame is acknowledged."""

    kind: FrameKind
    views: Sequence[Any]
    nbytes: int
    handled: int = 0  # For the header.


def is_bulk(nbytes: int, inline_bytes: int) -> bool:
    return nbytes >= BULK_BYTES or inline_bytes + nbytes > INLINE_BYTES


class _Outgoing(Struct):
    views: deque[memoryview]
    nbytes: int
    sent: int = 0
    cut_bytes: int = 0  # Bytes of the first view that earlier chunks contain.
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
        piece = self.views[0][self.sent : self.sent + COPY_BYTES]
        segment.write(self.sent, piece)
        self.sent += len(piece)
        return self.sent == self.nbytes


class BulkQueue:
    """Queue of large outgoing values, which are sent one after the other.

    `pool` provides shared memory. `values` holds the values that are not fully sent.
    `chunks` holds the numbers and sizes of unacknowledged chunk frames.
    """

    def __init__(self, pool: SharedMemoryPool) -> None:
        self.nbytes = 0  # Total size of `values`.
        self.copying = False  # Whether a copy continues in the next loop iteration.
        self._pool = pool
        self.values: deque[_Outgoing] = deque()
        self.chunks: deque[tuple[int, int]] = deque()
        self._chunk_bytes = 0

    def split(
        self, sizes: Sequence[int], values: Sequence[Any]
    ) -> tuple[list[memoryview], int]:
        """Add the large values. Return the elements of the others, and their bytes."""
        views: list[memoryview] = []
        inline_bytes, is_small = 0, sum(sizes) < BULK_BYTES
        for nbytes, value in zip(sizes, values, strict=True):
            if is_small or not is_bulk(nbytes, inline_bytes):
                views += filter(None, parts(value))
                inline_bytes += nbytes
            else:
                self.add(parts(value))
        return views, inline_bytes

    def add(self, views: Sequence[memoryview]) -> None:
        nbytes = sum([len(view) for view in views])
        self.values.append(_Outgoing(deque(views), nbytes))
        self.nbytes += nbytes

    def next(self, local: bool) -> Parcel | None:
        """Return the next frame or None. If `local`, the peer can share memory."""
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
        if parcel.kind is FrameKind.CHUNK:
            self.chunks.append((sequence, parcel.nbytes))
            self._chunk_bytes += parcel.nbytes

    def acknowledged(self, sequence: int) -> None:
        while self.chunks and self.chunks[0][0] <= sequence:
            self._chunk_bytes -= self.chunks.popleft()[1]

    def clear(self) -> None:
        self.values.clear()
        self.chunks.clear()
        self.nbytes = 0


class Delivery(Struct):
    """A message from a peer, with its values. `missing` counts those not yet arrived.

    The values are in the order of `landing(message)`. `number` counts the peer's
    messages from 1.
    """

    message: Any
    values: list[Any]
    number: int
    missing: int = 0


class _Incoming(Struct):
    kind: Any
    delivery: Delivery
    slot: int
    received_bytes: int = 0
    view: memoryview | None = None


Payload = bytes | memoryview
_Head = tuple[StepFrame, tuple[Any, ...], ArrayLayout | None]


class Assembler:
    """Combines the messages of one peer with their values.

    Values larger than `value_bytes_max` are rejected. All methods raise ProtocolError
    if the received data do not match the announced values.
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
        self.order: Order = Order()
        self._heads: dict[bytes, _Head] = {}
        self.messages = 0  # Number of messages received so far.

    @property
    def is_complete(self) -> bool:
        return not self._incoming

    def bundle(self, payload: bytes) -> Sequence[Delivery]:
        """Decode a bundle. Return the deliveries that can now be passed on."""
        deliveries: list[Delivery] = []
        start, end = 0, len(payload)
        while start < end:
            first = start + MESSAGE_BYTES
            stop = first + int.from_bytes(payload[start:first], "little")
            if stop > end:
                raise ProtocolError(
                    f"a bundle has only {end - start} bytes left for a message of "
                    f"{stop - start} bytes"
                )
            is_large = stop - first >= COPIED_BYTES
            data = (memoryview(payload) if is_large else payload)[first:stop]
            deliveries += self._deliver(*self._codec.decode(data), data)
            start = stop
        return deliveries

    def step(self, payload: bytes) -> Sequence[Delivery]:
        """Decode a step frame. Its head is the same in each step, and decoded once."""
        end = STEP.size + COUNT_BYTES
        end += int.from_bytes(payload[STEP.size : end], "little")
        head = payload[STEP.size : end]
        if head not in self._heads:
            frame, kinds, _ = self._codec.decode(head)
            if not isinstance(frame, StepFrame):
                raise ProtocolError(f"a {type(frame).__name__} is no step frame")
            if len(self._heads) >= HEADS_MAX:
                self._heads.clear()
            most = max([kind.array_nbytes for kind in kinds], default=0)
            is_valid = len(kinds) == len(frame.slots) and most <= self._value_bytes_max
            layout = layout_of(kinds) if is_valid else None
            self._heads[head] = frame, kinds, layout
        frame, kinds, layout = self._heads[head]
        number, base = STEP.unpack_from(payload)
        message = StepFrame(frame.context, number, frame.slots, base, frame.begins)
        nbytes = layout[-1][3] if layout else 0
        if layout is None or self._incoming or len(payload) != end + nbytes:
            return self._deliver(message, kinds, end, payload)
        self.messages += 1
        values = [
            np.ndarray(shape, dtype, payload[end + start : end + stop])
            for shape, dtype, start, stop in layout
        ]
        return (Delivery(message, values, self.messages),)

    def _deliver(
        self, message: Any, kinds: Sequence[Any], offset: int, payload: Payload
    ) -> Sequence[Delivery]:
        if isinstance(message, StepFrame):
            expected = len(message.slots)
        else:
            keys_of = LANDING.get(message.__class__)
            expected = 0 if keys_of is None else len(keys_of(message))
        if len(kinds) != expected:
            raise ProtocolError(
                f"a {type(message).__name__} has {len(kinds)} values; expected"
                f" {expected}"
            )
        self.messages += 1
        delivery = Delivery(message, [], self.messages)
        if kinds:
            offset = self._take_values(delivery, kinds, payload, offset)
        if offset != len(payload):
            surplus = len(payload) - offset
            raise ProtocolError(f"a message has {surplus} bytes after its last value")
        if not self._incoming:  # All earlier deliveries are complete.
            return (delivery,)
        return self.order.arrived(delivery, not delivery.missing)

    def _take_values(
        self, delivery: Delivery, kinds: Sequence[Any], payload: Payload, offset: int
    ) -> int:
        view, first, values = memoryview(payload), offset, delivery.values
        for slot, kind in enumerate(kinds):
            nbytes = kind.array_nbytes
            if nbytes > self._value_bytes_max:
                raise ProtocolError(
                    f"a received value has {nbytes} bytes; expected at most "
                    f"value_bytes_max = {self._value_bytes_max}"
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
                    f"a message has only {len(payload) - offset} bytes left for a "
                    f"value of {nbytes} bytes"
                )
            values.append(array_over(kind, view[offset : offset + nbytes]))
            offset += nbytes
        return offset

    def target(self, nbytes: int) -> memoryview:
        """Return memory for the next elements. Fill it, then call `received`."""
        incoming = self._incoming[0] if self._incoming else None
        missing = incoming.kind.nbytes - incoming.received_bytes if incoming else 0
        if incoming is None or not 0 < nbytes <= missing:
            raise ProtocolError(
                f"a chunk has {nbytes} bytes; expected 1 to {missing}, the missing "
                "part of the value"
            )
        if incoming.view is None:
            incoming.view = self._buffers.aligned(incoming.kind.nbytes)
        return incoming.view[incoming.received_bytes : incoming.received_bytes + nbytes]

    def lent(self, segment: int, nbytes: int) -> Sequence[Delivery]:
        incoming = self._incoming[0] if self._incoming else None
        if not incoming or incoming.received_bytes or nbytes != incoming.kind.nbytes:
            raise ProtocolError(
                f"shared memory segment {segment} holds {nbytes} bytes, which no "
                "announced value has"
            )
        try:
            incoming.view = self._borrowed.borrow(segment, nbytes)
        except ConnectionError as error:
            raise ProtocolError(str(error)) from None
        return self.received(nbytes)

    def received(self, nbytes: int) -> Sequence[Delivery]:
        incoming = self._incoming[0]
        incoming.received_bytes += nbytes
        if incoming.received_bytes < incoming.kind.nbytes:
            return ()
        assert incoming.view is not None, incoming.kind
        self._incoming.popleft()
        delivery = incoming.delivery
        delivery.values[incoming.slot] = array_over(incoming.kind, incoming.view)
        delivery.missing -= 1
        return () if delivery.missing else self.order.completed(delivery)

    def clear(self) -> None:
        self._incoming.clear()
        self._heads.clear()
        self.order = Order()
