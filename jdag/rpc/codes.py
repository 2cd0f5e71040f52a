"""What the functions that go by name are made of, so that two versions are told apart.

A worker that was started before a module was changed would compute other numbers by the
same names, and nobody would see it. So who names a function tells a digest of its code
ahead of that, once, and who finds a function by a name holds it to what was told.

The digest is of what is loaded, not of a file, which may have been changed since: of
the function's code, of its defaults and closure, and of what of its own package it may
name: functions, classes, numbers, texts, arrays, and what lists, dicts and sets hold of
these, up to a bound. Not of what other objects hold, nor of what it changes itself.
Other packages are held to their versions by the handshake.
"""

import dis
import json
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache, partial
from hashlib import blake2b, sha256
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jdag.compute.exported import Definition
from jdag.errors import JdagError, ProtocolError
from jdag.functions import CHANGING, changes, is_small, name_of
from jdag.wire.trees import Named, Node, Part

_HEAD = b"codes of functions\n"
_PLAIN = (int, float, complex, str, bytes, bool, type(None))
_PARTS_MAX = 10_000  # Of what one function may name.
_ITEMS_MAX, _BYTES_MAX = 10_000, 1 << 24  # Of one global; beyond, its size alone.
_NAMES_MAX = 4096  # Of functions of which it was told.
# Where pytest has put its own in the place of an assertion, code is not as written.
_REWRITTEN = "@py"
_STORES = "STORE_GLOBAL"
_HELD = ("__wrapped__", "fwd", "bwd", "jvp", "func", "args", "keywords")


class _Changed(Exception):
    """The code is not as it was written."""


def digest_of(found: Any) -> str:
    """Return the digest of a function or class; empty if its code is not as written."""
    digest = blake2b(digest_size=16)
    try:
        for part in _Walk(found).parts(found):
            digest.update(f"{len(part)} {part}".encode(errors="replace"))
    except _Changed:
        return ""
    return digest.hexdigest()


class _Walk:
    """Goes through all that something is made of, once, in an order of its own."""

    def __init__(self, root: Any) -> None:
        self._top = str(getattr(root, "__module__", "")).partition(".")[0]
        self._seen: dict[int, tuple[int, Any]] = {}  # It is kept: ids are used again.

    def parts(self, value: Any) -> Iterator[str]:
        """Give texts, equal for equal things."""
        if isinstance(value, _PLAIN):
            yield f"{type(value).__name__} {value!r}"
        elif isinstance(value, tuple | frozenset):
            items = value if isinstance(value, tuple) else sorted(value, key=repr)
            yield f"{type(value).__name__} {len(items)}"
            for item in items:
                yield from self.parts(item)
        elif id(value) in self._seen:
            yield f"again {self._seen[id(value)][0]}"
        elif len(self._seen) < _PARTS_MAX:
            self._seen[id(value)] = (len(self._seen), value)
            yield from self._of(value)

    def _of(self, value: Any) -> Iterator[str]:
        if isinstance(value, MethodType | staticmethod | classmethod):
            yield from self.parts(value.__func__)
        elif isinstance(value, property):
            yield from self.parts(value.fget)
        elif isinstance(value, CodeType):
            yield from self._of_code(value)
        elif not self._is_own(value):
            name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
            yield f"{type(value).__name__} {name} of {_module_of(value)}"
        elif isinstance(value, FunctionType):
            yield from self._of_function(value)
        elif isinstance(value, type):
            yield f"class {value.__qualname__}"
            yield from self.parts(value.__bases__)
            for name, member in sorted(vars(value).items()):
                if not name.startswith("__") or isinstance(member, FunctionType):
                    yield name
                    yield from self.parts(member)
        else:
            yield "object"
            yield from self.parts(type(value))
            for name in (*_HELD, *getattr(value, "__dataclass_fields__", ())):
                if (held := getattr(value, name, None)) is not None:
                    yield name
                    yield from self._of_items(held)

    def _of_items(self, held: Any) -> Iterator[str]:
        yield from self.parts(tuple(held.items()) if type(held) is dict else held)

    def _is_own(self, value: Any) -> bool:
        """Whether a value is of the package, or wraps what is."""
        while isinstance(value, partial):
            value = value.func
        return _module_of(value).partition(".")[0] == self._top

    def _of_function(self, fn: FunctionType) -> Iterator[str]:
        yield f"function {fn.__qualname__}"
        yield from self._of_code(fn.__code__, fn.__doc__)
        yield from self.parts(fn.__defaults__)
        yield from self._of_items(fn.__kwdefaults__)
        for cell in fn.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # Not filled yet.
                continue
            yield from self._of_held(held, fn.__code__)
        names = tuple(dict.fromkeys(_names(fn.__code__)))
        spaces = [fn.__globals__]
        for name in names:
            found = fn.__globals__.get(name)
            if not isinstance(found, ModuleType):
                continue
            if found.__name__.partition(".")[0] == self._top:
                spaces.append(vars(found))
        stored = _stored(fn.__code__)  # What it changes itself is no part of it.
        for space in spaces:
            for name in names:
                if name in stored or name not in space:
                    continue
                if not isinstance(space[name], ModuleType):
                    yield f"global {name}"
                    yield from self._of_held(space[name], fn.__code__)

    def _of_held(self, value: Any, code: CodeType) -> Iterator[str]:
        """What a function holds or reads, if it does not change that itself."""
        kind: Any = type(value)
        if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
            yield f"array {value.dtype} {value.shape}"
            if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
                yield _bytes_of(np.asarray(value))
        elif kind not in CHANGING:
            yield from self.parts(value)
        elif not changes(code, kind):
            is_array = kind is np.ndarray
            yield f"{kind.__name__} {value.shape if is_array else len(value)}"
            if not is_small(value, _ITEMS_MAX, _BYTES_MAX):
                return
            if is_array:
                yield f"{value.dtype} {_bytes_of(value)}"
                return
            items = sorted(value, key=repr) if kind is set else value
            for item in items:
                yield from self._of_held(item, code)
                if kind is dict:
                    yield from self._of_held(value[item], code)

    def _of_code(self, code: CodeType, doc: str | None = None) -> Iterator[str]:
        """What code does; neither where it is written nor what is said of it."""
        if any(name.startswith(_REWRITTEN) for name in code.co_names):
            raise _Changed
        yield code.co_name
        yield sha256(code.co_code + code.co_exceptiontable).hexdigest()
        yield repr((code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount))
        yield from self.parts((code.co_varnames, code.co_names))
        yield from self.parts((code.co_freevars, code.co_cellvars))
        for const in code.co_consts:
            yield from self.parts(None if doc is not None and const == doc else const)


