"""Fingerprints of code: workers compare the functions that go by name.

A worker that was started before a module was changed would compute other numbers by the
same names, unnoticed. So digests of functions and classes
(`jdag.compute.fingerprint.digest_of`) are sent once, ahead of the first message that
names them, and the receiver compares what it finds by these names. Versions of other
packages are compared by the handshake.
"""

import json
from collections.abc import Mapping
from hashlib import sha256
from typing import Any

from jdag.compute.exported import Definition
from jdag.compute.fingerprint import digest_of
from jdag.engine.functions import name_of
from jdag.errors import JdagError, ProtocolError

_HEAD = b"codes of functions\n"
_NAMES_MAX = 4096


def fingerprints_of(found: Mapping[str, Any]) -> tuple[Definition, ...]:
    """Return the definition with the digests of functions and classes, by name."""
    codes = {name: digest_of(found[name]) for name in sorted(found)}
    told = {name: digest for name, digest in codes.items() if digest}
    body = _HEAD + json.dumps(told).encode()
    return (Definition(sha256(body).digest(), body),) if told else ()


def are_fingerprints(data: bytes) -> bool:
    """Tell whether a definition holds digests, rather than a function."""
    return data.startswith(_HEAD)


class CodeFingerprints:
    """The digests that were received, by name of the function."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._checked: dict[str, tuple[str, int]] = {}

    def tell(self, data: bytes) -> bool:
        """Take received digests; return whether one contradicts a former one.

        Raises:
            ProtocolError: the data are no table of digests.
        """
        try:
            told = json.loads(data[len(_HEAD) :])
        except ValueError:
            told = None
        texts = told.values() if isinstance(told, dict) else (None,)
        if not all(isinstance(text, str) for text in texts):
            raise ProtocolError("codes of functions that are no JSON table of texts")
        contradicts = any(self._told.get(n, code) != code for n, code in told.items())
        self._told.update(told)
        while len(self._told) > _NAMES_MAX:
            name = next(iter(self._told))
            del self._told[name]
            self._checked.pop(name, None)
        return contradicts

    def check(self, name: str, found: Any) -> None:
        """Compare the function of a name here with the digest that was received.

        Raises:
            JdagError: they differ.
        """
        told = self._told.get(name)
        if told is None or self._checked.get(name) == (told, id(found)):
            return
        if digest_of(found) not in ("", told):
            raise JdagError(
                f"{name_of(found)}, or what it uses of its package, is other code here "
                "than where it was named, or has other values: the module has to be "
                "the same on both sides, and a worker that was started before a change "
                "has to be started anew. What is random, or is changed by a program, "
                "is not the same: pass it as an argument"
            )
        self._checked[name] = told, id(found)  # A module keeps it alive.
