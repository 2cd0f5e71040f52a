"""What a call runs: a function, or a callable pytree as an argument of its own call."""

from collections.abc import Callable
from enum import Enum
from functools import partial
from types import FunctionType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any

import jax.tree_util as jtu

from jdag.compute.fingerprint import KEYED
from jdag.errors import JdagError, kind_of
from jdag.functions import Applied, is_program, is_unjitted, name_of


def called(
    fn: Any, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
    """Return what is called in place of `fn`, with which arguments, how many added.

    A callable pytree, such as a module, is an argument of its own call, so that the
    arrays and refs in it are arguments as any others; a method of one likewise.

    Raises:
        JdagError: it cannot be called; or it is a method of an object, or a callable
            object, that is neither a pytree nor hashable by value.
    """
    if type(fn) is FunctionType:
        return fn, args, 0
    if not callable(fn):
        raise JdagError(f"a call takes a function, not {fn!r}")
    is_method = type(fn) is MethodType
    is_node = _is_node(fn.__self__ if is_method else fn)
    if not is_node or isinstance(fn, partial):
        _refuse_mutable(fn)
    if not is_node:
        return fn, args, 0
    if is_method:
        return fn.__func__, (fn.__self__, *args), 1
    return Applied(fn), (fn, *args), 1


def _is_node(value: Any) -> bool:
    return type(value) not in (tuple, list, dict) and not jtu.all_leaves((value,))


def _refuse_mutable(fn: Any) -> None:
    """Raise JdagError if what `fn` reads may change unseen by `key_of`.

    What runs as Python each time, programs and unjitted functions, may read anything.
    """
    if is_program(fn) or is_unjitted(fn):
        return
    while isinstance(fn, partial):
        fn = fn.func
    owner = getattr(fn, "__self__", fn)
    if not _is_by_value(owner):
        raise JdagError(
            f"{name_of(fn)} reads {kind_of(owner)}, which could change between two "
            "calls without notice, as it is neither a pytree nor hashable by value "
            "(by its own __eq__ and __hash__): make it a pytree "
            "(jax.tree_util.register_dataclass, equinox.Module), not in a partial, or "
            "pass what it reads as arguments"
        )


def _is_by_value(owner: Any) -> bool:
    kind: Any = type(owner)
    if isinstance(owner, type | Enum | ModuleType | None) or hasattr(kind, KEYED):
        return True
    # Functions implemented in C, and what JAX makes: jax.jit, jax.custom_vjp, arrays.
    in_c = isinstance(kind.__call__, WrapperDescriptorType)
    if in_c or kind.__module__.partition(".")[0] in ("jax", "jaxlib"):
        return True
    if kind.__eq__ is object.__eq__ or kind.__hash__ in (object.__hash__, None):
        return False
    try:
        hash(owner)
    except TypeError:
        return _is_node(owner)  # A module in a partial: its arrays have no hash.
    return True
