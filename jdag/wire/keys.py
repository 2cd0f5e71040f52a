"""Keys as bytes: kind, context, name, index; the kind says how the name is written.

Keys of values that never leave their worker, residuals and scratch, have no layout.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from jdag.engine.vocabulary import Key
from jdag.errors import ProtocolError
from jdag.wire.cursors import Reader, Writer
from jdag.wire.encoding import (
    CONTEXT,
    CONTEXT_MAYBE,
    FLAG,
    LEAF,
    PASS,
    PATH,
    REQUEST,
    WORKER,
    Layout,
    integer,
    items,
)

# The place in this table is the kind's number: only append.
NAMES = {
    "output": PATH,
    "received": items(PATH, WORKER),
    "constant": PATH,
    "leaf": LEAF,
    "gradient": LEAF,
    "seed": PASS,
    "cotangent": items(PASS, PATH),
    "reading": REQUEST,
    "newest": LEAF,
}

_KINDS = tuple(NAMES)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
# The first two bytes of a key: its kind, and whether it has a context.
_BARE = {kind: bytes((number, 0)) for kind, number in _NUMBERS.items()}
_OF_CONTEXT = {kind: bytes((number, 1)) for kind, number in _NUMBERS.items()}
_HEADS = {
    head: (kind, heads is _OF_CONTEXT, NAMES[kind].read)
    for heads in (_BARE, _OF_CONTEXT)
    for kind, head in heads.items()
}
_KIND = integer(1, "kind of a key")
_INDEX = integer(4, "index of a key")
_FIXED = _KIND.fixed + CONTEXT_MAYBE.fixed + _INDEX.fixed
_OUTPUT = CONTEXT.fixed + PATH.fixed
_read_context, _read_index = CONTEXT.read, _INDEX.read
_write_context, _write_index = CONTEXT.write, _INDEX.write
_made: Callable[[tuple[Any, ...]], Key] = partial(tuple.__new__, Key)


def _layout(kind: str) -> Layout:
    name = NAMES.get(kind)
    if name is None:
        raise ProtocolError(
            f"a key of kind {kind!r} cannot travel: allowed are {', '.join(NAMES)}"
        )
    return name


def _more(key: Key) -> int:
    kind, context, name, _ = key
    if kind == "output" and context is not None:  # Most keys are of this kind.
        return _OUTPUT + 4 * len(name)
    layout = _layout(kind)
    return layout.size(name) + (0 if context is None else CONTEXT.fixed)


def _write(writer: Writer, key: Key) -> None:
    kind, context, name, index = key
    write_name = _layout(kind).write
    if context is None:
        writer.out += _BARE[kind]
    else:
        writer.out += _OF_CONTEXT[kind]
        _write_context(writer, context)
    write_name(writer, name)
    _write_index(writer, index)


def _read(reader: Reader) -> Key:
    offset = reader.offset
    head = _HEADS.get(reader.data[offset : offset + 2])
    if head is None:
        raise _no_key(reader)
    kind, has_context, read_name = head
    reader.offset = offset + 2
    context = _read_context(reader) if has_context else None
    return _made((kind, context, read_name(reader), _read_index(reader)))


def _no_key(reader: Reader) -> ProtocolError:
    number: int = _KIND.read(reader)
    if number >= len(_KINDS):
        return ProtocolError(
            f"kind {number} of a key: allowed is 0 to {len(_KINDS) - 1}"
        )
    return ProtocolError(f"flag = {FLAG.read(reader)}: allowed are 0 and 1")


KEY = Layout(_FIXED, _more, _write, _read)
