"""Decoding of nested data: items become Python objects, in one pass.

Only data objects are made. Their parts are put in place without running code of their
classes, except for pytree nodes in JAX's registry. Items that break the protocol (too
deep, unknown workers, arrays without elements) raise a ProtocolError; names that are
not allowed, or stand for nothing here, any other JdagError.
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
from jdag.compute.buffers import delivered, landed
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
    """Makes Python objects of items.

    Args:
        allowed: gives functions and classes by name.
        known: the workers that refs may name; without it there may be no refs.
        view: the elements of the arrays, in order.
        bound: returns a pair by its spec.
        arrays: in place of `view` the arrays themselves.
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
        self._left, self._nbytes, self._arrays = view, view.nbytes, arrays

    def made(self, item: Any, depth: int = 0) -> Any:
        """Return the object of an item.

        Raises:
            JdagError: an object is not allowed, does not exist, or is not data.
        """
        trees.check_depth(depth)
        match item:
            case trees.TupleItem() | trees.ListItem():
                found = self.each(item.items, depth)
                return tuple(found) if type(item) is trees.TupleItem else found
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
                    f"{item.name}: values of this class cannot travel; allowed are "
                    "numbers, strings, functions and classes, tuples, dataclasses, "
                    "enums, partials, dtypes and JAX's pytree nodes of these"
                )
            case trees.Part() | Hole():
                raise JdagError(f"{item!r} outside of a structure of arguments")
            case _:
                return _PLAIN.get(type(item), _same)(item)

    def each(self, items: Iterable[Any], depth: int) -> list[Any]:
        """Return the objects of the parts of an item at this depth."""
        return [self.made(item, depth + 1) for item in items]

    def node(self, item: trees.TreeNode) -> Any:
        """Return the class of an instance."""
        kind = _BUILT_IN.get(item.name) or self.allowed.find(item.name)
        if not isinstance(kind, type):
            raise JdagError(f"{item.name} is no class")
        return kind

    def check_end(self) -> None:
        """Raise ProtocolError if elements are left."""
        if len(self._left):
            raise ProtocolError(f"{len(self._left)} of {self._nbytes} bytes are left")

    def _ref(self, item: Any) -> Any:
        if self._known is None:
            raise ProtocolError("a ref cannot travel here")
        _CHECKS[type(item)](item, self._known)
        if type(item) is ObjectId:
            return item
        aval = aval_from(item.aval)
        return RefData(item.key, item.owner, aval, item.tracked, item.descends)

    def _array(self, item: trees.ArrayItem) -> Any:
        """Return the next array, as JAX or numpy array like the original."""
        kind = item.kind
        data, self._left = self._left[: kind.nbytes], self._left[kind.nbytes :]
        if len(data) < kind.nbytes:
            raise ProtocolError(
                f"array {kind.dtype}{kind.shape} takes {kind.nbytes} bytes; "
                f"{len(data)} of {self._nbytes} are left"
            )
        if item.form == "array":
            return delivered(landed(kind, data))
        values = np.frombuffer(bytes(data), dtype_of(kind.dtype)).reshape(kind.shape)
        return values if item.form == "numpy" else values[()]

    def _instance(self, item: trees.TreeNode, depth: int) -> Any:
        kind, values = self.node(item), self.each(item.parts, depth)
        if kind is PairData and self._bound is not None:
            return PairData(self._bound(*values), *values)
        try:
            return _put_together(kind, values)
        except Exception as error:  # Whatever a pytree node's own code raises.
            raise JdagError(
                f"{item.name} cannot be made of {len(values)} parts: "
                f"{named_text(error)}"
            ) from error


def unmarshal(item: Any, allowed: Allowed) -> Any:
    """Return the object of an item without arrays and refs; see `Reader.made`."""
    return Reader(allowed).made(item)


def received_copy(value: Any, allowed: Allowed) -> Any:
    """Return what a receiver makes of a value that is sent to it, with its arrays."""
    arrays: list[Any] = []
    item = trees.pack(value, arrays, opaque=True)
    return Reader(allowed, arrays=iter([array for _, array in arrays])).made(item)


def read_tree(data: Any, allowed: Allowed, known: Known, bound: Any = None) -> Any:
    """Decode nested data; see `Reader`."""
    item, view = trees.read_items(data)
    reader = Reader(allowed, known, view, bound)
    value = reader.made(item)
    reader.check_end()
    return value


def structure(data: Any, allowed: Allowed) -> tuple[Any, Any]:
    """Return the treedef of a structure, and its leaves: `HOLE`, or statics.

    Raises:
        JdagError: as `unmarshal`.
    """
    leaves: list[Any] = []
    reader = Reader(allowed)

    def node(kind: Any, aux: Any, children: Iterable[Any]) -> Any:
        try:
            return _treedef(kind, aux, list(map(made, children)))
        except (ValueError, TypeError) as error:
            raise JdagError(f"{kind} is no pytree node here: {error}") from error

    def made(item: Any) -> Any:
        match item:
            case trees.Part():
                leaves.append(reader.made(item.value))
                return _LEAF
            case Hole():
                leaves.append(HOLE)
                return _LEAF
            case trees.TreeNode(parts=(aux, *children)):
                return node(reader.node(item), reader.made(aux), children)
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
                raise JdagError(f"{item!r} is no structure of arguments")

    return made(data), leaves


_LEAF = jtu.tree_structure(0)
_CHECKS = {kind: check_of(kind) for kind in (trees.RefParts, ObjectId)}
_BUILT_IN: dict[str, Any] = {
    "collections:OrderedDict": OrderedDict,
    "collections:defaultdict": defaultdict,
    "functools:partial": functools.partial,
    trees.APPLIED: Applied,
    trees.DTYPE: np.dtype,
}


def _put_together(kind: Any, values: list[Any]) -> Any:
    if kind is Applied:
        name, unjitted, program = values
        return Applied(name, unjitted, program)
    if issubclass(kind, Enum | np.dtype):
        (name,) = values
        return jnp.dtype(name) if kind is np.dtype else kind[name]
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        if len(values) != len(kind._fields):
            raise ValueError(f"it has {len(kind._fields)}")
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
