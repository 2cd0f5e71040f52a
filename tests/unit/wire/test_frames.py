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

WIDE = (1 << 64) - 1
HEADERS = [
    Header(0, 0, 0, FrameKind.PURE),
    Header(0, WIDE, 16, FrameKind.PURE),
    Header(1, 0, 0, FrameKind.MESSAGE),
    Header(WIDE, WIDE, 64 << 20, FrameKind.MESSAGE),
    Header(7, 3, 1, FrameKind.CHUNK),
    Header(7, 3, CHUNK_MAX_BYTES, FrameKind.CHUNK),
    Header(8, 3, 256 << 20, FrameKind.DEFINE),
    Header(9, 3, 1 << 20, FrameKind.ASIDE, 5),
    Header(9, 3, 0, FrameKind.MESSAGE, WIDE),
]


def test_headers_are_read_as_they_were_written():
    for header in HEADERS:
        data = pack_header(*header)
        assert len(data) == FRAME_BYTES
        assert unpack_header(data) == unpack_header(memoryview(data)) == header


def test_a_header_is_four_little_endian_words_with_the_kind_on_top():
    header = pack_header(5, 6, 0x1234, FrameKind.DEFINE, 7)
    assert header[:8] == (5).to_bytes(8, "little")
    assert header[8:16] == (6).to_bytes(8, "little")
    assert header[16:24] == (7).to_bytes(8, "little")
    assert header[24:31] == (0x1234).to_bytes(7, "little")
    assert header[31] == 3


def raw(sequence: int, length: int, kind: int) -> bytes:
    words = (sequence.to_bytes(8, "little"), bytes(16), length.to_bytes(7, "little"))
    return b"".join([*words, bytes([kind])])


@pytest.mark.parametrize("kind", FrameKind)
def test_a_length_above_the_cap_of_its_kind_is_refused_before_memory_is_taken(kind):
    sequence = int(kind is not FrameKind.PURE)
    allowed = LENGTHS_MAX[kind]
    assert unpack_header(raw(sequence, allowed, kind)).length == allowed
    for length in (allowed + 1, (1 << 56) - 1):
        message = f"a {kind.name} frame of {length} bytes: at most {allowed}"
        with pytest.raises(ProtocolError, match=message):
            unpack_header(raw(sequence, length, kind))


UNKNOWN = [(1, 0, kind, f"a frame of kind {kind}: expe") for kind in (7, 8, 127, 255)]


@pytest.mark.parametrize(
    ("sequence", "length", "kind", "text"),
    [
        *UNKNOWN,
        (1, 16, FrameKind.PURE, "a PURE frame with sequence 1: expected 0"),
        *[
            (0, 16, kind, f"a {kind.name} frame with sequence 0: expected at least 1")
            for kind in [*FrameKind][1:]
        ],
        (1, 0, FrameKind.CHUNK, "a CHUNK frame of 0 bytes"),
    ],
)
def test_a_header_that_no_frame_has_is_refused(sequence, length, kind, text):
    with pytest.raises(ProtocolError, match=text):
        unpack_header(raw(sequence, length, kind))
