"""One call of data_parallel: its arrays, its chunks, and the terms of its processes."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, SupportsIndex

import jax
import jax.tree_util as jtu

from jdag.compute.avals import aval_of
from jdag.compute.configuration import configuration
from jdag.compute.pytrees import Template, is_static
from jdag.engine.arrays import HOLE
from jdag.engine.functions import name_of
from jdag.errors import JdagError, unusable
from jdag.parallel.apply import DeviceCall, call_of, tracked_of
from jdag.parallel.devices import Device, check_platform, device_of, resolved_devices
from jdag.parallel.movement import as_int, chunk_sizes, rows_of
from jdag.parallel.processes import Processes, Terms, processes_of
from jdag.parallel.waiting import check_deadline

WHAT = "data_parallel"


class ParallelTask(NamedTuple):
    """A function, its arrays, and how they are split into replicas.

    Attributes:
        call: the function and its arrays: parameters, then arrays with rows.
        shared: the number of parameter arrays.
        dim: the dimension of rows, counted from the start.
        sizes: the number of real rows of each chunk.
        devices: the device of each chunk.
        target: the device of the outputs.
        axis_name: set for a function that reduces over replicas.
        processes: set for several processes; `sizes` and `devices` are then those of
            this process.
        terms: the properties that must be equal on all processes.
        everywhere: the number of real rows of each replica of all processes.
    """

    call: DeviceCall
    shared: int
    dim: int
    sizes: tuple[int, ...]
    devices: tuple[jax.Device, ...]
    target: jax.Device
    axis_name: str | None
    has_aux: bool
    processes: Processes | None = None
    terms: Terms = ()
    everywhere: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.call.fn)

    def outputs_of(self, out_tree: Any) -> Any:
        if not self.has_aux:
            return out_tree
        node, parts = out_tree.node_data(), out_tree.children()
        if node is None or node[0] is not tuple or len(parts) != 2:
            raise JdagError(
                f"{self.name} returned {out_tree}; with has_aux=True it must return "
                "a pair, (outputs, aux)"
            )
        return parts[0]


def task_of(  # noqa: PLR0913 - the arguments of data_parallel.
    fn: Callable[..., Any],
    params: Any,
    x: Any,
    devices: Sequence[Device] | None,
    output_device: Device | None,
    dim: SupportsIndex,
    *,
    axis_name: str | None,
    has_aux: bool,
    deadline_s: float,
) -> ParallelTask:
    if axis_name is not None and not isinstance(axis_name, str):
        raise JdagError(unusable("axis_name", axis_name, "a str, or None"))
    if not isinstance(has_aux, bool):
        raise JdagError(unusable("has_aux", has_aux, "True or False"))
    check_deadline(deadline_s)
    processes = processes_of(devices, WHAT, deadline_s)
    chosen = resolved_devices(devices, WHAT) if processes is None else processes.own
    if axis_name is not None:
        check_platform(chosen, WHAT)
    target = chosen[0] if output_device is None else device_of(output_device, WHAT)
    mask = () if axis_name is None else (HOLE,)
    call = call_of(fn, (params, x, *mask), WHAT)
    array_count = len([leaf for leaf in jtu.tree_leaves(x) if not is_static(leaf)])
    shared = len(call.arrays) - array_count
    dims, count = rows_of(x, call.arrays[shared:], as_int(dim, WHAT), WHAT)
    if len(set(dims)) > 1:
        raise JdagError(
            f"{WHAT}: dim = {dim} is a different dimension of each array of x, {dims}: "
            "count dimensions from the start"
        )
    sizes = chunk_sizes(count, len(chosen))
    cut = dims[0], sizes, chosen[: len(sizes)]
    task = ParallelTask(call, shared, *cut, target, axis_name, has_aux, processes)
    return task if processes is None else _agreed(task, processes)


def _agreed(task: ParallelTask, processes: Processes) -> ParallelTask:
    """Add the terms. With an axis name, also set the rows of each replica."""
    task = task._replace(terms=_terms_of(task, processes))
    if task.axis_name is None:
        return task
    counts = processes.agreed(task.terms, sum(task.sizes))
    if 0 in counts:
        raise JdagError(
            f"{processes.what}: process {counts.index(0)} has no rows; with axis_name "
            "each process needs at least one row"
        )
    size = max([-(-count // len(processes.own)) for count in counts])
    remaining, real = list(counts), []
    for device in processes.devices:
        real.append(min(size, remaining[device.process_index]))
        remaining[device.process_index] -= real[-1]
    both = zip(processes.devices, real, strict=True)
    own = tuple([rows for device, rows in both if device in processes.own])
    return task._replace(sizes=own, devices=processes.own, everywhere=tuple(real))


def _terms_of(task: ParallelTask, processes: Processes) -> Terms:
    terms = [("fn", task.name)]
    arrays = task.call.arrays
    # With axis_name the template ends with the mask, which is not in `arrays`.
    kinds = zip(_paths(task.call.template), arrays, tracked_of(arrays), strict=False)
    for index, (path, array, tracked) in enumerate(kinds):
        sizes = list(map(str, array.shape))
        if index >= task.shared:
            sizes[task.dim] = "rows"  # The number of rows may differ.
        kind = f"{aval_of(array).dtype}[{','.join(sizes)}]"
        terms.append((path, f"{kind}, differentiated" if tracked else kind))
    options = ("axis_name", task.axis_name), ("has_aux", task.has_aux)
    terms += [(key, repr(value)) for key, value in options]
    terms += [(key, repr(value)) for key, value in configuration().settings]
    return (*terms, ("devices", ", ".join(map(str, processes.devices))))


def _paths(template: Template) -> list[str]:
    """Return the names of a call's arrays, such as `params['w']`."""
    treedef = template.treedef
    numbers = jtu.tree_unflatten(treedef, range(treedef.num_leaves))
    leaves = jtu.tree_leaves_with_path(numbers)
    names = [*["fn"][: bool(template.own)], "params", "x", "rows"]
    return [
        names[path[1].idx] + jtu.keystr(path[2:])
        for (path, _), leaf in zip(leaves, template.leaves, strict=True)
        if leaf is HOLE
    ]
