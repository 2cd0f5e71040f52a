"""Devices of a worker by name, such as `cpu:1`: parsing, lookup and placing arrays.

A name is a platform and an index among this process's devices of that platform. None is
the default device: JAX's own choice. `place` is where a call runs: `ps0`, or on one of
its devices `ps0/cpu:1`.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import lru_cache
from typing import Any

import jax

from jdag.compute.duals import Dual, is_array_type
from jdag.errors import JdagError

_PLACE = re.compile(r"(.+)/([a-z]+:\d+)", re.DOTALL)


def parsed_place(place: str) -> tuple[str, str | None]:
    """Return the worker and the device of a place; None if it names no device."""
    found = _PLACE.fullmatch(place)
    return (place, None) if found is None else (found[1], found[2])


def available() -> tuple[str, ...]:
    """Return the names of all devices of this process, CPUs last."""
    platforms = dict.fromkeys((jax.local_devices()[0].platform, "cpu"))
    return tuple(
        f"{platform}:{index}"
        for platform in platforms
        for index in range(len(jax.local_devices(backend=platform)))
    )


def check_device(device: str, worker: str, what: str) -> None:
    """Raise JdagError if this process, and so the worker, has no such device."""
    if device not in available():
        raise JdagError(
            f"{what}: worker {worker!r} has no device {device!r}; it has "
            f"{', '.join(available())}"
        )


@lru_cache(maxsize=256)
def _found(device: str) -> Any:
    platform, _, index = device.partition(":")
    return jax.local_devices(backend=platform)[int(index)]


def device_named(device: str | None) -> Any:
    """Return JAX's device of a name, or the default one; it must exist."""
    if device is not None:
        return _found(device)
    config: Any = jax.config
    chosen = config.jax_default_device
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def put(values: Sequence[Any], device: str | None) -> tuple[Any, ...]:
    """Return the values with each JAX array on the device; no value changes.

    Arrays already there, and arrays over several devices, are returned unchanged. Both
    arrays of a dual are put.
    """
    target = device_named(device)
    return tuple([_put(value, target) for value in values])


def _put(value: Any, target: Any) -> Any:
    if value.__class__ is Dual:
        return Dual(*[_put(part, target) for part in value.keeps])
    return jax.device_put(value, target) if _is_elsewhere(value, target) else value


def _is_elsewhere(value: Any, target: Any) -> bool:
    if not isinstance(value, jax.Array) or value.is_deleted():
        return False  # Its use raises a clear error.
    there = value.devices()
    return len(there) == 1 and target not in there


def on_default(value: Any) -> Any:
    """Return the value on the default device, if it was committed to another."""
    if is_array_type(value.__class__) and value.committed:
        return put((value,), None)[0]
    return value


def working_on(device: str | None) -> AbstractContextManager[Any]:
    """Return a context in which computations without array arguments run there."""
    context: AbstractContextManager[Any] = jax.default_device(device_named(device))
    return context
