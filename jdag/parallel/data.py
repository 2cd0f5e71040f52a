"""Data parallel: a function of parameters and rows, its rows over several devices.

Rows are scattered, parameters replicated, the function applied to each chunk, outputs
gathered; gradients of the replicas are added where the parameters live, in order.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from jdag.compute.avals import aval_of
from jdag.compute.configuration import configuration
from jdag.compute.devices import named
from jdag.compute.moves import Target, home_of, moved
from jdag.compute.pairs import CACHE
from jdag.compute.pytrees import is_static
from jdag.errors import JdagError, unusable
from jdag.functions import is_unjitted, key_of
from jdag.parallel.apply import Call, call_of, merged, tracked_of
from jdag.parallel.devices import Device, device_of, devices_of
from jdag.parallel.dispatch import Each, Plan, Task
from jdag.parallel.movement import chunk_sizes, rows_of
from jdag.parallel.processes import given_by_all, processes_of
from jdag.parallel.program import ByPmap, ByShardMap, OneProgram
from jdag.parallel.wide import Wide, terms_of, together

WHAT = "data_parallel"
HOW = ("pmap", "shard_map", "each")
EACH = ("each", None)
PLANS_MAX = 256


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
) -> Any:
    """Apply `fn(params, x)` to chunks of x, one on each device, and join the outputs.

    It can be differentiated by `jax.grad` and `jax.vjp`, by params and by x, and that
    again, by `jax.jvp` too; not by `jax.jacrev` and `jax.hessian`, which are `jax.vmap`
    inside. Gradients of the parameters are added where these live, in the order of the
    devices. Chunks have `ceil(n / k)` of n rows for k devices; where rows do not
    suffice for all, there are fewer replicas.

    The devices may be those of several processes; `jdag.parallel` says what is then
    whose, and how exact sums are.

    Args:
        fn: a pure function of parameters and rows; it is jitted, or, marked by
            `jdag.unjitted`, called as it stands on every device.
        params: a pytree of arrays, replicated; what is no array is part of `fn`.
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
        how: "pmap" or "shard_map", one program over all devices, for chunks of one size
            or with `axis_name`; "each", a call on every device, else. None chooses.

    Returns:
        What `fn` returns: outputs joined along `dim`, scalars of the replicas as a
        vector with one element for each.

    Raises:
        JdagError: what is wrong with the devices, with x or with `how`; an output is no
            array or cannot be joined; processes do not do the same.
        WorkerLost: another process has ended.
        Exception: what `fn` raised.
    """
    processes = processes_of(devices, WHAT)
    chosen = devices_of(devices, WHAT) if processes is None else processes.own
    target = chosen[0] if output_device is None else device_of(output_device, WHAT)
    rows = () if axis_name is None else (jnp.float32(0),)  # Stands for what is given.
    call = call_of(fn, (params, x, *rows), WHAT)
    arrays = call.arrays[: len(call.arrays) - len(rows)]
    task = _task(call, arrays, x, dim, chosen, (axis_name, has_aux))
    if processes is not None:
        task = together(task, processes)
        mine = arrays[: task.shared]
        arrays[: task.shared] = given_by_all(mine, processes, terms_of(task))
    function = key_of(task.fn), is_unjitted(task.fn)
    parts = (*function, *task[1:], _how(task, how), configuration())
    outputs = _outputs(_plan(_Key(parts, task)), task.tracked, arrays, target)
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


def _task(
    call: Call,
    arrays: Sequence[Any],
    x: Any,
    dim: SupportsIndex,
    devices: tuple[jax.Device, ...],
    options: tuple[str | None, bool],
) -> Task:
    """What is to be done with these arrays, the last of which are those of x."""
    taken = len([leaf for leaf in jtu.tree_leaves(x) if not is_static(leaf)])
    shared = len(arrays) - taken
    dims, rows = rows_of(x, arrays[shared:], dim, WHAT)
    if dims != [dims[0]] * taken:
        raise JdagError(
            f"{WHAT}: dim = {dim} is another dimension of each array of x, {dims}: "
            "count it from the start"
        )
    sizes = chunk_sizes(rows, len(devices))
    return Task(
        call.fn,
        call.template,
        tuple(map(aval_of, arrays)),
        tracked_of(arrays),
        shared,
        sizes,
        dims[0],
        devices[: len(sizes)],
        *options,
    )


def _how(task: Task, how: str | None) -> str:
    equal = len(set(task.sizes)) == 1
    if not isinstance(task.axis_name, str | None):
        raise JdagError(unusable("axis_name", task.axis_name, "a str, or None"))
    if how is not None and how not in HOW:
        raise JdagError(unusable("how", how, " or ".join(map(repr, HOW))))
    if is_unjitted(task.fn) and (task.axis_name is not None or how not in EACH):
        asked = f"how = {how!r}" if task.axis_name is None else "an axis_name"
        raise JdagError(
            f"data_parallel: {task.name} is marked by jdag.unjitted, and {asked} makes "
            "one compiled program of all replicas: leave it out, or the mark"
        )
    if task.axis_name is not None:
        if how == "each":
            raise JdagError(
                "data_parallel: how = 'each' runs every replica by itself, and "
                f"axis_name = {task.axis_name!r} is for a function that reduces over "
                "all: leave one of them out"
            )
        if task.processes is not None and how == "pmap":
            raise JdagError(
                "data_parallel: how = 'pmap' with an axis_name is for the devices of "
                "one process: over several it is 'shard_map', or None"
            )
        return how or ("pmap" if task.processes is None else "shard_map")
    if how in ("pmap", "shard_map") and not equal:
        raise JdagError(
            f"data_parallel: how = {how!r} takes chunks of one size, and these have "
            f"{', '.join(map(str, task.sizes))} rows: leave it out, or give fn an axis "
            "name, so that it is told which rows are real"
        )
    # One replica needs no program over several devices.
    is_one = equal and len(task.sizes) > 1 and not is_unjitted(task.fn)
    return how or ("pmap" if is_one else "each")


def _outputs(
    plan: Plan, tracked: tuple[bool, ...], arrays: Sequence[Any], target: Target
) -> Any:
    if True not in tracked:
        return plan.forward(arrays, target)[0]
    # Where it is not known, as inside of jax.checkpoint, it is the default device.
    homes = tuple([home_of(array) or named(None) for array in arrays])
    both = list(zip(arrays, tracked, strict=True))
    return _applied(
        (plan, tracked, homes, target),
        [array for array, is_tracked in both if is_tracked],
        [array for array, is_tracked in both if not is_tracked],
    )


class _Key(tuple[Hashable, ...]):
    """The key of a plan; the task that it is made from rides along, uncompared."""

    task: Task

    def __new__(cls, parts: tuple[Hashable, ...], task: Task) -> "_Key":
        made = super().__new__(cls, parts)
        made.task = task
        return made


@lru_cache(maxsize=PLANS_MAX)
def _plan(key: _Key) -> Plan:
    how, task = key[-2], key.task
    if how == "each":  # Its pairs are counted where they are kept.
        return Each(task)
    CACHE.count(task.fn, key[0])
    if task.everywhere:
        return OneProgram(task, partial(Wide, task=task))
    return OneProgram(task, ByPmap if how == "pmap" else ByShardMap)


# A call: its plan, what is tracked, where the arrays live, and where outputs go.
_Static = tuple[Plan, tuple[bool, ...], tuple[Target, ...], Target]


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _applied(static: _Static, smooth: Any, rest: Any) -> Any:
    return _forward(static, smooth, rest)[0]


def _forward(static: _Static, smooth: Any, rest: Any) -> Any:
    plan, tracked, _, target = static
    return plan.forward(merged(tracked, smooth, rest), target)


def _backward(static: _Static, residuals: Any, cotangents: Any) -> Any:
    plan, tracked, homes, target = static
    # Of an array over several devices it comes to one of them all, and is spread again.
    single = [home if isinstance(home, jax.Device) else target for home in homes]
    found = plan.vjp(residuals, jtu.tree_leaves(cotangents), single)
    if found is None:
        return None, None
    wheres = [
        home for home, is_tracked in zip(homes, tracked, strict=True) if is_tracked
    ]
    return moved(found, wheres), None


_applied.defvjp(_forward, _backward)
