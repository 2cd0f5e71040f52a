"""The handshake: properties that must agree in all processes of a cluster.

The properties are versions, byte order, and everything that affects the bits of
results: JAX's configuration, XLA flags, and the number of cores. The Python version
must agree because functions sent by name are compared by their code.

The kinds of devices are exchanged, but may differ. The CPUs may differ too, although
XLA compiles code for the instructions of a CPU. Results then repeat bit by bit only if
each worker stays on a host of the same kind, so main warns.
"""

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jdag.compute.configuration import configuration
from jdag.errors import JoinError
from jdag.runtime.versions import UNKNOWN, version_of

# Version of the requests, greetings, frames and messages.
PROTOCOL = 10

Handshake = Mapping[str, Any]

# Fields that must agree, most important first. The value is the remedy if they differ.
AGREE: Mapping[str, str] = {
    "jdag": "install one version on both",
    "python": "run one version of Python on both",
    "jax": "install one version on both",
    "jaxlib": "install one version on both",
    "numpy": "install one version on both",
    "optax": "install one version on both",
    "byteorder": "use machines of one byte order",
    "configuration": "configure JAX alike on both, before anything is computed",
    "xla_flags": "set XLA_FLAGS alike for both, before they start",
    "cores": "use the same number of cores for both, by taskset --cpu-list",
    "nproc": "set NPROC alike for both, before they start",
}
_PACKAGES = ("jdag", "jax", "jaxlib", "numpy", "optax")
_OPTIONAL = ("optax",)  # A process that lacks the package never runs its code.
# Prefixes of CPU flags for which XLA compiles different code.
_INSTRUCTIONS = (
    *("sse", "avx", "fma", "f16c", "bmi", "amx"),
    *("asimd", "sve", "sme", "bf16"),
)
_SHOWN_MAX = 200


def ours() -> dict[str, Any]:
    """Return the handshake of this process. This starts JAX's backend."""
    config = dict(configuration().settings)
    return {
        **{package: version_of(package) for package in _PACKAGES},
        "python": ".".join(map(str, sys.version_info[:2])),
        "byteorder": sys.byteorder,
        "configuration": {key: _plain(value) for key, value in config.items()},
        "xla_flags": " ".join(os.environ.get("XLA_FLAGS", "").split()),
        "cores": len(os.sched_getaffinity(0)),
        "nproc": os.environ.get("NPROC", ""),
        "platform": jax.local_devices()[0].platform,
        "cpu": _cpu(),
        "host": platform.node(),
        "pid": os.getpid(),
        "boot": _boot(),
    }


def _boot() -> str:
    """Return an id of this PID namespace and of this boot of the host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"  # Unique in practice.


def _cpu() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [platform.machine(), platform.processor()]
    lines = [line.partition(":") for line in text.splitlines()]
    fields = {key.strip(): value.strip() for key, _, value in lines}
    flags = (fields.get("flags") or fields.get("Features") or "").split()
    model = fields.get("model name") or fields.get("CPU part") or ""
    used = sorted([flag for flag in flags if flag.startswith(_INSTRUCTIONS)])
    return [platform.machine(), model, *used]


def protocols_differ(version: int | str, them: str, me: str) -> str:
    """Return an error text. `version` is that of the other end, or "" if unknown."""
    older = me if str(version).isdigit() and int(version) > PROTOCOL else them
    return (
        f"{them} uses version {version or 'unknown'} of jdag's protocol, and {me} "
        f"uses version {PROTOCOL}; upgrade jdag for {older}"
    )


def other_cpu(local: Handshake, peer: Handshake, me: str, them: str) -> str | None:
    cpu, peer_cpu = local.get("cpu") or (), peer.get("cpu")
    on_cpus = local.get("platform") == peer.get("platform") == "cpu"
    if not on_cpus or not isinstance(peer_cpu, list) or list(cpu) == peer_cpu:
        return None
    lacks = [str(feature) for feature in cpu if feature not in peer_cpu]
    has = [str(feature) for feature in peer_cpu if feature not in cpu]
    return (
        f"the CPU of {them} differs from that of {me}: it lacks {_listed(lacks)} and "
        f"also has {_listed(has)}; gradients are right, but their bits repeat only if "
        "each worker stays on a host of the same kind"
    )


def _listed(words: Sequence[str]) -> str:
    return (", ".join(words) or "nothing")[:_SHOWN_MAX]


def _plain(value: Any) -> bool | int | float | str | None:
    """Convert a JAX setting to a JSON value. Some settings are enumeration members."""
    value = getattr(value, "value", value)
    is_plain = value is None or isinstance(value, bool | int | float)
    return value if is_plain else str(value)


def refuse_mismatch(local: Handshake, peer: Handshake, me: str, them: str) -> None:
    for field, remedy in AGREE.items():
        a, b = local.get(field), peer.get(field)
        if a == b or (field in _OPTIONAL and UNKNOWN in (a, b)):
            continue
        name = field
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            name = next(key for key in (*a, *b) if a.get(key) != b.get(key))
            a, b = a.get(name), b.get(name)
        raise JoinError(
            f"{me} and {them} differ in {name}: {me} has {_shown(a)}, "
            f"{them} has {_shown(b)}; {remedy}"
        )


def _shown(value: Any) -> str:
    return json.dumps(value, default=repr)[:_SHOWN_MAX]
