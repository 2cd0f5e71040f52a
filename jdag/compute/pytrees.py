"""Flattening of arguments into refs, constants, and statics (part of the function)."""

import warnings
from collections.abc import Callable, Hashable, Iterable, Sequence
from enum import Enum
from functools import lru_cache
from numbers import Number
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np
from msgspec import Struct

from jdag.compute.avals import Aval, aval_of, frozen
from jdag.compute.callables import refuse_mutable
from jdag.compute.fingerprint import key_of
from jdag.compute.refs import RefBase
from jdag.engine.arrays import HOLE
from jdag.engine.functions import TAKEN, call_site
from jdag.errors import ContextError, JdagError, is_deeper, kind_of, repr_of

ALLOWED = (
    "refs, JAX and numpy arrays, Python int, float and complex, and, as part of the "
    "function: str, bool, None, functions, and what jdag.static(value) wraps"
)

NUMBERS = (bool, int, float, complex)  # Python's; those of numpy are arrays.
NO_LEAF = (
    "{0!r} is a Python number inside a pytree, and so a constant: it has no gradient, "
    "and no optimizer changes it; write jnp.asarray({0!r}) for a leaf"
)
_warned: list[str] = []  # The warning of a number inside a pytree, once given.


# JAX flattens pytrees recursively. If the stack is too small it does not give back the
# depth it has used, so everything that runs afterwards has less.
_DEPTH_MAX = 150
_one_level: Any = jtu.default_registry.flatten_one_level
_flatten: Any = jtu.default_registry.flatten


def _check_depth(tree: Any, what: str) -> None:
    """Raise JdagError if a pytree, called `what`, is too deep or contains itself."""
    if is_deeper(tree, _DEPTH_MAX, _children):
        raise JdagError(
            f"{what} is a pytree that is nested more than {_DEPTH_MAX} deep, or that "
            "contains itself"
        )


def _children(nodes: list[Any]) -> list[Any]:
    """The children of nodes; a leaf has none."""
    found: list[Any] = []
    for node in nodes:
        kind = type(node)
        if kind is tuple or kind is list:
            found += node
        elif kind is dict:
            found += node.values()
        elif (parts := _one_level(node)) is not None:
            found += parts[0]
    return found


class Static:
    """A hashable value that is part of the function, not traced: an axis, a shape.

    Equal statics have equal values of equal types: True is not 1, 0.0 is not -0.0.

    Raises:
        JdagError: the value cannot be hashed, or is a callable that could change.
    """

    __slots__ = ("key", "value")

    def __init__(self, value: Hashable) -> None:
        _check_depth(value, "what jdag.static takes")
        try:
            hash(value)
        except (TypeError, RecursionError) as error:
            raise JdagError(
                f"jdag.static takes a hashable value, not {repr_of(value)} of type "
                f"{type(value).__name__}; a tuple would be right for a list"
            ) from error
        self.value = value
        self.key = key_of(refuse_mutable(value))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Static) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"static({self.value!r})"


static = Static


class Form:
    """A pytree without its arrays, or refs: its `treedef`, and its other `leaves`.

    `HOLE` is in the place of each array. Equal forms have holes at the same places. The
    other leaves are not compared, so that a gradient, which has None there, has the
    form of its pytree.
    """

    __slots__ = ("_hash", "key", "leaves", "treedef")

    def __init__(
        self, treedef: Any, leaves: Sequence[Any], key: Hashable = None
    ) -> None:
        self.treedef = treedef
        self.leaves = tuple(leaves)
        holes = tuple([leaf is HOLE for leaf in leaves])
        self.key = (treedef, holes) if key is None else key
        self._hash = hash(self.key)

    @property
    def num_leaves(self) -> int:
        """Number of holes."""
        return sum(leaf is HOLE for leaf in self.leaves)

    @property
    def bare(self) -> "Form":
        """The same form with None in place of all leaves but holes."""
        leaves = [HOLE if leaf is HOLE else None for leaf in self.leaves]
        return Form(self.treedef, leaves)

    def rebuild(self, values: Sequence[Any]) -> Any:
        """Return the pytree with these values in its holes, in order."""
        rest = iter(values)
        leaves = [next(rest) if leaf is HOLE else leaf for leaf in self.leaves]
        assert next(rest, HOLE) is HOLE, f"more values than holes: {len(values)}"
        return jtu.tree_unflatten(self.treedef, leaves)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Form) and self.key == other.key

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return str(self.treedef)


