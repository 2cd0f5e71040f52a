"""Arguments and results of programs as bytes: nested data, refs, arrays, names.

Each item is a byte that says what it is, then its content. Refs travel as data. What
only code can make again travels by name: functions and classes as `Named`, instances
(named tuples, dataclasses, enums, partials, dtypes and JAX's own pytree nodes) as
`Node`, the name of their class and their parts. Reading gives `Named`, `Node`,
`RefParts` and `Raw` arrays, which write as the same bytes again; who reads makes of
them what they name, if it allows that. Anything else is refused: nothing is pickled.

Structures of arguments (`jdag.wire.specs`) have besides `HOLE` in the place of each
array, `Part` around each static, and `Opaque` for what cannot travel.
"""

import functools
import struct
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, NamedTuple

import jax
import numpy as np

from jdag.engine.vocabulary import Key, LeafId, Worker
from jdag.errors import ProtocolError
from jdag.functions import name_of
from jdag.wire.arrays import ARRAY_TYPE, AXIS_BYTES, ArrayType, sizes, type_of
from jdag.wire.cursors import COUNT_BYTES, Reader, Writer, one_deeper
from jdag.wire.encoding import (
    FLAG,
    LEAF,
    NAME,
    TEXT,
    WORKER,
    Layout,
    items,
    many,
    maybe,
    record,
)
from jdag.wire.keys import KEY

DEPTH_MAX = 100
BYTES_MAX = 1 << 28
DTYPE = "numpy:dtype"  # Each has a class of its own.
_ABSTRACT = ("shape", "dtype", "nbytes")  # Of an abstract value, whatever its class.


class RefParts(NamedTuple):
    """A ref as it travels."""

    key: Key
    owner: Worker
    aval: Any
    tracked: bool
    descends: LeafId | None


class Named(NamedTuple):
    """A function or class, by `module:qualname`."""

    name: str


class Node(NamedTuple):
    """An instance: the name of its class, and its parts."""

    name: str
    parts: tuple[Any, ...]


class Raw(NamedTuple):
    """An array as it travels: its type, and its elements row by row.

    `form` says whose it is: "array" JAX's, "numpy" and "scalar" numpy's.
    """

    kind: ArrayType
    data: bytes
    form: str = "array"


class _Hole(Enum):
    HOLE = 0


HOLE = _Hole.HOLE  # The place of an array in a structure.


class Part(NamedTuple):
    """A static in a structure: what is at its place."""

    value: Any


class Opaque(NamedTuple):
    """What cannot travel, in its place: the name of its class."""

    name: str


def _write_bytes(writer: Writer, data: bytes) -> None:
    writer.count(data, "bytes")
    writer.out += data


def _read_bytes(reader: Reader) -> bytes:
    return reader.counted(8, BYTES_MAX, "bytes")[1]


def _write_int(writer: Writer, value: int) -> None:
    _write_bytes(writer, value.to_bytes(_int_more(value), "little", signed=True))


def _int_more(value: int) -> int:
    return value.bit_length() // 8 + 1  # One bit more for the sign.


def _packed(
    packing: struct.Struct, split: Callable[[Any], Any], made: Callable[..., Any]
) -> Layout:
    return Layout(
        packing.size,
        None,
        lambda writer, value: writer.out.extend(packing.pack(*split(value))),
        lambda reader: made(*packing.unpack(reader.take(packing.size, "a number"))),
    )


def _array_more(value: Any) -> int:
    if isinstance(value, Raw):
        return AXIS_BYTES * len(value.kind.shape) + len(value.data)
    return AXIS_BYTES * len(value.shape) + sizes((value,))[0]


def _write_array(writer: Writer, value: Any) -> None:
    raw = value if type(value) is Raw else Raw(type_of(value), _bytes_of(value))
    assert len(raw.data) == raw.kind.nbytes, (raw.kind, len(raw.data))
    ARRAY_TYPE.write(writer, raw.kind)
    writer.out += raw.data


def _check_there(value: Any) -> None:
    """Raise ProtocolError where an array has no elements; tracers are a `jax.Array`."""
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_array or isinstance(value, jax.core.Tracer):
        raise ProtocolError(f"{value!r} is abstract and has no bytes to send")


def _bytes_of(value: Any) -> bytes:
    """The elements of a JAX or numpy array."""
    _check_there(value)
    if isinstance(value, jax.Array) and str(value.dtype).startswith("key<"):
        value = jax.random.key_data(value)
    return np.asarray(value).tobytes()


def _read_array(reader: Reader) -> tuple[ArrayType, bytes]:
    kind = ARRAY_TYPE.read(reader)
    return kind, reader.take(kind.nbytes, f"array {kind.dtype}{kind.shape}")


def form(value: Any) -> tuple[str, Any]:
    """What an item is, and the content that the layout of that kind takes.

    Raises:
        ProtocolError: it cannot travel.
    """
    kind = _PLAIN.get(type(value))
    if kind is not None:
        return kind, value
    wrapped = _WRAPPED.get(type(value))
    if wrapped is not None:
        return wrapped, value[0]
    if type(value) is bool:
        return ("true" if value else "false"), None
    if type(value) is dict:
        return "dict", tuple(value.items())
    if isinstance(value, type):
        return "named", name_of(value)
    if isinstance(value, _ARRAYS) or all(hasattr(value, name) for name in _ABSTRACT):
        return _form_of_array(value), value
    if all(hasattr(value, name) for name in RefParts._fields):
        return "ref", value
    if callable(value) and has_name(value):
        return "named", name_of(value)
    return "node", _taken_apart(value)


