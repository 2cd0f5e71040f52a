"""Data parallel over several processes: what they agree on, and the sums they share.

The processes are those of `jax.distributed`; each runs the same program on its own
devices and rows. A collective that one of them does not enter, or enters with other
shapes, hangs or ends the process. So before each they exchange a few words: what they
are about to do, as a hash, and a number. Where the hashes differ they exchange what
they stand for, and all raise the same error. Who does not come to that is named
(`jdag.parallel.waiting`).

Parameters that are equal on all processes are shared by a primitive that does nothing.
Its transpose adds the cotangents of all processes, one collective for all leaves.
"""

import atexit
import hashlib
import json
from collections import Counter
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jdag.compute.avals import aval_of
from jdag.compute.moves import home_of
from jdag.errors import JdagError, WorkerLost
from jdag.parallel.apply import tracked_of
from jdag.parallel.devices import device_of, distinct
from jdag.parallel.waiting import DEADLINE_S, Waiting

AXIS = "processes"
COMPANIES_MAX = 16

# What a process is about to do: names and values, which all have to have alike.
Terms = tuple[tuple[str, str], ...]

INSIDE = (
    "data_parallel over several processes cannot be inside of jax.jit, jax.vmap, or a "
    "loop or branch of jax.lax: call it and jax.grad outside of these; the function "
    "that it is given is jitted. With axis_name it has first derivatives only"
)

# The terms of a process that does nothing more.
ENDED = {"fn": "none: its program has ended"}

SHARED = Primitive("jdag_shared")
SHARED.multiple_results = True
SUMMED = Primitive("jdag_summed")
SUMMED.multiple_results = True


class Processes:
    """The processes whose devices work together, as this one sees them.

    `own` are the devices of this process, `devices` those of all, in the order of the
    replicas; `places` has for each of all its process and its number there.

    Args:
        devices: of all processes.
        what: the function that was given them, for errors.
        deadline_s: how many seconds they wait for each other.

    Raises:
        JdagError: a process has none, or not as many as the others.
    """

    def __init__(
        self, devices: tuple[jax.Device, ...], what: str, deadline_s: float
    ) -> None:
        self.devices = devices
        self.what = what
        self._deadline_s = deadline_s
        counts = Counter([device.process_index for device in devices])
        every = [counts[number] for number in range(jax.process_count())]
        if every != [every[0]] * len(every):
            has = ", ".join([f"process {p} has {n}" for p, n in enumerate(every)])
            raise JdagError(
                f"{what}: devices of several processes are as many of each, and here "
                f"{has}: give it jax.devices(), or, for this process alone, "
                "jax.local_devices()"
            )
        me = jax.process_index()
        self.own = tuple([one for one in devices if one.process_index == me])
        seen: Counter[int] = Counter()
        places = []
        for device in devices:
            places.append((device.process_index, seen[device.process_index]))
            seen[device.process_index] += 1
        self.places = tuple(places)
        self._meeting = _meeting(devices[0].platform)

    @property
    def count(self) -> int:
        """How many processes there are."""
        return jax.process_count()

    def agreed(self, terms: Terms, number: int = 0) -> tuple[int, ...]:
        """Return the number that each process gives, once all have the same terms.

        It waits for all processes.

        Raises:
            JdagError: their terms differ; names the first that does, and both values.
            WorkerLost: a process is gone, or has not come in time.
        """
        terms = (*terms, ("deadline_s", f"{self._deadline_s:g}"))
        what = f"{self.what} over {self.count} processes"
        return self._meeting.agreed(what, terms, number, deadline_s=self._deadline_s)

    def summed(self, arrays: Sequence[Any], terms: Terms) -> list[Any]:
        """Return the sum of each array over all processes, where the array was.

        It is one collective for all arrays of a dtype.

        Raises:
            JdagError: the processes do not add the same.
            WorkerLost: a process is gone.
        """
        kinds = [str(aval_of(array).strong) for array in arrays]
        self.agreed((*terms, ("step", "sum"), *numbered("gradient", kinds)))
        homes = [home_of(array) for array in arrays]
        flats = _flat(jax.device_put(list(arrays), self._meeting.place))
        shapes = tuple([(array.shape, array.dtype) for array in arrays])
        parts = _unflattened(self._meeting.summed(flats), shapes)
        found: list[Any] = jax.device_put(parts, homes)
        return found


