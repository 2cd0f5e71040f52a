"""Encoder of protobuf's wire format, for the files of other tools.

These files need only three wire types (protobuf.dev, "Encoding"), so jdag does not
depend on the protobuf library. The tests read the files with that library.
"""

from functools import lru_cache

_VARINT, _FIXED64, _BYTES = 0, 1, 2


@lru_cache(1 << 14)  # Most values are tags, lengths and track numbers, which repeat.
def varint(value: int) -> bytes:
    """Encode an int from 0 to 2**64 - 1 in base 128, least significant digit first."""
    assert 0 <= value < 1 << 64, value
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def number(field: int, value: int) -> bytes:
    """Encode a field of type uint64, non-negative int64, bool or enum."""
    return varint(field << 3 | _VARINT) + varint(value)


def fixed64(field: int, value: int) -> bytes:
    return varint(field << 3 | _FIXED64) + value.to_bytes(8, "little")


def nested(field: int, value: bytes | str) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | _BYTES) + varint(len(data)) + data


def packed(field: int, values: tuple[int, ...]) -> bytes:
    """Encode a repeated field of ints. An empty field is encoded as no bytes."""
    return nested(field, b"".join(map(varint, values))) if values else b""
