"""The fingerprint of a function: its code and the values that it reads.

A function reads its defaults, its closure and the globals that it names. Globals that
are functions of the same package are fingerprinted too. Numbers, strings, tuples, small
containers and numpy arrays count by value, other objects by identity.

Outputs: `key_of`, a hashable key for caches, which includes the names of functions,
    since costs and messages refer to these; `function_digest`, which processes compare.
    A digest describes an object that counts by identity: an array by its bytes, an
    object of the same package by its parts, any other by its name.

Invariants: functions with equal keys compute the same unless an object that counts by
identity has changed. True, 1 and 1.0 differ, as do 0.0 and -0.0. Objects that
the code itself changes do not count by value. Keys keep their objects alive.
"""

import dis
import inspect
from collections.abc import Callable, Hashable, Iterator
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from marshal import dumps
from numbers import Number
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

# Mutable types that count by value, with the methods that mutate them.
MUTABLE: dict[Any, tuple[str, ...]] = {
    list: ("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"),
    dict: ("update", "setdefault", "pop", "popitem", "clear"),
    set: ("add", "update", "discard", "remove", "pop", "clear"),
    np.ndarray: ("fill", "put", "sort", "partition", "resize"),
}
_PLAIN = (str, bytes, Number, type(None))
_sorted = partial(sorted, key=lambda item: getattr(item, "__qualname__", repr(item)))
# Functions that return the parts of a value, by type.
_ITEMS: dict[Any, Callable[[Any], Any]] = {
    **dict.fromkeys((tuple, list), iter),
    **dict.fromkeys((set, frozenset), _sorted),
    dict: dict.items,
    np.ndarray: lambda a: (str(a.dtype), a.shape, blake2b(a.tobytes()).digest()),
    MethodType: attrgetter("__func__", "__self__"),
    partial: lambda fn: (fn.func, fn.args, *fn.keywords.items()),
}
_STORES = ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR")
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
KEYED = "__jdag_key__"  # The attribute of objects that supply their own key.
ITEMS_MAX, BYTES_MAX = 64, 1 << 16  # Larger values count by identity.
_DESCRIBED_MAX = (10_000, 1 << 24)  # Digests include only the size of larger values.
FUNCTIONS_MAX, READS_MAX = 100, 4096  # Followed functions; functions with cached reads.
# Functions of these packages are not followed: users do not change them.
FIXED = ("jax", "jaxlib", "numpy", "optax", "jdag")
_WRAPPED = ("__wrapped__", "fwd", "bwd", "jvp")  # Attributes of JAX's functions.
_HAS_DOC: int = getattr(inspect, "CO_HAS_DOCSTRING", 0)  # Python 3.13 and later.
_CODE = attrgetter("__code__")
_UNFILLED = CellType()

Changes = tuple[Any, ...]
Seen = dict[int, int]


class Facts(NamedTuple):
    """The names that code and its nested code read, and types that it may change."""

    reads: tuple[str, ...]  # Globals that the code does not assign.
    names: tuple[str, ...]  # Globals and attributes.
    changes: Changes  # The types of MUTABLE that the code may change.


@lru_cache(maxsize=4096)
def _facts_of(code: CodeType) -> Facts:
    codes = [code]
    for nested in codes:  # The loop extends the list.
        codes.extend(const for const in nested.co_consts if isinstance(const, CodeType))
    steps = [(s.opname, s.argval) for each in codes for s in dis.get_instructions(each)]
    reads = dict.fromkeys(name for step, name in steps if step in _LOADS)
    names = dict.fromkeys(name for nested in codes for name in nested.co_names)
    stores = any(step in _STORES for step, _ in steps)
    return Facts(
        tuple([name for name in reads if ("STORE_GLOBAL", name) not in steps]),
        tuple(names),
        tuple(
            kind
            for kind, methods in MUTABLE.items()
            if stores or {*methods} & names.keys()
        ),
    )


class ById:
    def __init__(self, value: object, *, is_described: bool = True) -> None:
        self.value = value
        self.is_described = is_described  # Whether digests describe the object.

    def __hash__(self) -> int:
        return id(self.value)

    def __eq__(self, key: object) -> bool:
        return isinstance(key, ById) and self.value is key.value


class Once:
    """A key with a cached hash, since keys of closures are large."""

    def __init__(self, key: Hashable) -> None:
        self.key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, key: object) -> bool:
        return self is key or (isinstance(key, Once) and self.key == key.key)


