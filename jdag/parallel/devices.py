"""Resolution of device arguments (names or JAX devices)."""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from jdag.compute.devices import available, device_named
from jdag.errors import JdagError

# A device name, such as "cpu:1", or a JAX device.
Device: TypeAlias = str | jax.Device


def resolved_devices(
    devices: Sequence[Device] | None, caller: str
) -> tuple[jax.Device, ...]:
    if devices is None:
        return tuple(jax.local_devices())
    if isinstance(devices, np.ndarray | np.flatiter):  # Such as `mesh.devices`.
        devices = list(np.ravel(devices)) if np.ndim(devices) == 1 else devices
    if isinstance(devices, str | jax.Device) or not isinstance(devices, Sequence):
        raise JdagError(
            f"{caller}: devices = {devices!r}: expected a list of devices, such as "
            f"[{', '.join(map(repr, available()[:2]))}], or None for all devices"
        )
    if not devices:
        raise JdagError(
            f"{caller}: the list of devices is empty; expected one or more of "
            f"{', '.join(available())}, or None for all devices"
        )
    return distinct([device_of(device, caller) for device in devices], caller)


def distinct(devices: Sequence[jax.Device], caller: str) -> tuple[jax.Device, ...]:
    for index, device in enumerate(devices):
        if device in devices[:index]:
            raise JdagError(f"{caller}: device {device_name(device)} is listed twice")
    return tuple(devices)


def check_platform(devices: Sequence[jax.Device], caller: str) -> None:
    if len({device.platform for device in devices}) > 1:
        names = ", ".join(map(device_name, devices))
        raise JdagError(
            f"{caller}: {names} are of several platforms: expected devices of one "
            "platform, such as all GPUs"
        )


def device_of(device: Device, caller: str) -> jax.Device:
    if isinstance(device, jax.Device):
        if device in jax.local_devices(backend=device.platform):
            return device
        raise JdagError(
            f"{caller}: {device} belongs to process {device.process_index}, and this "
            f"is process {jax.process_index()}, which has {', '.join(available())}; "
            "only data_parallel(devices=jax.devices()) uses devices of other processes"
        )
    if device in available():
        return device_named(device)
    if isinstance(device, str) and "/" in device:
        worker, _, name = device.rpartition("/")
        raise JdagError(
            f"{caller}: {device!r} is a device of another worker: call {caller} in a "
            f"function that runs there, ctx.call({worker!r}, fn, ...), with the device "
            f"{name!r}"
        )
    raise JdagError(
        f"{caller}: this process has no device {device!r}; it has the devices "
        f"{', '.join(available())}. data_parallel also accepts devices of other "
        "processes (jax.devices()) after jax.distributed.initialize(address, "
        "num_processes, process_id) in each process"
    )


def device_name(device: jax.Device) -> str:
    if device.process_index != jax.process_index():
        return f"{device} of process {device.process_index}"
    index = jax.local_devices(backend=device.platform).index(device)
    return f"{device.platform}:{index}"
