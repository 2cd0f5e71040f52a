"""Arguments taken apart: refs, constants, and statics, part of the function."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from jdag.errors import ContextError, JdagError
from jdag.functions import value_key

ALLOWED = (
    "refs, JAX and numpy arrays, Python int, float and complex, and, as part of the "
    "function: str, bool, None, functions, and what jdag.static(value) wraps"
)


class Static:
    """A value that is part of the function that is called: an axis, a shape.

    Equal statics have equal values of equal types: True is not 1, 0.0 is not -0.0.
    """

    __slots__ = ("key", "value")

    def __init__(self, value: Hashable) -> None:
        try:
            hash(value)
        except TypeError as error:
            raise JdagError(
                f"jdag.static takes a hashable value, not {value!r} of type "
                f"{type(value).__name__}; a tuple would be right for a list"
            ) from error
        self.value = value
        self.key = value_key(value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"static({self.value!r})"


def static(value: Hashable) -> Static:
    """Wrap a hashable value so that it is part of the function, not traced.

    Raises:
        JdagError: the value cannot be hashed.
    """
    return Static(value)


class Template:
    """What arguments are without their arrays: the tree, and statics by place."""

    __slots__ = ("_hash", "_leaves", "key", "treedef")

    def __init__(self, treedef: Any, leaves: Sequence[Any], key: Hashable) -> None:
        self.treedef = treedef
        self.key = (treedef, key)
        self._leaves = tuple(leaves)
        self._hash = hash(self.key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Template) and self.key == other.key

    def rebuild(self, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return (args, kwargs) with `values` at the array-like positions, in order."""
        rest = iter(values)
        leaves = [next(rest) if leaf is HOLE else leaf for leaf in self._leaves]
        assert next(rest, HOLE) is HOLE, f"more values than holes: {len(values)}"
        args, kwargs = jtu.tree_unflatten(self.treedef, leaves)
        return args, kwargs


class _Hole(Enum):
    """The place of an array in a template."""

    HOLE = 0


HOLE = _Hole.HOLE


@dataclass(frozen=True, slots=True)
class Split:
    """Arguments taken apart.

    A position is an index among the array-like leaves (refs and constants together) in
    the order in which JAX flattens (args, kwargs).
    """

    refs: tuple[tuple[int, Any], ...]
    constants: tuple[tuple[int, Any], ...]
    template: Template

    @property
    def size(self) -> int:
        """Number of positions."""
        return len(self.refs) + len(self.constants)


@dataclass(slots=True)
class _Parts:
    refs: list[tuple[int, Any]] = field(default_factory=list)
    constants: list[tuple[int, Any]] = field(default_factory=list)
    leaves: list[Any] = field(default_factory=list)
    statics: list[tuple[int, Hashable]] = field(default_factory=list)


class _Kind(Enum):
    """What a leaf of a type is to a call."""

    SCALAR = 0
    ARRAY = 1
    NUMPY = 2
    STATIC = 3
    WRAPPED = 4
    TRACER = 5
    REFUSED = 6


def _kind_of_type(cls: type) -> _Kind:
    if issubclass(cls, jax.core.Tracer):
        return _Kind.TRACER
    if issubclass(cls, Static):
        return _Kind.WRAPPED
    if issubclass(cls, np.ndarray | np.generic):
        return _Kind.NUMPY
    if issubclass(cls, bool | str):
        return _Kind.STATIC
    if cls in (int, float, complex):
        return _Kind.SCALAR
    if issubclass(cls, jax.Array):
        return _Kind.ARRAY
    return (
        _Kind.STATIC
        if any("__call__" in base.__dict__ for base in cls.__mro__)
        else _Kind.REFUSED
    )


_kind: Callable[[Any], _Kind] = lru_cache(maxsize=1024)(_kind_of_type)