class Template(Form):
    """The form of arguments (args, kwargs), which also compares statics.

    `own` is how many of the first arguments are the function itself.
    """

    __slots__ = ("own",)

    def __init__(
        self, treedef: Any, leaves: Sequence[Any], key: Hashable, own: int
    ) -> None:
        numbers = _numbers(treedef) if _has_data(treedef) else None
        super().__init__(treedef, leaves, (treedef, numbers, key))
        self.own = own

    def name(self, position: int) -> str:
        """The name of the argument at a position in errors: `argument 1['w']`."""
        holes = [index for index, leaf in enumerate(self.leaves) if leaf is HOLE]
        args, kwargs = jtu.tree_unflatten(self.treedef, range(len(self.leaves)))
        return _argument_name(args, kwargs, holes[position], self.own)


@lru_cache(maxsize=4096)
def _has_data(treedef: Any) -> bool:
    node = treedef.node_data()
    if node is None:
        return False
    kind, data = node
    plain = kind in (tuple, list, type(None)) or (
        kind is dict and all(type(key) is str for key in data)
    )
    return not plain or any(map(_has_data, treedef.children()))


def _numbers(treedef: Any) -> Hashable:
    """The numbers in the data of nodes, since a treedef's `==` equates True and 1.

    Such data are static fields of users' nodes, and keys of dicts.
    """
    node = treedef.node_data()
    if node is None:
        return None
    return (_number_key(node[1]), tuple(map(_numbers, treedef.children())))


def _number_key(data: Any) -> Hashable:
    if isinstance(data, Number):
        return (type(data), repr(data))
    if isinstance(data, dict):
        return _number_key(tuple(data.items()))
    if isinstance(data, tuple | list):
        return tuple(map(_number_key, data))
    return None


def template_of(treedef: Any, leaves: Sequence[Any], own: int) -> Template:
    """Return the template with these leaves: `HOLE`, or statics."""
    statics = [(p, key_of(o)) for p, o in enumerate(leaves) if o is not HOLE]
    known = None if statics else template_of_arrays(treedef, own)
    return known or Template(treedef, leaves, tuple(statics), own)


