"""How fields become bytes: a layout says what a field takes, writes it and reads it.

Numbers are little-endian. A count is 4 bytes and stands before what it counts: the
numbers of a path, the bytes of a text (UTF-8), the slots of a mask (one bit each), the
items of a sequence. What may be missing has a byte before it, 0 or 1.

A layout takes `fixed` bytes whatever the value, and `more(value)` beyond these; `more`
is None where there is nothing more. Sizes need not be written to be known.
"""

import struct
from collections.abc import Callable, Sequence
from functools import lru_cache
from operator import attrgetter, call
from typing import Any, NamedTuple

from jdag.engine.vocabulary import ContextId, LeafId, Path, Worker
from jdag.errors import ProtocolError
from jdag.wire.cursors import (
    COUNT_BYTES,
    SLOTS_MAX,
    Reader,
    Writer,
    limited,
    no_number,
)

NAME_MAX_BYTES = 1 << 16  # Of a text that names something.
TEXT_MAX_BYTES = 1 << 28
PATH_MAX = 1 << 12  # Numbers in a path: so deep programs may call each other.

_COUNT = struct.Struct("<I")
_NONE = bytes(COUNT_BYTES)
_REMEMBERED = 4096
_REMEMBERED_BYTES = 256  # Longer ones come too seldom to be worth their memory.


class Layout(NamedTuple):
    """How one kind of field becomes bytes; see the module."""

    fixed: int
    more: Callable[[Any], int] | None
    write: Callable[[Writer, Any], None]
    read: Callable[[Reader], Any]

    def size(self, value: Any) -> int:
        """How many bytes a value takes."""
        return self.fixed + (self.more(value) if self.more else 0)


_CODES = {1: "B", 2: "H", 4: "I", 8: "Q"}


def integer(size: int, what: str, signed: bool = False) -> Layout:
    """A whole number of `size` bytes; `what` names it in errors."""
    code = _CODES.get(size)
    if code is None:
        return Layout(
            size,
            None,
            lambda writer, value: writer.integer(value, size, what, signed),
            lambda reader: reader.integer(size, what, signed),
        )
    packing = struct.Struct(f"<{code.lower() if signed else code}")
    pack, unpack_from = packing.pack, packing.unpack_from

    def write(writer: Writer, value: int) -> None:
        try:
            writer.out += pack(value)
        except struct.error as error:
            raise no_number(value, size, what, signed) from error

    def read(reader: Reader) -> int:
        offset = reader.offset
        try:
            number: int = unpack_from(reader.data, offset)[0]
        except struct.error as error:
            raise reader.short(size, what) from error
        reader.offset = offset + size
        return number

    return Layout(size, None, write, read)


def many(item: Layout, what: str) -> Layout:
    """A sequence of items, read as a tuple; `what` names them in errors."""
    each, more_of_one = item.fixed, item.more
    write_one, read_one, least = item.write, item.read, max(item.fixed, 1)

    def more(items: Sequence[Any]) -> int:
        if not items:
            return 0
        total = each * len(items)
        return total + sum(map(more_of_one, items)) if more_of_one else total

    def write(writer: Writer, items: Sequence[Any]) -> None:
        if not items:
            writer.out += _NONE
            return
        writer.count(items, what)
        for one in items:
            write_one(writer, one)

    def read(reader: Reader) -> tuple[Any, ...]:
        number = reader.count(least, what)
        return tuple([read_one(reader) for _ in range(number)]) if number else ()

    return Layout(COUNT_BYTES, more, write, read)


def maybe(item: Layout) -> Layout:
    """What may be None."""
    fixed, more_of_it = item.fixed, item.more

    def more(value: Any) -> int:
        if value is None:
            return 0
        return fixed + more_of_it(value) if more_of_it else fixed

    def write(writer: Writer, value: Any) -> None:
        if value is None:
            writer.out.append(0)
        else:
            writer.out.append(1)
            item.write(writer, value)

    def read(reader: Reader) -> Any:
        return item.read(reader) if _read_flag(reader) else None

    return Layout(1, more, write, read)


def _in_a_row(
    layouts: Sequence[Layout], parts: Sequence[str], made: str, known: dict[str, Any]
) -> tuple[Callable[[Writer, Any], None], Callable[[Reader], Any]]:
    """Write and read of layouts one after the other, without a loop.

    `parts` and `made` are Python: of each layout what it writes of a `value`, and what
    is made of all that was read; `known` are the other names in them.
    """
    writes = [f"write_{at}(writer, {part})" for at, part in enumerate(parts)]
    reads = [f"read_{at}(reader)" for at in range(len(layouts))]
    for at, layout in enumerate(layouts):
        known |= {f"write_{at}": layout.write, f"read_{at}": layout.read}
    exec(
        f"def write(writer, value): {'; '.join(writes)}\n"
        f"def read(reader): return {made.format(', '.join(reads))}",
        known,
    )
    return known["write"], known["read"]