class GlobalReads(Once):
    """The key of code and of the globals that it reads. Closures of the code share it.

    The key is valid while all names refer to the same objects as before. Keys of the
    objects in `mutable`, which may change in place, are computed each time.
    """

    def __init__(self, code: CodeType, space: dict[str, Any]) -> None:
        self.code, self.space, self.module = code, space, str(space.get("__name__"))
        self.watched: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self.mutable: list[tuple[Any, Changes]] = []
        self._numbers: dict[tuple[Hashable, int], int] = {}
        facts = _facts_of(code)
        self.changes = facts.changes  # Types that the code itself may change.
        super().__init__((code, *self._read(space, facts.reads, facts)))

    def is_current(self) -> bool:
        for get, name, value in self.watched:  # noqa: SIM110 (it runs in each call)
            if get(name) is not value:
                return False
        return True

    def _read(
        self, values: dict[str, Any], names: tuple[str, ...], reader: Facts
    ) -> Iterator[Hashable]:
        for name in names:
            value = values.get(name)
            self.watched.append((values.get, name, value))
            yield (name, self._part(value, reader))

    def _part(self, value: Any, reader: Facts) -> Hashable:
        top, is_function = _top_of(self.module), type(value) is FunctionType
        is_followed = top not in FIXED and _top_of(_module_of(value)) == top
        if is_function and is_followed and len(self._numbers) < FUNCTIONS_MAX:
            if not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
                code = value.__code__
                self.watched.append((_CODE, value, code))
                facts = _facts_of(code)
                place = (code, id(value.__globals__))
                return self._followed(place, value.__globals__, facts.reads, facts)
        elif isinstance(value, ModuleType) and is_followed:
            place = (ById(value), id(reader))  # The attributes depend on the reader.
            return self._followed(place, vars(value), reader.names, reader)
        elif is_function or _is_fixed(value):
            return ById(value) if is_function else key_of(value)
        self.mutable.append((value, reader.changes))
        return None

    def _followed(self, place: tuple[Hashable, int], *space: Any) -> Hashable:
        """Return the key of a function or module; if already keyed, its number."""
        if place in self._numbers:
            return self._numbers[place]
        self._numbers[place] = len(self._numbers)
        return (place[0], *self._read(*space))


def _is_fixed(value: Any) -> bool:
    kind: Any = type(value)
    rule = _rule_of(kind)
    if rule is not None or isinstance(value, type):
        return rule in (None, repr)
    by_id = kind.__hash__ is object.__hash__
    return by_id and not is_dataclass(kind) and not hasattr(kind, KEYED)


@lru_cache(maxsize=READS_MAX)
def _slot(code: int, space: int) -> list[GlobalReads]:
    """Return the cached reads of code, which keep the objects of both ids alive."""
    return []


@lru_cache(maxsize=4096)
def _rule_of(kind: Any) -> Any:
    if issubclass(kind, _PLAIN):
        return repr
    sorts = (tuple, frozenset, MethodType, partial)
    return next((_ITEMS[sort] for sort in sorts if issubclass(kind, sort)), None)


def key_of(value: Any, seen: Seen | None = None, changes: Changes = ()) -> Hashable:
    """Return the key of a function, a static argument or any value inside them.

    `seen` numbers the functions keyed so far, by id; `changes` are the mutable types
    that the code which reads the value may change in place.
    """
    kind: Any = type(value)
    if kind is FunctionType:
        return _function_key(value, seen)
    rule = _rule_of(kind)
    if rule is repr:
        return (kind, repr(value))
    seen = {} if seen is None else seen
    if rule is not None:
        return (kind, *[key_of(item, seen, changes) for item in rule(value)])
    if isinstance(value, type):
        return value
    if hasattr(kind, KEYED):
        keyed: Hashable = getattr(value, KEYED)
        return keyed
    if kind in MUTABLE:
        if kind not in changes and _is_small(value, ITEMS_MAX, BYTES_MAX):
            return (kind, *[key_of(i, seen, changes) for i in _ITEMS[kind](value)])
        return ById(value, is_described=kind not in changes)
    try:
        hash(value)
    except TypeError:
        return ById(value)
    if not is_dataclass(value) or seen.get(id(value), -1) >= 0:
        return (kind, value)
    seen[id(value)] = len(seen)
    field_keys = [key_of(getattr(value, field.name), seen) for field in fields(value)]
    seen[id(value)] = -1  # Another equal object then has an equal key.
    return (kind, value, *field_keys)


def _function_key(fn: FunctionType, seen: Seen | None) -> Hashable:
    slot = _slot(id(fn.__code__), id(fn.__globals__))
    if not slot or not slot[0].is_current():
        slot[:] = [GlobalReads(fn.__code__, fn.__globals__)]
    reads = slot[0]
    names = fn.__module__, fn.__qualname__
    if not (reads.mutable or fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__):
        return (reads, names)
    seen = {} if seen is None else seen
    if id(fn) in seen:
        return ("again", seen[id(fn)])
    if len(seen) >= FUNCTIONS_MAX:
        return ById(fn)
    seen[id(fn)] = len(seen)
    cells = fn.__closure__ or ()
    captured = [c if c == _UNFILLED else c.cell_contents for c in cells]
    captured += [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).items()]
    keys = [key_of(value, seen, changes) for value, changes in reads.mutable]
    keys += [key_of(value, seen, reads.changes) for value in captured]
    return (reads, names, *keys)


