"""The values that one worker holds by key, with their bytes."""

import math
from collections.abc import Hashable
from typing import Any

import numpy as np

from jdag.compute.avals import Aval
from jdag.compute.duals import is_array


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
    """

    __slots__ = (
        "_buffers",
        "_devices",
        "_held",
        "_holds",
        "bytes_held",
        "bytes_peak",
    )

    def __init__(self) -> None:
        self._held: dict[Hashable, Any] = {}
        self._devices: dict[Hashable, str] = {}  # Only of values not on the default.
        self._holds: dict[int, tuple[int, int]] = {}  # By id: how often, bytes.
        self._buffers: dict[Hashable, Buffer] = {}  # Those requested so far.
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
            self._count(value)
        if replaced is not None:
            self._let_go(key, replaced)
        self.bytes_peak = max(self.bytes_peak, self.bytes_held)

    def get(self, key: Hashable) -> Any:
        """Return the value under a key; KeyError if there is none."""
        return self._held[key]

    def device(self, key: Hashable) -> str | None:
        """The device on which the value under a key is, None for the default."""
        return self._devices.get(key)

    def drop(self, key: Hashable) -> None:
        """Drop the value under a key; KeyError if there is none."""
        self._let_go(key, self._held.pop(key))
        if self._devices:
            self._devices.pop(key, None)

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
        if value.__class__ is not Aval:
            self._uncount(value)
        elif key in self._buffers:
            self._uncount(self._buffers.pop(key))
        else:
            self.bytes_held -= value.nbytes

    def __contains__(self, key: Hashable) -> bool:
        return key in self._held

    @property
    def held(self) -> int:
        """Number of held values."""
        return len(self._held)

    def _count(self, value: Any) -> None:
        holds = self._holds
        for part in _kept_by(value):
            name = id(part)
            if name in holds:
                count, nbytes = holds[name]
                holds[name] = (count + 1, nbytes)
            else:
                nbytes = _nbytes(part)
                self.bytes_held += nbytes
                holds[name] = (1, nbytes)

    def _uncount(self, value: Any) -> None:
        holds = self._holds
        for part in _kept_by(value):
            name = id(part)
            count, nbytes = holds[name]
            if count > 1:
                holds[name] = (count - 1, nbytes)
            else:
                del holds[name]
                self.bytes_held -= nbytes


def _kept_by(value: Any) -> tuple[Any, ...]:
    """The objects that a value keeps alive while it is held."""
    if is_array(value):
        return (value,)
    parts: tuple[Any, ...] = getattr(value, "keeps", (value,))
    return parts


def _nbytes(part: Any) -> int:
    # `jax.Array.nbytes` takes most of a microsecond, and these two a third of one.
    if is_array(part) and isinstance(part.dtype, np.dtype):
        return math.prod(part.shape) * int(part.dtype.itemsize)
    return int(getattr(part, "nbytes", 0))
