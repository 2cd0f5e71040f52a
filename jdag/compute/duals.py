"""Duals: values with a tangent, their derivative along a direction.

A dual can be used wherever its primal can: it is held under one key, travels in one
slot, and adds to arrays and other duals. A value without a tangent (a constant, an
integer, anything that no direction reaches) is an array; its tangent is zero and is
never materialized. So a run is of second order only where its leaves are duals.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.tree_util as jtu

from jdag.engine.functions import remote, unjitted
from jdag.errors import JdagError, text_of

# Parts of JAX's errors where a jvp is missing: custom_vjp, callbacks, primitives.
_NO_JVP = ("forward-mode", "do not support JVP", "Differentiation rule for")


class Dual:
    """An array and its tangent, of the same shape and dtype; to JAX a pytree of both.

    It is not an array itself: code that treats it as one fails.
    """

    __slots__ = ("primal", "tangent")

    def __init__(self, primal: Any, tangent: Any) -> None:
        self.primal = primal
        self.tangent = tangent

    @property
    def keeps(self) -> tuple[Any, Any]:
        """The arrays that it keeps alive."""
        return (self.primal, self.tangent)

    def __add__(self, other: Any) -> "Dual":
        if other.__class__ is Dual:
            return Dual(self.primal + other.primal, self.tangent + other.tangent)
        return Dual(self.primal + other, self.tangent)

    def __radd__(self, other: Any) -> "Dual":
        return Dual(other + self.primal, self.tangent)

    def __repr__(self) -> str:
        return f"Dual({self.primal!r}, {self.tangent!r})"


jtu.register_pytree_node(
    Dual, lambda dual: (dual.keeps, None), lambda _, children: Dual(*children)
)


# Of a value's class; a call of it that was made before runs no Python.
is_array_type: Callable[[Any], bool] = lru_cache(maxsize=1024)(
    lambda kind: issubclass(kind, jax.Array)
)


def is_array(value: Any) -> bool:
    """Tell whether a value is a JAX array; a tracer is not.

    `isinstance(value, jax.Array)` holds for tracers too, and takes five times as long.
    """
    return is_array_type(type(value))


def are_arrays(values: Iterable[Any]) -> bool:
    """Tell whether all values are JAX arrays, as in `is_array`."""
    return all(map(is_array_type, dict.fromkeys(map(type, values))))


def is_dual(value: object) -> bool:
    """Tell whether a value has a tangent."""
    return value.__class__ is Dual


def any_dual(values: Iterable[Any]) -> bool:
    """Tell whether one of the values has a tangent."""
    return any([value.__class__ is Dual for value in values])


def primal_of(value: Any) -> Any:
    """Return a value without its tangent."""
    return value.primal if value.__class__ is Dual else value


# jit would copy these arrays, which are already held.
@unjitted(shapes=lambda *both: list(map(Dual, *both)))
@remote
def seeded(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Dual]:
    """Return duals of these primals and tangents."""
    return list(map(Dual, primals, tangents))


def along(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the jvp of a function, on pytrees that contain duals.

    Values that are not duals are constants. Outputs that can have a tangent are duals,
    the others (integers, bools, keys) arrays. `name` is the user's function, for
    profiles.
    """

    def jvp(*args: Any) -> Any:
        leaves, treedef = jtu.tree_flatten(args, is_leaf=is_dual)
        indices = [index for index, leaf in enumerate(leaves) if is_dual(leaf)]

        def moving(*primals: Any) -> Any:
            values = list(leaves)
            for index, primal in zip(indices, primals, strict=True):
                values[index] = primal
            return fn(*jtu.tree_unflatten(treedef, values))

        primals = [leaves[index].primal for index in indices]
        tangents = [leaves[index].tangent for index in indices]
        return jtu.tree_map(_joined, *jax.jvp(moving, primals, tangents))

    jvp.__name__ = f"jvp_{name.rpartition(':')[2]}"
    jvp.__qualname__ = jvp.__name__
    return jvp


def _joined(primal: Any, tangent: Any) -> Any:
    return primal if tangent.dtype == jax.dtypes.float0 else Dual(primal, tangent)


def refuse_no_jvp(name: str, error: Exception) -> None:
    """Raise an error that names the function, if JAX reports a missing jvp."""
    said = text_of(error)
    if any(words in said for words in _NO_JVP):
        raise JdagError(
            f"{name} has no second derivative by jdag.hvp, which differentiates its "
            f"vjp forward: {said.splitlines()[0]} A custom_vjp whose rules call no "
            "custom_vjp function, not even itself, has one; so has a custom_jvp, "
            "around a callback too"
        ) from error
