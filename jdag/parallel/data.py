"""Data parallelism: apply a function of parameters and rows on several devices.

Rows are scattered, parameters replicated, the function applied to each chunk, outputs
gathered. Gradients of the replicas are added in order where the parameters live. Chunks
of one size run in one program over the devices (`jdag.parallel.program`), any others
side by side, as `parallel_apply` runs them.
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
from jdag.parallel.processes import replace, summed
from jdag.parallel.program import in_one_program
from jdag.parallel.task import ParallelTask, task_of
from jdag.parallel.waiting import DEADLINE_S


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
    deadline_s: float = DEADLINE_S,
) -> Any:
    """Apply `fn(params, x)` to chunks of x, one on each device, and join the outputs.

    Differentiable by JAX in params and x, also repeatedly, forward and backward; not
    supported are `jax.jacrev` and `jax.hessian`, which use `jax.vmap`. Parameter
    gradients are added where the parameters live, in the order of the devices. n rows
    over k devices make chunks of `ceil(n / k)` rows; with too few rows there are fewer
    replicas.

    For devices of several processes, see `jdag.parallel`.

    Args:
        fn: a pure function of parameters and rows. It is jitted unless it moves arrays
            between devices itself.
        params: a pytree of arrays, replicated; other leaves are static.
        x: a pytree of arrays with equally many rows along `dim`.
        devices: names or devices, of one kind or several; None: all devices of this
            process. With several processes, each contributes the same number.
        output_device: the device of the outputs; None: the first device.
        dim: the dimension of rows, in x and in outputs.
        axis_name: the axis of replicas, for an `fn` that reduces over all replicas, as
            batch normalisation does; devices are of one kind. `fn` is then called as
            `fn(params, x, rows)`; rows, float32 of shape (rows of the chunk,), is 1 for
            a real row and 0 for padding (see `row_mean`).
        has_aux: `fn` returns (outputs, aux). aux is that of the first replica and is
            not differentiated. With `axis_name`, values reduced over all replicas, such
            as running statistics, are equal on each.
        deadline_s: how long processes wait for each other; the same on all.

    Returns:
        The outputs of `fn`, joined along `dim`; scalars become a vector with one
        element per replica.

    Raises:
        JdagError: unusable devices or x; an output that is no array or cannot be
            joined; processes that do not do the same.
        WorkerLost: another process has ended, or not called it in time.
        Exception: what `fn` raised.
    """
    options: Any = dict(axis_name=axis_name, has_aux=has_aux, deadline_s=deadline_s)
    task = _received(task_of(fn, params, x, devices, output_device, dim, **options))
    outputs = in_one_program(task) if _is_one_program(task) else None
    if outputs is None:
        outputs = _side_by_side(task)
    return (outputs[0], jax.lax.stop_gradient(outputs[1])) if has_aux else outputs


def _is_one_program(task: ParallelTask) -> bool:
    """Tell whether one program may run all replicas, if `fn` moves no arrays."""
    if task.axis_name is not None:
        return True
    platforms = {device.platform for device in task.devices}
    equal = len(task.sizes) > 1 == len(set(task.sizes)) == len(platforms)
    # Where the arrays' devices are unknown JAX is tracing, and inside of jit it would
    # compare the program's devices with others before it comes to the move.
    return equal and None not in map(home_of, task.call.arrays)


def _received(task: ParallelTask) -> ParallelTask:
    """Return the task, with its arrays' cotangents brought home and summed."""
    arrays, tracked = list(task.call.arrays), tracked_of(task.call.arrays)
    shared = [index for index in range(task.shared) if tracked[index]]
    if True in tracked and None in map(home_of, arrays):
        indices = [index for index, is_one in enumerate(tracked) if is_one]
        replace(arrays, indices, beside)
    if task.processes is not None and shared:
        processes, terms = task.processes, task.terms
        replace(arrays, shared, lambda cts, _: summed(cts, processes, terms))
    return task._replace(call=task.call._replace(arrays=arrays))


def _side_by_side(task: ParallelTask) -> Any:
    """Run the replicas, each by itself."""
    arrays, shared, dim = task.call.arrays, task.shared, task.dim
    count = len(task.sizes)
    replicas = repeat_arrays(arrays[:shared], count)
    rows = cuttable(arrays[shared:], list(map(home_of, arrays[shared:])))
    pieces = [cut_array(array, task.sizes, dim) for array in rows]
    own = [replicas[n * shared : (n + 1) * shared] for n in range(count)]
    calls = [
        task.call._replace(arrays=[*own[n], *[piece[n] for piece in pieces]])
        for n in range(count)
    ]
    found = applied(calls, task.devices)
    trees = [task.outputs_of(made.out_tree) for made, _ in found]
    for number, tree in enumerate(trees):
        if tree != trees[0]:
            raise JdagError(
                f"{task.name} returned {trees[0]} of replica 0 and {tree} of replica "
                f"{number}: outputs of other structures cannot be joined"
            )
    size = trees[0].num_leaves
    flat = [outputs[:size] for _, outputs in found]
    for index, parts in enumerate(zip(*flat, strict=True)):
        check_joined(parts, dim, f"output {index} of {task.name}")
    gathered = columns(flat, [task.target] * size, task.devices)
    leaves = [concatenated(parts, dim) for parts in gathered]
    made, outputs = found[0]
    aux = outputs[size:]
    leaves += moved_arrays(aux, [task.target] * len(aux))
    return jtu.tree_unflatten(made.out_tree, leaves)


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
