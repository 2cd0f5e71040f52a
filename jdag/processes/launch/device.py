"""The device on which this process computes, and its JAX settings."""

import os
from collections.abc import Mapping
from typing import Any

import jax

from jdag.errors import JdagError, JoinError

# Settings that select a device; not passed on to a worker with its own device.
PLACING = (
    "jax_platforms",
    "jax_platform_name",
    "jax_default_device",
    "jax_cuda_visible_devices",
    "jax_rocm_visible_devices",
)
_VISIBLE = "CUDA_VISIBLE_DEVICES"
_GUARDS = ("jax_transfer_guard_host_to_device", "jax_transfer_guard_device_to_host")
_PLAIN = (bool, int, float, str, type(None))


def settings_of(device: str | None) -> dict[str, Any]:
    """Return JAX's settings in this process, for a worker on `device`.

    Thread-local settings take precedence over those of the process.
    """
    config: Any = jax.config
    found = {}
    for name, of_all in config.values.items():
        here = getattr(config, name, of_all)
        value = getattr(here, "value", here)  # Of an enumeration.
        if isinstance(value, _PLAIN) and (device is None or name not in PLACING):
            found[name] = value
    return found


def configure(settings: Mapping[str, Any]) -> None:
    """Apply JAX settings; must run before its backend starts."""
    config: Any = jax.config
    now = settings_of(None)
    for name, value in settings.items():
        if now.get(name) != value:
            config.update(name, value)


def refuse_unusable(what: str) -> None:
    """Raise JdagError under settings of JAX that processes cannot compute under.

    These forbid to move values to others, or to compile what goes to them.
    """
    config: Any = jax.config
    if config.jax_disable_jit:
        raise JdagError(
            f"{what}: jax_disable_jit is True, and functions go to other workers "
            "compiled, so bits would be others than here: debug by jdag.simulate, or "
            "make the cluster, and use it, under jax.disable_jit(False)"
        )
    for name in _GUARDS:
        guard = getattr(config, name)
        if guard in ("disallow", "disallow_explicit"):
            raise JdagError(
                f"{what}: {name} is {guard!r}, and values that come from other workers "
                "are transferred: make the cluster, and use it, where transfers are "
                "allowed"
            )


def share_gpu(device: str | None) -> None:
    """Allocate GPU memory on demand, so that several processes may share a GPU.

    An existing environment variable wins. Has no effect once JAX's backend has started.
    """
    if device != "cpu":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def use_device(device: str | None, worker: str) -> None:
    """Compute on `cpu`, `gpu` or `gpu:N`; None leaves the choice to JAX.

    With `gpu:N` the worker sees only that GPU, as its `gpu:0`. GPU memory is allocated
    on demand, so several workers may share it.

    Raises:
        JoinError: the device does not exist.
    """
    kind, _, number = (device or "").partition(":")
    if kind == "cpu":
        configure({"jax_platforms": "cpu"})
        return
    share_gpu(device)
    if number:
        visible = os.environ.get(_VISIBLE)
        if visible is not None:
            names = [name.strip() for name in visible.split(",") if name.strip()]
            if int(number) >= len(names):
                said = f"worker {worker!r} has no device {device!r}: "
                raise JoinError(f"{said}{_VISIBLE} is {visible!r}")
            number = names[int(number)]
        os.environ[_VISIBLE] = number
    if kind == "gpu":
        backend = jax.default_backend()
        if backend != "gpu":
            raise JoinError(
                f"worker {worker!r} has no device {device!r}: JAX finds a {backend} "
                "here; install JAX for the GPU, or take cpu"
            )
