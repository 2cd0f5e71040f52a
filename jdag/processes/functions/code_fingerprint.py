"""Code fingerprints: workers compare functions that are sent by name.

If a module changes after a worker has started, the same name means different code
there. So names of functions and classes that users write go with the digest of what
they name, `module:qualname#digest`, and the receiver compares its own. Versions of
other packages are compared by the handshake.
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
    """A function or class by its key."""

    def __init__(self, value: Any) -> None:
        super().__init__(key_of(value))
        self.value = value


@lru_cache(maxsize=_CODES_MAX)
def _code_of(keyed: _Keyed) -> str:
    return function_digest(keyed.value)


def coded_name(value: Any) -> str:
    """Return the name of a function or class, with its digest where users wrote it."""
    name = name_of(value)
    top = name.partition(":")[0].partition(".")[0]
    if top in FIXED or top in sys.stdlib_module_names:
        return name
    code = _code_of(_Keyed(value))
    return f"{name}#{code}" if code else name


def check_code(name: str, code: str, found: Any) -> None:
    """Raise JdagError if what is found by a name here has not the digest of there."""
    if _code_of(_Keyed(found)) in ("", code):
        return
    hint = f"; workers skip what is under `{GUARD}`" * name.startswith(MAIN)
    raise JdagError(
        f"{name_of(found)}, or something that it uses in its package, has different "
        "code or values here than where it was named: the module has to be the same on "
        "both sides; restart workers that began before a change. Random values and "
        "state in globals differ between processes: pass values as arguments, and keep "
        "state in an object, which cluster.host(worker, Class) makes on a worker" + hint
    )
