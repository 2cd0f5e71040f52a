"""The device of this process and its JAX settings."""

import os
from collections.abc import Mapping
from typing import Any

import jax

from jdag.errors import JdagError, JoinError

# Settings that select a device. A worker with a `device` option does not inherit them.
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
    config: Any = jax.config
    settings = {}
    for name, process_value in config.values.items():
        value = getattr(config, name, process_value)  # This thread's value.
        value = getattr(value, "value", value)  # Unwrap an enum member.
        if isinstance(value, _PLAIN) and (device is None or name not in PLACING):
            settings[name] = value
    return settings


def configure(settings: Mapping[str, Any]) -> None:
    """Apply JAX settings. Call this before the backend starts."""
    config: Any = jax.config
    current = settings_of(None)
    for name, value in settings.items():
        if current.get(name) != value:
            config.update(name, value)


def refuse_unusable(caller: str) -> None:
    config: Any = jax.config
    if config.jax_disable_jit:
        raise JdagError(
            f"{caller}: jax_disable_jit = True: expected False, because workers "
            "compile all functions and results could differ in the last bits; debug "
            "with jdag.simulate, or use the cluster under jax.disable_jit(False)"
        )
    for name in _GUARDS:
        guard = getattr(config, name)
        if guard in ("disallow", "disallow_explicit"):
            raise JdagError(
                f"{caller}: {name} = {guard!r}: expected a setting that allows "
                "transfers, because values received from workers are transferred to a "
                "device"
            )


def share_gpu(device: str | None) -> None:
    """Let processes share a GPU's memory. Call this before the JAX backend starts."""
    if device != "cpu":
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def use_device(device: str | None, worker: str) -> None:
    """Select `cpu`, `gpu` or `gpu:N` for this process. None leaves the choice to JAX.

    With `gpu:N` only that GPU is visible, as `gpu:0`.

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
                raise JoinError(
                    f"worker {worker!r} has no device {device!r}: {_VISIBLE} is "
                    f"{visible!r}"
                )
            number = names[int(number)]
        os.environ[_VISIBLE] = number
    if kind == "gpu":
        backend = jax.default_backend()
        if backend != "gpu":
            raise JoinError(
                f"worker {worker!r} has no device {device!r}: its JAX backend is "
                f"{backend}; install JAX with GPU support, or use device cpu"
            )
