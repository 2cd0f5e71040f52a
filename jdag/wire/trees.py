"""Arguments and results of programs as bytes: nested data, refs, arrays, names.

Refs and handles are sent as data, functions and classes by name (`Named`). Named
tuples, dataclasses, enums, partials, dtypes and JAX's pytree nodes become a `TreeNode`:
the name of their class and their parts. Anything else is refused with a ProtocolError:
nothing is pickled.

On the wire an item is a number, a string or one of the structs below. A tree is encoded
as 4 bytes with the length of its items, the items, and the elements of its arrays. The
receiver converts the items to Python objects (`jdag.processes.functions.unmarshal`).

Structures of arguments (`jdag.wire.specs`) also have a `HOLE` for each array, `Part`
around each static, and `Opaque` for parts that cannot be sent.
"""

import re
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Annotated, Any, Literal

import jax
import numpy as np
from msgspec import Meta
from msgspec.msgpack import Decoder

from jdag.engine.arrays import ArrayType, Hole
from jdag.engine.functions import TAKEN, Applied, is_program, is_unjitted, name_of
from jdag.engine.messages import Several
from jdag.engine.names import (
    DATA_MAX_BYTES,
    Key,
    LeafId,
    Name,
    ObjectId,
    Record,
    Worker,
)
from jdag.errors import JdagError, ProtocolError
from jdag.wire.arrays import type_of
from jdag.wire.encoding import bounded, decoded, encoded

DEPTH_MAX = 100
APPLIED = "jdag.engine.functions:Applied"
DTYPE = "numpy:dtype"  # For all dtypes, although each has a different class.
COUNT_BYTES = 4  # The length prefix of a tree and of an envelope.
_ABSTRACT = ("shape", "dtype", "nbytes")  # Attributes of all abstract values.

Bytes = Annotated[bytes, Meta(max_length=DATA_MAX_BYTES)]


class Wide(Record, tag=0):
    data: Bytes


class Complex(Record, tag=1):
    real: float
    imag: float


class Text(Record, tag=2):
    """A string with lone surrogates."""

    data: Bytes


class BytesItem(Record, tag=13):
    """Bytes as a struct, since a union of msgspec cannot have bytes and strings."""

    data: Bytes


class TupleItem(Record, tag=3):
    items: "Several[Item]"


class ListItem(Record, tag=4):
    items: "Several[Item]"


class DictItem(Record, tag=5):
    items: "Several[tuple[Item, Item]]"


class RefParts(Record, tag=6):
    key: Key
    owner: Worker
    aval: ArrayType
    tracked: bool
    descends: LeafId | None


class ArrayItem(Record, tag=7):
    """A JAX array, numpy array or numpy scalar. The elements follow the items."""

    kind: ArrayType
    form: Literal["array", "numpy", "scalar"]


class Named(Record, tag=8):
    name: Name


class TreeNode(Record, tag=9):
    name: Name
    parts: "Several[Item]"


class Part(Record, tag=11):
    """A static argument in a structure."""

    value: "Item"


class Opaque(Record, tag=12):
    """A value that cannot be sent: the name of its class."""

    name: Name


if TYPE_CHECKING:
    Item = Any
else:
    Item = (
        None | bool | int | float | str | BytesItem | Wide | Complex | Text | TupleItem
        | ListItem | DictItem | RefParts | ArrayItem | Named | TreeNode | Hole | Part
        | Opaque | ObjectId
    )  # fmt: skip

Each = Callable[[Iterable[Any]], tuple[Any, ...]]


def _text_item(text: str, _: Each) -> Any:
    if text.isascii() or not _SURROGATE.search(text):
        return text
    return Text(text.encode("utf-8", "surrogatepass"))


def _int_item(number: int, _: Each) -> Any:
    if -(1 << 63) <= number < 1 << 64:
        return number
    size = number.bit_length() // 8 + 1  # With a bit for the sign.
    return Wide(number.to_bytes(size, "little", signed=True))


def _dict_item(data: dict[Any, Any], each: Each) -> Any:
    items = each(chain.from_iterable(data.items()))
    return DictItem(tuple(zip(items[::2], items[1::2], strict=True)))


# By exact type, so that bools and IntEnums are not packed as ints.
_ITEMS: dict[type, Callable[[Any, Each], Any]] = {
    **dict.fromkeys((type(None), bool, float, ObjectId), lambda value, _: value),
    int: _int_item,
    str: _text_item,
    bytes: lambda data, _: BytesItem(data),
    complex: lambda number, _: Complex(number.real, number.imag),
    tuple: lambda data, each: TupleItem(each(data)),
    list: lambda data, each: ListItem(each(data)),
    dict: _dict_item,
}


