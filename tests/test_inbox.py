"""The inbox of one peer: bytes that do not fit what was announced are refused."""

from typing import Any

import jax.numpy as jnp
import pytest

from jdag.compute.buffers import Buffers, parts
from jdag.errors import ProtocolError
from jdag.rpc.inbox import Inbox
from jdag.rpc.peer import LINK
from jdag.rpc.segments import Borrowed
from jdag.wire.arrays import type_of
from jdag.wire.frames import (
    CHUNK_HEADER_BYTES,
    CHUNK_MAX_BYTES,
    FrameKind,
    pack_chunk,
    pack_header,
)
from jdag.wire.link import Link
from jdag.wire.messages import Codec
from tests.peer_cases import assert_same, primal

CODEC = Codec(("a", "b"))
VALUE = jnp.arange(65_536 + 1_000, dtype=jnp.float32)  # 4,000 bytes over a chunk.


class Heard:
    """The messages that came; the rest of a sink is not used here."""

    def __init__(self) -> None:
        self.messages: list[tuple[Any, Any]] = []

    def arrived(self, message: Any, values: Any) -> None:
        self.messages.append((message, list(values)))


def made() -> tuple[Inbox, Heard]:
    heard: Any = Heard()
    borrowed = Borrowed("b", lambda number: None)
    link = Link("b", LINK)
    return Inbox(link, CODEC, heard, Buffers(), borrowed, 1 << 30), heard


def chunk(sequence: int, offset: int, elements: bytes) -> bytes:
    length = CHUNK_HEADER_BYTES + len(elements)
    head = pack_header(sequence, 0, length, FrameKind.CHUNK)
    return head + pack_chunk(1, offset) + elements


def sent(last: int) -> tuple[bytes, bytes]:
    """A message with its first chunk, and a second chunk of so many bytes."""
    head = CODEC.encode_with(primal(1), [type_of(VALUE)])
    frame = pack_header(1, 0, len(head), FrameKind.MESSAGE) + head
    elements = b"".join(parts(VALUE))
    first = chunk(2, 0, elements[:CHUNK_MAX_BYTES])
    rest = elements[CHUNK_MAX_BYTES:]
    return frame + first, chunk(3, CHUNK_MAX_BYTES, (rest + bytes(last))[:last])


class Piece:
    """A stream of which just these bytes have come."""

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


def read_in(inbox: Inbox, *pieces: bytes) -> None:
    """Have it read all of each piece before the next one comes."""
    for piece in pieces:
        stream: Any = Piece(piece)
        while inbox.read(stream):
            pass


@pytest.mark.parametrize("here", [0, 100, 4_100])
def test_a_chunk_that_is_longer_than_what_is_missing_is_refused(here: int):
    inbox, heard = made()
    before, last = sent(4_100)
    cut = len(last) - 4_100 + here
    said = "chunk of 4100 bytes for value 1, of which 4000 are missing"
    with pytest.raises(ProtocolError, match=said):
        read_in(inbox, before, last[:cut], last[cut:])
    assert heard.messages == []


def test_a_chunk_of_just_what_is_missing_completes_its_value():
    inbox, heard = made()
    read_in(inbox, *sent(4_000))
    ((message, values),) = heard.messages
    assert message == primal(1)
    assert_same(values, [VALUE])


@pytest.mark.parametrize("again", [1, 2, 3, 5])
def test_a_frame_out_of_turn_is_refused_and_no_message_comes_twice(again: int):
    inbox, heard = made()

    def frame(sequence: int) -> bytes:
        body = CODEC.encode(primal(sequence, slots=0))
        return pack_header(sequence, 0, len(body), FrameKind.MESSAGE) + body

    read_in(inbox, *map(frame, (1, 2, 3)))
    with pytest.raises(ProtocolError, match=f"frame {again} after 3"):
        read_in(inbox, frame(again))
    assert [message for message, _ in heard.messages] == [
        primal(number, slots=0) for number in (1, 2, 3)
    ]
