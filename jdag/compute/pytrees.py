"""Flattening of arguments into refs, constants and statics (parts of the function)."""

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
from jdag.compute.configuration import Configuration
from jdag.compute.fingerprint import key_of
from jdag.compute.refs import RefBase
from jdag.engine.arrays import HOLE
from jdag.engine.functions import TAKEN, call_site
from jdag.errors import ContextError, JdagError, is_deeper, kind_of, repr_of

ALLOWED = (
    "refs, JAX and numpy arrays, Python int, float and complex, and, as static parts "
    "of the function: str, bool, None, functions, and values in jdag.static(value)"
)

NUMBERS = (bool, int, float, complex)  # Python's numbers; numpy's are arrays.
NO_LEAF = (
    "{0!r} is a Python number inside a pytree, so it is a constant without a gradient, "
    "which optimizers do not change; write jnp.asarray({0!r}) for a leaf"
)
_warned: list[str] = []  # The warning about a number inside a pytree, once issued.


# JAX flattens pytrees recursively. On a stack overflow it does not restore the
# recursion depth, so all later code has less stack.
_DEPTH_MAX = 150
_one_level: Any = jtu.default_registry.flatten_one_level
_flatten: Any = jtu.default_registry.flatten


def _check_depth(tree: Any, what: str) -> None:
    if is_deeper(tree, _DEPTH_MAX, _children):
        raise JdagError(
            f"{what} is a pytree that is nested more than {_DEPTH_MAX} levels deep, or "
            "that contains itself"
        )


def _children(nodes: list[Any]) -> list[Any]:
    children: list[Any] = []
    for node in nodes:
        kind = type(node)
        if kind is tuple or kind is list:
            children += node
        elif kind is dict:
            children += node.values()
        elif (parts := _one_level(node)) is not None:
            children += parts[0]
    return children


class Static:
    """A hashable value that is a constant of the function, such as an axis or a shape.

    A call with another value traces the function again. True and 1 are different
    values, as are 0.0 and -0.0.

    Raises:
        JdagError: the value is not hashable, or is a callable that could change.
    """

    __slots__ = ("key", "value")

    def __init__(self, value: Hashable) -> None:
        _check_depth(value, "the argument of jdag.static")
        try:
            hash(value)
        except (TypeError, RecursionError) as error:
            raise JdagError(
                f"jdag.static takes a hashable value, not {repr_of(value)} of type "
                f"{type(value).__name__}; use a tuple in place of a list"
            ) from error
        self.value = value
        self.key = key_of(refuse_mutable(value))

    def __eq__(self, value: object) -> bool:
        return isinstance(value, Static) and self.key == value.key

    def __hash__(self) -> int:
        return hash(self.key)

    def __repr__(self) -> str:
        return f"static({self.value!r})"


static = Static


