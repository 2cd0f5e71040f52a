"""What a call of data_parallel comes to, made once for all calls that look alike.

A call looks as what it is given does: its function, by `key_of`; of each array its
abstract value, where it lives and whether it is tracked; devices, options, and the
settings of JAX. What is made of that depends on nothing that arrays hold, and keeps
none of them: how rows are cut, which way replicas go, and the plan that runs them.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu

from jdag.compute.avals import aval_of
from jdag.compute.configuration import configuration
from jdag.compute.duals import are_arrays, is_array
from jdag.compute.fingerprint import key_of
from jdag.compute.moves import Target, home_of
from jdag.compute.pairs import CACHE
from jdag.compute.pytrees import is_static
from jdag.errors import JdagError
from jdag.functions import is_unjitted
from jdag.parallel.apply import Call, tracked_of
from jdag.parallel.devices import Device, device_of, devices_of
from jdag.parallel.dispatch import Alone, Each, Plan, Task
from jdag.parallel.movement import chunk_sizes, rows_of
from jdag.parallel.processes import Processes, processes_of
from jdag.parallel.program import ByPmap, ByShardMap, OneProgram
from jdag.parallel.waiting import check_deadline
from jdag.parallel.wide import Wide

WHAT = "data_parallel"
EACH = ("each", None)
MADE_MAX = 512


class Options(NamedTuple):
    """What a call was given beside its function and its arrays."""

    dim: int
    devices: tuple[jax.Device, ...]
    axis_name: str | None
    has_aux: bool
    how: str | None
    processes: Processes | None


class Ready(NamedTuple):
    """What a call comes to that looks as one before did: only its arrays are new."""

    task: Task
    homes: tuple[Target, ...]
    plan: Plan | None  # None over several processes, which agree on it in each call.


def ready_for(call: Call, x: Any, options: Options) -> Ready:
    """Return what a call comes to; its last arrays are those of x.

    Raises:
        JdagError: what is wrong with x, with `how`, or with what the function returns.
        Exception: what the function raised when it was traced.
    """
    function = (key_of(call.fn), is_unjitted(call.fn), call.template.key)
    key = (*function, *_looks(call.arrays), *options, configuration())
    ready: Ready = _once(key, partial(_made_ready, call, x, options))
    return ready


def plan_of(task: Task, how: str | None) -> Plan:
    """Return the plan of a task."""
    function = key_of(task.fn), is_unjitted(task.fn)
    how = _how(task, how)
    key = (*function, *task[1:], how, configuration())
    plan: Plan = _once(key, partial(_made_plan, task, how))
    return plan


def places_of(
    devices: Any, output_device: Device | None, deadline_s: float
) -> tuple[Processes | None, tuple[jax.Device, ...], jax.Device]:
    """Return the processes that work, the devices of this one, and where outputs go.

    Raises:
        JdagError: what is wrong with the devices, or with the deadline.
    """
    check_deadline(deadline_s)  # Before True is looked up, which equals 1.
    given = tuple(devices) if type(devices) is list else devices
    try:
        return _known_places(given, output_device, deadline_s)
    except TypeError:  # It cannot be hashed.
        return _places(devices, output_device, deadline_s)


def _places(
    devices: Any, output_device: Device | None, deadline_s: float
) -> tuple[Processes | None, tuple[jax.Device, ...], jax.Device]:
    processes = processes_of(devices, WHAT, deadline_s)
    chosen = devices_of(devices, WHAT) if processes is None else processes.own
    given = output_device is not None
    return processes, chosen, device_of(output_device, WHAT) if given else chosen[0]


_known_places = lru_cache(maxsize=256)(_places)


def _once(key: tuple[Hashable, ...], make: Callable[[], Any]) -> Any:
    """Return what was made for this key, now if it never was."""
    place = _place_for(key)
    if not place:
        place.append(make())
    return place[0]


@lru_cache(maxsize=MADE_MAX)
def _place_for(key: tuple[Hashable, ...]) -> list[Any]:
    """The place, empty at first, of what is made once for this key."""
    del key
    return []


def _looks(arrays: Sequence[Any]) -> tuple[Hashable, ...]:
    """What each array looks like, at once where none is a tracer."""
    if are_arrays(arrays):
        avals = tuple([array.aval for array in arrays])
        return avals, tuple([array.sharding for array in arrays])
    return tuple(map(_look, arrays))


def _look(array: Any) -> tuple[Hashable, Target, bool]:
    if is_array(array):
        return array.aval, array.sharding, False
    return aval_of(array), home_of(array), tracked_of((array,))[0]


def _made_ready(call: Call, x: Any, options: Options) -> Ready:
    task = _task(call, x, options)
    plan = plan_of(task, options.how) if task.processes is None else None
    return Ready(task, tuple(map(home_of, call.arrays)), plan)


def _task(call: Call, x: Any, options: Options) -> Task:
    """What is to be done with the arrays of a call; the last are those of x."""
    arrays, dim = call.arrays, options.dim
    taken = len([leaf for leaf in jtu.tree_leaves(x) if not is_static(leaf)])
    shared = len(arrays) - taken
    dims, rows = rows_of(x, arrays[shared:], dim, WHAT)
    if dims != [dims[0]] * taken:
        raise JdagError(
            f"{WHAT}: dim = {dim} is another dimension of each array of x, {dims}: "
            "count it from the start"
        )
    sizes = chunk_sizes(rows, len(options.devices))
    return Task(
        call.fn,
        call.template,
        tuple(map(aval_of, arrays)),
        tracked_of(arrays),
        shared,
        sizes,
        dims[0],
        options.devices[: len(sizes)],
        options.axis_name,
        options.has_aux,
        options.processes,
    )


def _how(task: Task, how: str | None) -> str:
    equal = len(set(task.sizes)) == 1
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


def _made_plan(task: Task, how: str) -> Plan:
    if how == "each":  # Its pairs are counted where they are kept.
        return Alone(task) if len(task.sizes) == 1 else Each(task)
    CACHE.count(task.fn, key_of(task.fn))
    if task.everywhere:
        return OneProgram(task, partial(Wide, task=task))
    return OneProgram(task, ByPmap if how == "pmap" else ByShardMap)