class Split(Struct, frozen=True):
    """The flattened arguments of a call.

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

    def filled(self, values: Iterable[tuple[int, Any]]) -> Any:
        """Return args and kwargs with these values at their positions."""
        found: list[Any] = [None] * self.size
        for position, value in values:
            found[position] = value
        return self.template.rebuild(found)

    def aval(self, position: int, value: Any) -> Aval:
        """Return the abstract value of a constant."""
        try:
            return aval_of(value)
        except JdagError as error:
            where = self.template.name(position)
            raise JdagError(f"{where}: {error}") from None


class _Kind(Enum):
    """How a call treats leaves of a type."""

    SCALAR = 0
    ARRAY = 1
    STATIC = 2
    WRAPPED = 3
    TRACER = 4
    REFUSED = 5


def _kind_of_type(cls: type) -> _Kind:
    kinds: tuple[tuple[_Kind, Any], ...] = (
        (_Kind.TRACER, jax.core.Tracer),
        (_Kind.WRAPPED, Static),
        (_Kind.ARRAY, np.ndarray | np.generic),
        (_Kind.STATIC, bool | str),
        (_Kind.ARRAY, jax.Array),
    )
    if cls in (int, float, complex):
        return _Kind.SCALAR
    is_called = any("__call__" in base.__dict__ for base in cls.__mro__)
    other = _Kind.STATIC if is_called else _Kind.REFUSED
    return next((kind for kind, base in kinds if issubclass(cls, base)), other)


_kind: Callable[[Any], _Kind] = lru_cache(maxsize=1024)(_kind_of_type)


def split(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_ref: Callable[[Any], bool],
    own: int = 0,
) -> Split:
    """Flatten the arguments of a call into refs, constants and a template.

    Writable numpy arrays are copied, so that later writes by the caller do not reach a
    computation that runs later. `own` is how many of the first arguments are the
    function itself; it is used only in errors.
    """
    is_flat = not kwargs and all(map(_is_leaf, map(type, args)))
    treedef = None
    try:
        if is_flat:
            leaves = list(args)
        else:
            leaves, treedef = flatten((args, kwargs))
    except JdagError:  # Find which argument is refused.
        for name, value in (*enumerate(args, -own), *kwargs.items()):
            flatten(value, what=f"argument {name!r}")
        raise
    refs: list[tuple[int, Any]] = []
    constants: list[tuple[int, Any]] = []
    statics: list[tuple[int, Hashable]] = []
    position = 0
    for index, leaf in enumerate(leaves):
        if is_ref(leaf):
            refs.append((position, leaf))
            leaves[index] = HOLE
            position += 1
            continue
        kind = _kind(type(leaf))
        if kind is _Kind.STATIC:
            statics.append((index, key_of(refuse_mutable(leaf))))
            continue
        elif kind is _Kind.WRAPPED:
            statics.append((index, leaf.key))
            leaves[index] = leaf.value
            continue
        elif kind is _Kind.TRACER or kind is _Kind.REFUSED:
            raise _refusal(leaf, _argument_name(args, kwargs, index, own))
        else:
            try:
                constants.append((position, frozen(leaf)))
            except JdagError as error:
                where = _argument_name(args, kwargs, index, own)
                raise JdagError(f"{where}: {error}") from None
        leaves[index] = HOLE
        position += 1
    if is_flat:
        template: Template = _flat_template(position, own)
    else:
        known = None if statics else template_of_arrays(treedef, own)
        template = known or Template(treedef, leaves, tuple(statics), own)
    return Split(tuple(refs), tuple(constants), template)


@lru_cache(maxsize=1024)
def _is_leaf(kind: type) -> bool:
    """Tell whether values of a type are leaves of any pytree, and no statics."""
    is_plain = kind in (np.ndarray, int, float, complex)
    return is_plain or issubclass(kind, RefBase | jax.Array)


@lru_cache(maxsize=1024)
def _flat_template(size: int, own: int) -> Any:
    """Return the template of so many arguments that are leaves."""
    return template_of_arrays(flatten(((0,) * size, {}))[1], own)


@lru_cache(maxsize=4096)
def template_of_arrays(treedef: Any, own: int) -> Template | None:
    """Return the template without statics; None where equal structures may differ."""
    if _has_data(treedef):
        return None
    return Template(treedef, (HOLE,) * treedef.num_leaves, (), own)


def _argument_name(
    args: tuple[Any, ...], kwargs: dict[str, Any], index: int, own: int
) -> str:
    path = jtu.tree_flatten_with_path((args, kwargs))[0][index][0]
    if path[0].idx == 1:
        first = f"argument {path[1].key!r}"
    elif path[1].idx < own:
        first = "the function's "
    else:
        first = f"argument {path[1].idx - own}"
    return first + jtu.keystr(path[2:])


def _refusal(leaf: Any, where: str) -> JdagError:
    if _kind(type(leaf)) is _Kind.TRACER:
        return ContextError(
            f"a tracer as {where} ({type(leaf).__name__}): jdag runs outside of jit, "
            "vmap and grad; put these inside of the function that is called, and use "
            "ctx.backward or jdag.value_and_grad for gradients"
        )
    takes = getattr(type(leaf), TAKEN, f"it takes pytrees of {ALLOWED}")
    return JdagError(f"{where} is {kind_of(leaf)}, which a call does not take; {takes}")


def argument_numbers(argnums: Any, count: int) -> tuple[int, ...]:
    """Return which of `count` arguments `argnums` selects; -1 is the last."""
    numbers = argnums if isinstance(argnums, tuple | list) else (argnums,)
    for number in numbers:
        if type(number) is not int:
            raise JdagError(
                f"argnums={argnums!r}: allowed are an int, or a tuple of ints"
            )
        if not -count <= number < count:
            allowed = f"{-count} to {count - 1}" if count else "none"
            raise JdagError(
                f"argnums={argnums!r} with {count} arguments after the context: "
                f"allowed are {allowed}"
            )
    found = tuple([number % count for number in numbers])
    if len(set(found)) < len(found):
        raise JdagError(
            f"argnums={argnums!r} names an argument twice; it takes each once"
        )
    return found


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, what: str = "this"
) -> tuple[list[Any], Any]:
    """Return the leaves of a pytree in JAX's order, and its treedef.

    `is_leaf` stops the traversal; `what` is the name of the tree in errors.
    """
    try:
        _check_depth(tree, what)
        leaves, treedef = _flatten(tree, is_leaf)
    except ValueError as error:  # Dicts with keys of several types.
        why = f" {error.__cause__}" if error.__cause__ else ""
        raise JdagError(f"{what} is no pytree of JAX: {error}{why}") from None
    return leaves, treedef


def flatten_refs(tree: Any, is_ref: Callable[[Any], bool]) -> tuple[list[Any], Form]:
    """Return the refs of a pytree in JAX's order, and its form.

    Other leaves must be None or, beside at least one ref, statics or Python numbers.
    """
    leaves, treedef = flatten(tree, _is_none)
    refs = [leaf for leaf in leaves if is_ref(leaf)]
    for index, leaf in enumerate(leaves):
        if not (is_ref(leaf) or leaf is None or (refs and is_constant(leaf))):
            flat = jtu.tree_flatten_with_path(tree, is_leaf=_is_none)[0]
            path = jtu.keystr(flat[index][0])
            raise JdagError(
                f"{f'leaf {path}' if path else 'the value'} is {kind_of(leaf)}; "
                "it takes a ref, or a pytree of refs"
            )
    return refs, Form(treedef, [HOLE if is_ref(leaf) else leaf for leaf in leaves])


def _is_none(leaf: object) -> bool:
    return leaf is None


def is_static(leaf: Any) -> bool:
    """Tell whether a call treats a leaf as part of the function, not as an array."""
    return _kind(type(leaf)) in (_Kind.STATIC, _Kind.WRAPPED)


def is_constant(leaf: Any) -> bool:
    """Tell whether a leaf inside a pytree is a static or a Python number."""
    return is_static(leaf) or _kind(type(leaf)) is _Kind.SCALAR


def indices_of_arrays(what: str, tree: Any, leaves: Sequence[Any]) -> list[int]:
    """Return which leaves are arrays or refs; a Python number only if it is the tree.

    The first such number inside a pytree in this process warns, naming `what`.
    """
    if type(tree) in NUMBERS:
        return [0]
    for index, leaf in enumerate(leaves):
        if _kind(type(leaf)) is _Kind.SCALAR and not _warned:
            _warned.append(f"{what}, at {paths(tree)[index]}: {NO_LEAF.format(leaf)}")
            site = call_site()
            warnings.warn_explicit(_warned[0], UserWarning, site.file, site.line)
    return [index for index, leaf in enumerate(leaves) if not is_constant(leaf)]


def no_gradient(aval: Aval, abstract: bool) -> Any:
    """Return the gradient of an integer: as in JAX, zeros of float0."""
    float0 = jax.dtypes.float0
    if abstract:
        return jax.ShapeDtypeStruct(aval.shape, float0)
    return np.zeros(aval.shape, float0)


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    """Return the pytree that a treedef or `Form` describes, with these leaves."""
    if isinstance(treedef, Form):
        return treedef.rebuild(leaves)
    return treedef.unflatten(leaves)


def paths(tree: Any, is_ref: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the name of each leaf, such as `['w'][0]`, in JAX's order.

    With `is_ref`, only of refs.
    """
    found = jtu.tree_flatten_with_path(tree)[0]
    return [jtu.keystr(path) for path, leaf in found if is_ref is None or is_ref(leaf)]
