"""What a connection receives: bytes that do not fit what was announced are refused."""

from typing import Any

import jax.numpy as jnp
import pytest

from jdag.compute.buffers import Buffers, parts
from jdag.errors import ProtocolError
from jdag.processes.net.large_values import Assembler, Delivery, Parcel
from jdag.processes.net.receiving import FrameCounters, FrameReader
from jdag.processes.net.shared_memory import BorrowedMemory, SharedMemoryPool
from jdag.wire.arrays import type_of
from jdag.wire.frames import (
    CHUNK_MAX_BYTES,
    FrameKind,
    pack_header,
)
from jdag.wire.messages import Codec
from tests.tools.connection_cases import assert_same, primal
from tests.tools.error_texts import fails_with

CODEC = Codec(("a", "b"))
VALUE = jnp.arange(65_536 + 1_000, dtype=jnp.float32)  # 4,000 bytes over a chunk.


def made() -> tuple[FrameReader, list[Any]]:
    """A reader, and where its events go."""
    borrowed = BorrowedMemory("b", lambda number: None)
    pool = SharedMemoryPool("b", lambda: None)
    buffers = Buffers()
    assembler = Assembler(CODEC, buffers, borrowed, 1 << 30)
    return FrameReader(FrameCounters(), assembler, buffers, pool, borrowed), []


def chunk(sequence: int, elements: bytes) -> bytes:
    return pack_header(sequence, 0, len(elements), FrameKind.CHUNK) + elements


def sent(last: int) -> tuple[bytes, bytes]:
    """A message with its first chunk, and a second chunk of so many bytes."""
    head = CODEC.encode(primal(1), [type_of(VALUE)])
    frame = pack_header(1, 0, len(head), FrameKind.MESSAGE) + head
    elements = b"".join(parts(VALUE))
    first = chunk(2, elements[:CHUNK_MAX_BYTES])
    rest = elements[CHUNK_MAX_BYTES:]
    return frame + first, chunk(3, (rest + bytes(last))[:last])


class Piece:
    """A stream of which just these bytes have come."""

    buffered = True

    def __init__(self, data: bytes) -> None:
        self.left = data

    def recv_into(self, view: memoryview) -> int:
        if not self.left:
            raise BlockingIOError
        count = min(len(view), len(self.left))
        view[:count] = self.left[:count]
        self.left = self.left[count:]
        return count

    def pending(self) -> bool:
        return bool(self.left)


def read_in(reader: FrameReader, events: list[Any], *pieces: bytes) -> None:
    """Have it read all of each piece before the next one comes."""
    for piece in pieces:
        stream: Any = Piece(piece)
        while reader.read(stream, events):
            pass


@pytest.mark.parametrize("last", [1, 4, -1])
def test_who_has_less_than_before_or_more_than_was_sent_is_another(last: int):
    numbers = FrameCounters()
    numbers.sent = 3
    numbers.unacknowledged.extend([Parcel(FrameKind.MESSAGE, (), 0)] * 3)
    numbers.acknowledge(2)
    with pytest.raises(ProtocolError, match=f"frames up to number {last}; expected"):
        numbers.acknowledge(last)
    assert numbers.acknowledged == 2 and len(numbers.unacknowledged) == 1


@pytest.mark.parametrize("here", [0, 100, 4_100])
def test_a_chunk_that_is_longer_than_what_is_missing_is_refused(here: int):
    reader, events = made()
    before, last = sent(4_100)
    cut = len(last) - 4_100 + here
    said = "a chunk has 4100 bytes; expected 1 to 4000"
    with pytest.raises(ProtocolError, match=said):
        read_in(reader, events, before, last[:cut], last[cut:])
    assert events == []


def test_a_chunk_of_just_what_is_missing_completes_its_value():
    reader, events = made()
    read_in(reader, events, *sent(4_000))
    (delivery,) = events
    assert isinstance(delivery, Delivery) and delivery.message == primal(1)
    assert_same(delivery.values, [VALUE])


@pytest.mark.parametrize("again", [1, 2, 3, 5])
def test_a_frame_out_of_turn_is_refused_and_no_message_comes_twice(again: int):
    reader, events = made()

    def frame(sequence: int) -> bytes:
        body = CODEC.encode(primal(sequence, slots=0))
        return pack_header(sequence, 0, len(body), FrameKind.MESSAGE) + body

    read_in(reader, events, *map(frame, (1, 2, 3)))
    with pytest.raises(ProtocolError, match=f"frame number {again}; expected"):
        read_in(reader, events, frame(again))
    assert [delivery.message for delivery in events] == [
        primal(number, slots=0) for number in (1, 2, 3)
    ]


def test_a_message_brings_as_many_values_as_land():
    reader, events = made()
    body = CODEC.encode(primal(1))
    frame = pack_header(1, 0, len(body), FrameKind.MESSAGE) + body
    with fails_with(ProtocolError, "processes.a_primal_with_0_values"):
        read_in(reader, events, frame)
    assert events == []
