"""Cache of tasks and plans of data_parallel.

The key has the function (`key_of`), avals, tracked arrays, devices, options and the JAX
configuration. Cached tasks and plans hold no arrays.
"""

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.tree_util as jtu

from jdag.compute.avals import aval_of
from jdag.compute.configuration import configuration
from jdag.compute.duals import are_arrays
from jdag.compute.fingerprint import key_of
from jdag.compute.pairs import CACHE
from jdag.compute.pytrees import Template, is_static
from jdag.engine.arrays import HOLE
from jdag.errors import JdagError
from jdag.parallel.apply import DeviceCall, tracked_of
from jdag.parallel.devices import Device, check_platform, device_of, devices_of
from jdag.parallel.dispatch import DispatchTask, Each
from jdag.parallel.movement import chunk_sizes, rows_of
from jdag.parallel.processes import Processes, Terms, processes_of
from jdag.parallel.program import OneProgram
from jdag.parallel.waiting import check_deadline

WHAT = "data_parallel"
MADE_MAX = 512


def plan_for(
    call: DeviceCall, x: Any, how: str | None, **options: Any
) -> tuple[DispatchTask, Each | OneProgram]:
    """Return the task of a call and its plan; the call's last arrays are those of x.

    `options` are fields of `DispatchTask`, with `dim` and `devices` as passed by users.
    """
    function = key_of(call.fn), call.template.key
    looks = _looks(call.arrays)
    key = (*function, *looks, how, *options.values(), configuration())
    made = _made_for(key)
    if "task" not in made:
        made["task"] = _task(call, x, **options)
    task = together(made["task"])
    if task.everywhere:
        made = _made_for((*key, task.everywhere))
    if "plan" not in made:
        is_each = _is_each(task, how)
        if not is_each:  # The cache of pairs counts its own.
            CACHE.count(task.fn, key_of(task.fn))
        made["plan"] = Each(task) if is_each else OneProgram(task)
    return task, made["plan"]


def _looks(arrays: Sequence[Any]) -> tuple[Hashable, ...]:
    if are_arrays(arrays):
        return tuple([array.aval for array in arrays]), ()
    return tuple(map(aval_of, arrays)), tracked_of(arrays)


@lru_cache(maxsize=MADE_MAX)
def _made_for(key: tuple[Hashable, ...]) -> dict[str, Any]:
    """The cache entry of a key, a dict that is empty at first."""
    del key
    return {}


def devices_for(
    devices: Any, output_device: Device | None, deadline_s: float
) -> tuple[Processes | None, tuple[jax.Device, ...], jax.Device]:
    """Return the processes, this one's devices, and the output device."""
    check_deadline(deadline_s)  # Before the cache, for which True equals 1.
    given = tuple(devices) if type(devices) is list else devices
    known: Any = _known_devices
    try:
        return known(given, output_device, deadline_s)
    except TypeError:  # Unhashable.
        return known.__wrapped__(devices, output_device, deadline_s)


@lru_cache(maxsize=256)
def _known_devices(
    devices: Any, output_device: Device | None, deadline_s: float
) -> tuple[Processes | None, tuple[jax.Device, ...], jax.Device]:
    processes = processes_of(devices, WHAT, deadline_s)
    chosen = devices_of(devices, WHAT) if processes is None else processes.own
    check_platform(chosen, WHAT)
    given = output_device is not None
    return processes, chosen, device_of(output_device, WHAT) if given else chosen[0]


def _task(
    call: DeviceCall,
    x: Any,
    *,
    dim: int,
    devices: tuple[jax.Device, ...],
    **options: Any,
) -> DispatchTask:
    arrays = call.arrays
    taken = len([leaf for leaf in jtu.tree_leaves(x) if not is_static(leaf)])
    shared = len(arrays) - taken
    dims, rows = rows_of(x, arrays[shared:], dim, WHAT)
    if dims != [dims[0]] * taken:
        raise JdagError(
            f"{WHAT}: dim = {dim} is another dimension of each array of x, {dims}: "
            "count it from the start"
        )
    sizes = chunk_sizes(rows, len(devices))
    task = DispatchTask(
        call.fn,
        call.template,
        avals=tuple(map(aval_of, arrays)),
        tracked=tracked_of(arrays),
        shared=shared,
        sizes=sizes,
        dim=dims[0],
        devices=devices[: len(sizes)],
        **options,
    )
    processes = task.processes
    return task._replace(terms=terms_of(task, processes)) if processes else task


def _is_each(task: DispatchTask, how: str | None) -> bool:
    equal = len(set(task.sizes)) == 1
    if task.axis_name is not None:
        if how == "each":
            raise JdagError(
                "data_parallel: how = 'each' runs every replica by itself, and "
                f"axis_name = {task.axis_name!r} is for a function that reduces over "
                "all: leave one of them out"
            )
        return False
    if how in ("pmap", "shard_map") and not equal:
        raise JdagError(
            f"data_parallel: how = {how!r} takes chunks of one size, and these have "
            f"{', '.join(map(str, task.sizes))} rows: leave it out, or set axis_name, "
            "with which fn gets a mask of the real rows"
        )
    # One replica needs no program over several devices.
    is_simple = not equal or len(task.sizes) == 1
    return how == "each" or (how is None and is_simple)


# ---------------------------------------------- agreement of several processes


def together(task: DispatchTask) -> DispatchTask:
    """Complete the task of a function that reduces over several processes.

    Such a function needs equal chunks on all processes, so these exchange their numbers
    of rows.
    """
    processes = task.processes
    if processes is None or task.axis_name is None:
        return task
    counts = processes.agreed(task.terms, task.rows)
    if 0 in counts:
        raise JdagError(
            f"{processes.what}: process {counts.index(0)} has no rows; with axis_name "
            "each process has one or more"
        )
    size = max([-(-count // len(processes.own)) for count in counts])
    left, real = list(counts), []
    for device in processes.devices:
        real.append(min(size, left[device.process_index]))
        left[device.process_index] -= real[-1]
    both = zip(processes.devices, real, strict=True)
    own = tuple([rows for device, rows in both if device in processes.own])
    return task._replace(sizes=own, devices=processes.own, everywhere=tuple(real))


def terms_of(task: DispatchTask, processes: Processes) -> Terms:
    """Return the properties of a task that must be equal on all processes."""
    found = [("fn", task.name)]
    # With axis_name the template's last array is the mask, which no task has.
    kinds = zip(_paths(task.template), task.avals, task.tracked, strict=False)
    for index, (path, aval, tracked) in enumerate(kinds):
        sizes = list(map(str, aval.shape))
        if index >= task.shared:
            sizes[task.dim] = "rows"  # The number of rows may differ.
        kind = f"{aval.dtype}[{','.join(sizes)}]"
        found.append((path, f"{kind}, differentiated" if tracked else kind))
    options = ("axis_name", task.axis_name), ("has_aux", task.has_aux)
    found += [(key, repr(value)) for key, value in options]
    found += [(key, repr(value)) for key, value in configuration().settings]
    return (*found, ("devices", ", ".join(map(str, processes.devices))))


def _paths(template: Template) -> list[str]:
    """The names of a call's arrays, such as `params['w']`."""
    treedef = template.treedef
    leaves = jtu.tree_leaves_with_path(
        jtu.tree_unflatten(treedef, range(treedef.num_leaves))
    )
    names = [*["fn"][: bool(template.own)], "params", "x", "rows"]
    return [
        names[path[1].idx] + jtu.keystr(path[2:])
        for (path, _), leaf in zip(leaves, template.leaves, strict=True)
        if leaf is HOLE
    ]