def _is_small(value: Any, items_max: int, bytes_max: int) -> bool:
    pending, items, nbytes = [value], 0, 0
    for part in pending:  # The list grows; repeated items count each time.
        if isinstance(part, np.ndarray):
            nbytes += bytes_max + 1 if part.dtype.hasobject else part.nbytes
        elif isinstance(part, list | tuple | dict | set | frozenset):
            items += len(part)
            if items <= items_max:
                pending += [*part, *part.values()] if isinstance(part, dict) else part
    return items <= items_max and nbytes <= bytes_max


def _module_of(value: Any) -> str:
    module = getattr(value, "__module__", None) or getattr(value, "__name__", None)
    return module if isinstance(module, str) else ""


def _top_of(module: Any) -> str:
    return str(module).partition(".")[0]


class _RewrittenError(Exception):
    """Code with assertions rewritten by pytest, which differs in other processes."""


def function_digest(function: Any) -> str:
    """Return the digest of a function or class; empty if it must not be compared.

    It must not be compared if pytest rewrote its code or its functions nest too deep.
    """
    try:
        texts = list(_texts_of(key_of(function), _top_of(_module_of(function)), {}))
    except (RecursionError, _RewrittenError):
        return ""
    return blake2b(repr(texts).encode(), digest_size=16).hexdigest()


def _texts_of(part: Any, top: str, seen: dict[int, Any]) -> Iterator[str]:
    """Yield a part of a key as strings; code outside package `top` by name only."""
    if type(part) is tuple and part and isinstance(part[0], GlobalReads):
        reads, (module, _), *values = part
        part = f"{reads.code.co_qualname} of {module}"
        if _top_of(module) == top:
            part = (reads.key if _top_of(reads.module) == top else reads.code, *values)
    if type(part) is tuple:
        yield f"tuple {len(part)}"
        for item in part:
            yield from _texts_of(item, top, seen)
    elif isinstance(part, CodeType):
        yield dumps(_bare(part), 2).hex()  # Version 2 writes no references.
    elif isinstance(part, _PLAIN):
        yield f"{type(part).__name__} {part!r}"
    else:
        value = part.value if isinstance(part, ById) else part
        name = getattr(value, "__qualname__", "")
        yield f"{type(value).__name__} {name} of {_module_of(value)}"
        if not isinstance(part, ById) or part.is_described:
            yield from _texts_of(_described(value, top, seen), top, seen)


def _described(value: Any, top: str, seen: dict[int, Any]) -> Any:
    """Return the parts of an object that counts by identity, as a key."""
    if isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer):
        is_key = jnp.issubdtype(value.dtype, jax.dtypes.prng_key)
        value = np.asarray(jax.random.key_data(value) if is_key else value)
    if type(value) in MUTABLE:
        if _is_small(value, *_DESCRIBED_MAX):
            return tuple([key_of(item) for item in _ITEMS[type(value)](value)])
        is_array = isinstance(value, np.ndarray)
        return (str(value.dtype), *value.shape) if is_array else len(value)
    if _top_of(_module_of(value)) != top or id(value) in seen:
        return ()
    seen[id(value)] = value
    if isinstance(value, FunctionType):  # A key has at most FUNCTIONS_MAX functions.
        return key_of(value)
    if not isinstance(value, type):
        names = (*_WRAPPED, *getattr(value, "__dataclass_fields__", ()))
        return key_of((type(value), *[getattr(value, name, None) for name in names]))
    parts: list[Any] = [value.__bases__]
    for name, member in sorted(vars(value).items()):
        bare = getattr(member, "fget", getattr(member, "__func__", member))
        if name[:2] != "__" or isinstance(bare, FunctionType):
            parts.append((name, bare))
    return key_of(tuple(parts))


@lru_cache(maxsize=4096)
def _bare(code: CodeType) -> CodeType:
    if any(name.startswith("@py") for name in code.co_names):
        raise _RewrittenError
    consts = [_bare(c) if isinstance(c, CodeType) else c for c in code.co_consts]
    is_def = code.co_name[0] != "<" and code.co_flags & _HAS_DOC == _HAS_DOC
    if consts and is_def and isinstance(consts[0], str):
        consts[0] = None
    return code.replace(
        co_consts=tuple(consts), co_filename="", co_firstlineno=1, co_linetable=b""
    )
