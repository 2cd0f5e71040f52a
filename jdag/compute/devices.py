"""Devices of a worker by name, such as `cpu:1`: parsing, lookup and placing arrays.

A name is a platform and an index among this process's devices of that platform. None is
the default device: JAX's own choice. A place is where a call runs: `ps0`, or on one of
its devices `ps0/cpu:1`.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import cache, lru_cache
from typing import Any

import jax

from jdag.compute.duals import Dual, is_array_type
from jdag.errors import JdagError

_PLACE = re.compile(r"(.+)/([a-z]+:\d+)", re.DOTALL)


def split_place(place: str) -> tuple[str, str | None]:
    match = _PLACE.fullmatch(place)
    return (place, None) if match is None else (match[1], match[2])


def available() -> tuple[str, ...]:
    platforms = dict.fromkeys((jax.local_devices()[0].platform, "cpu"))
    return tuple(
        f"{platform}:{index}"
        for platform in platforms
        for index in range(len(jax.local_devices(backend=platform)))
    )


@cache
def has_accelerator() -> bool:
    return jax.default_backend() != "cpu"


def check_device(device: str, worker: str, location: str) -> None:
    if device not in available():
        raise JdagError(
            f"{location}: worker {worker!r} has no device {device!r}; it has the "
            f"devices {', '.join(available())}"
        )


@lru_cache(maxsize=256)
def _device(device: str) -> Any:
    platform, _, index = device.partition(":")
    return jax.local_devices(backend=platform)[int(index)]


def device_named(device: str | None) -> Any:
    """Return JAX's device of this name, which must exist; for None, the default."""
    if device is not None:
        return _device(device)
    config: Any = jax.config
    chosen = config.jax_default_device
    if isinstance(chosen, str):
        return jax.local_devices(backend=chosen)[0]
    return jax.local_devices()[0] if chosen is None else chosen


def put(values: Sequence[Any], device: str | None) -> tuple[Any, ...]:
    """Return the values with every JAX array, including arrays of duals, on the device.

    Arrays that are already there or on several devices are returned unchanged.
    """
    target = device_named(device)
    return tuple([_put(value, target) for value in values])


def _put(value: Any, target: Any) -> Any:
    if value.__class__ is Dual:
        return Dual(*[_put(part, target) for part in value.keeps])
    return jax.device_put(value, target) if _is_elsewhere(value, target) else value


def _is_elsewhere(value: Any, target: Any) -> bool:
    if not isinstance(value, jax.Array) or value.is_deleted():
        return False  # A later use raises a clear error.
    devices = value.devices()
    return len(devices) == 1 and target not in devices


def on_default(value: Any) -> Any:
    if is_array_type(value.__class__) and value.committed:
        return put((value,), None)[0]
    return value


def working_on(device: str | None) -> AbstractContextManager[Any]:
    context: AbstractContextManager[Any] = jax.default_device(device_named(device))
    return context
