"""Functions of calls. A callable pytree also becomes an argument of its call."""

from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from types import FunctionType, MethodType, ModuleType, WrapperDescriptorType
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from jdag.compute.fingerprint import KEYED, MUTABLE
from jdag.engine.functions import Applied, code_of, is_program, is_unjitted, name_of
from jdag.errors import JdagError, kind_of

JITTED: Any = type(jax.jit(abs))
_FIXED = (type, Enum, ModuleType, FunctionType, type(None))


def called(
    fn: Any, args: tuple[Any, ...]
) -> tuple[Callable[..., Any], tuple[Any, ...], int]:
    """Return the function to call for `fn`, its arguments, and how many were added.

    A callable pytree, such as a module, or the object of a method becomes an argument
    of the call, so that its arrays and refs are ordinary arguments.
    """
    if type(fn.__wrapped__ if type(fn) is JITTED else fn) is FunctionType:
        return fn, args, 0
    if not callable(fn):
        raise JdagError(f"a call takes a function, not {fn!r}")
    is_method = type(fn) is MethodType
    is_node = _is_node(fn.__self__ if is_method else fn)
    if not is_node or isinstance(fn, partial):
        refuse_mutable(fn)
    if not is_node:
        return fn, args, 0
    if is_method:
        return fn.__func__, (fn.__self__, *args), 1
    applied = Applied(name_of(fn), is_unjitted(fn), is_program(fn), code_of(fn))
    return applied, (fn, *args), 1


def _is_node(value: Any) -> bool:
    return type(value) not in (tuple, list, dict) and not jtu.all_leaves((value,))


def refuse_mutable(fn: Any) -> Any:
    """Return `fn`; raise JdagError if its state could change while its key does not.

    Programs and unjitted functions run as Python in each call and may hold any object.
    """
    runs_as_python = is_program(fn) or is_unjitted(fn)
    if not callable(fn) or type(fn) is FunctionType or runs_as_python:
        return fn
    pending, seen = [fn], {}
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        parts = _keyed_parts(value)
        if parts is None:
            raise JdagError(
                f"{name_of(fn)} reads {kind_of(value)}, which could change between two "
                "calls without notice: it is neither a pytree nor hashable by value "
                "(with its own __eq__ and __hash__, also of its fields). Make it a "
                "pytree (jax.tree_util.register_dataclass, equinox.Module) outside of "
                "any partial, or pass the values that it reads as arguments"
            )
        pending.extend(parts)
    return fn


def _keyed_parts(value: Any) -> Iterable[Any] | None:
    """Return the parts of a value that its key includes; None if others can change."""
    kind: Any = type(value)
    if isinstance(value, _FIXED) or hasattr(kind, KEYED):
        return ()
    if isinstance(value, partial):
        return (value.func, *value.args, *value.keywords.values())
    owner: Any = getattr(value, "__self__", None)
    if owner is not None:
        kind = type(owner)
        return None if kind in MUTABLE else (owner,)
    if kind in MUTABLE or isinstance(value, tuple):
        return value.values() if kind is dict else () if kind is np.ndarray else value
    # Functions in C; objects of JAX and optax (jitted functions, arrays, MultiSteps).
    in_c = callable(value) and isinstance(kind.__call__, WrapperDescriptorType)
    if in_c or kind.__module__.partition(".")[0] in ("jax", "jaxlib", "optax"):
        return [value.__wrapped__] if hasattr(value, "__wrapped__") else ()
    if kind.__eq__ is object.__eq__ or kind.__hash__ in (object.__hash__, None):
        return () if kind is object else None
    try:
        hash(value)
    except TypeError:  # A module in a partial has no hash, since arrays have none.
        return () if _is_node(value) else None
    return [getattr(value, name) for name in getattr(kind, "__dataclass_fields__", ())]