def record(kind: Any, **fields: Layout) -> Layout:
    """Fields one after the other, in the order in which `kind` takes them.

    Only what has no fixed size is looked at when one is measured.
    """
    names = tuple(fields)
    assert names == kind.__match_args__[: len(names)], (kind, names)
    fixed = sum(layout.fixed for layout in fields.values())
    variable = {name: field.more for name, field in fields.items() if field.more}
    sizes = tuple(variable.values())
    # A named tuple takes one tuple sooner than so many arguments.
    made = "new(kind, ({},))" if issubclass(kind, tuple) else "kind({})"
    parts = [f"value.{name}" for name in names]
    known = {"kind": kind, "new": tuple.__new__}
    write, read = _in_a_row(tuple(fields.values()), parts, made, known)
    if not variable:
        return Layout(fixed, None, write, read)
    get = attrgetter(*variable)
    if len(sizes) == 1:
        only = sizes[0]
        return Layout(fixed, lambda value: only(get(value)), write, read)
    return Layout(fixed, lambda value: sum(map(call, sizes, get(value))), write, read)


def alike(item: Layout, one: str, other: str) -> Layout:
    """A record, two fields of which have to be of one length."""
    both = attrgetter(one, other)

    def read(reader: Reader) -> Any:
        value = item.read(reader)
        here, there = both(value)
        if len(here) != len(there):
            raise ProtocolError(
                f"{type(value).__name__} of {len(here)} {one} and {len(there)}"
                f" {other}: allowed is the same number"
            )
        return value

    return item._replace(read=read)


def items(*layouts: Layout) -> Layout:
    """The items of a tuple, one after the other."""
    fixed = sum(layout.fixed for layout in layouts)
    sizes = [(place, each.more) for place, each in enumerate(layouts) if each.more]

    def more(them: tuple[Any, ...]) -> int:
        return sum([more_of_one(them[place]) for place, more_of_one in sizes])

    parts = [f"value[{place}]" for place in range(len(layouts))]
    write, read = _in_a_row(layouts, parts, "({},)", {})
    return Layout(fixed, more, write, read)


def remembered(item: Layout) -> Layout:
    """The same, where it has a fixed size: those of late are not made anew.

    It may hold numbers of workers, but no names of them.
    """
    size = item.fixed
    assert item.more is None, item

    @lru_cache(_REMEMBERED)
    def written(value: Any) -> bytes:
        writer = Writer({})
        item.write(writer, value)
        return bytes(writer.out)

    @lru_cache(_REMEMBERED)
    def made(data: bytes, names: int) -> Any:
        return item.read(Reader(data, {}, names))

    def write(writer: Writer, value: Any) -> None:
        writer.out += written(value)

    def read(reader: Reader) -> Any:
        offset = reader.offset
        end = offset + size
        data = reader.data[offset:end]
        if len(data) < size:
            return item.read(reader)  # Which says what is missing.
        reader.offset = end
        return made(data, reader.names)

    return Layout(size, None, write, read)


def _write_flag(writer: Writer, value: bool) -> None:
    writer.out.append(bool(value))


def _read_flag(reader: Reader) -> bool:
    offset = reader.offset
    try:
        number = reader.data[offset]
    except IndexError as error:
        raise reader.short(1, "flag") from error
    if number > 1:
        raise ProtocolError(f"flag = {number}: allowed are 0 and 1")
    reader.offset = offset + 1
    return number == 1


