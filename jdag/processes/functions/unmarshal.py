"""Decoding of nested data: wire items become Python objects, in one pass.

Only data objects are built. The code of their classes does not run, except for pytree
nodes in JAX's registry. Items that violate the protocol (nested too deeply, unknown
workers, arrays with missing elements) raise ProtocolError. Names that are not allowed
or do not exist raise JdagError.
"""

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jdag.compute.avals import aval_from, dtype_of
from jdag.compute.buffers import array_over, delivered
from jdag.compute.refs import RefData
from jdag.engine.arrays import HOLE, Hole
from jdag.engine.functions import Applied
from jdag.engine.names import ObjectId
from jdag.errors import JdagError, ProtocolError, named_text
from jdag.processes.functions.allowed import Allowed
from jdag.wire import trees
from jdag.wire.encoding import Known, check_of
from jdag.wire.specs import PairData

_EMPTY = memoryview(b"")


def _same(item: Any) -> Any:
    return item


def _text(item: trees.Text) -> str:
    try:
        return item.data.decode("utf-8", "surrogatepass")
    except UnicodeDecodeError as error:
        raise ProtocolError(f"text {item.data[:80]!r} is not UTF-8: {error}") from error


_PLAIN: dict[type, Callable[[Any], Any]] = {
    trees.BytesItem: lambda item: item.data,
    trees.Wide: lambda item: int.from_bytes(item.data, "little", signed=True),
    trees.Complex: lambda item: complex(item.real, item.imag),
    trees.Text: _text,
}


class Reader:
    """Decodes wire items to Python objects.

    Args:
        allowed: the allowlist of functions and classes.
        known: the workers that refs may name. If None, refs are refused.
        view: the bytes of the elements of all arrays, in order.
        bound: a function that maps a spec to its pair.
        arrays: already decoded arrays. If given, they replace those of `view`.
    """

    def __init__(
        self,
        allowed: Allowed,
        known: Known | None = None,
        view: memoryview = _EMPTY,
        bound: Callable[[bytes], Any] | None = None,
        arrays: Iterator[Any] | None = None,
    ) -> None:
        self.allowed, self._known, self._bound = allowed, known, bound
        self._rest, self._nbytes, self._arrays = view, view.nbytes, arrays

    def object_of(self, item: Any, depth: int = 0) -> Any:
        """Decode an item.

        Raises:
            JdagError: a name is absent or not allowed, or a value cannot be sent.
        """
        trees.check_depth(depth)
        match item:
            case trees.TupleItem() | trees.ListItem():
                values = self.each(item.items, depth)
                return tuple(values) if type(item) is trees.TupleItem else values
            case trees.DictItem():
                items = [self.each(pair, depth) for pair in item.items]
                try:
                    return dict(items)
                except TypeError as error:
                    raise JdagError(f"a dict key cannot be hashed: {error}") from error
            case trees.ArrayItem():
                return next(self._arrays) if self._arrays else self._array(item)
            case trees.RefParts() | ObjectId():
                return self._ref(item)
            case trees.Named():
                return self.allowed.find(item.name)
            case trees.TreeNode():
                return self._instance(item, depth)
            case trees.Opaque():
                raise JdagError(
                    f"values of class {item.name} cannot be sent; expected "
                    "numbers, strings, functions and classes, tuples, dataclasses, "
                    "enums, partials, dtypes and JAX's pytree nodes of these"
                )
            case trees.Part() | Hole():
                raise JdagError(
                    f"the item {item!r} is only valid in a structure of arguments"
                )
            case _:
                return _PLAIN.get(type(item), _same)(item)

    def each(self, items: Iterable[Any], depth: int) -> list[Any]:
        return [self.object_of(item, depth + 1) for item in items]

    def class_of(self, item: trees.TreeNode) -> Any:
        kind = _BUILT_IN.get(item.name) or self.allowed.find(item.name)
        if not isinstance(kind, type):
            raise JdagError(f"the name {item.name} does not refer to a class")
        return kind

    def check_end(self) -> None:
        if len(self._rest):
            raise ProtocolError(
                f"{len(self._rest)} of {self._nbytes} bytes belong to no array"
            )

    def _ref(self, item: Any) -> Any:
        if self._known is None:
            raise ProtocolError("refs are not allowed in static data")
        _CHECKS[type(item)](item, self._known)
        if type(item) is ObjectId:
            return item
        aval = aval_from(item.aval)
        return RefData(item.key, item.owner, aval, item.tracked, item.descends)

    def _array(self, item: trees.ArrayItem) -> Any:
        kind = item.kind
        data, self._rest = self._rest[: kind.nbytes], self._rest[kind.nbytes :]
        if len(data) < kind.nbytes:
            raise ProtocolError(
                f"array {kind.dtype}{kind.shape} needs {kind.nbytes} bytes, but only "
                f"{len(data)} of {self._nbytes} bytes are left"
            )
        if item.form == "array":
            return delivered(array_over(kind, data))
        values = np.frombuffer(bytes(data), dtype_of(kind.dtype)).reshape(kind.shape)
        return values if item.form == "numpy" else values[()]

    def _instance(self, item: trees.TreeNode, depth: int) -> Any:
        kind, values = self.class_of(item), self.each(item.parts, depth)
        if kind is PairData and self._bound is not None:
            return PairData(self._bound(*values), *values)
        try:
            return _build(kind, values)
        except Exception as error:  # Raised by the code of a pytree node.
            raise JdagError(
                f"a {item.name} cannot be built from {len(values)} received values: "
                f"{named_text(error)}"
            ) from error


