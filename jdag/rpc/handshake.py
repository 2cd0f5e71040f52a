"""The handshake: what has to be the same in all processes of a cluster.

Versions, byte order, and what the bits of results depend on: JAX's configuration, the
flags of XLA, and how many cores there are to compute with. On which kind of device a
worker computes may differ, and is told.
"""

import json
import os
import platform
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from jdag.compute.pairs import configuration
from jdag.errors import JoinError

Handshake = Mapping[str, Any]

# What has to agree, first what explains the rest; and what to do if it does not.
AGREE: Mapping[str, str] = {
    "jdag": "install one version on both",
    "jax": "install one version on both",
    "jaxlib": "install one version on both",
    "numpy": "install one version on both",
    "byteorder": "use machines of one byte order",
    "configuration": "configure JAX alike on both, before anything is computed",
    "xla_flags": "set XLA_FLAGS alike for both, before they start",
    "cores": "let both use as many cores, by taskset --cpu-list",
    "nproc": "set NPROC alike for both, before they start",
}
_SHOWN_MAX = 200


def ours() -> dict[str, Any]:
    """Return what this process says of itself; starts JAX's backend."""
    config = configuration()._asdict()
    return {
        "jdag": _version("jdag"),
        "jax": _version("jax"),
        "jaxlib": _version("jaxlib"),
        "numpy": _version("numpy"),
        "byteorder": sys.byteorder,
        "configuration": {key: _plain(value) for key, value in config.items()},
        "xla_flags": " ".join(os.environ.get("XLA_FLAGS", "").split()),
        "cores": len(os.sched_getaffinity(0)),
        "nproc": os.environ.get("NPROC", ""),
        "platform": jax.local_devices()[0].platform,
        "host": platform.node(),
        "pid": os.getpid(),
        "boot": _boot(),
    }


def _boot() -> str:
    """Return what tells one namespace of process numbers, on one running host."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"{platform.node()} {os.getpid()}"  # As good as no other's.


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # From a checkout that is not installed.
        return "0+unknown"


def _plain(value: Any) -> bool | str | None:
    """Return a setting of JAX as JSON has it; some are enumerations of texts."""
    value = getattr(value, "value", value)
    return value if value is None or isinstance(value, bool) else str(value)


def refuse_mismatch(mine: Handshake, theirs: Handshake, me: str, them: str) -> None:
    """See that two processes may work together.

    Args:
        mine: what this process says of itself.
        theirs: what another one says; of another version, it may say other things.
        me: how this process is called where something differs.
        them: how the other one is.

    Raises:
        JoinError: names the first thing that differs, what both sides have of it, and
            what to do.
    """
    for field, to_do in AGREE.items():
        here, there = mine.get(field), theirs.get(field)
        if here == there:
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