def _form_of_array(value: Any) -> str:
    if isinstance(value, Raw):
        return value.form
    if isinstance(value, np.generic):
        return "scalar"
    return "numpy" if isinstance(value, np.ndarray) else "array"


def has_name(value: Any) -> bool:
    """Tell whether a callable has a name of its own, not only its class."""
    return hasattr(value, "__qualname__") or hasattr(value, "__name__")


def _taken_apart(value: Any) -> tuple[str, tuple[Any, ...]]:
    """The name of an instance's class, and its parts in an order of their own."""
    name = name_of(type(value))
    if isinstance(value, Enum):
        return name, (value.name,)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return name, tuple(value)
    if is_dataclass(value):
        return name, tuple([getattr(value, field.name) for field in fields(value)])
    if isinstance(value, functools.partial):
        return name, (value.func, value.args, value.keywords)
    if isinstance(value, np.dtype):
        return DTYPE, (str(value),)
    if isinstance(value, frozenset):
        return name, tuple(sorted(value, key=repr))
    treedef: Any
    children, treedef = jax.tree.flatten(value, is_leaf=lambda part: part is not value)
    if jax.tree_util.treedef_is_leaf(treedef):
        raise ProtocolError(
            f"{value!r} of type {name} cannot travel: allowed are refs, arrays, None,"
            " bool, int, float, complex, str, bytes, functions and classes, and tuples,"
            " lists, dicts, frozensets, dataclasses, enums, partials, dtypes and JAX's"
            " pytree nodes of these"
        )
    return name, (treedef.node_data()[1], *children)


def _made(kind: str, content: Any) -> Any:
    """The item that has this content."""
    match kind:
        case "true" | "false":
            return kind == "true"
        case "list":
            return list(content)
        case "array" | "numpy" | "scalar":
            of, data = content
            return Raw(of, data, kind)
        case "named":
            return Named(content)
        case "node":
            return Node(*content)
        case "hole":
            return HOLE
        case "part":
            return Part(content)
        case "opaque":
            return Opaque(content)
        case "dict":
            try:
                return dict(content)
            except TypeError as error:
                raise ProtocolError(f"a dict whose keys cannot be: {error}") from error
        case _:
            return content


def check_can_travel(tree: Any) -> None:
    """Raise ProtocolError where data cannot travel: nested too deep, or what they are.

    Sizes need not be written to be known, so measuring finds neither.
    """
    level, depth = [tree], 0
    while level:
        depth = one_deeper(depth, DEPTH_MAX)
        level = [part for one in level for part in _parts(*form(one))]


def _parts(kind: str, content: Any) -> Iterable[Any]:
    """The items in an item."""
    parts: Iterable[Any] = ()
    match kind:
        case "tuple" | "list":
            parts = content
        case "dict":
            parts = [part for item in content for part in item]
        case "node":
            parts = content[1]
        case "part":
            parts = (content,)
        case "array" | "numpy" | "scalar" if not isinstance(content, Raw):
            type_of(content)
            _check_there(content)
    return parts


def _more(tree: Any) -> int:
    kind, content = form(tree)
    return FORMS[kind].size(content)


def _write(writer: Writer, tree: Any) -> None:
    kind, content = form(tree)
    writer.out.append(_NUMBERS[kind])
    writer.deeper(DEPTH_MAX)
    FORMS[kind].write(writer, content)
    writer.depth -= 1


def _read(reader: Reader) -> Any:
    number = reader.integer(1, "kind of data")
    if number >= len(_KINDS):
        raise ProtocolError(f"kind {number} of data: allowed is 0 to {len(_KINDS) - 1}")
    kind = _KINDS[number]
    reader.deeper(DEPTH_MAX)
    content = FORMS[kind].read(reader)
    reader.depth -= 1
    return _made(kind, content)


TREE = Layout(1, _more, _write, _read)
BYTES = Layout(COUNT_BYTES, len, _write_bytes, _read_bytes)
_ARRAY = Layout(ARRAY_TYPE.fixed, _array_more, _write_array, _read_array)
_NOTHING = Layout(0, None, lambda writer, value: None, lambda reader: None)
# The place in this table is the kind's number: only append.
FORMS = {
    "none": _NOTHING,
    "false": _NOTHING,
    "true": _NOTHING,
    "int": Layout(
        COUNT_BYTES,
        _int_more,
        _write_int,
        lambda reader: int.from_bytes(_read_bytes(reader), "little", signed=True),
    ),
    "float": _packed(struct.Struct("<d"), lambda value: (value,), float),
    "complex": _packed(
        struct.Struct("<dd"), lambda value: (value.real, value.imag), complex
    ),
    "text": TEXT,
    "bytes": BYTES,
    "tuple": many(TREE, "items"),
    "list": many(TREE, "items"),
    "dict": many(items(TREE, TREE), "items"),
    "ref": record(
        RefParts,
        key=KEY,
        owner=WORKER,
        aval=ARRAY_TYPE,
        tracked=FLAG,
        descends=maybe(LEAF),
    ),
    "array": _ARRAY,
    "named": NAME,
    "node": items(NAME, many(TREE, "parts")),
    "numpy": _ARRAY,
    "scalar": _ARRAY,
    "hole": _NOTHING,
    "part": TREE,
    "opaque": NAME,
}
_KINDS = tuple(FORMS)
_NUMBERS = {kind: number for number, kind in enumerate(_KINDS)}
_ARRAYS = (Raw, jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
_PLAIN = {
    type(None): "none",
    int: "int",
    float: "float",
    complex: "complex",
    str: "text",
    bytes: "bytes",
    tuple: "tuple",
    list: "list",
    Node: "node",
    _Hole: "hole",
}
_WRAPPED: dict[Any, str] = {Named: "named", Part: "part", Opaque: "opaque"}
