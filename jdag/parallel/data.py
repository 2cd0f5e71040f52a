"""Data parallelism: apply a function of parameters and rows on several devices.

Rows are scattered, parameters are replicated, the function is applied to each chunk,
and outputs are gathered. Gradients of the replicas are added in order on the device of
the parameters. Chunks of equal size run as one program over the devices
(`jdag.parallel.program`), others separately, as in `parallel_apply`.
"""

from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from jdag.compute.avals import aval_of
from jdag.compute.moves import beside, cuttable, home_of, moved_arrays
from jdag.errors import JdagError
from jdag.parallel.apply import applied, tracked_of
from jdag.parallel.devices import Device
from jdag.parallel.movement import (
    check_joined,
    columns,
    concatenated,
    cut_array,
    repeat_arrays,
)
from jdag.parallel.processes import SUMMED, replace
from jdag.parallel.program import in_one_program
from jdag.parallel.task import ParallelTask, task_of
from jdag.parallel.waiting import DEADLINE_S


def data_parallel(  # noqa: PLR0913 - PyTorch's arguments, and keywords.
    fn: Callable[..., Any],
    params: Any,
    x: Any,
    devices: Sequence[Device] | None = None,
    output_device: Device | None = None,
    dim: SupportsIndex = 0,
    *,
    axis_name: str | None = None,
    has_aux: bool = False,
    deadline_s: float = DEADLINE_S,
) -> Any:
    """Apply `fn(params, x)` to chunks of x, one on each device, and join the outputs.

    JAX can differentiate it in params and x, in forward and reverse mode and to any
    order, except by `jax.jacrev` and `jax.hessian`, which use `jax.vmap`. Parameter
    gradients are added on the device of the parameters, in the order of the devices.
    n rows over k devices give chunks of `ceil(n / k)` rows. With too few rows there are
    fewer replicas than devices.

    For devices of several processes, see `jdag.parallel`.

    Args:
        fn: a pure function of parameters and rows. It is jitted, unless it moves arrays
            between devices.
        params: a pytree of arrays, replicated; other leaves are static.
        x: a pytree of arrays with equally many rows along `dim`.
        devices: names or devices, of one platform or several; None: all devices of
            this process. With several processes, each must own equally many.
        output_device: the device of the outputs; None: the first device.
        dim: the dimension of rows, in x and in outputs.
        axis_name: the axis of replicas, for an `fn` that reduces over all replicas,
            such as batch normalization. It needs devices of one platform, and calls
            `fn(params, x, rows)`: rows, float32 of shape (rows of the chunk,), is 1 for
            a real row and 0 for padding (see `row_mean`).
        has_aux: `fn` returns (outputs, aux). The result contains the aux of the first
            replica, without a gradient. With `axis_name`, values reduced over all
            replicas, such as running statistics, are equal on all.
        deadline_s: how long processes wait for each other, in seconds; equal on all
            processes.

    Returns:
        The outputs of `fn`, joined along `dim`; scalars become a vector with one
        element per replica.

    Raises:
        JdagError: unusable devices or x; an output that is not an array or cannot be
            joined; other processes passed other functions, shapes or options.
        WorkerLost: another process has ended, or has not made the call in time.
        Exception: raised by `fn`.
    """
    options: Any = dict(axis_name=axis_name, has_aux=has_aux, deadline_s=deadline_s)
    task = _received(task_of(fn, params, x, devices, output_device, dim, **options))
    outputs = in_one_program(task) if _is_one_program(task) else None
    if outputs is None:
        outputs = _side_by_side(task)
    return (outputs[0], jax.lax.stop_gradient(outputs[1])) if has_aux else outputs


def _is_one_program(task: ParallelTask) -> bool:
    """Whether one program may run all replicas, if `fn` moves no arrays."""
    if task.axis_name is not None:
        return True
    platforms = {device.platform for device in task.devices}
    is_equal = len(task.sizes) > 1 == len(set(task.sizes)) == len(platforms)
    # Devices are unknown while JAX traces. Inside of jit, JAX would refuse the devices
    # of the program before it reaches the move of its arguments.
    return is_equal and None not in map(home_of, task.call.arrays)


def _received(task: ParallelTask) -> ParallelTask:
    arrays, tracked = list(task.call.arrays), tracked_of(task.call.arrays)
    shared = [index for index in range(task.shared) if tracked[index]]
    if True in tracked and None in map(home_of, arrays):
        indices = [index for index, is_tracked in enumerate(tracked) if is_tracked]
        replace(arrays, indices, beside)
    if task.processes is not None and shared:
        options = {"processes": task.processes, "terms": task.terms}
        replace(arrays, shared, lambda cts, _: SUMMED.bind(*cts, **options))
    return task._replace(call=task.call._replace(arrays=arrays))


def _side_by_side(task: ParallelTask) -> Any:
    arrays, shared, dim = task.call.arrays, task.shared, task.dim
    count = len(task.sizes)
    replicas = repeat_arrays(arrays[:shared], count)
    rows = cuttable(arrays[shared:], list(map(home_of, arrays[shared:])))
    pieces = [cut_array(array, task.sizes, dim) for array in rows]
    inputs = [
        [*replicas[n * shared : (n + 1) * shared], *[piece[n] for piece in pieces]]
        for n in range(count)
    ]
    results = applied([task.call._replace(arrays=a) for a in inputs], task.devices)
    trees = [task.outputs_of(fn.out_tree) for fn, _ in results]
    for replica, tree in enumerate(trees):
        if tree != trees[0]:
            raise JdagError(
                f"{task.name} returned {trees[0]} in replica 0 and {tree} in replica "
                f"{replica}: outputs of different structures cannot be joined"
            )
    size = trees[0].num_leaves
    flat = [outputs[:size] for _, outputs in results]
    for index, parts in enumerate(zip(*flat, strict=True)):
        check_joined(parts, dim, f"output {index} of {task.name}")
    gathered = columns(flat, [task.target] * size, task.devices)
    leaves = [concatenated(parts, dim) for parts in gathered]
    fn, outputs = results[0]
    aux = outputs[size:]
    leaves += moved_arrays(aux, [task.target] * len(aux))
    return jtu.tree_unflatten(fn.out_tree, leaves)


def row_mean(x: Any, rows: Any, axis_name: str) -> Any:
    """Return the mean over the real rows of all replicas, in an `fn` with `axis_name`.

    The mean is weighted by rows, so it equals the mean on one device for any chunk
    sizes. Low-precision sums are accumulated in float32.

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
            f"row_mean needs a float or complex array, not {aval_of(x)}: convert it, "
            "as in x.astype(jnp.float32)"
        )
    shape = (-1,) + (1,) * (x.ndim - 1)
    real = jnp.where(rows.reshape(shape) > 0, x, 0)
    wide = jnp.promote_types(x.dtype, jnp.float32)
    total = jax.lax.psum(jnp.sum(real, axis=0, dtype=wide), axis_name)
    count = jax.lax.psum(jnp.sum(rows), axis_name)
    return (total / count.astype(wide)).astype(x.dtype)
