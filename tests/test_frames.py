"""Headers of frames: checked before believed, whatever connections break off."""

from random import Random

import pytest

from jdag.errors import ProtocolError
from jdag.wire.frames import (
    CHUNK,
    CHUNK_MAX_BYTES,
    LENGTHS_MAX,
    FrameKind,
    Header,
    pack_header,
    unpack_header,
)
from jdag.wire.link import FRAME_BYTES, Frame, Link, LinkSettings

WIDE = (1 << 64) - 1
HEADERS = [
    Header(0, 0, 0, FrameKind.PURE),
    Header(0, WIDE, 16, FrameKind.PURE),
    Header(1, 0, 0, FrameKind.MESSAGE),
    Header(WIDE, WIDE, 64 << 20, FrameKind.MESSAGE),
    Header(7, 3, CHUNK.size + 1, FrameKind.CHUNK),
    Header(7, 3, CHUNK.size + CHUNK_MAX_BYTES, FrameKind.CHUNK),
    Header(8, 3, 256 << 20, FrameKind.DEFINE),
    Header(9, 3, 1 << 20, FrameKind.ASIDE),
]


def test_headers_are_read_as_they_were_written():
    for header in HEADERS:
        data = pack_header(*header)
        assert len(data) == FRAME_BYTES
        assert unpack_header(data) == unpack_header(memoryview(data)) == header


def test_a_header_is_three_little_endian_words_with_the_kind_on_top():
    header = pack_header(5, 6, 0x1234, FrameKind.DEFINE)
    assert header[:8] == (5).to_bytes(8, "little")
    assert header[8:16] == (6).to_bytes(8, "little")
    assert header[16:23] == (0x1234).to_bytes(7, "little")
    assert header[23] == 3


def raw(sequence: int, length: int, kind: int) -> bytes:
    words = (sequence.to_bytes(8, "little"), bytes(8), length.to_bytes(7, "little"))
    return b"".join([*words, bytes([kind])])


@pytest.mark.parametrize("kind", FrameKind)
def test_a_length_above_the_cap_of_its_kind_is_refused_before_memory_is_taken(kind):
    sequence = int(kind is not FrameKind.PURE)
    allowed = LENGTHS_MAX[kind]
    assert unpack_header(raw(sequence, allowed, kind)).length == allowed
    for length in (allowed + 1, (1 << 56) - 1):
        said = f"a {kind.name} frame of {length} bytes: allowed are {allowed}"
        with pytest.raises(ProtocolError, match=said):
            unpack_header(raw(sequence, length, kind))


@pytest.mark.parametrize("kind", [6, 7, 127, 255])
def test_a_kind_that_there_is_not_is_refused(kind: int):
    with pytest.raises(ProtocolError, match=f"kind {kind} of a frame: allowed is 0 to"):
        unpack_header(raw(1, 0, kind))


@pytest.mark.parametrize("kind", FrameKind)
def test_sequence_0_is_that_of_a_pure_frame_alone(kind: FrameKind):
    pure = kind is FrameKind.PURE
    with pytest.raises(ProtocolError, match=f"a {kind.name} frame of sequence {+pure}"):
        unpack_header(raw(int(pure), 16, kind))


@pytest.mark.parametrize("length", [0, 1, CHUNK.size])
def test_a_chunk_brings_at_least_a_byte(length: int):
    with pytest.raises(ProtocolError, match=f"a CHUNK frame of {length} bytes"):
        unpack_header(raw(1, length, FrameKind.CHUNK))


def test_random_bytes_are_headers_or_refused():
    rng = Random("noise")
    found = 0
    for _ in range(3000):
        try:
            header = unpack_header(rng.randbytes(FRAME_BYTES))
        except ProtocolError:
            continue
        assert header.length <= LENGTHS_MAX[header.kind]
        found += 1
    assert found == 0  # One in 2^30 lengths is short enough.


class Side:
    """One end: a link, and what it has of a frame on the connection of now."""

    def __init__(self, peer: str) -> None:
        settings = LinkSettings(resend_ns=10**12, resend_max=0, ack_delay_ns=0)
        self.link = Link(peer, settings)
        self.told: list[bytes] = []
        self.got: list[bytes] = []
        self.connect()

    def connect(self) -> None:
        self.head = b""
        self.header: Header | None = None
        self.payload = bytearray()
        self.out = bytearray()

    def put(self, frames) -> None:
        for sequence, acknowledged, payload in frames:
            kind = FrameKind.MESSAGE if sequence else FrameKind.PURE
            data = payload or b""
            self.out += pack_header(sequence, acknowledged, len(data), kind) + data

    def take(self, data: bytes) -> None:
        while data:
            if self.header is None:
                lacks = FRAME_BYTES - len(self.head)
                self.head, data = self.head + data[:lacks], data[lacks:]
                if len(self.head) == FRAME_BYTES:
                    self.header, self.head = unpack_header(self.head), b""
            if self.header is not None:
                missing = self.header.length - len(self.payload)
                self.payload += data[:missing]
                data = data[missing:]
                if len(self.payload) == self.header.length:
                    self.receive(self.header, bytes(self.payload))
                    self.header = None
                    self.payload.clear()

    def receive(self, header: Header, payload: bytes) -> None:
        frame = Frame(header.sequence, header.acknowledged, payload)
        self.got.extend(self.link.receive(frame, 0))


def reconnect(sides: list[Side]) -> None:
    """A new connection: each is told what the other has received."""
    received = [side.link.received for side in sides]
    for side, other in zip(sides, reversed(received), strict=True):
        side.connect()
        side.put(side.link.resume(other, 0))


def test_connections_that_are_cut_anywhere_lose_nothing_and_bring_nothing_twice():
    cuts = resent = 0
    for seed in range(200):
        rng = Random(f"torment {seed}")
        sides = [Side("b"), Side("a")]
        for step in range(rng.randrange(1, 120)):
            me = rng.randrange(2)
            side, other = sides[me], sides[1 - me]
            chance = rng.random()
            if chance < 0.4:
                payload = f"{seed} {step} ".encode() + rng.randbytes(rng.randrange(60))
                side.told.append(payload)
                side.put([side.link.send(payload, 0)])
            elif chance < 0.85:
                size = rng.randrange(90)
                other.take(bytes(side.out[:size]))
                del side.out[:size]
            elif chance < 0.93:
                side.put(side.link.tick(0))
            else:
                cuts += 1
                reconnect(sides)
        reconnect(sides)
        for _ in range(4):
            for side, other in zip(sides, reversed(sides), strict=True):
                data, side.out = bytes(side.out), bytearray()
                other.take(data)
                side.put(side.link.tick(0))
        for side, other in zip(sides, reversed(sides), strict=True):
            assert side.got == other.told, seed
            assert side.link.deadline_ns is None and side.link.duplicates == 0, seed
            resent += side.link.resent
    assert cuts > 200 and resent > 1000, (cuts, resent)
