"""Fingerprints of code: workers compare the functions that go by name.

A worker that was started before a module was changed would compute other numbers by the
same names, unnoticed. So digests of functions are sent once, ahead of the first message
that names them, and the receiver compares what it finds by these names.

The digest of a function is that of its key (`jdag.compute.fingerprint`), in which
objects that count by identity are described: an array by its bytes, one of the same
package by what it is made of, and any other by its name. Versions of other packages are
compared by the handshake.
"""

import inspect
import json
from collections.abc import Callable, Iterator
from functools import lru_cache
from hashlib import blake2b, sha256
from numbers import Number
from types import CodeType, FunctionType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdag.compute.exported import Definition
from jdag.compute.fingerprint import (
    MUTABLE,
    PLAIN,
    ById,
    GlobalReads,
    is_small,
    items_key,
    key_of,
    module_of,
    top_of,
)
from jdag.engine.functions import name_of
from jdag.errors import JdagError, ProtocolError
from jdag.wire.trees import Named, Part, TreeNode

_HAS_DOC: int = getattr(inspect, "CO_HAS_DOCSTRING", 0)  # Of Python 3.13 and later.
_HEAD = b"codes of functions\n"
_NAMES_MAX = 4096
_ITEMS_MAX, _BYTES_MAX = 10_000, 1 << 24  # Of larger values, the size is compared.
_OBJECTS_MAX = 10_000  # Described for one function.
_HELD = ("__wrapped__", "fwd", "bwd", "jvp")  # By functions that JAX has wrapped.


def digest_of(found: Any) -> str:
    """Return the digest of a function or class; empty if it is not to be compared.

    That is so if pytest rewrote its code, or if its functions call each other too deep.
    """
    try:
        texts = list(_texts(key_of(found), top_of(module_of(found)), {}))
    except RecursionError:
        return ""
    known = "" not in texts
    return blake2b(repr(texts).encode(), digest_size=16).hexdigest() if known else ""


def _texts(part: Any, top: str, seen: dict[int, Any]) -> Iterator[str]:
    """Give the texts of a part of a key; objects of the package `top` are described."""
    if isinstance(part, GlobalReads):
        part = (part, part.module)
    if type(part) is tuple and part and isinstance(part[0], GlobalReads):
        reads, module, *held = part
        part = f"{reads.code.co_qualname} of {module}"
        if top_of(module) == top:
            part = (reads.key if top_of(reads.module) == top else reads.code, *held)
    if type(part) is tuple:
        yield f"tuple {len(part)}"
        for item in part:
            yield from _texts(item, top, seen)
    elif isinstance(part, CodeType):
        yield _text_of(part)
    elif isinstance(part, (*PLAIN, Number)):
        yield f"{type(part).__name__} {part!r}"
    else:
        value = part.held if isinstance(part, ById) else part
        name = getattr(value, "__qualname__", "")
        yield f"{type(value).__name__} {name} of {module_of(value)}"
        if not isinstance(part, ById) or part.is_told:
            yield from _texts(_described(value, top, seen), top, seen)


def _described(value: Any, top: str, seen: dict[int, Any]) -> Any:
    """Return what an object that counts by identity is made of, as a key."""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        value = np.asarray(jax.random.key_data(value) if is_key else value)
    if type(value) in MUTABLE:
        if is_small(value, _ITEMS_MAX, _BYTES_MAX):
            return items_key(value, type(value), {})
        is_array = isinstance(value, np.ndarray)
        return (str(value.dtype), *value.shape) if is_array else len(value)
    if top_of(module_of(value)) != top or id(value) in seen or len(seen) > _OBJECTS_MAX:
        return ()
    seen[id(value)] = value
    if isinstance(value, FunctionType):  # One of more than a key follows.
        return key_of(value)
    if not isinstance(value, type):
        names = (*_HELD, *getattr(value, "__dataclass_fields__", ()))
        return key_of((type(value), *[getattr(value, name, None) for name in names]))
    held: list[Any] = [value.__bases__]
    for name, member in sorted(vars(value).items()):
        bare = getattr(member, "fget", getattr(member, "__func__", member))
        if name[:2] != "__" or isinstance(bare, FunctionType):
            held.append((name, bare))
    return key_of(tuple(held))


@lru_cache(maxsize=4096)
def _text_of(code: CodeType) -> str:
    """Describe what code does, but not its place nor its docstring.

    Of code that pytest has rewritten, with its assertions, the text is empty.
    """
    if any(name.startswith("@py") for name in code.co_names):
        return ""
    consts = list(code.co_consts)
    is_def = code.co_name[0] != "<" and code.co_flags & _HAS_DOC == _HAS_DOC
    if consts and is_def and isinstance(consts[0], str):
        consts[0] = None
    for place, const in enumerate(consts):
        if isinstance(const, CodeType):
            consts[place] = _text_of(const)
            if not consts[place]:
                return ""
        elif isinstance(const, frozenset):
            consts[place] = sorted(map(repr, const))
    counts = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount)
    names = (code.co_varnames, code.co_names, code.co_freevars, code.co_cellvars)
    does = (code.co_name, code.co_code, code.co_exceptiontable)
    return blake2b(repr((does, counts, names, consts)).encode()).hexdigest()


def fingerprints_of(data: Any, find: Callable[[str], Any]) -> tuple[Definition, ...]:
    """Return the definition with the digests of all functions that nested data name.

    Args:
        data: nested data of `jdag.wire.trees`.
        find: returns the function of a name, or None if it is not compared.
    """
    found = {name: find(name) for name in sorted(dict.fromkeys(_named(data)))}
    codes = {name: digest_of(one) for name, one in found.items() if one is not None}
    told = {name: digest for name, digest in codes.items() if digest}
    body = _HEAD + json.dumps(told).encode()
    return (Definition(sha256(body).digest(), body),) if told else ()


def _named(data: Any) -> list[str]:
    items: Any = ()
    match data:
        case Named():
            return [data.name]
        case TreeNode():
            items = data.parts
        case Part():
            items = (data.value,)
        case tuple() | list():
            items = data
        case dict():
            items = (*data, *data.values())
    return [name for item in items for name in _named(item)]


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
        digest = digest_of(found)
        if digest and digest != told:
            raise JdagError(
                f"{name_of(found)}, or what it uses of its package, is other code here "
                "than where it was named, or has other values: the module has to be "
                "the same on both sides, and a worker that was started before a change "
                "has to be started anew. What is random, or is changed by a program, "
                "is not the same: pass it as an argument"
            )
        self._checked[name] = told, id(found)  # A module keeps it alive.
