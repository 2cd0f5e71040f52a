"""The handshake: properties that must agree in all processes of a cluster.

These are versions, byte order, and everything that affects the bits of results: JAX's
configuration, XLA flags, the number of cores. The Python version counts because
functions sent by name are compared by their code. The maximal value size counts because
the sender enforces it for both.

Kinds of devices may differ, and are exchanged. CPUs may differ too, although XLA
compiles for their instructions: the host of a worker is part of its placement. Results
then repeat bit by bit only while each worker stays on its kind of host, so a warning is
given.
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

# The version of requests, hello, frames and messages.
PROTOCOL = 8

Handshake = Mapping[str, Any]

# Fields that must agree, most significant first, and the remedy if they do not.
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
    "cores": "let both use as many cores, by taskset --cpu-list",
    "nproc": "set NPROC alike for both, before they start",
}
_PACKAGES = ("jdag", "jax", "jaxlib", "numpy", "optax")
_IF_THERE = ("optax",)  # A process without it runs nothing of it.
# Of the instructions of a CPU, those that XLA compiles for where they are there.
_INSTRUCTIONS = (
    *("sse", "avx", "fma", "f16c", "bmi", "amx"),
    *("asimd", "sve", "sme", "bf16"),
)
_SHOWN_MAX = 200


def ours() -> dict[str, Any]:
    """Return the handshake of this process; starts JAX's backend."""
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
    """Identify the PID namespace on one boot of a host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"  # Practically unique.


def _cpu() -> list[str]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return [platform.machine(), platform.processor()]
    lines = [line.partition(":") for line in text.splitlines()]
    said = {key.strip(): value.strip() for key, _, value in lines}
    flags = (said.get("flags") or said.get("Features") or "").split()
    model = said.get("model name") or said.get("CPU part") or ""
    found = sorted([flag for flag in flags if flag.startswith(_INSTRUCTIONS)])
    return [platform.machine(), model, *found]


def protocols_differ(theirs: int | str, them: str, me: str) -> str:
    """Return the error text; `theirs` is the other version, empty if none was sent."""
    older = me if str(theirs).isdigit() and int(theirs) > PROTOCOL else them
    return (
        f"{them} speaks version {theirs or 'unknown'} of jdag's protocol and {me} "
        f"version {PROTOCOL}; upgrade jdag for {older}"
    )


def other_cpu(mine: Handshake, theirs: Handshake, me: str, them: str) -> str | None:
    """Return how the CPUs of two processes on CPUs differ, or None."""
    here, there = mine.get("cpu"), theirs.get("cpu")
    on_cpus = mine.get("platform") == theirs.get("platform") == "cpu"
    if here == there or not on_cpus or not isinstance(there, list):
        return None
    lacks = [str(one) for one in here or () if one not in there]
    has = [str(one) for one in there if one not in (here or ())]
    return (
        f"the CPU of {them} is not of the kind of that of {me}: only here "
        f"{_listed(lacks)}, only there {_listed(has)}; gradients are right, and their "
        "bits repeat as long as each worker stays on its kind of host"
    )


def _listed(words: Sequence[str]) -> str:
    return (", ".join(words) or "nothing")[:_SHOWN_MAX]


def _plain(value: Any) -> bool | int | float | str | None:
    """Return a setting of JAX as JSON has it; some are enumerations of texts."""
    value = getattr(value, "value", value)
    is_plain = value is None or isinstance(value, bool | int | float)
    return value if is_plain else str(value)


def refuse_mismatch(mine: Handshake, theirs: Handshake, me: str, them: str) -> None:
    """Check that two processes may work together, perhaps of different versions.

    Raises:
        JoinError: the first difference, with both values and the remedy.
    """
    for field, to_do in AGREE.items():
        here, there = mine.get(field), theirs.get(field)
        if here == there or (field in _IF_THERE and UNKNOWN in (here, there)):
            continue
        name = field
        if isinstance(here, Mapping) and isinstance(there, Mapping):
            keys = [key for key in (*here, *there) if here.get(key) != there.get(key)]
            name, here, there = keys[0], here.get(keys[0]), there.get(keys[0])
        raise JoinError(
            f"{me} and {them} differ in {name}: {me} has {_shown(here)}, "
            f"{them} has {_shown(there)}; {to_do}"
        )


def _shown(value: Any) -> str:
    return json.dumps(value, default=repr)[:_SHOWN_MAX]
