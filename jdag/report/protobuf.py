"""The wire format of protobuf: fields as bytes, for files of other tools.

Three kinds of field suffice for them (protobuf.dev, "Encoding"), so no run needs the
protobuf library; tests read the files with it.
"""

from functools import lru_cache

_VARINT, _FIXED64, _BYTES = 0, 1, 2


@lru_cache(1 << 14)  # Most are tags, lengths and numbers of tracks.
def varint(value: int) -> bytes:
    """Return an int of 0 to 2**64 - 1 in base 128, least significant part first."""
    assert 0 <= value < 1 << 64, value
    parts = bytearray()
    while value > 0x7F:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def number(field: int, value: int) -> bytes:
    """Return a field of type uint64, int64 (of at least 0), bool or an enum."""
    return varint(field << 3 | _VARINT) + varint(value)


def fixed64(field: int, value: int) -> bytes:
    """Return a field of type fixed64."""
    return varint(field << 3 | _FIXED64) + value.to_bytes(8, "little")


def nested(field: int, value: bytes | str) -> bytes:
    """Return a field that holds text, bytes or a message."""
    data = value.encode() if isinstance(value, str) else value
    return varint(field << 3 | _BYTES) + varint(len(data)) + data


def packed(field: int, values: tuple[int, ...]) -> bytes:
    """Return a repeated field of ints; nothing if there are none."""
    return nested(field, b"".join(map(varint, values))) if values else b""