def pack(
    tree: Any,
    arrays: list[Any] | None = None,
    *,
    opaque: bool = False,
    depth: int = 0,
    name: Callable[[Any], str] = name_of,
) -> Any:
    """Convert nested data to an item.

    Args:
        tree: the data.
        arrays: receives (type, array) for each array; None: arrays are refused.
        opaque: replace refs and parts that cannot be sent by `Opaque`; by default
            they are refused.
        depth: the depth of the item in the structure that it will be a part of.
        name: a function that names functions and classes; if `opaque`, also the
            classes of instances.

    Raises:
        ProtocolError: a part is refused, or the data are nested too deep.
    """
    depth_max = min(DEPTH_MAX, depth + DEPTH_MAX // 2) if opaque else DEPTH_MAX
    default: Callable[[Any, Each], Any] = partial(_other_item, arrays, opaque, name)

    def item(value: Any, depth: int) -> Any:
        try:
            check_depth(depth, depth_max)
            return _ITEMS.get(type(value), default)(
                value, lambda data: tuple([item(part, depth + 1) for part in data])
            )
        except ProtocolError:
            if not opaque:
                raise
            return Opaque(name_of(type(value)))

    return item(tree, depth)


def _other_item(
    arrays: list[Any] | None,
    opaque: bool,
    name: Callable[[Any], str],
    value: Any,
    each: Each,
) -> Any:
    if isinstance(value, type):
        return Named(name(value))
    if isinstance(value, _ARRAYS) or all(hasattr(value, n) for n in _ABSTRACT):
        if arrays is None:
            raise ProtocolError("arrays are not allowed in static data")
        kind = type_of(value)
        arrays.append((kind, value))
        return ArrayItem(kind, _form_of(value))
    if all(hasattr(value, name) for name in RefParts.__struct_fields__):
        if opaque:
            raise ProtocolError("refs are not allowed in static data")
        kind = type_of(value.aval)
        return RefParts(value.key, value.owner, kind, value.tracked, value.descends)
    if callable(value) and (
        hasattr(value, "__qualname__") or hasattr(value, "__name__")
    ):
        return Named(name(value))
    class_name, parts = _flattened(value, name if opaque else name_of)
    return TreeNode(class_name, each(parts))


def _form_of(array: Any) -> Any:
    if isinstance(array, np.generic):
        return "scalar"
    return "numpy" if isinstance(array, np.ndarray) else "array"


def check_depth(depth: int, depth_max: int = DEPTH_MAX) -> None:
    if depth >= depth_max:
        raise ProtocolError(
            f"the data are nested too deep to be sent: expected at most {depth_max} "
            "levels"
        )


def _flattened(
    value: Any, class_name: Callable[[Any], str]
) -> tuple[str, tuple[Any, ...]]:
    if isinstance(value, Applied):
        return APPLIED, (value.name, is_unjitted(value), is_program(value))
    name = class_name(type(value))
    if isinstance(value, Enum):
        return name, (value.name,)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return name, tuple(value)
    if is_dataclass(value):
        return name, tuple([getattr(value, field.name) for field in fields(value)])
    if isinstance(value, partial):
        return name, (value.func, value.args, value.keywords)
    if isinstance(value, np.dtype):
        return DTYPE, (str(value),)
    if isinstance(value, frozenset):
        return name, tuple(sorted(value, key=repr))
    treedef: Any
    children, treedef = jax.tree.flatten(value, is_leaf=lambda part: part is not value)
    node = treedef.node_data()
    if node is None:
        raise ProtocolError(
            f"{value!r} of type {name} cannot be sent: expected refs, arrays, None,"
            " bool, int, float, complex, str, bytes, functions and classes, and tuples,"
            " lists, dicts, frozensets, dataclasses, enums, partials, dtypes and JAX's"
            f" pytree nodes of these; {getattr(type(value), TAKEN, '')}".rstrip("; ")
        )
    return name, (node[1], *children)


def _packed(tree: Any, **options: Any) -> tuple[bytes, list[tuple[ArrayType, Any]]]:
    arrays: list[tuple[ArrayType, Any]] = []
    return bounded(_decoder, encoded(pack(tree, arrays, **options))), arrays


def tree_size(
    tree: Any, check: Callable[[Any], None] = lambda _: None, *, opaque: bool = False
) -> int:
    if type(tree) is memoryview:
        return len(tree)
    items, arrays = _packed(tree, opaque=opaque)
    for _, array in arrays:
        check(array)
    return COUNT_BYTES + len(items) + sum([kind.nbytes for kind, _ in arrays])


def check_travels(description: str, tree: Any) -> None:
    """Raise JdagError, with `description` as prefix, if nested data cannot be sent."""
    try:
        tree_size(tree)
    except ProtocolError as error:
        raise JdagError(f"{description}: {error}") from None


def write_tree(tree: Any, **options: Any) -> bytes | memoryview:
    """Encode nested data with options of `pack`. A memoryview is already encoded."""
    if type(tree) is memoryview:
        return tree
    items, arrays = _packed(tree, **options)
    count = len(items).to_bytes(COUNT_BYTES, "little")
    return b"".join([count, items, *[_elements(array) for _, array in arrays]])


def check_there(value: Any) -> None:
    is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
    if not is_array or isinstance(value, jax.core.Tracer):
        raise ProtocolError(f"{value!r} is abstract and has no bytes to send")


def _elements(value: Any) -> Any:
    check_there(value)
    if isinstance(value, jax.Array) and str(value.dtype).startswith("key<"):
        value = jax.random.key_data(value)
    return np.ascontiguousarray(value).reshape(-1).view(np.uint8)


def read_items(data: bytes | memoryview) -> tuple[Any, memoryview]:
    view = memoryview(data)
    start = COUNT_BYTES + int.from_bytes(view[:COUNT_BYTES], "little")
    return decoded(_decoder, view[COUNT_BYTES:start]), view[start:]


_SURROGATE = re.compile("[\ud800-\udfff]")
_decoder: Decoder[Any] = Decoder(Item)
_ARRAYS = (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)
