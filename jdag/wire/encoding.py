"""How fields become bytes: a layout says what a field takes, writes it and reads it.

Numbers are little-endian. A count is 4 bytes and stands before what it counts: the
numbers of a path, the bytes of a text (UTF-8), the slots of a mask (one bit each), the
items of a sequence. What may be missing has a byte before it, 0 or 1.

A layout takes `fixed` bytes whatever the value, and `more(value)` beyond these; `more`
is None where there is nothing more. Sizes need not be written to be known.
"""

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter, call
from typing import Any, NamedTuple

from jdag.engine.vocabulary import ContextId, LeafId, Path, Worker
from jdag.errors import ProtocolError

COUNT_BYTES = 4


def _deeper(depth: int, depth_max: int) -> int:
    if depth >= depth_max:
        raise ProtocolError(
            f"data nested more than {depth} deep cannot travel: allowed is {depth_max}"
        )
    return depth + 1


class Writer:
    """Bytes being written; `numbers` are those of the workers."""

    __slots__ = ("depth", "numbers", "out")

    def __init__(self, numbers: Mapping[Worker, int]) -> None:
        self.numbers = numbers
        self.out = bytearray()
        self.depth = 0

    def deeper(self, depth_max: int) -> None:
        """Note that what follows is nested one deeper."""
        self.depth = _deeper(self.depth, depth_max)

    def integer(self, value: int, size: int, what: str, signed: bool = False) -> None:
        """Append a whole number of `size` bytes.

        Raises:
            ProtocolError: it is no int, or too large or too small for its bytes.
        """
        try:
            self.out += value.to_bytes(size, "little", signed=signed)
        except (AttributeError, OverflowError) as error:
            least = -(1 << 8 * size - 1) if signed else 0
            most = least + (1 << 8 * size) - 1
            raise ProtocolError(
                f"{what} = {value!r} cannot travel: allowed is an int from {least} to"
                f" {most}"
            ) from error

    def count(self, items: Any, what: str) -> None:
        """Append how many there are of what follows."""
        self.integer(len(items), COUNT_BYTES, f"number of {what}")


class Reader:
    """Bytes being read; `workers` by their numbers."""

    __slots__ = ("_data", "_offset", "depth", "workers")

    def __init__(self, data: bytes, workers: Mapping[int, Worker]) -> None:
        self.workers = workers
        self._data = data
        self._offset = 0
        self.depth = 0

    def deeper(self, depth_max: int) -> None:
        """Note that what follows is nested one deeper."""
        self.depth = _deeper(self.depth, depth_max)

    @property
    def left(self) -> int:
        """How many bytes are not read yet."""
        return len(self._data) - self._offset

    def take(self, size: int, what: str) -> bytes:
        """Read so many bytes.

        Raises:
            ProtocolError: there are fewer.
        """
        if size > self.left:
            raise ProtocolError(
                f"{what} at byte {self._offset} takes {size} bytes;"
                f" {self.left} of {len(self._data)} are left"
            )
        start = self._offset
        self._offset += size
        return self._data[start : self._offset]

    def integer(self, size: int, what: str, signed: bool = False) -> int:
        """Read a whole number of `size` bytes."""
        return int.from_bytes(self.take(size, what), "little", signed=signed)

    def count(self, each: int, what: str) -> int:
        """Read how many follow, each of at least so many bytes.

        Raises:
            ProtocolError: more than the rest of the bytes can hold.
        """
        number = self.integer(COUNT_BYTES, f"number of {what}")
        if number * each > self.left:
            raise ProtocolError(
                f"{number} {what} of at least {each} bytes are announced at byte"
                f" {self._offset}; {self.left} bytes are left"
            )
        return number


class Layout(NamedTuple):
    """How one kind of field becomes bytes; see the module."""

    fixed: int
    more: Callable[[Any], int] | None
    write: Callable[[Writer, Any], None]
    read: Callable[[Reader], Any]

    def size(self, value: Any) -> int:
        """How many bytes a value takes."""
        return self.fixed + (self.more(value) if self.more else 0)


def integer(size: int, what: str, signed: bool = False) -> Layout:
    """A whole number of `size` bytes; `what` names it in errors."""

    def write(writer: Writer, value: int) -> None:
        writer.integer(value, size, what, signed)

    return Layout(size, None, write, lambda reader: reader.integer(size, what, signed))


def many(item: Layout, what: str) -> Layout:
    """A sequence of items, read as a tuple; `what` names them in errors."""
    each, more_of_one = item.fixed, item.more

    def more(items: Sequence[Any]) -> int:
        if not items:
            return 0
        total = each * len(items)
        return total + sum(map(more_of_one, items)) if more_of_one else total

    def write(writer: Writer, items: Sequence[Any]) -> None:
        writer.count(items, what)
        for one in items:
            item.write(writer, one)

    def read(reader: Reader) -> tuple[Any, ...]:
        number = reader.count(max(each, 1), what)
        return tuple([item.read(reader) for _ in range(number)])

    return Layout(COUNT_BYTES, more, write, read)


