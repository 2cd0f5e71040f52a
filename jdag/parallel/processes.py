"""Data parallelism over several processes: agreement and sums of gradients.

The processes are those of `jax.distributed`; each runs the same program on its own
devices and rows. A collective hangs or aborts if a process does not enter it, or enters
it with other shapes. So before each collective the processes exchange a number and a
hash of their terms (function, shapes, options). If the hashes differ, the processes
exchange the terms, and all raise the same error. Late processes are named in the error
(`jdag.parallel.waiting`).

Parameter gradients are added by a linear primitive, so that forward-mode
differentiation works.
"""

import atexit
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import Any, NamedTuple, NoReturn

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from jax.interpreters import ad
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdag.compute.avals import aval_of
from jdag.compute.moves import home_of, primitive
from jdag.errors import JdagError, WorkerLost
from jdag.parallel.devices import device_of, distinct
from jdag.parallel.waiting import DEADLINE_S, Waiting

_AXIS = "processes"
PLATFORMS_MAX = 8

# Names and values that must be equal on all processes before a collective.
Terms = tuple[tuple[str, str], ...]

INSIDE = (
    "data_parallel over several processes cannot be inside of jax.jit, jax.vmap, or a "
    "loop or branch of jax.lax: call it and jax.grad outside of these; the function "
    "that it is given is jitted"
)

# The terms of a process whose program has ended.
ENDED = {"fn": "none: its program has ended"}


class Processes(NamedTuple):
    """The processes of one data-parallel call.

    Attributes:
        devices: of all processes, in the order of the replicas.
        own: those of this process.
        what: the caller's name in errors.
        deadline_s: how long the processes wait for each other.
    """

    devices: tuple[jax.Device, ...]
    own: tuple[jax.Device, ...]
    what: str
    deadline_s: float

    @property
    def meeting(self) -> "ProcessGroup":
        """The channel for collectives of these processes."""
        return _meeting(self.devices[0].platform)

    def agreed(self, terms: Terms, number: int = 0) -> tuple[int, ...]:
        """Wait for all processes, compare their terms, and return all their numbers.

        Raises:
            JdagError: terms differ; names the first difference.
            WorkerLost: a process is gone or late.
        """
        terms = (*terms, ("deadline_s", f"{self.deadline_s:g}"))
        return self.meeting.agreed(self.what, terms, number, self.deadline_s)


