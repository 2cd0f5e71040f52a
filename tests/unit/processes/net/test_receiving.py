"""What a connection receives: bytes that do not fit what was announced are refused."""

from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.compute.buffers import Buffers, parts
from jdag.engine.protocol import Acknowledged, ContextId, StepFrame
from jdag.errors import ProtocolError
from jdag.processes.net.large_values import Assembler, Delivery, Parcel
from jdag.processes.net.receiving import (
    FrameCounters,
    FrameReader,
    ReceivedAcknowledgement,
)
from jdag.processes.net.shared_memory import BorrowedMemory, SharedMemoryPool
from jdag.wire.arrays import type_of
from jdag.wire.frames import (
    CHUNK_MAX_BYTES,
    FRAME_BYTES,
    FrameKind,
    pack_header,
)
from jdag.wire.messages import STEP, Codec
from tests.tools.connection_cases import assert_same, primal
from tests.tools.error_texts import fails_with
from tests.tools.fuzz_cases import in_bundle

CODEC = Codec(("a", "b"))
VALUE = jnp.arange(65_536 + 1_000, dtype=jnp.float32)  # 4,000 bytes over a chunk.
SMALL = jnp.arange(3, dtype=jnp.float32)


def made() -> tuple[FrameReader, list[Any]]:
    """A reader, and where its events go."""
    borrowed = BorrowedMemory("b", lambda number: None)
    pool = SharedMemoryPool("b", lambda: None)
    buffers = Buffers()
    assembler = Assembler(CODEC, buffers, borrowed, 1 << 30)
    return FrameReader("b", FrameCounters(), assembler, buffers, pool, borrowed), []


def acknowledged(count: int, number: int) -> ReceivedAcknowledgement:
    return ReceivedAcknowledgement(Acknowledged("b", count), number)


def bundle(sequence: int, *messages: bytes, handled: int = 0) -> bytes:
    body = in_bundle(*messages)
    return pack_header(sequence, 0, len(body), FrameKind.MESSAGE, handled) + body


def chunk(sequence: int, elements: bytes) -> bytes:
    return pack_header(sequence, 0, len(elements), FrameKind.CHUNK) + elements


def sent(last: int) -> tuple[bytes, bytes]:
    """A message with its first chunk, and a second chunk of so many bytes."""
    head = CODEC.encode(primal(1), [type_of(VALUE)])
    frame = bundle(1, head)
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
        return bundle(sequence, CODEC.encode(primal(sequence, slots=0)))

    read_in(reader, events, *map(frame, (1, 2, 3)))
    with pytest.raises(ProtocolError, match=f"frame number {again}; expected"):
        read_in(reader, events, frame(again))
    assert [delivery.message for delivery in events] == [
        primal(number, slots=0) for number in (1, 2, 3)
    ]


def test_a_message_brings_as_many_values_as_land():
    reader, events = made()
    with fails_with(ProtocolError, "processes.a_primal_with_0_values"):
        read_in(reader, events, bundle(1, CODEC.encode(primal(1))))
    assert events == []


def primals(*numbers: int) -> list[bytes]:
    kinds = [type_of(SMALL)]
    elements = b"".join(parts(SMALL))
    return [CODEC.encode(primal(number), kinds) + elements for number in numbers]


@pytest.mark.parametrize("sizes", [[3], [1, 2], [2, 1], [1, 1, 1], [0, 3], [1, 0, 2]])
def test_messages_are_the_same_however_they_are_bundled(sizes: list[int]):
    reader, events = made()
    bodies = iter(primals(1, 2, 3))
    for sequence, size in enumerate(sizes, 1):
        read_in(reader, events, bundle(sequence, *[next(bodies) for _ in range(size)]))
    assert [delivery.message for delivery in events] == [*map(primal, (1, 2, 3))]
    assert [delivery.number for delivery in events] == [1, 2, 3]
    for delivery in events:
        assert_same(delivery.values, [SMALL])


def test_a_bundle_that_is_cut_within_a_message_is_refused_and_so_is_its_rest():
    whole = in_bundle(*primals(1, 2))
    middle = len(whole) // 2
    for cut in [*range(1, middle), *range(middle + 1, len(whole))]:
        for body in (whole[:cut], whole[cut:]):
            reader, events = made()
            frame = pack_header(1, 0, len(body), FrameKind.MESSAGE) + body
            with pytest.raises(ProtocolError):
                read_in(reader, events, frame)
            assert events == []


@pytest.mark.parametrize("surplus", [1, 2, 255])
def test_a_length_beyond_the_frame_is_refused_though_the_message_is_whole(surplus: int):
    reader, events = made()
    (body,) = primals(1)
    frame = bytearray(bundle(1, body))
    length = len(body) + surplus
    frame[FRAME_BYTES : FRAME_BYTES + 4] = length.to_bytes(4, "little")
    wanted = f"only {len(body) + 4} bytes left for a message of {length + 4} bytes"
    with pytest.raises(ProtocolError, match=wanted):
        read_in(reader, events, bytes(frame))
    assert events == []


