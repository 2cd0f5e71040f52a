"""Keys as bytes: kind, context, name, index; the kind says how the name is written.

Keys of values that never leave their worker, residuals and scratch, have no layout.
"""

from typing import Any

from jdag.engine.vocabulary import Key
from jdag.errors import ProtocolError
from jdag.wire.encoding import (
    CONTEXT,
    CONTEXT_MAYBE,
    LEAF,
    PASS,
    PATH,
    REQUEST,
    WORKER,
    Layout,
    Reader,
    Writer,
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
_KIND = integer(1, "kind of a key")
_INDEX = integer(4, "index of a key")
_FIXED = _KIND.fixed + CONTEXT_MAYBE.fixed + _INDEX.fixed
_OUTPUT = CONTEXT.fixed + PATH.fixed


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
    layout = _layout(key.kind)
    _KIND.write(writer, _NUMBERS[key.kind])
    CONTEXT_MAYBE.write(writer, key.context)
    layout.write(writer, key.name)
    _INDEX.write(writer, key.index)


def _read(reader: Reader) -> Key:
    number: Any = _KIND.read(reader)
    if number >= len(_KINDS):
        raise ProtocolError(
            f"kind {number} of a key: allowed is 0 to {len(_KINDS) - 1}"
        )
    kind = _KINDS[number]
    context = CONTEXT_MAYBE.read(reader)
    name = NAMES[kind].read(reader)
    return Key(kind, context, name, _INDEX.read(reader))


KEY = Layout(_FIXED, _more, _write, _read)
