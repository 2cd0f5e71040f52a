"""Duals: values with a tangent, their derivative along a direction.

A dual can be used wherever its primal can: it is stored under one key, sent in one
slot, and can be added to arrays and other duals. A value without a tangent (a constant,
an integer, any value that does not depend on the direction) stays an array; its zero
tangent is not materialized. So a run computes second derivatives only if its leaves are
duals.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.tree_util as jtu
from jax._src.array import ArrayImpl

from jdag.engine.functions import remote, unjitted
from jdag.errors import JdagError, text_of

# Parts of JAX's errors where a jvp is missing: custom_vjp, callbacks, primitives.
_NO_JVP = ("forward-mode", "do not support JVP", "Differentiation rule for")


class Dual:
    """An array and its tangent, of the same shape and dtype, as a pytree of JAX.

    A dual is not an array: code that treats it as an array fails.
    """

    __slots__ = ("primal", "tangent")

    def __init__(self, primal: Any, tangent: Any) -> None:
        self.primal = primal
        self.tangent = tangent

    @property
    def keeps(self) -> tuple[Any, Any]:
        return (self.primal, self.tangent)

    def __add__(self, addend: Any) -> "Dual":
        if addend.__class__ is Dual:
            return Dual(self.primal + addend.primal, self.tangent + addend.tangent)
        return Dual(self.primal + addend, self.tangent)

    def __radd__(self, addend: Any) -> "Dual":
        return Dual(addend + self.primal, self.tangent)

    def __repr__(self) -> str:
        return f"Dual({self.primal!r}, {self.tangent!r})"


jtu.register_pytree_node(
    Dual, lambda dual: (dual.keeps, None), lambda _, children: Dual(*children)
)


JaxArray: Any = ArrayImpl  # The class of arrays that are no keys, for fast checks.

# The argument is the class of a value. Cached calls run no Python code.
is_array_type: Callable[[Any], bool] = lru_cache(maxsize=1024)(
    lambda kind: issubclass(kind, jax.Array)
)


def is_array(value: Any) -> bool:
    """Whether a value is a JAX array and not a tracer.

    `isinstance(value, jax.Array)` is true for tracers, and takes five times as long.
    """
    return is_array_type(type(value))


def are_arrays(values: Iterable[Any]) -> bool:
    return all(map(is_array_type, dict.fromkeys(map(type, values))))


def is_dual(value: object) -> bool:
    return value.__class__ is Dual


def any_dual(values: Iterable[Any]) -> bool:
    return any([value.__class__ is Dual for value in values])


def primal_of(value: Any) -> Any:
    return value.primal if value.__class__ is Dual else value


# Unjitted, since jit would copy these arrays, which are already held.
@unjitted(shapes=lambda *both: list(map(Dual, *both)))
@remote
def seeded(primals: Sequence[Any], tangents: Sequence[Any]) -> list[Dual]:
    return list(map(Dual, primals, tangents))


def jvp_of(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """Return the jvp of a function, on pytrees that contain duals.

    Values that are not duals are constants. Outputs that can have a tangent are duals,
    and other outputs (integers, bools, PRNG keys) are arrays. `name` is that of the
    user's function, for profiles.
    """

    def jvp(*args: Any) -> Any:
        leaves, treedef = jtu.tree_flatten(args, is_leaf=is_dual)
        indices = [index for index, leaf in enumerate(leaves) if is_dual(leaf)]

        def of_primals(*primals: Any) -> Any:
            values = list(leaves)
            for index, primal in zip(indices, primals, strict=True):
                values[index] = primal
            return fn(*jtu.tree_unflatten(treedef, values))

        primals = [leaves[index].primal for index in indices]
        tangents = [leaves[index].tangent for index in indices]
        return jtu.tree_map(_dual_or_array, *jax.jvp(of_primals, primals, tangents))

    jvp.__name__ = f"jvp_{name.rpartition(':')[2]}"
    jvp.__qualname__ = jvp.__name__
    return jvp


def _dual_or_array(primal: Any, tangent: Any) -> Any:
    return primal if tangent.dtype == jax.dtypes.float0 else Dual(primal, tangent)


def refuse_no_jvp(name: str, error: Exception) -> None:
    message = text_of(error)
    if any(part in message for part in _NO_JVP):
        raise JdagError(
            f"{name} has no second derivative by jdag.hvp, which differentiates the "
            f"vjp in forward mode: {message.splitlines()[0]} A custom_vjp function has "
            "a second derivative if its rules call no custom_vjp function (including "
            "itself). A custom_jvp function has one, even around a callback"
        ) from error
