"""Traffic of a real session, and what comes of it when it is tampered with."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

from msgspec import Struct

from jdag.processes.net.connection import Connection
from jdag.processes.net.large_values import Parcel
from jdag.wire.frames import MESSAGE_BYTES, FrameKind, pack_header
from jdag.wire.messages import Codec

ODD = (0, 1, 2, 3, 7, 255, 256, 65_535, 1 << 31, (1 << 32) - 1, 1 << 47)


class Recorded(NamedTuple):
    kind: FrameKind
    payload: bytes


@contextmanager
def recording() -> Iterator[list[Recorded]]:
    kept: list[Recorded] = []
    put: Callable[..., int] = Connection._put

    def note(self: Connection, parcel: Parcel, sequence: int = -1) -> int:
        kept.append(Recorded(parcel.kind, b"".join(map(bytes, parcel.views))))
        return put(self, parcel, sequence)

    with patch.object(Connection, "_put", note):
        yield kept


def changed(data: Any, rng: random.Random, chance: float) -> Any:
    if isinstance(data, bool):
        return not data if rng.random() < chance else data
    if isinstance(data, Enum):
        return rng.choice(list(type(data))) if rng.random() < chance else data
    if isinstance(data, int):
        if rng.random() >= chance:
            return data
        return rng.choice((*ODD, data + 1, max(0, data - 1)))
    if isinstance(data, str):
        names = ("a", "b", "c", "constant", "leaf", "received", "made", "")
        return rng.choice(names) if rng.random() < chance else data
    if isinstance(data, tuple) and not hasattr(data, "_fields"):
        items = [changed(item, rng, chance) for item in data]
        if items and rng.random() < chance:
            place = rng.randrange(len(items))
            how = rng.randrange(3)
            items[place:] = (
                items[place + 1 :],
                [*items[place:], items[place]],
                items[place:][::-1],
            )[how]
        return tuple(items)
    if isinstance(data, tuple):
        return type(data)(*[changed(item, rng, chance) for item in data])
    if isinstance(data, Struct):
        parts = [getattr(data, name) for name in data.__struct_fields__]
        return type(data)(*[changed(part, rng, chance) for part in parts])
    return data


def tampered(payload: bytes, others: Sequence[Recorded], rng: random.Random) -> bytes:
    data = bytearray(payload)
    match rng.randrange(4):
        case 0 if data:
            for _ in range(rng.randrange(1, 4)):
                data[rng.randrange(len(data))] = rng.randrange(256)
        case 1:
            del data[rng.randrange(len(data) + 1) :]
        case 2:
            data += rng.randbytes(rng.randrange(1, 40))
        case _:
            other = rng.choice(others).payload
            place = rng.randrange(len(data) + 1)
            data[place:] = other[min(place, len(other)) :]
    return bytes(data)


def lie(payload: bytes, codec: Codec, rng: random.Random) -> bytes | None:
    """Change one message of a bundle."""
    starts = [0]
    while (start := starts[-1]) < len(payload):
        length = int.from_bytes(payload[start : start + MESSAGE_BYTES], "little")
        starts.append(start + MESSAGE_BYTES + length)
    if len(starts) == 1:
        return None
    start, stop = rng.choice([*pairwise(starts)])
    message, kinds, offset = codec.decode(payload, start + MESSAGE_BYTES, stop)
    told = changed(message, rng, rng.choice((0.02, 0.1, 0.4)))
    try:
        data = codec.encode(told, kinds) + payload[offset:stop]
    except Exception:  # What cannot be written cannot be said.
        return None
    return payload[:start] + in_bundle(data) + payload[stop:]


def in_bundle(*messages: bytes) -> bytes:
    parts = [len(data).to_bytes(MESSAGE_BYTES, "little") + data for data in messages]
    return b"".join(parts)


def attack(
    recorded: Sequence[Recorded], codec: Codec, rng: random.Random, sequence: int
) -> bytes:
    kind, payload = rng.choice(recorded)
    how = rng.randrange(10)
    if kind is FrameKind.MESSAGE and how < 6:
        payload = lie(payload, codec, rng) or tampered(payload, recorded, rng)
    elif how < 8:
        payload = tampered(payload, recorded, rng)
    number = sequence if kind else 0
    handled = rng.choice(ODD) if rng.random() < 0.02 else 0
    frame = pack_header(number, 0, len(payload), kind, handled) + payload
    return tampered(frame, recorded, rng) if how == 9 else frame