class Form:
    """A pytree without its arrays or refs: its `treedef`, and its other `leaves`.

    `HOLE` replaces each array. Equal forms have equal treedefs and holes. The other
    leaves are not compared, so that a gradient, which has None there, has the form of
    its pytree.
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
        return sum(leaf is HOLE for leaf in self.leaves)

    @property
    def bare(self) -> "Form":
        leaves = [HOLE if leaf is HOLE else None for leaf in self.leaves]
        return Form(self.treedef, leaves)

    def rebuild(self, values: Sequence[Any]) -> Any:
        rest = iter(values)
        leaves = [next(rest) if leaf is HOLE else leaf for leaf in self.leaves]
        assert next(rest, HOLE) is HOLE, f"more values than holes: {len(values)}"
        return jtu.tree_unflatten(self.treedef, leaves)

    def __eq__(self, form: object) -> bool:
        return isinstance(form, Form) and self.key == form.key

    def __hash__(self) -> int:
        return self._hash

    def __str__(self) -> str:
        return str(self.treedef)


class Template(Form):
    """The form of arguments (args, kwargs). Its equality also compares statics.

    The first `own` arguments are the function itself.
    """

    __slots__ = ("own",)

    def __init__(
        self, treedef: Any, leaves: Sequence[Any], key: Hashable, own: int
    ) -> None:
        numbers = _numbers(treedef) if _has_data(treedef) else None
        super().__init__(treedef, leaves, (treedef, numbers, key))
        self.own = own

    def name(self, position: int) -> str:
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
    """Return the numbers in nodes' data, where a treedef's `==` equates True and 1."""
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
        return len(self.refs) + len(self.constants)

    def filled(self, values: Iterable[tuple[int, Any]]) -> Any:
        leaves: list[Any] = [None] * self.size
        for position, value in values:
            leaves[position] = value
        return self.template.rebuild(leaves)

    def aval(
        self, position: int, value: Any, configured: Configuration | None = None
    ) -> Aval:
        try:
            return aval_of(value, configured)
        except JdagError as error:
            where = self.template.name(position)
            raise JdagError(f"{where}: {error}") from None


class _Kind(Enum):
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
    default = _Kind.STATIC if is_called else _Kind.REFUSED
    return next((kind for kind, base in kinds if issubclass(cls, base)), default)


_kind: Callable[[Any], _Kind] = lru_cache(maxsize=1024)(_kind_of_type)


def split(
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    is_ref: Callable[[Any], bool],
    own: int = 0,
) -> Split:
    """Flatten the arguments of a call into refs, constants and a template.

    Writable numpy arrays are copied, so that later writes by the caller do not change a
    later computation. The first `own` arguments are the function itself; error texts
    number the arguments after these.
    """
    is_flat = not kwargs and all(map(_is_leaf, map(type, args)))
    treedef = None
    try:
        if is_flat:
            leaves = list(args)
        else:
            leaves, treedef = flatten((args, kwargs))
    except JdagError:  # Find the refused argument.
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
        shared = None if statics else template_of_arrays(treedef, own)
        template = shared or Template(treedef, leaves, tuple(statics), own)
    return Split(tuple(refs), tuple(constants), template)


@lru_cache(maxsize=1024)
def _is_leaf(kind: type) -> bool:
    is_plain = kind in (np.ndarray, int, float, complex)
    return is_plain or issubclass(kind, RefBase | jax.Array)


@lru_cache(maxsize=1024)
def _flat_template(size: int, own: int) -> Any:
    return template_of_arrays(flatten(((0,) * size, {}))[1], own)


@lru_cache(maxsize=4096)
def template_of_arrays(treedef: Any, own: int) -> Template | None:
    """Return a template without statics; None if equal treedefs may differ in data."""
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
            f"{where} is a tracer ({type(leaf).__name__}): jdag runs outside of jit, "
            "vmap and grad; apply these inside of the called function, and use "
            "ctx.backward or jdag.value_and_grad for gradients"
        )
    takes = getattr(type(leaf), TAKEN, f"it takes pytrees of {ALLOWED}")
    return JdagError(f"{where} is {kind_of(leaf)}, which no call accepts; {takes}")


def argument_numbers(argnums: Any, count: int) -> tuple[int, ...]:
    numbers = argnums if isinstance(argnums, tuple | list) else (argnums,)
    for number in numbers:
        if type(number) is not int:
            raise JdagError(f"argnums={argnums!r}: expected an int or a tuple of ints")
        if not -count <= number < count:
            allowed = f"{-count} to {count - 1}" if count else "none"
            raise JdagError(
                f"argnums={argnums!r} with {count} arguments after the context: "
                f"expected {allowed}"
            )
    normalized = tuple([number % count for number in numbers])
    if len(set(normalized)) < len(normalized):
        raise JdagError(f"argnums={argnums!r} names an argument twice; list each once")
    return normalized


def flatten(
    tree: Any, is_leaf: Callable[[Any], bool] | None = None, what: str = "this"
) -> tuple[list[Any], Any]:
    """Return the leaves in JAX's order and the treedef; errors name the tree `what`."""
    try:
        _check_depth(tree, what)
        leaves, treedef = _flatten(tree, is_leaf)
    except ValueError as error:  # Dicts with keys of several types.
        why = f" {error.__cause__}" if error.__cause__ else ""
        raise JdagError(f"{what} is not a pytree of JAX: {error}{why}") from None
    return leaves, treedef


def flatten_refs(tree: Any, is_ref: Callable[[Any], bool]) -> tuple[list[Any], Form]:
    """Return a pytree's refs and form. If it has refs, it may also have constants."""
    leaves, treedef = flatten(tree, _is_none)
    refs = [leaf for leaf in leaves if is_ref(leaf)]
    for index, leaf in enumerate(leaves):
        if not (is_ref(leaf) or leaf is None or (refs and is_constant(leaf))):
            flat = jtu.tree_flatten_with_path(tree, is_leaf=_is_none)[0]
            path = jtu.keystr(flat[index][0])
            raise JdagError(
                f"{f'leaf {path}' if path else 'the value'} is {kind_of(leaf)}; "
                "expected a ref, or a pytree of refs"
            )
    return refs, Form(treedef, [HOLE if is_ref(leaf) else leaf for leaf in leaves])


def _is_none(leaf: object) -> bool:
    return leaf is None


def is_static(leaf: Any) -> bool:
    return _kind(type(leaf)) in (_Kind.STATIC, _Kind.WRAPPED)


def is_constant(leaf: Any) -> bool:
    return is_static(leaf) or _kind(type(leaf)) is _Kind.SCALAR


def indices_of_arrays(what: str, tree: Any, leaves: Sequence[Any]) -> list[int]:
    """Return the indices of arrays and refs; for a tree that is a Python number, [0].

    The first Python number inside a pytree in a process causes a warning, in which
    `what` names the tree.
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
    float0 = jax.dtypes.float0
    if abstract:
        return jax.ShapeDtypeStruct(aval.shape, float0)
    return np.zeros(aval.shape, float0)


def unflatten(treedef: Any, leaves: Sequence[Any]) -> Any:
    if isinstance(treedef, Form):
        return treedef.rebuild(leaves)
    return treedef.unflatten(leaves)


def paths(tree: Any, is_ref: Callable[[Any], bool] | None = None) -> list[str]:
    """Return the path of each leaf, such as `['w'][0]`; with `is_ref`, only of refs."""
    leaves = jtu.tree_flatten_with_path(tree)[0]
    return [jtu.keystr(path) for path, leaf in leaves if is_ref is None or is_ref(leaf)]
