"""The values that one worker holds by key, with their bytes."""

import math
from collections.abc import Callable, Hashable, Iterable
from functools import lru_cache
from typing import Any

import jax
import numpy as np

from jdag.compute.avals import Aval
from jdag.compute.duals import is_array_type


class Buffer:
    """Stands for the array of an abstract value; only its size is known.

    Equal abstract values are one object; buffers distinguish their arrays.
    """

    __slots__ = ("nbytes",)

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes


class Values:
    """Values by key: arrays, residuals, scalars, abstract values, errors.

    `bytes_held` is the current size of the held arrays, `bytes_peak` its maximum. An
    array held several times, by keys or inside residuals, counts once; two arrays that
    share a buffer count twice, and so does an array that several workers hold. Each
    abstract value counts as its own array, which residuals may hold as well; values
    without `nbytes` count nothing.

    `activations_peak` is the most that was held for backward passes at once, in bytes:
    what `activate` said of each key, until it is dropped.
    """

    __slots__ = (
        "_activations",
        "_activations_held",
        "_buffers",
        "_devices",
        "_held",
        "_holds",
        "activations_peak",
        "bytes_held",
        "bytes_peak",
        "get",
    )

    def __init__(self) -> None:
        self._held: dict[Hashable, Any] = {}
        # Return the value under a key; KeyError if there is none.
        self.get: Callable[[Hashable], Any] = self._held.__getitem__
        self._devices: dict[Hashable, str] = {}  # Only of values not on the default.
        self._holds: dict[int, tuple[int, int]] = {}  # By id: how often, bytes.
        self._buffers: dict[Hashable, Buffer] = {}  # Those requested so far.
        self._activations: dict[Hashable, int] = {}
        self._activations_held = 0
        self.activations_peak = 0
        self.bytes_held = 0
        self.bytes_peak = 0

    def put(self, key: Hashable, value: Any, device: str | None = None) -> None:
        """Hold a value under a key, replacing any previous one.

        `device` is where the value is; None is the worker's default.
        """
        if device is not None:
            self._devices[key] = device
        elif self._devices:
            self._devices.pop(key, None)
        replaced = self._held.get(key)
        self._held[key] = value
        if value.__class__ is Aval:  # Not shared yet: there is nothing to look up.
            self.bytes_held += value.nbytes
        else:
            holds = self._holds
            for part in (value,) if _is_one(value.__class__) else _kept_by(value):
                name = id(part)
                if name in holds:
                    count, nbytes = holds[name]
                    holds[name] = (count + 1, nbytes)
                else:
                    nbytes = _nbytes(part)
                    self.bytes_held += nbytes
                    holds[name] = (1, nbytes)
        if replaced is not None:
            self._let_go(key, replaced)
        self.bytes_peak = max(self.bytes_peak, self.bytes_held)

    def activate(self, key: Hashable, nbytes: int) -> None:
        """Say how many bytes a value that is held since now keeps for a pass."""
        self._activations[key] = nbytes
        self._activations_held += nbytes
        self.activations_peak = max(self.activations_peak, self._activations_held)

    def device(self, key: Hashable) -> str | None:
        """The device on which the value under a key is, None for the default."""
        return self._devices.get(key)

    @property
    def all_default(self) -> bool:
        """Whether all values are on the worker's default device."""
        return not self._devices

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Drop the values under these keys; one that is not held is no error."""
        held, devices, activations = self._held, self._devices, self._activations
        buffers = self._buffers
        for key in keys:
            if key in held:
                value = held.pop(key)
                if value.__class__ is Aval and key not in buffers:
                    self.bytes_held -= value.nbytes
                else:
                    self._let_go(key, value)
                if key in activations:
                    self._activations_held -= activations.pop(key)
                if devices:
                    devices.pop(key, None)

    def buffer(self, key: Hashable) -> Buffer:
        """Return the buffer that stands for the array of a held abstract value.

        A value with it in `keeps` holds that array too, until it is dropped.
        """
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = Buffer(self._held[key].nbytes)
            self._holds[id(buffer)] = (1, buffer.nbytes)
        return buffer

    def _let_go(self, key: Hashable, value: Any) -> None:
        if value.__class__ is Aval:
            if key not in self._buffers:
                self.bytes_held -= value.nbytes
                return
            value = self._buffers.pop(key)
        holds = self._holds
        for part in (value,) if _is_one(value.__class__) else _kept_by(value):
            name = id(part)
            count, nbytes = holds[name]
            if count > 1:
                holds[name] = (count - 1, nbytes)
            else:
                del holds[name]
                self.bytes_held -= nbytes

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    @property
    def held(self) -> int:
        """Number of held values."""
        return len(self._held)


def _kept_by(value: Any) -> tuple[Any, ...]:
    """The objects that a value, which is no array, keeps alive while it is held."""
    parts: tuple[Any, ...] = getattr(value, "keeps", (value,))
    return parts


# Whether a value of this class is an array; it is asked for each value that is held.
_is_one: Callable[[Any], bool] = lru_cache(1024)(
    lambda kind: issubclass(kind, jax.Array | np.ndarray)
)


def _nbytes(part: Any) -> int:
    if is_array_type(part.__class__):
        aval = part.aval  # Its attributes take a fifth of the time of the array's own.
        if isinstance(aval.dtype, np.dtype):
            return math.prod(aval.shape) * int(aval.dtype.itemsize)
    return int(getattr(part, "nbytes", 0))