@lru_cache(maxsize=4096)
def _stored(code: CodeType) -> tuple[str, ...]:
    """The globals that code, or code in it, gives values to."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    own = [one.argval for one in dis.get_instructions(code) if one.opname == _STORES]
    return (*own, *[name for one in inner for name in _stored(one)])


def _bytes_of(array: Any) -> str:
    return sha256(array.tobytes()).hexdigest() if array.nbytes <= _BYTES_MAX else ""


def _module_of(value: Any) -> str:
    module = getattr(value, "__module__", None)
    return module if isinstance(module, str) else ""


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _names(const)


# ------------------------------------------------------------------------ who names


def codes_of(data: Any, find: Callable[[str], Any]) -> tuple[Definition, ...]:
    """Return what is told of all that nested data name, ahead of them.

    Args:
        data: nested data of `jdag.wire.trees`.
        find: returns what a name is, or None where nothing is told of that.
    """
    found = {name: find(name) for name in sorted(dict.fromkeys(_named(data)))}
    codes = {name: digest_of(one) for name, one in found.items() if one is not None}
    told = {name: digest for name, digest in codes.items() if digest}
    if not told:
        return ()
    body = _HEAD + json.dumps(told).encode()
    return (Definition(sha256(body).digest(), body),)


def _named(data: Any) -> Iterator[str]:
    match data:
        case Named():
            yield data.name
        case Node():
            for part in data.parts:
                yield from _named(part)
        case Part():
            yield from _named(data.value)
        case tuple() | list():
            for item in data:
                yield from _named(item)
        case dict():
            for key, item in data.items():
                yield from _named(key)
                yield from _named(item)


def are_codes(data: bytes) -> bool:
    """Whether what is defined is not a function, but tells of some."""
    return data.startswith(_HEAD)


# ------------------------------------------------------------------------ who is told


class Codes:
    """What was told of functions, by name."""

    def __init__(self) -> None:
        self._told: dict[str, str] = {}
        self._checked: dict[str, tuple[str, int]] = {}

    def tell(self, data: bytes) -> bool:
        """Take what was told; whether it contradicts what was told before.

        Raises:
            ProtocolError: it is nothing that is told.
        """
        try:
            told = json.loads(data[len(_HEAD) :])
        except ValueError as error:
            raise ProtocolError(
                f"codes of functions that are no JSON: {error}"
            ) from None
        if not isinstance(told, Mapping) or not all(
            isinstance(digest, str) for digest in told.values()
        ):
            raise ProtocolError("codes of functions that are no table of texts")
        is_new = any(self._told.get(name, code) != code for name, code in told.items())
        self._told.update(told)
        while len(self._told) > _NAMES_MAX:
            name = next(iter(self._told))
            del self._told[name]
            self._checked.pop(name, None)
        return is_new

    def check(self, name: str, found: Any) -> None:
        """Hold what a name is here to what was told of it.

        Raises:
            JdagError: it is made of other code.
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
        self._checked[name] = told, id(found)  # It is of a module, and lives on.
