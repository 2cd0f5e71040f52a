"""Hooks: functions of a cotangent, run uncompiled on the cotangent's worker.

Those of `on_cotangent` replace it (`hooked`), those of `on_gradient` observe it
(`seen`).
"""

from collections.abc import Callable
from typing import Any

import jax

from jdag.compute.avals import Aval, aval_of, frozen
from jdag.compute.buffers import delivered
from jdag.compute.duals import is_dual
from jdag.errors import JdagError


def hooked(function: Callable[[Any], Any], cotangent: Any) -> Any:
    """Return the function's replacement of a cotangent, or for None the cotangent.

    The function is not compiled, so it can print or collect JAX arrays. For an abstract
    cotangent (`Aval`) it is traced. For a dual it receives the primal and must not
    replace it, since its effect on the tangent is unknown.
    """
    cotangent = delivered(cotangent)
    if is_dual(cotangent):
        if function(cotangent.primal) is None:
            return cotangent
        raise JdagError(
            "the hook would replace a cotangent in a run of jdag.hvp, which cannot "
            "differentiate it; there a hook has to return None"
        )
    abstract = isinstance(cotangent, Aval)
    if abstract:
        result = jax.eval_shape(function, cotangent.struct())
    else:
        result = function(cotangent)
    if result is None:
        return cotangent
    wanted = aval_of(cotangent).strong
    found = aval_of(result) if hasattr(result, "dtype") else None
    if found is None or found.strong != wanted:
        given = f"a {type(result).__name__}" if found is None else str(found)
        raise JdagError(
            f"the hook returned {given}, and the cotangent is {wanted}; it has to "
            "return an array of that shape and dtype, or None to leave it as it is"
        )
    if abstract:
        return wanted
    # The hook may still write to a numpy array; a weak type would propagate.
    kept = frozen(result)
    return jax.lax.convert_element_type(kept, wanted.dtype) if found.weak else kept


def seen(function: Callable[[Any], Any], gradient: Any) -> None:
    """Pass a gradient to an observing function, as in `hooked`; ignore its result."""

    def see(gradient: Any) -> None:
        function(gradient)

    hooked(see, gradient)
