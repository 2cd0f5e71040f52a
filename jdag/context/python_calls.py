"""Calls of functions that run as Python: `jdag.unjitted` without `shapes`."""

from collections.abc import Callable
from typing import Any

from jdag.compute.devices import put, working_on
from jdag.compute.pytrees import flatten, unflatten
from jdag.compute.refs import is_ref
from jdag.compute.tracing import arrays_of, as_jax
from jdag.context.refs import fetch
from jdag.engine.functions import name_of, program, remote, shapes_of
from jdag.errors import JdagError


def is_waited_for(state: Any, fn: Callable[..., Any], refs: Any) -> bool:
    """Whether a call of an unjitted function waits; JdagError if a ref is tracked."""
    for _, ref in refs:
        if is_ref(ref) and ref.tracked:
            raise JdagError(
                f"{name_of(fn)} is marked by jdag.unjitted, and {ref!r}, an argument, "
                "is tracked: no cotangent comes back through Python. "
                "jdag.stop_gradient(ref) makes it a constant; a function marked by "
                "@jdag.program calls, fetches and branches, and its calls are "
                "differentiated"
            )
    return not (state.is_plain or state.abstract or shapes_of(fn))


@remote
@program
def run_python(ctx: Any, device: str | None, fn: Any, args: Any, kwargs: Any) -> Any:
    """Run a function on arrays, on this worker; return refs to its results here."""
    leaves, treedef = flatten(fetch((args, kwargs)))
    given = unflatten(treedef, put(list(map(as_jax, leaves)), device))
    with working_on(device):
        result = fn(*given[0], **given[1])
    arrays, out_tree = arrays_of(name_of(fn), result)
    place = ctx.here if device is None else f"{ctx.here}/{device}"
    return ctx.move(place, unflatten(out_tree, arrays))
