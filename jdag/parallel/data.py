"""Data parallelism: apply a function of parameters and rows on several devices.

Rows are scattered, parameters replicated, the function applied to each chunk, outputs
gathered. Gradients of the replicas are added in order where the parameters live.
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

    Differentiable by `jax.grad` and `jax.vjp` in params and x, also repeatedly, and its
    gradients by `jax.jvp`. Not supported: `jax.jvp` of the function itself, and
    `jax.jacrev` and `jax.hessian`, which use `jax.vmap`. Parameter gradients are added
    where the parameters live, in the order of the devices. n rows over k devices make
    chunks of `ceil(n / k)` rows; with too few rows there are fewer replicas.

    For devices of several processes, see `jdag.parallel`.

    Args:
        fn: a pure function of parameters and rows. It is jitted unless it moves arrays
            between devices itself.
        params: a pytree of arrays, replicated; other leaves are static.
        x: a pytree of arrays with equally many rows along `dim`.
        devices: names or devices; None: all devices of this process. With several
            processes, each contributes the same number of devices.
        output_device: the device of the outputs; None: the first device.
        dim: the dimension of rows, in x and in outputs.
        axis_name: the axis of replicas, for an `fn` that reduces over all replicas, as
            batch normalisation does. `fn` is then called as `fn(params, x, rows)`;
            rows, float32 of shape (rows of the chunk,), is 1 for a real row and 0 for
            padding (see `row_mean`).
        has_aux: `fn` returns (outputs, aux). aux is that of the first replica and is
            not differentiated. With `axis_name`, values reduced over all replicas, such
            as running statistics, are equal on each.
        how: "pmap" or "shard_map": one program over all devices, for chunks of equal
            size or with `axis_name`. "each": one call per device. None: automatic.
        deadline_s: how long processes wait for each other; the same on all.

    Returns:
        The outputs of `fn`, joined along `dim`; scalars become a vector with one
        element per replica.

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
    """Return the mean over the real rows of all replicas; for use with `axis_name`.

    The mean is weighted by rows, so it equals that of one device for any chunk sizes.
    Low-precision sums are accumulated in float32.

    Args:
        x: float or complex, (rows, ...).
        rows: (rows,): 1 for a real row, 0 for padding.
        axis_name: the `axis_name` passed to `data_parallel`.

    Returns:
        (...), with the dtype of x; equal on all replicas.

    Raises:
        JdagError: x is an integer array.
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
        # Inside jax.checkpoint devices are unknown here: keep the arrays for the vjp.
        smooth = task.of_tracked(given) if None in homes else None
        return outputs, (residuals, smooth)

    def vjp(kept: Any, cotangents: Any) -> list[Any] | None:
        residuals, smooth = kept
        # The cotangent of a sharded array is made on one device, then resharded.
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
