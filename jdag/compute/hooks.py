"""Hooks: user functions of a cotangent, run uncompiled on the cotangent's worker.

An `on_cotangent` hook may replace a cotangent (`hooked`). An `on_gradient` hook only
observes a gradient (`seen`).
"""

from collections.abc import Callable
from typing import Any

import jax

from jdag.compute.avals import Aval, aval_of, frozen
from jdag.compute.buffers import delivered
from jdag.compute.duals import is_dual
from jdag.errors import JdagError


def hooked(function: Callable[[Any], Any], cotangent: Any) -> Any:
    """Call a hook. Return its result, or the cotangent if the hook returns None.

    The function is not compiled, so it can print or collect JAX arrays. It is traced
    for an abstract cotangent (`Aval`). For a dual, the hook receives the primal and
    must not replace it, since the effect on the tangent is unknown.
    """
    cotangent = delivered(cotangent)
    if is_dual(cotangent):
        if function(cotangent.primal) is None:
            return cotangent
        raise JdagError(
            "the hook would replace a cotangent in a run of jdag.hvp, which cannot "
            "differentiate the replacement; in such runs a hook must return None"
        )
    abstract = isinstance(cotangent, Aval)
    if abstract:
        result = jax.eval_shape(function, cotangent.struct())
    else:
        result = function(cotangent)
    if result is None:
        return cotangent
    expected = aval_of(cotangent).strong
    returned = aval_of(result) if hasattr(result, "dtype") else None
    if returned is None or returned.strong != expected:
        kind = type(result).__name__
        description = f"a {kind}" if returned is None else str(returned)
        raise JdagError(
            f"the hook returned {description}, but the cotangent is {expected}; it "
            "must return an array of that shape and dtype, or None to keep it"
        )
    if abstract:
        return expected
    # Copy, since the hook may still write to its numpy array; drop a weak type.
    replacement = frozen(result)
    if returned.weak:
        return jax.lax.convert_element_type(replacement, expected.dtype)
    return replacement


def seen(function: Callable[[Any], Any], gradient: Any) -> None:
    def observe(gradient: Any) -> None:
        function(gradient)

    hooked(observe, gradient)
