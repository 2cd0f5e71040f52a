"""Headers of frames: checked before believed, whatever connections break off."""

import pytest

from jdag.errors import ProtocolError
from jdag.wire.frames import (
    CHUNK_MAX_BYTES,
    FRAME_BYTES,
    LENGTHS_MAX,
    FrameKind,
    Header,
    pack_header,
    unpack_header,
)
from tests.tools.error_texts import fails_with

WIDE = (1 << 64) - 1
HEADERS = [
    Header(0, 0, 0, FrameKind.PURE),
    Header(0, WIDE, 16, FrameKind.PURE),
    Header(1, 0, 0, FrameKind.MESSAGE),
    Header(WIDE, WIDE, 64 << 20, FrameKind.MESSAGE),
    Header(7, 3, 1, FrameKind.CHUNK),
    Header(7, 3, CHUNK_MAX_BYTES, FrameKind.CHUNK),
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


def test_a_chunk_brings_at_least_a_byte():
    with fails_with(ProtocolError, "wire.a_chunk_frame_of_0"):
        unpack_header(raw(1, 0, FrameKind.CHUNK))
