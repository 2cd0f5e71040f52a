"""Data parallel: a function of parameters and rows, its rows over several devices.

Rows are scattered, parameters replicated, the function applied to each chunk, outputs
gathered; gradients of the replicas are added where the parameters live, in order.
"""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from jdag.compute.avals import aval_of
from jdag.compute.moves import Target, beside, home_of, transferred
from jdag.engine.arrays import HOLE
from jdag.errors import JdagError, unusable
from jdag.parallel.apply import call_of, differentiable
from jdag.parallel.devices import Device
from jdag.parallel.dispatch import DispatchTask, Each
from jdag.parallel.movement import whole
from jdag.parallel.processes import summed
from jdag.parallel.program import OneProgram
from jdag.parallel.ready import WHAT, devices_for, plan_for
from jdag.parallel.waiting import DEADLINE_S

HOW = ("pmap", "shard_map", "each")


def data_parallel(  # noqa: PLR0913 - as PyTorch has it, and ours by keyword.
    fn: Callable[..., Any],
    params: Any,
    x: Any,
    devices: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: SupportsIndex = 0,
    *,
    axis_name: str | None = None,
    has_aux: bool = False,
    how: str | None = None,
    deadline_s: float = DEADLINE_S,
) -> Any:
    """Apply `fn(params, x)` to chunks of x, one on each device, and join the outputs.

    It can be differentiated by `jax.grad` and `jax.vjp`, by params and by x, and these
    gradients again, by `jax.jvp` too. It has no `jax.jvp` of its own, and no
    `jax.jacrev` or `jax.hessian`, which are `jax.vmap` inside. Gradients of the
    parameters are added where these live, in the order of the devices. Chunks have
    `ceil(n / k)` of n rows for k devices; where rows do not suffice for all, there are
    fewer replicas.

    The devices may be those of several processes; `jdag.parallel` says what is then
    whose, and how exact sums are.

    Args:
        fn: a pure function of parameters and rows; it is jitted, or, marked by
            `jdag.unjitted`, called as it stands on every device.
        params: a pytree of arrays, replicated; other leaves are part of `fn`.
        x: a pytree of arrays with as many rows each along `dim`.
        devices: names or devices; None is all of this process. Of several processes
            these are as many of each.
        output_device: where outputs go; None is the first device.
        dim: the dimension that rows are counted along, in outputs as well.
        axis_name: a name for the axis of replicas, for a `fn` that reduces over all of
            them, as batch normalisation does. Then it is called as
            `fn(params, x, rows)`; rows, float32 of shape (rows of the chunk,), is 1 for
            a real row and 0 for one that fills a chunk up (see `row_mean`).
        has_aux: `fn` returns a pair; the second part comes from the first replica as it
            is, and nothing flows back to it. With `axis_name` what was reduced over all
            replicas, such as running statistics, is the same on each.
        how: "pmap" or "shard_map", both one program over all devices, for chunks of
            one size or with `axis_name`; "each", a call a device, else. None chooses.
        deadline_s: how long several processes wait for each other; the same on all.

    Returns:
        What `fn` returns: outputs joined along `dim`, scalars of the replicas as a
        vector with one element for each.

    Raises:
        JdagError: unusable devices, x or `how`; an output that is no array or cannot be
            joined; processes that do not do the same.
        WorkerLost: another process has ended, or not called it in time.
        Exception: what `fn` raised.
    """
    if axis_name is not None and not isinstance(axis_name, str):
        raise JdagError(unusable("axis_name", axis_name, "a str, or None"))
    if how is not None and how not in HOW:
        raise JdagError(unusable("how", how, " or ".join(map(repr, HOW))))
    if not isinstance(has_aux, bool):
        raise JdagError(unusable("has_aux", has_aux, "True or False"))
    processes, chosen, target = devices_for(devices, output_device, deadline_s)
    rows = () if axis_name is None else (HOLE,)
    call = call_of(fn, (params, x, *rows), WHAT)
    options = {"axis_name": axis_name, "has_aux": has_aux, "processes": processes}
    which = whole(dim, WHAT)
    task, plan = plan_for(call, x, how, dim=which, devices=chosen, **options)
    outputs = _outputs(task, plan, call.arrays, target)
    return (outputs[0], jax.lax.stop_gradient(outputs[1])) if has_aux else outputs


def row_mean(x: Any, rows: Any, axis_name: str) -> Any:
    """Return the mean over the real rows of all replicas, for a `fn` with an axis name.

    Sums are those of all replicas (`jax.lax.psum`), weighted by rows, so that the mean
    is that of one device, whatever the chunks. Sums of low precision are float32.

    Args:
        x: float or complex, (rows, ...).
        rows: (rows,): 1 for a real row, 0 for one that fills the chunk up.
        axis_name: that which `data_parallel` was given.

    Returns:
        (...), of the dtype of x; the same on each replica.

    Raises:
        JdagError: x has integers, which a mean would be cut to.
    """
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        raise JdagError(
            f"row_mean takes floats, not {aval_of(x)}: convert it, as by "
            "x.astype(jnp.float32)"
        )
    shape = (-1,) + (1,) * (x.ndim - 1)
    real = jnp.where(rows.reshape(shape) > 0, x, 0)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    total = jax.lax.psum(jnp.sum(real, axis=0, dtype=wide), axis_name)
    count = jax.lax.psum(jnp.sum(rows), axis_name)
    return (total / count.astype(wide)).astype(x.dtype)


def _outputs(
    task: DispatchTask, plan: Each | OneProgram, arrays: list[Any], target: Target
) -> Any:
    homes = list(map(home_of, arrays))
    shared = sum(task.tracked[: task.shared])

    def forward(given: Sequence[Any]) -> tuple[Any, Any]:
        outputs, residuals = plan.forward(given, homes, target)
        # Where they live is not known inside of jax.checkpoint: they are asked later.
        smooth = task.of_tracked(given) if None in homes else None
        return outputs, (residuals, smooth)

    def vjp(kept: Any, cotangents: Any) -> list[Any] | None:
        residuals, smooth = kept
        # Of an array over several devices it comes to one of them, and is spread again.
        single = [home if isinstance(home, jax.Device) else target for home in homes]
        found = plan.vjp(residuals, jtu.tree_leaves(cotangents), single)
        if found is None:
            return None
        if task.processes is not None and shared:
            sums = summed(found[:shared], task.processes, task.terms)
            found = [*sums, *found[shared:]]
        if smooth:
            return beside(found, smooth)
        return transferred(found, task.of_tracked(homes))

    return differentiable(forward, vjp, task.tracked, arrays)
