"""Arguments and results of programs as bytes: nested data, refs, arrays, names.

Refs travel as data. What only code can make again travels by name: functions and
classes as `Named`, instances (named tuples, dataclasses, enums, partials, dtypes and
JAX's own pytree nodes) as `Node`, the name of their class and their parts. Reading
gives `Named`, `Node`, `RefParts` and `Raw` arrays, which write as the same bytes again;
who reads makes of them what they name, if it allows that. Anything else is refused:
nothing is pickled.

On the wire an item is a number, a text or bytes, or one of the structs below. The bytes
of a tree are 4 that say how many follow for its items, these, and then the elements of
its arrays, one after the other.

Structures of arguments (`jdag.wire.specs`) have besides `HOLE` in the place of each
array, `Part` around each static, and `Opaque` for what cannot travel.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import jax
import numpy as np
from msgspec import Meta
from msgspec.msgpack import Decoder

from jdag.engine.functions import name_of
from jdag.engine.messages import Several
from jdag.engine.names import (
    DATA_MAX_BYTES,
    Key,
    LeafId,
    Name,
    Record,
    Worker,
)
from jdag.errors import ProtocolError
from jdag.wire.arrays import ArrayType, check_possible, type_of
from jdag.wire.encoding import Known, bounded, check_of, decoded, encoded

DEPTH_MAX = 100
DTYPE = "numpy:dtype"  # Each has a class of its own.
COUNT_BYTES = 4
_ABSTRACT = ("shape", "dtype", "nbytes")  # Of an abstract value, whatever its class.

Bytes = Annotated[bytes, Meta(max_length=DATA_MAX_BYTES)]
Take = Callable[[ArrayType], Any]


class _Wide(Record, tag=0):
    """An int of more than 64 bits."""

    data: Bytes


class _Complex(Record, tag=1):
    real: float
    imag: float


class _Text(Record, tag=2):
    """A text that is not Unicode."""

    data: Bytes


class _Bytes(Record, tag=13):
    data: Bytes


class _Tuple(Record, tag=3):
    items: "Several[Item]"


class _List(Record, tag=4):
    items: "Several[Item]"


class _Dict(Record, tag=5):
    items: "Several[tuple[Item, Item]]"


class RefParts(Record, tag=6):
    """A ref as it travels."""

    key: Key
    owner: Worker
    aval: ArrayType
    tracked: bool
    descends: LeafId | None


class _Array(Record, tag=7):
    """An array, the elements of which come later."""

    kind: ArrayType
    form: Literal["array", "numpy", "scalar"]


class Named(Record, tag=8):
    """A function or class, by `module:qualname`."""

    name: Name


class Node(Record, tag=9):
    """An instance: the name of its class, and its parts."""

    name: Name
    parts: "Several[Item]"


class _Hole(Record, tag=10):
    pass


class Part(Record, tag=11):
    """A static in a structure: what is at its place."""

    value: "Item"


class Opaque(Record, tag=12):
    """What cannot travel, in its place: the name of its class."""

    name: Name


HOLE = _Hole()  # The place of an array in a structure.
if TYPE_CHECKING:
    Item = Any
else:
    Item = (
        None | bool | int | float | str | _Bytes | _Wide | _Complex | _Text | _Tuple
        | _List | _Dict | RefParts | _Array | Named | Node | _Hole | Part | Opaque
    )  # fmt: skip


class Raw(NamedTuple):
    """An array as it travels: its type, and its elements row by row.

    `form` says whose it is: "array" JAX's, "numpy" and "scalar" numpy's.
    """

    kind: ArrayType
    data: Any
    form: str = "array"


def deeper(depth: int) -> int:
    """Return how deep that is what is one deeper, or raise ProtocolError."""
    if depth >= DEPTH_MAX:
        raise ProtocolError(
            f"data nested more than {depth} deep cannot travel: allowed is {DEPTH_MAX}"
        )
    return depth + 1


def check_there(value: Any) -> None:
    """Raise ProtocolError where an array has no elements; tracers are a `jax.Array`."""
    if isinstance(value, Raw):
        return
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_array or isinstance(value, jax.core.Tracer):
        raise ProtocolError(f"{value!r} is abstract and has no bytes to send")


def _elements(value: Any) -> Any:
    """The elements of a JAX or numpy array, as bytes."""
    check_there(value)
    if isinstance(value, Raw):
        return value.data
    if isinstance(value, jax.Array) and str(value.dtype).startswith("key<"):
        value = jax.random.key_data(value)
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def form(value: Any) -> tuple[str, Any]:
    """What kind of item data are, and their content.

    Raises:
        ProtocolError: it cannot travel.
    """
    kind = _PLAIN.get(type(value))
    if kind is not None:
        return kind, (value.name, value.parts) if kind == "node" else value
    if type(value) is Part:
        return "part", value.value
    if type(value) in (Named, Opaque):
        return ("named" if type(value) is Named else "opaque"), value.name
    if type(value) is bool:
        return ("true" if value else "false"), None
    if type(value) is dict:
        return "dict", tuple(value.items())
    if isinstance(value, type):
        return "named", name_of(value)
    if isinstance(value, _ARRAYS) or all(hasattr(value, name) for name in _ABSTRACT):
        return _form_of_array(value), value
    if all(hasattr(value, name) for name in RefParts.__struct_fields__):
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


def _packed(tree: Any, arrays: list[Any], depth: int) -> Any:
    """Data as an item; the arrays among them are noted."""
    depth = deeper(depth)
    kind, content = form(tree)
    item: Any = tree
    match kind:
        case "int" if not -(1 << 63) <= tree < 1 << 64:
            size = tree.bit_length() // 8 + 1  # One bit more for the sign.
            item = _Wide(tree.to_bytes(size, "little", signed=True))
        case "bytes":
            item = _Bytes(tree)
        case "complex":
            item = _Complex(tree.real, tree.imag)
        case "text" if not tree.isascii() and _SURROGATE.search(tree):
            item = _Text(tree.encode("utf-8", "surrogatepass"))
        case "tuple" | "list":
            items = tuple([_packed(item, arrays, depth) for item in content])
            item = _Tuple(items) if kind == "tuple" else _List(items)
        case "dict":
            pairs = [
                (_packed(key, arrays, depth), _packed(value, arrays, depth))
                for key, value in content
            ]
            item = _Dict(tuple(pairs))
        case "ref":
            item = RefParts(
                tree.key, tree.owner, type_of(tree.aval), tree.tracked, tree.descends
            )
        case "array" | "numpy" | "scalar":
            arrays.append(tree)
            item = _Array(_kind_of(tree), kind)
        case "named":
            item = Named(content)
        case "node":
            name, parts = content
            item = Node(name, tuple([_packed(part, arrays, depth) for part in parts]))
        case "part":
            item = Part(_packed(content, arrays, depth))
        case "opaque":
            item = Opaque(content)
        case _:
            pass
    return item


def _kind_of(array: Any) -> ArrayType:
    return array.kind if type(array) is Raw else type_of(array)


def _unpacked(item: Any, known: Known | None, take: Take, depth: int) -> Any:
    """The data of an item; `take` gives the elements of the next array in it."""
    depth = deeper(depth)
    data: Any = item
    match item:
        case _Wide():
            data = int.from_bytes(item.data, "little", signed=True)
        case _Bytes():
            data = item.data
        case _Complex():
            data = complex(item.real, item.imag)
        case _Text():
            data = _text(item.data)
        case _Tuple() | _List():
            found = [_unpacked(one, known, take, depth) for one in item.items]
            data = tuple(found) if type(item) is _Tuple else found
        case _Dict():
            pairs = [
                [_unpacked(one, known, take, depth) for one in pair]
                for pair in item.items
            ]
            try:
                data = dict(pairs)
            except TypeError as error:
                raise ProtocolError(f"a dict whose keys cannot be: {error}") from error
        case RefParts():
            if known is None:
                raise ProtocolError("a ref cannot travel here")
            _check_ref(item, known)
            data = item
        case _Array():
            check_possible(item.kind)
            data = Raw(item.kind, take(item.kind), item.form)
        case Node():
            parts = [_unpacked(part, known, take, depth) for part in item.parts]
            data = Node(item.name, tuple(parts))
        case _Hole():
            data = HOLE
        case Part():
            data = Part(_unpacked(item.value, known, take, depth))
        case _:
            pass
    return data


def _text(data: bytes) -> str:
    try:
        return data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"text {data[:80]!r} is not UTF-8: {error}") from error


def _no_arrays(*_: Any) -> Any:
    raise ProtocolError("arrays cannot travel here")


def pack(tree: Any) -> Any:
    """Return nested data without arrays as a field of a struct, an `Item`.

    Raises:
        ProtocolError: they cannot travel.
    """
    arrays: list[Any] = []
    item = _packed(tree, arrays, 0)
    return _no_arrays() if arrays else item


def unpack(item: Any) -> Any:
    """Return the nested data of a field of a struct, without arrays and refs.

    Raises:
        ProtocolError: there are some, they are nested too deep, or no data.
    """
    return _unpacked(item, None, _no_arrays, 0)


def tree_size(tree: Any, check: Callable[[Any], None] = lambda _: None) -> int:
    """How many bytes nested data take; `check` sees each array among them."""
    arrays: list[Any] = []
    items = bounded(_decoder, encoded(_packed(tree, arrays, 0)))
    for array in arrays:
        check(array)
    return COUNT_BYTES + len(items) + sum([_kind_of(one).nbytes for one in arrays])


def write_tree(tree: Any) -> bytes:
    """Return nested data as bytes.

    Raises:
        ProtocolError: they cannot travel.
    """
    arrays: list[Any] = []
    items = bounded(_decoder, encoded(_packed(tree, arrays, 0)))
    count = len(items).to_bytes(COUNT_BYTES, "little")
    return b"".join([count, items, *map(_elements, arrays)])


def read_tree(data: bytes | memoryview, known: Known) -> Any:
    """Return the nested data that bytes are; arrays are views of them.

    Raises:
        ProtocolError: they are none.
    """
    view = memoryview(data)
    start = COUNT_BYTES + int.from_bytes(view[:COUNT_BYTES], "little")
    left = [view[start:]]

    def take(kind: ArrayType) -> memoryview:
        elements, left[0] = left[0][: kind.nbytes], left[0][kind.nbytes :]
        if len(elements) < kind.nbytes:
            raise ProtocolError(
                f"array {kind.dtype}{kind.shape} takes {kind.nbytes} bytes; "
                f"{len(elements)} of {len(view)} are left"
            )
        return elements

    tree = _unpacked(decoded(_decoder, view[COUNT_BYTES:start]), known, take, 0)
    if len(left[0]):
        raise ProtocolError(f"{len(left[0])} of {len(view)} bytes are left")
    return tree


_SURROGATE = re.compile("[\ud800-\udfff]")
_decoder: Decoder[Any] = Decoder(Item)
_check_ref = check_of(RefParts)
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