def maybe(item: Layout) -> Layout:
    """What may be None."""
    fixed, more_of_it = item.fixed, item.more

    def more(value: Any) -> int:
        if value is None:
            return 0
        return fixed + more_of_it(value) if more_of_it else fixed

    def write(writer: Writer, value: Any) -> None:
        FLAG.write(writer, value is not None)
        if value is not None:
            item.write(writer, value)

    return Layout(
        1, more, write, lambda reader: item.read(reader) if FLAG.read(reader) else None
    )


def record(kind: Callable[..., Any], **fields: Layout) -> Layout:
    """Fields one after the other, read as keywords of `kind`.

    Only what has no fixed size is looked at when one is measured.
    """
    fixed = sum(layout.fixed for layout in fields.values())
    variable = {name: field.more for name, field in fields.items() if field.more}
    sizes = tuple(variable.values())

    def write(writer: Writer, value: Any) -> None:
        for name, field in fields.items():
            field.write(writer, getattr(value, name))

    def read(reader: Reader) -> Any:
        return kind(**{name: field.read(reader) for name, field in fields.items()})

    if not variable:
        return Layout(fixed, None, write, read)
    get = attrgetter(*variable)
    if len(sizes) == 1:
        only = sizes[0]
        return Layout(fixed, lambda value: only(get(value)), write, read)
    return Layout(fixed, lambda value: sum(map(call, sizes, get(value))), write, read)


def items(*layouts: Layout) -> Layout:
    """The items of a tuple, one after the other."""
    fixed = sum(layout.fixed for layout in layouts)
    sizes = [(place, each.more) for place, each in enumerate(layouts) if each.more]

    def more(them: tuple[Any, ...]) -> int:
        return sum([more_of_one(them[place]) for place, more_of_one in sizes])

    def write(writer: Writer, them: tuple[Any, ...]) -> None:
        for item, layout in zip(them, layouts, strict=True):
            layout.write(writer, item)

    def read(reader: Reader) -> tuple[Any, ...]:
        return tuple([layout.read(reader) for layout in layouts])

    return Layout(fixed, more, write, read)


def _write_flag(writer: Writer, value: bool) -> None:
    writer.out.append(bool(value))


def _read_flag(reader: Reader) -> bool:
    number = reader.integer(1, "flag")
    if number > 1:
        raise ProtocolError(f"flag = {number}: allowed are 0 and 1")
    return bool(number)


def text_more(text: str) -> int:
    """How many bytes a text takes beyond its count."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _write_text(writer: Writer, text: str) -> None:
    data = text.encode("utf-8", "surrogatepass")  # Names of files may hold any.
    writer.count(data, "bytes of text")
    writer.out += data


def _read_text(reader: Reader) -> str:
    data = reader.take(reader.count(1, "bytes of text"), "text")
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"text {data[:80]!r} is not UTF-8: {error}") from error


def _write_mask(writer: Writer, mask: Sequence[bool]) -> None:
    writer.count(mask, "slots")
    bits = int("0" + "".join("01"[bool(here)] for here in reversed(mask)), 2)
    writer.out += bits.to_bytes((len(mask) + 7) // 8, "little")


def _read_mask(reader: Reader) -> tuple[bool, ...]:
    slots = reader.integer(COUNT_BYTES, "number of slots")
    bits = reader.integer((slots + 7) // 8, "mask")
    if bits >> slots:
        raise ProtocolError(f"mask of {slots} slots has bits beyond its last slot")
    return tuple([digit == "1" for digit in reversed(f"{bits:0{slots}b}")][:slots])


def _write_worker(writer: Writer, worker: Worker) -> None:
    number = writer.numbers.get(worker)
    if number is None:
        raise ProtocolError(
            f"worker {worker!r} is not in the cluster: {', '.join(writer.numbers)}"
        )
    writer.integer(number, 2, "worker's number")


def _read_worker(reader: Reader) -> Worker:
    number = reader.integer(2, "worker's number")
    worker = reader.workers.get(number)
    if worker is None:
        raise ProtocolError(
            f"worker's number {number}: the cluster has {len(reader.workers)} workers"
        )
    return worker


def _path_more(path: Path) -> int:
    return 4 * len(path)


FLAG = Layout(1, None, _write_flag, _read_flag)
TEXT = Layout(COUNT_BYTES, text_more, _write_text, _read_text)
MASK = Layout(COUNT_BYTES, lambda mask: (len(mask) + 7) >> 3, _write_mask, _read_mask)
WORKER = Layout(2, None, _write_worker, _read_worker)
WORKERS = many(WORKER, "workers")
PATH = many(integer(4, "number in a path"), "numbers in a path")._replace(
    more=_path_more
)
CONTEXT = record(
    ContextId,
    number=integer(2, "context's worker"),
    counter=integer(6, "context's counter"),
    incarnation=integer(4, "context's incarnation"),
)
CONTEXT_MAYBE = maybe(CONTEXT)
LEAF = record(LeafId, worker=WORKER, number=integer(8, "leaf's number"))
REQUEST = integer(8, "number of a request")
PASS = integer(4, "number of a pass")
