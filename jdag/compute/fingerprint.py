"""The fingerprint of a function: its code and the values that it reads.

A function reads its defaults, its closure and the globals that it names; functions of
its own package among these are followed. Numbers, texts, tuples, small containers and
numpy arrays count by value, other objects by identity.

Output: a hashable key for caches, of which `jdag.rpc.code_fingerprint` makes a digest
    for other processes.
Invariants: equal keys compute the same unless an object that counts by identity has
    changed. True, 1 and 1.0 are different, as are 0.0 and -0.0. What the code itself
    changes does not count by value. Keys keep their objects alive.
"""

import dis
from collections.abc import Callable, Hashable
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from hashlib import blake2b
from numbers import Number
from operator import attrgetter
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np

# The types that count by value although they may change, with the methods that do so.
MUTABLE: dict[Any, tuple[str, ...]] = {
    list: ("append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"),
    dict: ("update", "setdefault", "pop", "popitem", "clear"),
    set: ("add", "update", "discard", "remove", "pop", "clear"),
    np.ndarray: ("fill", "put", "sort", "partition", "resize"),
}
_STORES = ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR")
_LOADS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")
KEYED = "__jdag_key__"  # The attribute of objects that supply their own key.
ITEMS_MAX, BYTES_MAX = 64, 1 << 16  # Larger values count by identity.
FUNCTIONS_MAX, READS_MAX = 100, 4096  # Followed, and functions whose reads are kept.
# Packages whose functions are not followed: users do not change them.
_FIXED = ("jax", "jaxlib", "numpy", "optax", "jdag")
PLAIN = (str, bytes, bool, type(None))
_CODE = attrgetter("__code__")
_UNFILLED = CellType()

Changes = tuple[Any, ...]
Seen = dict[int, int]


class Facts(NamedTuple):
    """What code, with the code inside of it, reads and changes."""

    reads: tuple[str, ...]  # Globals, without those that it assigns.
    names: tuple[str, ...]  # Globals and attributes.
    changes: tuple[Any, ...]  # The types of MUTABLE that it may change in place.


@lru_cache(maxsize=4096)
def facts_of(code: CodeType) -> Facts:
    """Return what code reads and changes."""
    codes = [code]
    for one in codes:  # The list grows.
        codes.extend(const for const in one.co_consts if isinstance(const, CodeType))
    steps = [(s.opname, s.argval) for one in codes for s in dis.get_instructions(one)]
    reads = dict.fromkeys(name for step, name in steps if step in _LOADS)
    names = dict.fromkeys(name for one in codes for name in one.co_names)
    stores = any(step in _STORES for step, _ in steps)
    return Facts(
        tuple([name for name in reads if ("STORE_GLOBAL", name) not in steps]),
        tuple(names),
        tuple(k for k, ways in MUTABLE.items() if stores or {*ways} & names.keys()),
    )


class ById:
    """The key of an object that counts by identity."""

    def __init__(self, held: object, *, is_told: bool = True) -> None:
        self.held, self.is_told = held, is_told  # Whether a digest describes it.

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.held is other.held


class Once:
    """A key that is hashed once, since keys of closures are large."""

    def __init__(self, key: Hashable) -> None:
        self.key, self._hash = key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Once) and self.key == other.key)


class GlobalReads(Once):
    """The key of code and of the globals that it reads, shared by all its closures.

    It is current while all names give the objects that they gave before. The keys of
    objects in `held`, which may change in place, are found anew each time.
    """

    def __init__(self, code: CodeType, space: dict[str, Any]) -> None:
        self.code, self.space, self.module = code, space, str(space.get("__name__"))
        self.watched: list[tuple[Callable[[Any], Any], Any, Any]] = []
        self.held: list[tuple[Any, Changes]] = []
        self.changes = facts_of(code).changes  # By the code itself.
        self._spaces = [(space, facts_of(code).reads, facts_of(code))]
        self._known: dict[Hashable, int] = {}
        parts: list[Hashable] = [code]
        for values, names, reader in self._spaces:  # The list grows.
            for name in names:
                value = values.get(name)
                self.watched.append((values.get, name, value))
                parts.append((name, self._part(value, reader)))
        super().__init__(tuple(parts))

    def is_current(self) -> bool:
        """Tell whether all names give the objects that they gave before."""
        for get, name, value in self.watched:  # noqa: SIM110 (it runs in each call)
            if get(name) is not value:
                return False
        return True

    def _part(self, value: Any, reader: Facts) -> Hashable:
        top = top_of(self.module)
        is_followed = top not in _FIXED and top_of(module_of(value)) == top
        if isinstance(value, ModuleType):
            if is_followed:
                place = (id(value), id(reader))  # Each reads attributes of its own.
                self._follow(place, vars(value), reader.names, reader)
            return ById(value)
        if type(value) is FunctionType:
            if not is_followed or len(self._known) >= FUNCTIONS_MAX:
                return ById(value)
            if not (value.__closure__ or value.__defaults__ or value.__kwdefaults__):
                code = value.__code__
                self.watched.append((_CODE, value, code))
                facts, space = facts_of(code), value.__globals__
                return (code, self._follow(id(value), space, facts.reads, facts))
        elif _is_fixed(value):
            return key_of(value)
        self.held.append((value, reader.changes))
        return None

    def _follow(self, place: Hashable, *space: Any) -> int:
        """Add a space of names, that of a function or module; return its number."""
        if place not in self._known:
            self._known[place] = len(self._known)
            self._spaces.append(space)
        return self._known[place]


