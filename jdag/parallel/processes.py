"""Data parallel over several processes: what they agree on, and the sums they share.

The processes are those of `jax.distributed`; each runs the same program on its own
devices and rows. A collective that one of them does not enter, or enters with other
shapes, hangs or ends the process. So before each they exchange a number and a hash of
what they are about to do. Where the hashes differ they exchange what was hashed, and
all raise the same error. A process that is late is named (`jdag.parallel.waiting`).

Gradients of parameters are added by a primitive that is linear, so that they can be
differentiated forwards.
"""

import atexit
import hashlib
import json
from collections import Counter
from collections.abc import Sequence
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

AXIS = "processes"
PLATFORMS_MAX = 8

# What a process is about to do: names and values, which all have to have alike.
Terms = tuple[tuple[str, str], ...]

INSIDE = (
    "data_parallel over several processes cannot be inside of jax.jit, jax.vmap, or a "
    "loop or branch of jax.lax: call it and jax.grad outside of these; the function "
    "that it is given is jitted. With axis_name it has first derivatives only"
)

# The terms of a process that does nothing more.
ENDED = {"fn": "none: its program has ended"}


class Processes(NamedTuple):
    """The processes whose devices work together, as this one sees them.

    `devices` are those of all, in the order of the replicas, and `own` those of this
    process; `what` they do is for errors; `deadline_s` is how long they wait for each
    other.
    """

    devices: tuple[jax.Device, ...]
    own: tuple[jax.Device, ...]
    what: str
    deadline_s: float

    @property
    def meeting(self) -> "Meeting":
        """How they speak to each other."""
        return _meeting(self.devices[0].platform)

    def agreed(self, terms: Terms, number: int = 0) -> tuple[int, ...]:
        """Return the number that each process gives, once all have the same terms.

        It waits for all processes. Where terms differ it raises a JdagError that names
        the first that does; where a process is gone, or late, WorkerLost.
        """
        terms = (*terms, ("deadline_s", f"{self.deadline_s:g}"))
        return self.meeting.agreed(self.what, terms, number, self.deadline_s)


class Meeting:
    """One device of each process, the same whatever devices are given elsewhere."""

    def __init__(self, platform: str) -> None:
        firsts: dict[int, jax.Device] = {}
        for device in jax.devices(platform):
            firsts.setdefault(device.process_index, device)
        devices = [firsts[number] for number in range(jax.process_count())]
        mesh, spec = Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS)
        self._place = firsts[jax.process_index()]
        self._sharding = NamedSharding(mesh, spec)
        same: Any = {"in_specs": spec, "out_specs": PartitionSpec(), "check_vma": False}
        self._gather = jax.jit(jax.shard_map(_gathered, mesh=mesh, **same))
        self._sum = jax.jit(jax.shard_map(_total, mesh=mesh, **same))
        self._waiting = Waiting(platform)
        self._deadline_s = DEADLINE_S  # The last that was given.
        self._is_over = False
        # Processes that still wait when this program ends are told so.
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
        """Return the sum of each array over all processes, where the array was.

        It is one collective for all arrays of a dtype.
        """
        here = jax.device_put(list(arrays), self._place)
        sums = self._sum([self._spread(array) for array in _parts(here)])
        found = [total.addressable_shards[0].data for total in sums]
        back: list[Any] = jax.device_put(found, list(map(home_of, arrays)))
        return back

    def _spread(self, array: Any) -> Any:
        """An array over all processes, of which this is the part of this one."""
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
        is_over, self._is_over = self._is_over, True  # Unless nothing is raised.
        try:
            found = self._waiting.met(enter, what, self._deadline_s)
        except (RuntimeError, ValueError) as error:  # What a collective may raise.
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
        """Say where the terms of a process differ from those of the first."""
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
                f"{every.index(ENDED)} has ended; all processes call it as often"
            )
        number = next(n for n, other in enumerate(every) if other != every[0])
        name, here, there = _difference(every[0], every[number])
        raise JdagError(
            f"{what}: {name} = {here} on process 0 and {there} on process {number}; "
            "all processes call it with equal functions, parameters and devices, as "
            "often and in the same order"
        )

    def _end(self) -> None:
        if not self._is_over:
            # The others raise the error; this process has ended.
            with suppress(JdagError):
                what = f"the end of the program of process {jax.process_index()}"
                ended = tuple(ENDED.items())
                self.agreed(what, ended, 0, self._deadline_s)


_meeting = lru_cache(maxsize=PLATFORMS_MAX)(Meeting)


def processes_of(devices: Any, what: str, deadline_s: float) -> Processes | None:
    """Return the processes that these devices belong to; None: to this one alone."""
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
            f"{what}: devices of several processes are as many of each, and here "
            f"{has}: give it jax.devices(), or, for this process alone, "
            "jax.local_devices()"
        )
    own = tuple([one for one in found if one.process_index == me])
    what = f"{what} over {len(every)} processes"
    return Processes(tuple(found), own, what, deadline_s)


def summed(arrays: Sequence[Any], processes: Processes, terms: Terms) -> list[Any]:
    """Return the sum of gradients over all processes, each where the gradient was.

    The gradients are alike on all; `terms` say what they belong to, for errors.
    """
    found: list[Any] = SUMMED.bind(*arrays, processes=processes, terms=terms)
    return found


@lru_cache(maxsize=1024)
def _hashed(terms: Terms) -> tuple[int, int]:
    digest = hashlib.blake2b(repr(terms).encode(), digest_size=8).digest()
    return int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")


def numbered(name: str, values: Sequence[str]) -> Terms:
    """Return terms of one name and a number each."""
    return tuple([(f"{name} {number}", value) for number, value in enumerate(values)])


def _difference(first: dict[str, str], other: dict[str, str]) -> tuple[str, str, str]:
    """Return the name of what differs first, and both values."""
    names = dict.fromkeys([*first, *other])
    both = [(n, first.get(n, "nothing"), other.get(n, "nothing")) for n in names]
    return next(found for found in both if found[1] != found[2])


def _gathered(part: Any) -> Any:
    return jax.lax.all_gather(part[0], AXIS)


@jax.jit
def _parts(arrays: Sequence[Any]) -> list[Any]:
    # Of arrays over all processes, those of this one.
    return [array[None] for array in arrays]


def _total(arrays: Sequence[Any]) -> list[Any]:
    """Add up what all processes have: one collective for all leaves of a dtype."""
    found = list(arrays)
    for dtype in dict.fromkeys([array.dtype for array in arrays]):
        indices = [n for n, array in enumerate(arrays) if array.dtype == dtype]
        flat, unravel = ravel_pytree([arrays[index] for index in indices])
        totals = unravel(jax.lax.psum(flat, AXIS))
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
        "a sum over processes cannot be differentiated backwards: of a gradient over "
        "several processes take jax.jvp, as in jax.jvp(jax.grad(loss), (p,), (v,))"
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