def split(
    args: tuple[Any, ...], kwargs: dict[str, Any], is_ref: Callable[[Any], bool]
) -> Split:
    """Take the arguments of a call apart into refs, constants and a template.

    Writable numpy arrays are copied: what the caller writes into one afterwards must
    not reach a computation that runs later.

    Raises:
        ContextError: an argument is a tracer of JAX.
        JdagError: an argument is nothing that a call takes.
    """
    leaves, treedef = jtu.tree_flatten((args, kwargs))
    parts = _Parts()
    position = 0
    for place, leaf in enumerate(leaves):
        if is_ref(leaf):
            parts.refs.append((position, leaf))
        else:
            kind = _kind(type(leaf))
            if kind is _Kind.STATIC or kind is _Kind.WRAPPED:
                wrapped = kind is _Kind.WRAPPED
                parts.leaves.append(leaf.value if wrapped else leaf)
                key = leaf.key if wrapped else value_key(leaf)
                parts.statics.append((place, key))
                continue
            if kind is _Kind.TRACER or kind is _Kind.REFUSED:
                raise _refusal(leaf, _place_name(args, kwargs, place))
            parts.constants.append((position, frozen(leaf)))
        parts.leaves.append(HOLE)
        position += 1
    template = Template(treedef, parts.leaves, tuple(parts.statics))
    return Split(tuple(parts.refs), tuple(parts.constants), template)


def frozen(value: Any) -> Any:
    """Return the value, or a read-only copy where it is a numpy array that can change.

    Raises:
        JdagError: a numpy array whose elements are not numbers or bools.
    """
    if not isinstance(value, np.ndarray | np.generic):
        return value
    if value.dtype.kind not in "biufcV":  # V: bfloat16 and its kin.
        raise JdagError(
            f"a numpy array of dtype {value.dtype} cannot be computed with; "
            "dtypes are bool, integers, floats and complex"
        )
    if isinstance(value, np.ndarray) and (
        value.flags.writeable or value.base is not None
    ):
        value = value.copy()
        value.flags.writeable = False
    return value


def _place_name(args: tuple[Any, ...], kwargs: dict[str, Any], place: int) -> str:
    path = jtu.tree_flatten_with_path((args, kwargs))[0][place][0]
    first = (
        f"argument {path[1].idx}" if path[0].idx == 0 else f"argument {path[1].key!r}"
    )
    return first + jtu.keystr(path[2:])


def _refusal(leaf: Any, where: str) -> JdagError:
    if _kind(type(leaf)) is _Kind.TRACER:
        return ContextError(
            f"a tracer as {where} ({type(leaf).__name__}): jdag runs outside of jit, "
            "vmap and grad; put these inside of the function that is called, and use "
            "ctx.backward or jdag.value_and_grad for gradients"
        )
    return JdagError(
        f"{where} is a {type(leaf).__name__}, which a call does not take; "
        f"it takes pytrees of {ALLOWED}"
    )


def flatten(
    tree: Any, is_ref: Callable[[Any], bool] | None = None
) -> tuple[list[Any], Any]:
    """Return the leaves of a pytree in JAX's order, and its treedef.

    With `is_ref`, every leaf has to be a ref.

    Raises:
        JdagError: a leaf is not a ref; its path and type are named.
    """
    leaves, treedef = jtu.tree_flatten(tree)
    if is_ref is not None:
        for place, leaf in enumerate(leaves):
            if not is_ref(leaf):
                path = jtu.keystr(jtu.tree_flatten_with_path(tree)[0][place][0])
                raise JdagError(
                    f"{f'leaf {path}' if path else 'the value'} is a "
                    f"{type(leaf).__name__}; it takes a ref, or a pytree of refs"
                )
    return leaves, treedef


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    """Return the pytree that `treedef` describes, with these leaves."""
    return jtu.tree_unflatten(treedef, leaves)


def map_leaves(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Return the pytree of `fn(leaf, *leaves of rest)`; all have one structure."""
    return jtu.tree_map(fn, tree, *rest)


def paths(tree: Any) -> list[str]:
    """Return the name of each leaf, such as `['w'][0]`, in JAX's order."""
    return [jtu.keystr(path) for path, _ in jtu.tree_flatten_with_path(tree)[0]]
