"""Frames of a data connection: headers of 32 bytes, checked before use.

A header has the frame's sequence and acknowledgement (see `jdag.sim.reliable_link`) and
the number of messages of `ACKNOWLEDGED` that its sender has handled, 8 bytes each, the
length of its payload, 7 bytes, and its kind, 1 byte; all little-endian. The kind
determines the payload:

PURE     nothing, or the few bytes of a ping; the only kind with sequence 0
MESSAGE  a bundle of messages, perhaps empty, each after its length, 4 bytes: the
         message, the headers of its values, the elements of small values
CHUNK    the next bytes of the first incomplete large value
DEFINE   a function: its digest, then its export
ASIDE    control data of the drivers
STEP     number and base of a step, 8 bytes each; then a message, with both numbers 0
SEGMENT  shared memory: a byte for the action, then numbers of 8 bytes each

Invariant: a decoded header has a known kind and a length allowed for it, so its payload
may be allocated. Any other header raises a ProtocolError, after which the connection
cannot be used.
"""

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import NamedTuple

from jdag.errors import ProtocolError


class FrameKind(IntEnum):
    PURE = 0
    MESSAGE = 1
    CHUNK = 2
    DEFINE = 3
    ASIDE = 4
    SEGMENT = 5
    STEP = 6


class Header(NamedTuple):
    sequence: int
    acknowledged: int
    length: int  # Bytes of the payload.
    kind: FrameKind
    handled: int = 0


CHUNK_MAX_BYTES = 256 << 10
LENGTHS_MAX: Mapping[int, int] = {
    FrameKind.PURE: 16,
    FrameKind.MESSAGE: 1 << 30,  # It contains the arguments of programs.
    FrameKind.CHUNK: CHUNK_MAX_BYTES,
    FrameKind.DEFINE: (256 << 20) + 32,
    FrameKind.ASIDE: 256 << 20,  # A graph may be large.
    FrameKind.SEGMENT: 17,
    FrameKind.STEP: 1 << 30,
}

HEADER = struct.Struct("<QQQQ")
FRAME_BYTES = HEADER.size
MESSAGE_BYTES = 4  # The length of a message in a bundle.
_KINDS = tuple(FrameKind)
LENGTH_BITS = 56
LENGTH_MASK = (1 << LENGTH_BITS) - 1


def pack_header(
    sequence: int, acknowledged: int, length: int, kind: FrameKind, handled: int = 0
) -> bytes:
    assert bool(sequence) == bool(kind), (sequence, kind)
    assert 0 <= length <= LENGTH_MASK, length
    return HEADER.pack(sequence, acknowledged, handled, kind << LENGTH_BITS | length)


def unpack_header(data: bytes | memoryview, start: int = 0) -> Header:
    """Decode the header at `start`, all of whose bytes must be present."""
    sequence, acknowledged, handled, rest = HEADER.unpack_from(data, start)
    number, length = rest >> LENGTH_BITS, rest & LENGTH_MASK
    if number >= len(_KINDS):
        raise ProtocolError(
            f"a frame of kind {number}: expected kind 0 to {len(_KINDS) - 1}"
        )
    kind = _KINDS[number]
    if length > LENGTHS_MAX[number]:
        raise ProtocolError(
            f"a {kind.name} frame of {length} bytes: at most {LENGTHS_MAX[number]}"
        )
    if bool(sequence) != bool(number):
        allowed = "at least 1" if number else "0"
        raise ProtocolError(
            f"a {kind.name} frame with sequence {sequence}: expected {allowed}"
        )
    if kind is FrameKind.CHUNK and not length:
        raise ProtocolError("a CHUNK frame of 0 bytes: expected at least 1")
    return Header(sequence, acknowledged, length, kind, handled)