class Meeting:
    """One device of each process, the same whatever devices are given elsewhere.

    `place` is that of this process.

    Args:
        platform: of the devices.
    """

    def __init__(self, platform: str) -> None:
        firsts: dict[int, jax.Device] = {}
        for device in jax.devices(platform):
            firsts.setdefault(device.process_index, device)
        devices = [firsts[number] for number in range(jax.process_count())]
        self.place = devices[jax.process_index()]
        self._count = len(devices)
        self._sharding = NamedSharding(
            Mesh(np.array(devices), (AXIS,)), PartitionSpec(AXIS)
        )
        self._gather = self._mapped(lambda a: jax.lax.all_gather(a[0], AXIS)[None])
        self._sum = self._mapped(lambda arrays: jax.lax.psum(arrays, AXIS))
        self._waiting = Waiting(platform)
        self._deadline_s = DEADLINE_S  # The last that was given.
        self._is_over = False
        # Who still waits when this program ends is told so.
        atexit.register(self._end)

    def agreed(
        self, what: str, terms: Terms, number: int = 0, *, deadline_s: float
    ) -> tuple[int, ...]:
        """See `Processes.agreed`; `what` is who asks."""
        self._deadline_s = deadline_s
        hashed = np.asarray([*_hashed(terms), number], np.uint32)
        found = self._gathered(hashed, what)
        if not (found[:, :-1] == found[0, :-1]).all():
            self._refuse(what, terms)
        return tuple(map(int, found[:, -1]))

    def summed(self, arrays: Sequence[Any]) -> list[Any]:
        """Return the sums of arrays (1, ...) over all processes, at `place`."""
        sums = self._sum([self._spread(array) for array in arrays])
        return [total.addressable_shards[0].data for total in sums]

    def _mapped(self, fn: Any) -> Any:
        mesh, spec = self._sharding.mesh, self._sharding.spec
        return jax.jit(
            jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        )

    def _spread(self, array: Any) -> Any:
        """An array over all processes, of which this is the part of this one."""
        shape = (self._count, *array.shape[1:])
        return jax.make_array_from_single_device_arrays(shape, self._sharding, [array])

    def _gathered(
        self, values: np.ndarray[Any, Any], what: str
    ) -> np.ndarray[Any, Any]:
        here = jax.device_put(values[None], self.place)
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
                f"one of the {self._count} processes that work together is gone: "
                f"{error}"
            ) from error
        self._is_over = is_over
        return np.asarray(found)

    def _entered(self, mine: Any) -> np.ndarray[Any, Any]:
        found = self._gather(mine)
        return np.asarray(found.addressable_shards[0].data)[0]

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
        name, *values = _difference(every[0], every[number])
        raise JdagError(
            f"{what}: {name} = {values[0]} on process 0 and "
            f"{values[1]} on process {number}; all processes call it with equal "
            "functions, parameters and devices, as often and in the same order"
        )

    def _end(self) -> None:
        if not self._is_over:
            # The others hear it; here there is nobody left to be told what they do.
            with suppress(JdagError):
                what = f"the end of the program of process {jax.process_index()}"
                ended = tuple(ENDED.items())
                self.agreed(what, ended, deadline_s=self._deadline_s)


_meeting = lru_cache(maxsize=COMPANIES_MAX)(Meeting)


