"""Data parallelism over several processes: agreement and sums of gradients.

The processes are those of `jax.distributed`; each runs the same program on its own
devices and rows. A collective hangs or aborts if a process does not enter it, or enters
it with other shapes. So before each collective the processes exchange a hash of their
terms (function, shapes, options). If the hashes differ, they exchange the terms, and
all raise the same error. An error names late processes (`jdag.parallel.waiting`).

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

# Names and values that must be equal on all processes.
Terms = tuple[tuple[str, str], ...]

INSIDE = (
    "data_parallel over several processes cannot be inside of jax.jit, jax.vmap, or a "
    "loop or branch of jax.lax: call it and jax.grad outside of these; its function is "
    "jitted"
)

# The terms of a process after the end of its program.
ENDED = {"fn": "none: its program has ended"}


class Processes(NamedTuple):
    """The processes of one data-parallel call.

    Attributes:
        devices: the devices of all processes, in the order of the replicas.
        own: the devices of this process.
        what: the caller's name in errors.
        deadline_s: how long the processes wait for each other, in seconds.
    """

    devices: tuple[jax.Device, ...]
    own: tuple[jax.Device, ...]
    what: str
    deadline_s: float

    @property
    def group(self) -> "ProcessGroup":
        return _group_of(self.devices[0].platform)

    def agreed(self, terms: Terms, number: int = 0) -> tuple[int, ...]:
        """Compare the terms of all processes; return the `number` of each process.

        Raises:
            JdagError: terms differ; the message names the first difference.
            WorkerLost: a process has ended or is late.
        """
        terms = (*terms, ("deadline_s", f"{self.deadline_s:g}"))
        return self.group.agreed(self.what, terms, number, self.deadline_s)


class ProcessGroup:
    """Collectives over one device of each process, the first device of a platform."""

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
        self._deadline_s = DEADLINE_S  # The deadline of the last call.
        self._is_over = False
        # At exit, notify processes that wait for this one.
        atexit.register(self._end)

    def agreed(
        self, what: str, terms: Terms, number: int, deadline_s: float
    ) -> tuple[int, ...]:
        self._deadline_s = deadline_s
        hashed = np.asarray([*_hashed(terms), number], np.uint32)
        gathered = self._gathered(hashed, what)
        if not (gathered[:, :-1] == gathered[0, :-1]).all():
            self._refuse(what, terms)
        return tuple(map(int, gathered[:, -1]))

    def summed(self, arrays: Sequence[Any]) -> list[Any]:
        """Sum each array over all processes. The sum is moved to the array's device."""
        local = jax.device_put(list(arrays), self._place)
        sums = self._sum([self._spread(array) for array in _local(local)])
        totals = [total.addressable_shards[0].data for total in sums]
        moved: list[Any] = jax.device_put(totals, list(map(home_of, arrays)))
        return moved

    def _spread(self, array: Any) -> Any:
        shape = (jax.process_count(), *array.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, [array])

    def _gathered(
        self, values: np.ndarray[Any, Any], what: str
    ) -> np.ndarray[Any, Any]:
        local = jax.device_put(values[None], self._place)
        if isinstance(local, jax.core.Tracer):
            raise JdagError(INSIDE)
        if self._is_over:
            raise WorkerLost("a process of this data_parallel call has ended")
        enter = partial(self._gather_rows, self._spread(local))
        self._is_over = True  # Reset below on success.
        try:
            rows = self._waiting.met(enter, what, self._deadline_s)
        except (RuntimeError, ValueError) as error:  # Raised by a failed collective.
            raise WorkerLost(
                f"one of the {jax.process_count()} processes of this data_parallel has "
                f"ended: {error}"
            ) from error
        self._is_over = False
        return np.asarray(rows)

    def _gather_rows(self, values: Any) -> np.ndarray[Any, Any]:
        rows = self._gather(values)
        return np.asarray(rows.addressable_shards[0].data)

    def _refuse(self, what: str, terms: Terms) -> None:
        text = json.dumps(terms).encode()
        sizes = self._gathered(np.asarray([len(text)], np.uint32), what)
        padded = np.zeros(int(sizes.max()), np.uint8)
        padded[: len(text)] = np.frombuffer(text, np.uint8)
        every = [
            dict(json.loads(bytes(row[: int(size)])))
            for row, (size,) in zip(self._gathered(padded, what), sizes, strict=True)
        ]
        if ENDED in every:
            self._is_over = True
            raise WorkerLost(
                f"{what}: the program of process {every.index(ENDED)} has ended; all "
                "processes must make the same number of calls"
            )
        number = next(n for n, values in enumerate(every) if values != every[0])
        both = every[0], every[number]
        keys = [key for terms_of in both for key in terms_of]
        key = next(key for key in keys if both[0].get(key) != both[1].get(key))
        values = [terms_of.get(key, "nothing") for terms_of in both]
        raise JdagError(
            f"{what}: {key} = {values[0]} on process 0 and {values[1]} on process "
            f"{number}; all processes must make the same calls in the same order, "
            "with equal functions, parameters and devices"
        )

    def _end(self) -> None:
        if not self._is_over:
            # The other processes raise errors; this one exits.
            with suppress(JdagError):
                what = f"the end of the program of process {jax.process_index()}"
                self.agreed(what, tuple(ENDED.items()), 0, self._deadline_s)