@pytest.mark.parametrize("at", [0, 1])
def test_a_message_has_all_bytes_of_its_length_in_a_bundle(at: int):
    bodies = primals(1, 2)
    for change in (lambda body: body + b"\0", lambda body: body[:-1]):
        reader, events = made()
        changed = [*bodies]
        changed[at] = change(bodies[at])
        with pytest.raises(ProtocolError, match=r"a message has (1 b|only \d+ b)ytes"):
            read_in(reader, events, bundle(1, *changed))
        assert events == []


def test_what_was_handled_comes_before_the_messages_of_its_frame():
    reader, events = made()
    read_in(reader, events, bundle(1, *primals(1, 2)))
    read_in(reader, events, bundle(2, *primals(3), handled=2))
    read_in(reader, events, bundle(3, handled=5))
    read_in(reader, events, bundle(4, *primals(4), handled=5), bundle(5, handled=6))
    read_in(reader, events, pack_header(0, 0, 0, FrameKind.PURE, 6))
    assert [
        event.message if isinstance(event, Delivery) else event for event in events
    ] == [
        *(primal(1), primal(2), acknowledged(2, 3), primal(3)),
        *(acknowledged(3, -1), primal(4), acknowledged(1, -2)),
    ]


def test_what_was_handled_does_not_wait_for_values_that_are_on_their_way():
    reader, events = made()
    before, last = sent(4_000)
    read_in(reader, events, before, bundle(3, handled=1))
    assert events == [acknowledged(1, -1)]
    rest = last[FRAME_BYTES:]
    read_in(reader, events, pack_header(4, 0, len(rest), FrameKind.CHUNK, 1) + rest)
    assert events[1].message == primal(1)


@pytest.mark.parametrize("kind", [FrameKind.PURE, FrameKind.MESSAGE])
def test_no_fewer_messages_are_handled_than_before(kind: FrameKind):
    reader, events = made()
    read_in(reader, events, bundle(1, handled=3))
    sequence = 2 if kind else 0
    with pytest.raises(ProtocolError, match="had handled 3 messages, and now 2"):
        read_in(reader, events, pack_header(sequence, 0, 0, kind, 2))


PLAN = ContextId(0, 1, 0)


def step_frame(
    sequence: int, number: int, values: list[Any], more: bytes = b""
) -> bytes:
    frame = StepFrame(PLAN, 0, tuple(range(len(values))), 0, True)
    head = CODEC.encode(frame, list(map(type_of, values)))
    elements = b"".join(chain(*map(parts, values)))
    body = STEP.pack(number, number - 1) + head + elements + more
    return pack_header(sequence, 0, len(body), FrameKind.STEP) + body


def described(values: list[Any]) -> list[Any]:
    return [(type_of(value), b"".join(parts(value))) for value in values]


VALUES = [
    [],
    [jnp.arange(3.0), np.arange(5, dtype=np.int8)],
    [2.5, jnp.arange(3.0)],  # A weak scalar is not taken from the layout.
    [jax.random.key(3)],
]


@pytest.mark.parametrize("values", VALUES, ids=len)
def test_a_step_frame_has_its_own_numbers_and_the_head_of_the_step_before(values):
    reader, events = made()
    for number in (1, 2, 3):
        read_in(reader, events, step_frame(number, number, values))
    for number, delivery in enumerate(events, 1):
        slots = tuple(range(len(values)))
        assert delivery.message == StepFrame(PLAN, number, slots, number - 1, True)
        assert described(delivery.values) == described(values)
    assert [delivery.number for delivery in events] == [1, 2, 3]
    assert len(reader.assembler._heads) == 1


@pytest.mark.parametrize("values", VALUES, ids=len)
@pytest.mark.parametrize("is_known", [False, True])
def test_a_step_frame_with_more_or_fewer_bytes_than_its_head_says_is_refused(
    values: list[Any], is_known: bool
):
    whole = step_frame(1, 7, values)[FRAME_BYTES:]
    longer = step_frame(1, 7, values, b"\0")[FRAME_BYTES:]
    for body in (longer, *[whole[:length] for length in range(len(whole))]):
        reader, events = made()
        if is_known:
            read_in(reader, events, step_frame(1, 6, values))
        sequence = 1 + is_known
        frame = pack_header(sequence, 0, len(body), FrameKind.STEP) + body
        with pytest.raises(ProtocolError):
            read_in(reader, events, frame)
        assert len(events) == is_known


def test_only_a_step_frame_has_the_kind_of_one():
    reader, events = made()
    body = STEP.pack(1, 0) + CODEC.encode(primal(1, slots=0))
    with pytest.raises(ProtocolError, match="a Primal is no step frame"):
        read_in(reader, events, pack_header(1, 0, len(body), FrameKind.STEP) + body)


def test_a_value_of_a_step_is_no_larger_than_any_other_may_be():
    reader, events = made()
    reader.assembler._value_bytes_max = 11
    with pytest.raises(ProtocolError, match="value_bytes_max = 11"):
        read_in(reader, events, step_frame(1, 1, [jnp.arange(3.0)]))


def test_a_step_begins_after_large_values_that_were_sent_before_it():
    reader, events = made()
    before, last = sent(4_000)
    later = last[FRAME_BYTES:]
    read_in(reader, events, before, step_frame(3, 1, [jnp.arange(3.0)]))
    assert events == []
    read_in(reader, events, chunk(4, later))
    assert [type(delivery.message).__name__ for delivery in events] == [
        "Primal",
        "StepFrame",
    ]
