"""Code fingerprints of functions that are sent by name.

If a module changes after a worker has started, the same name means different code on
that worker. The name of a user's function or class is therefore sent with a digest of
its code, as `module:qualname#digest`, and the receiver compares the digest with that of
its own code. The handshake compares the versions of other packages.
"""

import sys
from functools import lru_cache
from typing import Any

from jdag.compute.fingerprint import FIXED, Once, function_digest, key_of
from jdag.engine.functions import name_of
from jdag.errors import JdagError
from jdag.processes.functions.script import GUARD, MAIN

_CODES_MAX = 4096


class _Keyed(Once):
    def __init__(self, value: Any) -> None:
        super().__init__(key_of(value))
        self.value = value


@lru_cache(maxsize=_CODES_MAX)
def _digest_of(keyed: _Keyed) -> str:
    return function_digest(keyed.value)


def coded_name(value: Any) -> str:
    """Return the name of a function or class, with a digest if it is user code."""
    name = name_of(value)
    top = name.partition(":")[0].partition(".")[0]
    if top in FIXED or top in sys.stdlib_module_names:
        return name
    digest = _digest_of(_Keyed(value))
    return f"{name}#{digest}" if digest else name


def check_code(name: str, digest: str, value: Any) -> None:
    if _digest_of(_Keyed(value)) in ("", digest):
        return
    hint = f"; workers skip code under `{GUARD}`" * name.startswith(MAIN)
    raise JdagError(
        f"{name_of(value)}, or something that it uses in its package, has different "
        "code or values on the sender: the module must be the same on both sides; "
        "restart workers that started before a change. Random values and state in "
        "globals differ between processes: pass values as arguments, and keep state in "
        "an object that cluster.host(worker, Class) creates on a worker" + hint
    )
