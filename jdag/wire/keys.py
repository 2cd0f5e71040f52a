"""Keys as bytes: kind, context, name, index; the kind says how the name is written.

Keys of values that never leave their worker, residuals and scratch, have no layout.
"""

import struct
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

from jdag.engine.vocabulary import ContextId, Key
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
    SHALLOW,
    WORKER,
    Layout,
    integer,
    items,
    numbers,
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
# The names of most keys are paths of values of a context: these are taken as a whole.
_OF_PATHS = ("output", "constant")
_HEAD_BYTES = 2 + CONTEXT.fixed
_count_at = struct.Struct("<I").unpack_from
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


@lru_cache(1024)
def _head_of(kind: str, context: ContextId) -> bytes:
    writer = Writer({})
    _write_context(writer, context)
    return _OF_CONTEXT[kind] + bytes(writer.out)


@lru_cache(1024)
def _head_made(data: bytes, names: int) -> tuple[str, ContextId] | None:
    """Kind and context, where the name is a path; None if it is not, or no head."""
    head = _HEADS.get(data[:2])
    if len(data) < _HEAD_BYTES or head is None:
        return None
    if head[0] not in _OF_PATHS or not head[1]:
        return None
    context: ContextId = _read_context(Reader(data[2:], {}, names))
    return head[0], context


def _write(writer: Writer, key: Key) -> None:
    kind, context, name, index = key
    if context is not None and kind in _OF_PATHS and len(name) <= SHALLOW:
        head, depth = _head_of(kind, context), len(name)
        try:
            writer.out += head + numbers(depth + 2).pack(depth, *name, index)
        except struct.error:
            _write_parts(writer, key)  # It says which number is wrong.
            raise
    else:
        _write_parts(writer, key)


def _write_parts(writer: Writer, key: Key) -> None:
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
    data, offset = reader.data, reader.offset
    start = offset + _HEAD_BYTES
    known = _head_made(data[offset:start], reader.names)
    if known is not None and start + 4 <= len(data):
        (depth,) = _count_at(data, start)
        end = start + 4 * (depth + 2)
        if depth <= SHALLOW and end <= len(data):
            reader.offset = end
            *path, index = numbers(depth + 1).unpack_from(data, start + 4)
            return _made((*known, tuple(path), index))
    return _read_parts(reader)


def _read_parts(reader: Reader) -> Key:
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
