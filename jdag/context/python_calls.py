"""Calls of functions that run as Python: `jdag.unjitted` without `shapes`."""

from collections.abc import Callable
from typing import Any

from jdag.compute.devices import put, working_on
from jdag.compute.pytrees import flatten, unflatten
from jdag.compute.refs import is_ref
from jdag.compute.tracing import as_jax, flat_outputs
from jdag.context.refs import fetch
from jdag.engine.functions import name_of, program, remote, shapes_of
from jdag.errors import JdagError


def is_waited_for(state: Any, fn: Callable[..., Any], refs: Any) -> bool:
    """Whether a call of an unjitted function waits until the function has run."""
    for _, ref in refs:
        if is_ref(ref) and ref.tracked:
            raise JdagError(
                f"{name_of(fn)} is marked by jdag.unjitted, but {ref!r}, an argument, "
                "is tracked: no cotangent flows back through Python code. "
                "jdag.stop_gradient(ref) makes it a constant. In a function marked by "
                "@jdag.program, which may fetch and branch, calls are differentiated"
            )
    return not (state.is_plain or state.abstract or shapes_of(fn))


@remote
@program
def run_python(ctx: Any, device: str | None, fn: Any, args: Any, kwargs: Any) -> Any:
    leaves, treedef = flatten(fetch((args, kwargs)))
    args, kwargs = unflatten(treedef, put(list(map(as_jax, leaves)), device))
    with working_on(device):
        result = fn(*args, **kwargs)
    arrays, out_tree = flat_outputs(name_of(fn), result)
    place = ctx.here if device is None else f"{ctx.here}/{device}"
    return ctx.move(place, unflatten(out_tree, arrays))