def processes_of(
    devices: Any, what: str, deadline_s: float = DEADLINE_S
) -> Processes | None:
    """Return the processes that these devices belong to; None: to this one alone.

    Args:
        devices: what the function was given.
        what: the function, for errors.
        deadline_s: how many seconds the processes wait for each other.

    Raises:
        JdagError: a process has none, or not as many as the others; a device is there
            twice, or is none.
    """
    if not isinstance(devices, Sequence) or jax.process_count() == 1:
        return None
    me = jax.process_index()
    far = [isinstance(one, jax.Device) and one.process_index != me for one in devices]
    if True not in far:
        return None
    both = zip(devices, far, strict=True)
    found = [one if is_far else device_of(one, what) for one, is_far in both]
    return _company(distinct(found, what), what, deadline_s)


_company = lru_cache(maxsize=COMPANIES_MAX)(Processes)


def given_by_all(
    arrays: Sequence[Any], processes: Processes, terms: Terms
) -> list[Any]:
    """Return the arrays as they are; what flows back is added over all processes.

    Args:
        arrays: equal on all processes.
        processes: those.
        terms: what they belong to, for errors.
    """
    found = list(arrays)
    places = [place for place, tracked in enumerate(tracked_of(arrays)) if tracked]
    if places:
        given = [found[place] for place in places]
        passed = SHARED.bind(*given, processes=processes, terms=terms)
        for place, array in zip(places, passed, strict=True):
            found[place] = array
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
    for name in dict.fromkeys([*first, *other]):
        values = [terms.get(name, "nothing") for terms in (first, other)]
        if values[0] != values[1]:
            return name, values[0], values[1]
    raise AssertionError((first, other))


# ------------------------------------------------------- leaves as one array of a dtype


def _kinds(dtypes: Sequence[Hashable]) -> list[list[int]]:
    """Return the places of equal dtypes, dtype by dtype."""
    found: dict[Hashable, list[int]] = {}
    for place, dtype in enumerate(dtypes):
        found.setdefault(dtype, []).append(place)
    return list(found.values())


@jax.jit
def _flat(arrays: Sequence[Any]) -> list[Any]:
    groups = _kinds([array.dtype for array in arrays])
    return [
        jnp.concatenate([arrays[place].reshape(1, -1) for place in group], 1)
        for group in groups
    ]


@partial(jax.jit, static_argnums=1)
def _unflattened(flats: Sequence[Any], shapes: Sequence[Any]) -> list[Any]:
    found: list[Any] = [None] * len(shapes)
    groups = _kinds([dtype for _, dtype in shapes])
    for flat, group in zip(flats, groups, strict=True):
        pieces = jax.lax.split(flat, [prod(shapes[place][0]) for place in group], 1)
        for place, piece in zip(group, pieces, strict=True):
            found[place] = piece.reshape(shapes[place][0])
    return found


# --------------------------------------------------------------- sharing is linear


def _transposed(cotangents: Sequence[Any], *_: Any, processes: Any, terms: Any) -> Any:
    whole = list(map(ad.instantiate_zeros, cotangents))
    return SUMMED.bind(*whole, processes=processes, terms=terms)


def _sum_now(*arrays: Any, processes: Processes, terms: Terms) -> list[Any]:
    return processes.summed(arrays, terms)


def _refuse_twice(*_: Any, **__: Any) -> Any:
    raise JdagError(
        "a sum over processes cannot be differentiated backwards: of a gradient over "
        "several processes take jax.jvp, as in jax.jvp(jax.grad(loss), (p,), (v,))"
    )


def _refuse(*_: Any, **__: Any) -> Any:
    raise JdagError(INSIDE)


def _as_they_are(*arrays: Any, processes: Any, terms: Any) -> list[Any]:
    del processes, terms
    return list(arrays)


for _primitive in (SHARED, SUMMED):
    _primitive.def_abstract_eval(_as_they_are)
    batching.primitive_batchers[_primitive] = _refuse
SHARED.def_impl(_as_they_are)
SUMMED.def_impl(_sum_now)
ad.deflinear2(SHARED, _transposed)
ad.deflinear2(SUMMED, _refuse_twice)
mlir.register_lowering(SHARED, mlir.lower_fun(_as_they_are, multiple_results=True))
mlir.register_lowering(SUMMED, _refuse)
