"""Decoding of nested data: names and parts become Python objects again.

Only data objects are made. Their parts are put in place without running code of their
classes, except for pytree nodes in JAX's registry.
"""

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np

from jdag.compute.avals import aval_from, dtype_of
from jdag.compute.buffers import delivered, landed
from jdag.compute.refs import RefData
from jdag.engine.arrays import Hole
from jdag.engine.functions import Applied
from jdag.errors import JdagError, named_text
from jdag.rpc.allowed import Allowed
from jdag.wire.trees import APPLIED, DTYPE, Named, Opaque, Part, Raw, RefParts, TreeNode


def unmarshal(data: Any, allowed: Allowed) -> Any:
    """Return nested data with all names resolved.

    Raises:
        JdagError: an object is not allowed, does not exist, or is not data.
    """

    def made(item: Any) -> Any:
        match item:
            case Named():
                return allowed.find(item.name)
            case TreeNode():
                return _instance(item, allowed, made)
            case Raw():
                return array(item)
            case RefParts():
                aval = aval_from(item.aval)
                return RefData(item.key, item.owner, aval, item.tracked, item.descends)
            case Opaque():
                raise JdagError(
                    f"{item.name}: values of this class cannot travel; allowed are "
                    "numbers, strings, functions and classes, tuples, dataclasses, "
                    "enums, partials, dtypes and JAX's pytree nodes of these"
                )
            case Part():
                raise JdagError("a static outside of a structure of arguments")
            case tuple():
                return tuple([made(one) for one in item])
            case list():
                return [made(one) for one in item]
            case dict():
                items = [(made(key), made(one)) for key, one in item.items()]
                try:
                    return dict(items)
                except TypeError as error:
                    raise JdagError(f"a dict key cannot be hashed: {error}") from error
            case _:
                return item

    return made(data)


def structure(data: Any, allowed: Allowed) -> tuple[Any, Any]:
    """Return the treedef of a structure, and its leaves: `HOLE`, or statics.

    Raises:
        JdagError: as `unmarshal`.
    """
    leaves: list[Any] = []

    def node(kind: Any, aux: Any, children: Any) -> Any:
        try:
            return _treedef(kind, aux, [made(child) for child in children])
        except (ValueError, TypeError) as error:
            raise JdagError(f"{kind} is no pytree node here: {error}") from error

    def made(item: Any) -> Any:
        match item:
            case Part():
                leaves.append(unmarshal(item.value, allowed))
                return _LEAF
            case Hole():
                leaves.append(item)
                return _LEAF
            case TreeNode(parts=(aux, *children)):
                kind = _class(item.name, allowed)
                return node(kind, unmarshal(aux, allowed), children)
            case None:
                return node(type(None), None, ())
            case tuple() | list():
                return node(type(item), None, item)
            case dict():
                return node(dict, list(item), item.values())
            case _:
                raise JdagError(f"{item!r} is no structure of arguments")

    return made(data), leaves


_LEAF = jtu.tree_structure(0)
_BUILT_IN: dict[str, Any] = {
    "collections:OrderedDict": OrderedDict,
    "collections:defaultdict": defaultdict,
    "functools:partial": functools.partial,
    APPLIED: Applied,
    DTYPE: np.dtype,
}


def _class(name: str, allowed: Allowed) -> Any:
    kind = _BUILT_IN.get(name) or allowed.find(name)
    if not isinstance(kind, type):
        raise JdagError(f"{name} is no class")
    return kind


def _instance(item: TreeNode, allowed: Allowed, made: Callable[[Any], Any]) -> Any:
    kind = _class(item.name, allowed)
    values = [made(part) for part in item.parts]
    try:
        return _put_together(kind, values)
    except Exception as error:  # Whatever a pytree node's own code raises.
        raise JdagError(
            f"{item.name} cannot be made of {len(values)} parts: {named_text(error)}"
        ) from error


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


def array(raw: Raw) -> Any:
    """Return a received array, as JAX or numpy array like the original."""
    kind = raw.kind
    if raw.form == "array":
        return delivered(landed(kind, memoryview(raw.data)))
    values = np.frombuffer(bytes(raw.data), dtype_of(kind.dtype)).reshape(kind.shape)
    return values if raw.form == "numpy" else values[()]
