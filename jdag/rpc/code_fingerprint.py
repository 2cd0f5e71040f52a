"""Code fingerprints: workers compare functions that are sent by name.

If a module changes after a worker has started, the same name means different code
there. So the digests of functions and classes (`jdag.compute.fingerprint.digest_of`)
are sent once, before the first message that names them, and the receiver compares its
own. Versions of other packages are compared by the handshake.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from jdag.compute.exported import Definition
from jdag.compute.fingerprint import digest_of
from jdag.engine.functions import name_of
from jdag.errors import JdagError, ProtocolError
from jdag.rpc.script import GUARD, MAIN

_HEAD = b"codes of functions\n"
_NAMES_MAX = 4096


def fingerprints_of(found: Mapping[str, Any]) -> tuple[Definition, ...]:
    """Return a definition with the digests of the functions and classes."""
    codes = {name: digest_of(found[name]) for name in sorted(found)}
    told = {name: digest for name, digest in codes.items() if digest}
    body = _HEAD + json.dumps(told).encode()
    return (Definition(sha256(body).digest(), body),) if told else ()


def are_fingerprints(data: bytes) -> bool:
    """Whether a definition holds digests rather than a function."""
    return data.startswith(_HEAD)


class CodeFingerprints:
    """The digests received so far, by function name."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._checked: dict[str, tuple[str, int]] = {}

    def tell(self, data: bytes) -> bool:
        """Store received digests; return whether any contradicts an earlier one.

        Raises:
            ProtocolError: the data are not a table of digests.
        """
        try:
            told = json.loads(data[len(_HEAD) :])
        except ValueError:
            told = None
        texts = told.values() if isinstance(told, dict) else (None,)
        if not all(isinstance(text, str) for text in texts):
            raise ProtocolError("code fingerprints are not a JSON table of strings")
        contradicts = any(self._told.get(n, code) != code for n, code in told.items())
        self._told.update(told)
        while len(self._told) > _NAMES_MAX:
            name = next(iter(self._told))
            del self._told[name]
            self._checked.pop(name, None)
        return contradicts

    def check(self, name: str, found: Any) -> None:
        """Compare a local function with the received digest.

        Raises:
            JdagError: they differ.
        """
        told = self._told.get(name)
        if told is None or self._checked.get(name) == (told, id(found)):
            return
        if digest_of(found) not in ("", told):
            hint = f"; workers skip what is under `{GUARD}`" * name.startswith(MAIN)
            raise JdagError(
                f"{name_of(found)}, or something that it uses in its package, has "
                "different code or values here than where it was named: the module has "
                "to be the same on both sides; restart workers that began before a "
                "change. Random values and state in globals differ between processes: "
                "pass values as arguments, and keep state in an object, which "
                "cluster.host(worker, Class) makes on a worker" + hint
            )
        self._checked[name] = told, id(found)  # The module keeps `found` alive.
