"""Bytes being written and read, one field after the other; limits that both keep.

What is read is checked before memory is taken for it: a count against the bytes that
are left, a length against the most that is allowed. So whatever the bytes are, reading
them takes time and memory in proportion to their number.
"""

import struct
from collections.abc import Mapping
from typing import Any

from jdag.engine.vocabulary import Worker
from jdag.errors import ProtocolError

COUNT_BYTES = 4
SLOTS_MAX = 1 << 20  # Of all masks of a message: each is 64 times what it was as a bit.

_COUNT = struct.Struct("<I")


def one_deeper(depth: int, depth_max: int) -> int:
    """Return how deep that is what is one deeper, or raise ProtocolError."""
    if depth >= depth_max:
        raise ProtocolError(
            f"data nested more than {depth} deep cannot travel: allowed is {depth_max}"
        )
    return depth + 1


def _more_slots(slots: int, more: int) -> int:
    if slots + more > SLOTS_MAX:
        raise ProtocolError(
            f"{slots + more} slots in the masks of a message: allowed are {SLOTS_MAX}"
        )
    return slots + more


def limited(number: int, most: int, what: str) -> int:
    """Return a number that is at most so much, or raise ProtocolError."""
    if number > most:
        raise ProtocolError(f"{number} {what}: allowed are {most}")
    return number


class Writer:
    """Bytes being written, to `out`; `numbers` are those of the workers."""

    __slots__ = ("depth", "numbers", "out", "slots")

    def __init__(self, numbers: Mapping[Worker, int]) -> None:
        self.numbers = numbers
        self.out = bytearray()
        self.depth = 0
        self.slots = 0

    def deeper(self, depth_max: int) -> None:
        """Note that what follows is nested one deeper."""
        self.depth = one_deeper(self.depth, depth_max)

    def integer(self, value: int, size: int, what: str, signed: bool = False) -> None:
        """Append a whole number of `size` bytes.

        Raises:
            ProtocolError: it is no int, or too large or too small for its bytes.
        """
        try:
            self.out += value.to_bytes(size, "little", signed=signed)
        except (AttributeError, OverflowError) as error:
            raise no_number(value, size, what, signed) from error

    def more_slots(self, slots: int) -> None:
        """Note that a mask of so many slots follows."""
        self.slots = _more_slots(self.slots, slots)

    def count(self, items: Any, what: str) -> None:
        """Append how many there are of what follows."""
        try:
            self.out += _COUNT.pack(len(items))
        except struct.error as error:
            what = f"number of {what}"
            raise no_number(len(items), COUNT_BYTES, what, False) from error


def no_number(value: Any, size: int, what: str, signed: bool) -> ProtocolError:
    """What is raised where a value is no whole number of that size."""
    least = -(1 << 8 * size - 1) if signed else 0
    most = least + (1 << 8 * size) - 1
    long = isinstance(value, int) and value.bit_length() > 128
    said = f"a number of {value.bit_length()} bits" if long else repr(value)
    return ProtocolError(
        f"{what} = {said} cannot travel: allowed is an int from {least} to {most}"
    )


class Reader:
    """Bytes being read, from `offset` on; `workers` by their numbers.

    Those below `names` are of names, the others of later incarnations of these.
    """

    __slots__ = ("data", "depth", "names", "offset", "slots", "workers")

    def __init__(
        self, data: bytes, workers: Mapping[int, Worker], names: int | None = None
    ) -> None:
        self.workers = workers
        self.names = len(workers) if names is None else names
        self.data = data
        self.offset = 0
        self.depth = 0
        self.slots = 0

    def deeper(self, depth_max: int) -> None:
        """Note that what follows is nested one deeper."""
        self.depth = one_deeper(self.depth, depth_max)

    def more_slots(self, slots: int) -> None:
        """Note that a mask had so many slots."""
        self.slots = _more_slots(self.slots, slots)

    @property
    def left(self) -> int:
        """How many bytes are not read yet."""
        return len(self.data) - self.offset

    def short(self, size: int, what: str) -> ProtocolError:
        """What is raised where fewer bytes are left than something takes."""
        return ProtocolError(
            f"{what} at byte {self.offset} takes {size} bytes;"
            f" {self.left} of {len(self.data)} are left"
        )

    def take(self, size: int, what: str) -> bytes:
        """Read so many bytes.

        Raises:
            ProtocolError: there are fewer.
        """
        start = self.offset
        end = start + size
        if end > len(self.data):
            raise self.short(size, what)
        self.offset = end
        return self.data[start:end]

    def integer(self, size: int, what: str, signed: bool = False) -> int:
        """Read a whole number of `size` bytes."""
        return int.from_bytes(self.take(size, what), "little", signed=signed)

    def count(self, each: int, what: str) -> int:
        """Read how many follow, each of at least so many bytes.

        Raises:
            ProtocolError: more than the rest of the bytes can hold.
        """
        try:
            number: int = _COUNT.unpack_from(self.data, self.offset)[0]
        except struct.error as error:
            raise self.short(COUNT_BYTES, f"number of {what}") from error
        self.offset += COUNT_BYTES
        if number * each > len(self.data) - self.offset:
            raise ProtocolError(
                f"{number} {what} of at least {each} bytes are announced at byte"
                f" {self.offset}; {self.left} bytes are left"
            )
        return number

    def counted(self, bits: int, most: int, what: str) -> tuple[int, bytes]:
        """Read how many follow, at most so many of so many bits each, and them all.

        Raises:
            ProtocolError: they are more, or there are fewer bytes.
        """
        data, start = self.data, self.offset + COUNT_BYTES
        try:
            number: int = _COUNT.unpack_from(data, self.offset)[0]
        except struct.error as error:
            raise self.short(COUNT_BYTES, f"number of {what}") from error
        end = start + (number * bits + 7 >> 3)
        if number > most or end > len(data):
            limited(number, most, what)
            self.offset = start
            raise self.short(end - start, f"{number} {what}")
        self.offset = end
        return number, data[start:end]
