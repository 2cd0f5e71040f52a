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
    """Represents the array of an abstract value. Only the array's size is known.

    Equal abstract values are one object; buffers tell their arrays apart.
    """

    __slots__ = ("holders", "nbytes")

    def __init__(self, nbytes: int, holders: int = 0) -> None:
        self.nbytes = nbytes
        self.holders = holders  # Number of keys and residuals that hold the array.


class Values:
    """Values by key: arrays, residuals, scalars, abstract values, errors.

    `bytes_held` is the current size of the held arrays, `bytes_peak` its maximum. An
    array held several times, by keys or inside residuals, counts once. Two arrays that
    share a buffer count twice, and so does an array that several workers hold. Each
    abstract value counts as a separate array, which residuals may also hold. Values
    without `nbytes` count as 0 bytes.

    `activations_peak` is the maximum of bytes held at once for backward passes: the sum
    over the keys given to `activate` and not yet dropped.
    """

    __slots__ = (
        "_activations",
        "_activations_held",
        "_buffers",
        "_held",
        "_holds",
        "activations_peak",
        "bytes_held",
        "bytes_peak",
        "devices",
        "get",
    )

    def __init__(self) -> None:
        self._held: dict[Hashable, Any] = {}
        # Returns the value of a key; raises KeyError if no value is held.
        self.get: Callable[[Hashable], Any] = self._held.__getitem__
        self.devices: dict[Hashable, str] = {}  # No entry: default device.
        self._holds: dict[int, tuple[int, int]] = {}  # Count and bytes, by id.
        self._buffers: dict[Hashable, Buffer] = {}  # Buffers requested so far.
        self._activations: dict[Hashable, int] = {}
        self._activations_held = 0
        self.activations_peak = 0
        self.bytes_held = 0
        self.bytes_peak = 0

    def put(self, key: Hashable, value: Any, device: str | None = None) -> None:
        """Hold a value; it replaces any previous value. None is the default device."""
        if device is not None:
            self.devices[key] = device
        elif self.devices:
            self.devices.pop(key, None)
        replaced = self._held.get(key)
        self._held[key] = value
        if value.__class__ is Aval:  # A new abstract value is not shared.
            self.bytes_held += value.nbytes
        else:
            holds = self._holds
            is_array = _is_array_class(value.__class__)
            for part in (value,) if is_array else getattr(value, "keeps", (value,)):
                if part.__class__ is Buffer:
                    part.holders += 1
                    self.bytes_held += part.nbytes if part.holders == 1 else 0
                    continue
                name = id(part)
                if name in holds:
                    count, nbytes = holds[name]
                    holds[name] = (count + 1, nbytes)
                else:
                    nbytes = _nbytes(part)
                    self.bytes_held += nbytes
                    holds[name] = (1, nbytes)
        if replaced is not None:
            self._release(key, replaced)
        self.bytes_peak = max(self.bytes_peak, self.bytes_held)

    def activate(self, key: Hashable, nbytes: int) -> None:
        self._activations[key] = nbytes
        self._activations_held += nbytes
        self.activations_peak = max(self.activations_peak, self._activations_held)

    def account(self, nbytes: int, activation: int) -> None:
        """Count bytes that a step of a plan holds or, if negative, frees.

        They are computed from types. An array that a step holds twice counts twice.
        """
        self.bytes_held += nbytes
        self.bytes_peak = max(self.bytes_peak, self.bytes_held)
        if activation:
            self._activations_held += activation
            peak = max(self.activations_peak, self._activations_held)
            self.activations_peak = peak

    def device(self, key: Hashable) -> str | None:
        return self.devices.get(key)

    def drop(self, keys: Iterable[Hashable]) -> None:
        held, devices, activations = self._held, self.devices, self._activations
        buffers = self._buffers
        for key in keys:
            if key in held:
                value = held.pop(key)
                if value.__class__ is Aval and key not in buffers:
                    self.bytes_held -= value.nbytes
                else:
                    self._release(key, value)
                if key in activations:
                    self._activations_held -= activations.pop(key)
                if devices:
                    devices.pop(key, None)

    def buffer(self, key: Hashable) -> Buffer:
        """Return the buffer that represents the array of a held abstract value.

        A value that lists this buffer in `keeps` also holds the array until the value
        is dropped.
        """
        buffer = self._buffers.get(key)
        if buffer is None:
            buffer = self._buffers[key] = Buffer(self._held[key].nbytes, 1)
        return buffer

    def _release(self, key: Hashable, value: Any) -> None:
        if value.__class__ is Aval:
            if key not in self._buffers:
                self.bytes_held -= value.nbytes
                return
            value = self._buffers.pop(key)
        holds = self._holds
        is_array = _is_array_class(value.__class__)
        for part in (value,) if is_array else getattr(value, "keeps", (value,)):
            if part.__class__ is Buffer:
                part.holders -= 1
                self.bytes_held -= 0 if part.holders else part.nbytes
                continue
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
        return len(self._held)


# Whether values of this class are arrays; cached, since `put` calls it.
_is_array_class: Callable[[Any], bool] = lru_cache(1024)(
    lambda kind: issubclass(kind, jax.Array | np.ndarray)
)


def nbytes_of(value: Any) -> int:
    return sum(map(_nbytes, getattr(value, "keeps", (value,))))


def _nbytes(part: Any) -> int:
    if is_array_type(part.__class__):
        aval = part.aval  # Attributes of the array take five times as long.
        if isinstance(aval.dtype, np.dtype):
            return math.prod(aval.shape) * int(aval.dtype.itemsize)
    return int(getattr(part, "nbytes", 0))
