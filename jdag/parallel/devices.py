"""Device arguments: names or JAX devices to devices of this process."""

from collections.abc import Sequence
from typing import TypeAlias

import jax
import numpy as np

from jdag.compute.devices import available, device_named
from jdag.errors import JdagError

# A device name, such as "cpu:1", or a JAX device.
Device: TypeAlias = str | jax.Device


def resolved_devices(
    devices: Sequence[Device] | None, what: str
) -> tuple[jax.Device, ...]:
    """Resolve device arguments; None: all devices of this process."""
    if devices is None:
        return tuple(jax.local_devices())
    if isinstance(devices, np.ndarray | np.flatiter):  # As meshes have them.
        devices = list(np.ravel(devices)) if np.ndim(devices) == 1 else devices
    if isinstance(devices, str | jax.Device) or not isinstance(devices, Sequence):
        raise JdagError(
            f"{what}: devices = {devices!r}: allowed are a list of devices, such as "
            f"[{', '.join(map(repr, available()[:2]))}], and None for all"
        )
    if not devices:
        raise JdagError(
            f"{what}: no devices; it takes one or more of {', '.join(available())}, or "
            "None for all"
        )
    return distinct([device_of(device, what) for device in devices], what)


def distinct(devices: Sequence[jax.Device], what: str) -> tuple[jax.Device, ...]:
    """Return the devices; raise JdagError if one occurs twice."""
    for index, device in enumerate(devices):
        if device in devices[:index]:
            raise JdagError(f"{what}: device {device_name(device)} is there twice")
    return tuple(devices)


def check_platform(devices: Sequence[jax.Device], what: str) -> None:
    """Raise JdagError if the devices are of several platforms, as no computation is."""
    if len({device.platform for device in devices}) > 1:
        names = ", ".join(map(device_name, devices))
        raise JdagError(
            f"{what}: {names} are of several platforms: allowed are devices of one, "
            "such as all GPUs"
        )


def device_of(device: Device, what: str) -> jax.Device:
    """Resolve a device argument; raise JdagError if this process has no such device."""
    if isinstance(device, jax.Device):
        if device in jax.local_devices(backend=device.platform):
            return device
        raise JdagError(
            f"{what}: {device} belongs to process {device.process_index}, and this is "
            f"process {jax.process_index()}, which has {', '.join(available())}; over "
            "several processes there is data_parallel(devices=jax.devices())"
        )
    if device in available():
        return device_named(device)
    if isinstance(device, str) and "/" in device:
        worker, _, own = device.rpartition("/")
        raise JdagError(
            f"{what}: {device!r} is a device of a worker; it works on the devices of "
            f"the worker that it runs on, named as in {own!r}: call a function that "
            f"uses it by ctx.call({worker!r}, ...)"
        )
    raise JdagError(
        f"{what}: no device {device!r} here; there are {', '.join(available())}. Those "
        "of other processes are in jax.devices(), after jax.distributed.initialize("
        "address, num_processes, process_id) in each, and data_parallel takes them"
    )


def device_name(device: jax.Device) -> str:
    """Return the name of a device of this process, such as `cpu:1`."""
    if device.process_index != jax.process_index():
        return f"{device} of process {device.process_index}"
    index = jax.local_devices(backend=device.platform).index(device)
    return f"{device.platform}:{index}"