_group_of = lru_cache(maxsize=PLATFORMS_MAX)(ProcessGroup)


def processes_of(devices: Any, what: str, deadline_s: float) -> Processes | None:
    if not isinstance(devices, Sequence) or jax.process_count() == 1:
        return None
    index = jax.process_index()
    remote = [isinstance(d, jax.Device) and d.process_index != index for d in devices]
    if True not in remote:
        return None
    both = zip(devices, remote, strict=True)
    resolved = [d if is_remote else device_of(d, what) for d, is_remote in both]
    counter = Counter([device.process_index for device in distinct(resolved, what)])
    counts = [counter[number] for number in range(jax.process_count())]
    if len(set(counts)) > 1:
        listed = ", ".join([f"process {p} has {n}" for p, n in enumerate(counts)])
        raise JdagError(
            f"{what}: each process must have the same number of devices, but {listed}: "
            "pass jax.devices(), or, for this process alone, jax.local_devices()"
        )
    own = tuple([device for device in resolved if device.process_index == index])
    what = f"{what} over {len(counts)} processes"
    return Processes(tuple(resolved), own, what, deadline_s)


def replace(
    arrays: list[Any], indices: Sequence[int], rule: Callable[[Any, Any], Any]
) -> None:
    """Replace the arrays at these indices by copies; `rule` maps their cotangents.

    `rule(cotangents, arrays)` returns the cotangents of the original arrays.
    """
    identity: Any = jax.custom_vjp(list)
    identity.defvjp(
        lambda inputs: (list(inputs), inputs), lambda inputs, cts: (rule(cts, inputs),)
    )
    copies = identity([arrays[index] for index in indices])
    for index, copy in zip(indices, copies, strict=True):
        arrays[index] = copy


@lru_cache(maxsize=1024)
def _hashed(terms: Terms) -> tuple[int, int]:
    digest = hashlib.blake2b(repr(terms).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")


def numbered(name: str, values: Sequence[str]) -> Terms:
    return tuple([(f"{name} {number}", value) for number, value in enumerate(values)])


def _gathered(part: Any) -> Any:
    return jax.lax.all_gather(part[0], _AXIS)


@jax.jit
def _local(arrays: Sequence[Any]) -> list[Any]:
    # Shards of the global arrays.
    return [array[None] for array in arrays]


def _total(arrays: Sequence[Any]) -> list[Any]:
    sums = list(arrays)
    for dtype in dict.fromkeys([array.dtype for array in arrays]):
        indices = [n for n, array in enumerate(arrays) if array.dtype == dtype]
        flat, unravel = ravel_pytree([arrays[index] for index in indices])
        totals = unravel(jax.lax.psum(flat, _AXIS))
        for index, total in zip(indices, totals, strict=True):
            sums[index] = total[0]
    return sums


# ------------------------------------- the linear primitive that sums gradients


def _sum_now(*arrays: Any, processes: Processes, terms: Terms) -> list[Any]:
    kinds = [str(aval_of(array).strong) for array in arrays]
    processes.agreed((*terms, ("step", "sum"), *numbered("gradient", kinds)))
    return processes.group.summed(arrays)


def _refuse_twice(*_: Any, **__: Any) -> Any:
    raise JdagError(
        "a sum over processes has no reverse-mode derivative: for second derivatives "
        "use forward mode, as in jax.jvp(jax.grad(loss), (p,), (v,))"
    )


def _refuse(*_: Any, **__: Any) -> NoReturn:
    raise JdagError(INSIDE)


# Sums gradients over all processes; each sum is on its gradient's device. The processes
# compare terms, shapes and dtypes first.
SUMMED = primitive(
    "jdag_summed",
    _sum_now,
    lambda *arrays, processes, terms: list(arrays),
    _refuse,
)
ad.deflinear2(SUMMED, _refuse_twice)