class ProcessGroup:
    """Collectives over one device of each process: the first one of a platform."""

    def __init__(self, platform: str) -> None:
        firsts: dict[int, jax.Device] = {}
        for device in jax.devices(platform):
            firsts.setdefault(device.process_index, device)
        devices = [firsts[number] for number in range(jax.process_count())]
        mesh, spec = Mesh(np.array(devices), (_AXIS,)), PartitionSpec(_AXIS)
        self._place = firsts[jax.process_index()]
        self._sharding = NamedSharding(mesh, spec)
        same: Any = {"in_specs": spec, "out_specs": PartitionSpec(), "check_vma": False}
        self._gather = jax.jit(jax.shard_map(_gathered, mesh=mesh, **same))
        self._sum = jax.jit(jax.shard_map(_total, mesh=mesh, **same))
        self._waiting = Waiting(platform)
        self._deadline_s = DEADLINE_S  # Of the last call.
        self._is_over = False
        # At exit, notify processes that still wait for this one.
        atexit.register(self._end)

    def agreed(
        self, what: str, terms: Terms, number: int, deadline_s: float
    ) -> tuple[int, ...]:
        """See `Processes.agreed`; `what` names the caller in errors."""
        self._deadline_s = deadline_s
        hashed = np.asarray([*_hashed(terms), number], np.uint32)
        found = self._gathered(hashed, what)
        if not (found[:, :-1] == found[0, :-1]).all():
            self._refuse(what, terms)
        return tuple(map(int, found[:, -1]))

    def summed(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the sum of each array over all processes, on the array's device.

        All arrays of a dtype take one collective.
        """
        here = jax.device_put(list(arrays), self._place)
        sums = self._sum([self._spread(array) for array in _local(here)])
        found = [total.addressable_shards[0].data for total in sums]
        back: list[Any] = jax.device_put(found, list(map(home_of, arrays)))
        return back

    def _spread(self, array: Any) -> Any:
        """Return the global array whose local shard is `array`."""
        shape = (jax.process_count(), *array.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, [array])

    def _gathered(
        self, values: np.ndarray[Any, Any], what: str
    ) -> np.ndarray[Any, Any]:
        here = jax.device_put(values[None], self._place)
        if isinstance(here, jax.core.Tracer):
            raise JdagError(INSIDE)
        if self._is_over:
            raise WorkerLost("one of the processes that work together is gone")
        enter = partial(self._entered, self._spread(here))
        is_over, self._is_over = self._is_over, True  # Reset below on success.
        try:
            found = self._waiting.met(enter, what, self._deadline_s)
        except (RuntimeError, ValueError) as error:  # Raised by a failed collective.
            raise WorkerLost(
                f"one of the {jax.process_count()} processes that work together is "
                f"gone: {error}"
            ) from error
        self._is_over = is_over
        return np.asarray(found)

    def _entered(self, mine: Any) -> np.ndarray[Any, Any]:
        found = self._gather(mine)
        return np.asarray(found.addressable_shards[0].data)

    def _refuse(self, what: str, terms: Terms) -> None:
        """Exchange the terms and raise an error that names the first difference."""
        said = json.dumps(terms).encode()
        sizes = self._gathered(np.asarray([len(said)], np.uint32), what)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: len(said)] = np.frombuffer(said, np.uint8)
        every = [
            dict(json.loads(bytes(row[: int(size)])))
            for row, (size,) in zip(self._gathered(padded, what), sizes, strict=True)
        ]
        if ENDED in every:
            self._is_over = True
            raise WorkerLost(
                f"{what}: the program of process "
                f"{every.index(ENDED)} has ended; all processes must call it equally "
                "often"
            )
        number = next(n for n, other in enumerate(every) if other != every[0])
        name, here, there = _difference(every[0], every[number])
        raise JdagError(
            f"{what}: {name} = {here} on process 0 and {there} on process {number}; "
            "all processes must call it with equal functions, parameters and devices, "
            "equally often and in the same order"
        )

    def _end(self) -> None:
        if not self._is_over:
            # Errors are raised on the other processes; this one is exiting.
            with suppress(JdagError):
                what = f"the end of the program of process {jax.process_index()}"
                ended = tuple(ENDED.items())
                self.agreed(what, ended, 0, self._deadline_s)


_meeting = lru_cache(maxsize=PLATFORMS_MAX)(ProcessGroup)


def processes_of(devices: Any, what: str, deadline_s: float) -> Processes | None:
    """Return the processes that own these devices; None: only this one."""
    if not isinstance(devices, Sequence) or jax.process_count() == 1:
        return None
    me = jax.process_index()
    far = [isinstance(one, jax.Device) and one.process_index != me for one in devices]
    if True not in far:
        return None
    both = zip(devices, far, strict=True)
    found = [one if is_far else device_of(one, what) for one, is_far in both]
    counts = Counter([device.process_index for device in distinct(found, what)])
    every = [counts[number] for number in range(jax.process_count())]
    if every != [every[0]] * len(every):
        has = ", ".join([f"process {p} has {n}" for p, n in enumerate(every)])
        raise JdagError(
            f"{what}: each process must contribute the same number of devices, and "
            f"here {has}: pass jax.devices(), or, for this process alone, "
            "jax.local_devices()"
        )
    own = tuple([one for one in found if one.process_index == me])
    what = f"{what} over {len(every)} processes"
    return Processes(tuple(found), own, what, deadline_s)


def summed(arrays: Sequence[Any], processes: Processes, terms: Terms) -> list[Any]:
    """Sum gradients over all processes; each sum is on its gradient's device.

    Shapes and dtypes must be equal on all processes; `terms` are compared first.
    """
    found: list[Any] = SUMMED.bind(*arrays, processes=processes, terms=terms)
    return found


def replace(
    arrays: list[Any], indices: Sequence[int], rule: Callable[[Any, Any], Any]
) -> None:
    """Have cotangents of the arrays at these indices pass through a rule.

    `rule(cotangents, arrays)` returns the cotangents of the arrays that were there.
    """
    same: Any = jax.custom_vjp(list)
    same.defvjp(
        lambda given: (list(given), given), lambda kept, cts: (rule(cts, kept),)
    )
    found = same([arrays[index] for index in indices])
    for index, array in zip(indices, found, strict=True):
        arrays[index] = array


@lru_cache(maxsize=1024)
def _hashed(terms: Terms) -> tuple[int, int]:
    digest = hashlib.blake2b(repr(terms).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")


def numbered(name: str, values: Sequence[str]) -> Terms:
    """Return terms named `name 0`, `name 1`, ..."""
    return tuple([(f"{name} {number}", value) for number, value in enumerate(values)])


def _difference(first: dict[str, str], other: dict[str, str]) -> tuple[str, str, str]:
    names = dict.fromkeys([*first, *other])
    both = [(n, first.get(n, "nothing"), other.get(n, "nothing")) for n in names]
    return next(found for found in both if found[1] != found[2])


def _gathered(part: Any) -> Any:
    return jax.lax.all_gather(part[0], _AXIS)


@jax.jit
def _local(arrays: Sequence[Any]) -> list[Any]:
    # The local parts of the global arrays.
    return [array[None] for array in arrays]


def _total(arrays: Sequence[Any]) -> list[Any]:
    """Add arrays over all processes, with one collective per dtype."""
    found = list(arrays)
    for dtype in dict.fromkeys([array.dtype for array in arrays]):
        indices = [n for n, array in enumerate(arrays) if array.dtype == dtype]
        flat, unravel = ravel_pytree([arrays[index] for index in indices])
        totals = unravel(jax.lax.psum(flat, _AXIS))
        for index, total in zip(indices, totals, strict=True):
            found[index] = total[0]
    return found


# ----------------------------------------------------------------- a sum is linear


def _sum_now(*arrays: Any, processes: Processes, terms: Terms) -> list[Any]:
    kinds = [str(aval_of(array).strong) for array in arrays]
    processes.agreed((*terms, ("step", "sum"), *numbered("gradient", kinds)))
    return processes.meeting.summed(arrays)


def _refuse_twice(*_: Any, **__: Any) -> Any:
    raise JdagError(
        "a sum over processes has no reverse-mode derivative: for second derivatives "
        "use forward mode, as in jax.jvp(jax.grad(loss), (p,), (v,))"
    )


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise JdagError(INSIDE)


SUMMED = primitive(
    "jdag_summed",
    _sum_now,
    lambda *arrays, processes, terms: list(arrays),
    _refuse,
)
ad.deflinear2(SUMMED, _refuse_twice)
