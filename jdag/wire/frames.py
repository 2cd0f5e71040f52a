"""Frames of a data connection: a header of 24 bytes each, checked before it is used.

A header is the frame's sequence and what it acknowledges (`jdag.wire.link`), 8 bytes
each, the length of its payload, 7 bytes, and its kind, a byte; all little-endian. The
kind tells what the payload is:

PURE     nothing, or the few bytes of a ping; its sequence is 0, which no other has
MESSAGE  a message, the headers of its values, the elements of those that are small
CHUNK    the next bytes of the first large value of which some are to come
DEFINE   a function: its digest, then what was exported
ASIDE    control data of the drivers, beside the engines' messages
SEGMENT  of memory that both have: a byte for the action, numbers of 8 bytes each

Invariant: a header that was read names a kind that exists and a length that this kind
may have, so memory may be taken for it. Any other header raises a ProtocolError, after
which its connection is of no use.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from jdag.errors import ProtocolError
from jdag.wire.link import FRAME_BYTES


class FrameKind(IntEnum):
    """What a frame carries."""

    PURE = 0
    MESSAGE = 1
    CHUNK = 2
    DEFINE = 3
    ASIDE = 4
    SEGMENT = 5


class Header(NamedTuple):
    """The header of a frame; `length` is that of its payload."""

    sequence: int
    acknowledged: int
    length: int
    kind: FrameKind


CHUNK_MAX_BYTES = 256 << 10
LENGTHS_MAX: Mapping[int, int] = {
    FrameKind.PURE: 16,
    FrameKind.MESSAGE: 1 << 30,  # Arguments of programs travel inside.
    FrameKind.CHUNK: CHUNK_MAX_BYTES,
    FrameKind.DEFINE: (256 << 20) + 32,
    FrameKind.ASIDE: 256 << 20,  # A graph may be large.
    FrameKind.SEGMENT: 17,
}

_HEADER = struct.Struct("<QQQ")
assert _HEADER.size == FRAME_BYTES
_KINDS = tuple(FrameKind)
_LENGTH_BITS = 56
_LENGTH_MASK = (1 << _LENGTH_BITS) - 1


def pack_header(
    sequence: int, acknowledged: int, length: int, kind: FrameKind
) -> bytes:
    """The header of a frame whose payload has `length` bytes."""
    assert bool(sequence) == bool(kind), (sequence, kind)
    assert 0 <= length <= _LENGTH_MASK, length
    return _HEADER.pack(sequence, acknowledged, kind << _LENGTH_BITS | length)


def unpack_header(data: bytes | memoryview, start: int = 0) -> Header:
    """Read the header of a frame that begins there, all of whose bytes are there."""
    sequence, acknowledged, rest = _HEADER.unpack_from(data, start)
    number, length = rest >> _LENGTH_BITS, rest & _LENGTH_MASK
    if number >= len(_KINDS):
        raise ProtocolError(
            f"kind {number} of a frame: allowed is 0 to {len(_KINDS) - 1}"
        )
    kind = _KINDS[number]
    if length > LENGTHS_MAX[number]:
        raise ProtocolError(
            f"a {kind.name} frame of {length} bytes: allowed are {LENGTHS_MAX[number]}"
        )
    if bool(sequence) != bool(number):
        allowed = "at least 1" if number else "0"
        raise ProtocolError(
            f"a {kind.name} frame of sequence {sequence}: allowed is {allowed}"
        )
    if kind is FrameKind.CHUNK and not length:
        raise ProtocolError("a CHUNK frame of 0 bytes: it brings at least one")
    return Header(sequence, acknowledged, length, kind)