def text_more(text: str) -> int:
    """How many bytes a text takes beyond its count."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _text_bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")  # Names of files may hold any.


def _text_made(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"text {data[:80]!r} is not UTF-8: {error}") from error


_name_bytes = lru_cache(_REMEMBERED)(_text_bytes)
_name_made = lru_cache(_REMEMBERED)(_text_made)


def _write_text(writer: Writer, text: str) -> None:
    data = _text_bytes(text)
    writer.count(data, "bytes of text")
    writer.out += data


def _read_text(reader: Reader) -> str:
    return _text_made(reader.counted(8, TEXT_MAX_BYTES, "bytes of text")[1])


def _write_name(writer: Writer, name: str) -> None:
    data = _name_bytes(name) if len(name) <= _REMEMBERED_BYTES else _text_bytes(name)
    limited(len(data), NAME_MAX_BYTES, "bytes of a name")
    writer.out += _COUNT.pack(len(data))
    writer.out += data


def _read_name(reader: Reader) -> str:
    size, data = reader.counted(8, NAME_MAX_BYTES, "bytes of a name")
    return _name_made(data) if size <= _REMEMBERED_BYTES else _text_made(data)


def _mask_bytes(mask: tuple[bool, ...]) -> bytes:
    bits = int("0" + "".join("01"[bool(here)] for here in reversed(mask)), 2)
    return _COUNT.pack(len(mask)) + bits.to_bytes((len(mask) + 7) // 8, "little")


def _mask_made(data: bytes, slots: int) -> tuple[bool, ...]:
    bits = int.from_bytes(data, "little")
    if bits >> slots:
        raise ProtocolError(f"mask of {slots} slots has bits beyond its last slot")
    # No list on the way: the bools take 64 times what the bits did.
    return tuple(map("1".__eq__, reversed(f"{bits:0{slots}b}"))) if slots else ()


# Of few slots: there are no more of these than are remembered.
_FEW = 8
_few_bytes = lru_cache(1 << _FEW + 1)(_mask_bytes)
_few_made = lru_cache(1 << _FEW + 1)(_mask_made)


def _write_mask(writer: Writer, mask: Sequence[bool]) -> None:
    if len(mask) <= _FEW:
        writer.out += _few_bytes(tuple(mask))
    else:
        writer.more_slots(len(mask))
        writer.out += _mask_bytes(tuple(mask))


def _read_mask(reader: Reader) -> tuple[bool, ...]:
    slots, data = reader.counted(1, SLOTS_MAX, "slots")
    if slots <= _FEW:
        return _few_made(data, slots)
    reader.more_slots(slots)
    return _mask_made(data, slots)


_WORKER_NUMBER = integer(2, "worker's number")
_read_number: Callable[[Reader], int] = _WORKER_NUMBER.read
_write_number = _WORKER_NUMBER.write


def _write_worker(writer: Writer, worker: Worker) -> None:
    number = writer.numbers.get(worker)
    if number is None:
        raise ProtocolError(
            f"worker {worker!r} is not in the cluster: {', '.join(writer.numbers)}"
        )
    _write_number(writer, number)


def _read_worker(reader: Reader) -> Worker:
    number = _read_number(reader)
    worker = reader.workers.get(number)
    if worker is None:
        raise ProtocolError(
            f"worker's number {number}: the cluster has {len(reader.workers)} workers"
        )
    return worker


def _read_owner(reader: Reader) -> int:
    number = _read_number(reader)
    if number >= reader.names:
        raise ProtocolError(
            f"context's worker {number}: the cluster has {reader.names} workers"
        )
    return number


def _path_more(path: Path) -> int:
    return 4 * len(path)


@lru_cache(64)
def numbers(count: int) -> struct.Struct:
    """What packs so many numbers of 4 bytes each."""
    return struct.Struct(f"<{count}I")


def _path_made(data: bytes) -> Path:
    return numbers(len(data) // 4).unpack(data)


SHALLOW = 16  # Longer paths come too seldom to be worth their memory.
_known_path = lru_cache(_REMEMBERED)(_path_made)


def _write_path(writer: Writer, path: Path) -> None:
    depth = limited(len(path), PATH_MAX, "numbers in a path")
    try:
        writer.out += numbers(depth + 1).pack(depth, *path)
    except struct.error:
        for number in path:
            _PATH_NUMBER.write(writer, number)  # One of them says what is wrong.
        raise


def _read_path(reader: Reader) -> Path:
    depth, data = reader.counted(32, PATH_MAX, "numbers in a path")
    path: Path = (_known_path if depth <= SHALLOW else _path_made)(data)
    return path


FLAG = Layout(1, None, _write_flag, _read_flag)
TEXT = Layout(COUNT_BYTES, text_more, _write_text, _read_text)
NAME = Layout(COUNT_BYTES, text_more, _write_name, _read_name)
MASK = Layout(COUNT_BYTES, lambda mask: (len(mask) + 7) >> 3, _write_mask, _read_mask)
WORKER = Layout(2, None, _write_worker, _read_worker)
WORKERS = many(WORKER, "workers")
_PATH_NUMBER = integer(4, "number in a path")
PATH = Layout(COUNT_BYTES, _path_more, _write_path, _read_path)
CONTEXT = remembered(
    record(
        ContextId,
        number=integer(2, "context's worker")._replace(read=_read_owner),
        counter=integer(6, "context's counter"),
        incarnation=integer(4, "context's incarnation"),
    )
)
CONTEXT_MAYBE = maybe(CONTEXT)
LEAF = record(LeafId, worker=WORKER, number=integer(8, "leaf's number"))
REQUEST = integer(8, "number of a request")
PASS = integer(4, "number of a pass")
