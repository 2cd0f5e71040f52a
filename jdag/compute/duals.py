"""Duals: values with a tangent, which is how they change along a direction.

A dual goes wherever its primal would: it is held under one key, travels in one slot,
adds up with arrays and other duals. What has no tangent (a constant, an integer, what
no direction reaches) is no dual but an array, and its tangent is zero: no array is made
for that. So a run is of second order where its leaves are duals, and nowhere else.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.tree_util as jtu

from jdag.engine.functions import remote, unjitted
from jdag.errors import JdagError, text_of

# What JAX says where there is no jvp: of custom_vjp, callbacks, primitives.
_NO_JVP = ("forward-mode", "do not support JVP", "Differentiation rule for")


class Dual:
    """An array and its tangent, of the same shape and dtype; to JAX a pytree of both.

    It is no array itself: what takes it for one fails.
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


_is_array_type: Callable[[Any], bool] = lru_cache(maxsize=1024)(
    lambda kind: issubclass(kind, jax.Array)
)


def is_array(value: Any) -> bool:
    """Tell whether a value is an array of JAX; no tracer is.

    `isinstance` says of tracers too that they are a `jax.Array`, and takes five times
    as long.
    """
    return _is_array_type(type(value))


def are_arrays(values: Iterable[Any]) -> bool:
    """Tell whether all values are arrays of JAX, as `is_array` would of each."""
    return all(map(_is_array_type, dict.fromkeys(map(type, values))))


def is_dual(value: object) -> bool:
    """Tell whether a value has a tangent."""
    return value.__class__ is Dual


def any_dual(values: Iterable[Any]) -> bool:
    """Tell whether one of the values has a tangent."""
    return any([value.__class__ is Dual for value in values])


def primal_of(value: Any) -> Any:
    """Return a value without its tangent."""
    return value.primal if value.__class__ is Dual else value


@unjitted  # What jit returns it copies, and these are arrays that are held already.
@remote
def seeded(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Dual]:
    """Return duals of these primals and tangents."""
    return list(map(Dual, primals, tangents))


def along(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the jvp of a function: it takes and gives pytrees with duals in them.

    What is no dual is a constant. Outputs that can have a tangent are duals, the others
    (integers, bools, keys) arrays. `name` is that of the user's function, for profiles.
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
    """Raise an error that names the function, if JAX says that it has no jvp."""
    said = text_of(error)
    if any(words in said for words in _NO_JVP):
        raise JdagError(
            f"{name} has no second derivative by jdag.hvp, which differentiates its "
            f"vjp forward: {said.splitlines()[0]} A custom_vjp whose rules call no "
            "custom_vjp function, not even itself, has one; so has a custom_jvp, "
            "around a callback too"
        ) from error