def unmarshal(item: Any, allowed: Allowed) -> Any:
    """Decode an item without arrays or refs. For its errors see `Reader.object_of`."""
    return Reader(allowed).object_of(item)


def received_copy(value: Any, allowed: Allowed) -> Any:
    """Return the value as a receiver would decode it. Arrays are not copied."""
    arrays: list[Any] = []
    item = trees.pack(value, arrays, opaque=True)
    return Reader(allowed, arrays=iter([array for _, array in arrays])).object_of(item)


def read_tree(data: Any, allowed: Allowed, known: Known, bound: Any = None) -> Any:
    item, view = trees.read_items(data)
    reader = Reader(allowed, known, view, bound)
    value = reader.object_of(item)
    reader.check_end()
    return value


def structure(data: Any, allowed: Allowed) -> tuple[Any, Any]:
    """Return the treedef of a pytree structure, and its leaves (`HOLE` or statics)."""
    leaves: list[Any] = []
    reader = Reader(allowed)

    def node(kind: Any, aux: Any, children: Iterable[Any]) -> Any:
        try:
            return _treedef(kind, aux, list(map(treedef_of, children)))
        except (ValueError, TypeError) as error:
            raise JdagError(
                f"{kind} is not registered as a pytree node in this process: {error}"
            ) from error

    def treedef_of(item: Any) -> Any:
        match item:
            case trees.Part():
                leaves.append(reader.object_of(item.value))
                return _LEAF
            case Hole():
                leaves.append(HOLE)
                return _LEAF
            case trees.TreeNode(parts=(aux, *children)):
                return node(reader.class_of(item), reader.object_of(aux), children)
            case None:
                return node(type(None), None, ())
            case trees.TupleItem():
                return node(tuple, None, item.items)
            case trees.ListItem():
                return node(list, None, item.items)
            case trees.DictItem():
                keys = [key for key, _ in item.items]
                return node(dict, keys, [child for _, child in item.items])
            case _:
                raise JdagError(f"the item {item!r} is not a structure of arguments")

    return treedef_of(data), leaves


_LEAF = jtu.tree_structure(0)
_CHECKS = {kind: check_of(kind) for kind in (trees.RefParts, ObjectId)}
_BUILT_IN: dict[str, Any] = {
    "collections:OrderedDict": OrderedDict,
    "collections:defaultdict": defaultdict,
    "functools:partial": functools.partial,
    trees.APPLIED: Applied,
    trees.DTYPE: np.dtype,
}


def _build(kind: Any, values: list[Any]) -> Any:
    if kind is Applied:
        name, unjitted, program = values
        return Applied(name, unjitted, program)
    if issubclass(kind, Enum | np.dtype):
        (name,) = values
        return jnp.dtype(name) if kind is np.dtype else kind[name]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        if len(values) != len(kind._fields):
            raise ValueError(f"this named tuple has {len(kind._fields)} fields")
        return tuple.__new__(kind, values)
    if is_dataclass(kind):
        instance: Any = object.__new__(kind)  # type: ignore[arg-type]
        for field, value in zip(fields(kind), values, strict=True):
            object.__setattr__(instance, field.name, value)
        return instance
    if kind in (functools.partial, jtu.Partial):
        function, args, keywords = values
        return kind(function, *args, **keywords)
    if kind is frozenset:
        return frozenset(values)
    aux, *children = values
    return jtu.tree_unflatten(_treedef(kind, aux, [_LEAF] * len(children)), children)


def _treedef(kind: Any, aux: Any, children: list[Any]) -> Any:
    registry = jtu.default_registry
    return jtu.PyTreeDef.from_node_data_and_children(registry, (kind, aux), children)