def _is_fixed(value: Any) -> bool:
    """Tell whether the key of an object is always the same."""
    kind: Any = type(value)
    if sort_of(kind) is not None or isinstance(value, type):
        return sort_of(kind) in (None, PLAIN, Number)
    by_id = kind.__hash__ is object.__hash__
    return by_id and not is_dataclass(kind) and not hasattr(kind, KEYED)


@lru_cache(maxsize=READS_MAX)
def _slot(code: int, space: int) -> list[GlobalReads]:
    """Return where the reads of code are kept, which keep both ids in use."""
    return []


def key_of(value: Any, seen: Seen | None = None, changes: Changes = ()) -> Hashable:
    """Return the key of a function, a static argument or anything that these hold.

    `seen` numbers functions met before, by id; `changes` are the types that the code
    which reads the value may change in place.
    """
    kind: Any = type(value)
    if kind is FunctionType:
        return _function_key(value, {} if seen is None else seen)
    sort = sort_of(kind)
    if sort is PLAIN or sort is Number:
        return (kind, value if sort is PLAIN else repr(value))
    seen = {} if seen is None else seen
    if sort is not None:
        return items_key(value, sort, seen, changes)
    return _object_key(value, seen, changes)


def _object_key(value: Any, seen: Seen, changes: Changes) -> Hashable:
    kind: Any = type(value)
    if isinstance(value, type):
        return value
    if hasattr(kind, KEYED):
        keyed: Hashable = getattr(value, KEYED)
        return keyed
    if kind in MUTABLE:
        if kind in changes:
            return ById(value, is_told=False)
        if is_small(value, ITEMS_MAX, BYTES_MAX):
            return items_key(value, kind, seen, changes)
        return ById(value)
    try:
        hash(value)
    except TypeError:
        return ById(value)
    if not is_dataclass(value) or seen.get(id(value), -1) >= 0:
        return (kind, value)
    seen[id(value)] = len(seen)
    held = [key_of(getattr(value, field.name), seen) for field in fields(value)]
    seen[id(value)] = -1  # An equal object beside it has an equal key.
    return (kind, value, *held)


@lru_cache(maxsize=4096)
def sort_of(kind: Any) -> Any:
    """Return which rule values of a type have for their keys; None for objects."""
    sorts: Any = (PLAIN, Number, FunctionType, tuple, frozenset, MethodType, partial)
    return next((sort for sort in sorts if issubclass(kind, sort)), None)


def items_key(value: Any, sort: Any, seen: Seen, changes: Changes = ()) -> Hashable:
    """Return the key of a value that consists of items, by its sort or type."""
    items: Any = value
    if sort is dict:
        items = value.items()
    elif sort is partial:
        items = (value.func, value.args, *value.keywords.items())
    elif sort is np.ndarray:
        items = (str(value.dtype), value.shape, blake2b(value.tobytes()).digest())
    elif sort is MethodType:
        items = (value.__func__, value.__self__)
    elif sort is set or sort is frozenset:
        items = sorted(value, key=lambda one: getattr(one, "__qualname__", repr(one)))
    return (type(value), *[key_of(item, seen, changes) for item in items])


def _function_key(fn: FunctionType, seen: Seen) -> Hashable:
    closure = fn.__closure__
    slot = _slot(id(fn.__code__), id(fn.__globals__))
    if not slot or not slot[0].is_current():
        slot[:] = [GlobalReads(fn.__code__, fn.__globals__)]
    reads = slot[0]
    if not (reads.held or closure or fn.__defaults__ or fn.__kwdefaults__):
        return reads
    if id(fn) in seen:
        return ("again", seen[id(fn)])
    if len(seen) >= FUNCTIONS_MAX:
        return ById(fn)
    seen[id(fn)] = len(seen)
    own = [*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).items()]
    own.extend([c if c == _UNFILLED else c.cell_contents for c in closure or ()])
    held = [*reads.held, *[(one, reads.changes) for one in own]]
    return (reads, fn.__module__, *[key_of(one, seen, by) for one, by in held])


def is_small(value: Any, items_max: int, bytes_max: int) -> bool:
    """Tell whether containers and arrays, with those inside, hold no more than that."""
    waiting, items, nbytes = [value], 0, 0
    for one in waiting:  # It grows; each item counts, also again and again.
        if isinstance(one, np.ndarray):
            nbytes += bytes_max + 1 if one.dtype.hasobject else one.nbytes
        elif isinstance(one, list | tuple | dict | set | frozenset):
            items += len(one)
            if items <= items_max:
                waiting.extend([*one, *one.values()] if isinstance(one, dict) else one)
    return items <= items_max and nbytes <= bytes_max


def module_of(value: Any) -> str:
    """Return the module of a function, class or object, or the name of a module."""
    module = getattr(value, "__module__", None) or getattr(value, "__name__", None)
    return module if isinstance(module, str) else ""


def top_of(module: Any) -> str:
    """Return the name of the package of a module."""
    return str(module).partition(".")[0]
