"""What a function is: its name, its identity, its marks, and where it is called."""

import dis
import functools
import os
import sys
from collections.abc import Callable, Hashable, Mapping
from dataclasses import fields, is_dataclass
from hashlib import blake2b
from numbers import Number
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from jdag.errors import ContextError, JdagError, kind_of

Marked = TypeVar("Marked", bound=Callable[..., Any])

_UNJITTED = "__jdag_unjitted__"
_PROGRAM = "__jdag_program__"
CONTEXT = "__jdag_context__"  # What classes of contexts have.
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_PROGRAMS = os.path.join(_PACKAGE, "programs") + os.sep
_PLAIN = (str, bytes, bool, type(None))
_FUNCTIONS = (FunctionType, MethodType, functools.partial)
KEYED = "__jdag_key__"  # What an object has that says itself what it is, for caches.
ITEMS_MAX, BYTES_MAX = 64, 1 << 16  # Of what counts by what it holds.
# What may be changed where it is, and the methods that do it.
CHANGING: Mapping[Hashable, tuple[str, ...]] = {
    list: (
        "append",
        "extend",
        "insert",
        "pop",
        "remove",
        "clear",
        "sort",
        "reverse",
    ),
    dict: ("update", "setdefault", "pop", "popitem", "clear"),
    set: ("add", "update", "discard", "remove", "pop", "clear"),
    np.ndarray: ("fill", "put", "sort", "partition", "resize"),
}
_STORING = ("STORE_SUBSCR", "STORE_SLICE", "DELETE_SUBSCR")


class ById:
    """A key that equals only a key of the same object, which it keeps alive."""

    __slots__ = ("held",)

    def __init__(self, held: object) -> None:
        self.held = held

    def __hash__(self) -> int:
        return id(self.held)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ById) and self.held is other.held

    def __repr__(self) -> str:
        return f"ById({type(self.held).__name__})"


class Once:
    """A key that is hashed once, since those of closures are large."""

    __slots__ = ("_hash", "key")

    def __init__(self, key: Hashable) -> None:
        self.key = key
        self._hash = hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Once) and self.key == other.key)


class Applied:
    """A callable pytree as a function of itself, and then of its arguments.

    Its identity is the name of the pytree's class: all else of that is in the pytree.
    As a program it takes the context first, as programs do.
    """

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.name = name_of(fn)
        self.code = code_of(fn)
        setattr(self, _UNJITTED, is_unjitted(fn))
        setattr(self, _PROGRAM, is_program(fn))

    @classmethod
    def named(cls, name: str, *, unjitted: bool, program: bool) -> "Applied":
        """Return the one of pytrees whose class has this name and these marks."""
        made = cls.__new__(cls)
        made.name = name
        made.code = None
        setattr(made, _UNJITTED, unjitted)
        setattr(made, _PROGRAM, program)
        return made

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the pytree, which is the first argument; of a program, the second."""
        if is_program(self):
            return args[0](first, *args[1:], **kwargs)
        return first(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Applied) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> tuple[str, bool, bool]:
        return (self.name, is_unjitted(self), is_program(self))


def name_of(fn: Callable[..., Any]) -> str:
    """Name a function as `module:qualname`; a partial says so, an object its class.

    An object that has a name of its own, such as `jnp.add`, goes by that.
    """
    if isinstance(fn, Applied):
        return fn.name
    if isinstance(fn, functools.partial):
        return f"partial({name_of(fn.func)})"
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    if name is None:
        return f"{type(fn).__module__}:{type(fn).__qualname__}"
    return f"{fn.__module__}:{name}"


def name_on(pair: Any) -> str:
    """Name the function of a pair, and the device where that was named: `m:f@cpu:1`."""
    name: str = pair.name
    return name if pair.device is None else f"{name}@{pair.device}"


def key_of(fn: Callable[..., Any]) -> Hashable:
    """Return what `fn` is, for caches: equal keys compute the same.

    A function is its code, defaults, and what is in its closure and in the globals that
    its code names, so that a lambda made anew in a loop keeps its key as long as what
    it reads does. Lists, dicts, sets and numpy arrays of at most `ITEMS_MAX` items and
    `BYTES_MAX` bytes count by what they hold, unless the code itself may change them,
    as where it notes that it ran. All else that cannot be hashed counts by identity:
    changes inside of it are not seen, nor are those of objects, nor of globals that
    only a function that it calls reads.
    """
    return _function_key(fn, ())


def _function_key(fn: Any, above: tuple[int, ...]) -> Hashable:
    if id(fn) in above:  # A function that closes over itself.
        return ("itself", len(above) - above.index(id(fn)))
    if type(fn) is FunctionType:
        read = _globals_key(fn)
        if not (fn.__closure__ or fn.__defaults__ or fn.__kwdefaults__):
            return (fn.__code__, read)
        above = (*above, id(fn))
        return (
            fn.__code__,
            read,
            _value_key(fn.__defaults__, above, fn.__code__),
            _items_key(fn.__kwdefaults__ or {}, above, fn.__code__),
            tuple(_cell_key(cell, above, fn.__code__) for cell in fn.__closure__ or ()),
        )
    if type(fn) is MethodType:
        return (
            MethodType,
            _function_key(fn.__func__, above),
            _value_key(fn.__self__, above),
        )
    if isinstance(fn, functools.partial):
        return (
            type(fn),
            _function_key(fn.func, above),
            _value_key(fn.args, above),
            _items_key(fn.keywords, above),
        )
    return _object_key(fn, (*above, id(fn)))


@functools.lru_cache(maxsize=4096)
def _names(code: CodeType) -> tuple[str, ...]:
    """The names that code, and code inside of it, may read as globals."""
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    names = [*code.co_names, *(name for one in inner for name in _names(one))]
    return tuple(dict.fromkeys(names))


def _globals_key(fn: FunctionType) -> Hashable:
    """What a function reads of its module, as far as it can change unnoticed."""
    space = fn.__globals__
    key: list[Hashable] = []
    for name in _names(fn.__code__):
        value = space.get(name)
        if value is None or isinstance(value, ModuleType):
            continue
        if isinstance(value, FunctionType):
            key.append(ById(value))
        else:
            key.append(_value_key(value, (), fn.__code__))
    return tuple(key)


def _cell_key(cell: Any, above: tuple[int, ...], code: CodeType) -> Hashable:
    try:
        contents = cell.cell_contents
    except ValueError:  # Not filled yet; its own identity is all there is.
        return ById(cell)
    return _value_key(contents, above, code)


def _items_key(
    items: dict[str, Any], above: tuple[int, ...], code: CodeType | None = None
) -> Hashable:
    return tuple((name, _value_key(item, above, code)) for name, item in items.items())


def value_key(value: object) -> Hashable:
    """Return a key that keeps apart what `==` does not: True and 1, 0.0 and -0.0.

    Tuples, frozen dataclasses and small containers are taken apart, functions go by
    `key_of`, other hashable values by type and value, and the rest by identity (kept
    alive).
    """
    return _value_key(value, ())


def _value_key(
    value: Any, above: tuple[int, ...], code: CodeType | None = None
) -> Hashable:
    kind = type(value)
    sort = _sort(kind)
    if sort is _PLAIN:
        return (kind, value)
    if sort is Number:
        return (kind, repr(value))
    if sort is tuple:
        return (kind, tuple([_value_key(item, above, code) for item in value]))
    if sort is frozenset:
        return (kind, tuple(sorted(map(repr, value))), value)
    if sort is _FUNCTIONS:
        return _function_key(value, above)
    if id(value) in above:
        return ("itself", len(above) - above.index(id(value)))
    return _object_key(value, (*above, id(value)), code)


def _sort_of(kind: type) -> Any:
    """By which rule values of a type have their keys; None for that of objects."""
    for sort in (_PLAIN, Number, tuple, frozenset, _FUNCTIONS):
        if issubclass(kind, sort):
            return sort
    return None


_sort: Callable[[Any], Any] = functools.lru_cache(maxsize=4096)(_sort_of)


def _object_key(
    value: Any, above: tuple[int, ...], code: CodeType | None = None
) -> Hashable:
    if isinstance(value, type):
        return value
    if hasattr(type(value), KEYED):
        keyed: Hashable = getattr(value, KEYED)
        return keyed
    try:
        hash(value)
    except TypeError:
        return _held_key(value, above, code)
    if is_dataclass(value):
        held = (getattr(value, field.name) for field in fields(value))
        return (type(value), value, tuple(_value_key(item, above) for item in held))
    return (type(value), value)


def _held_key(value: Any, above: tuple[int, ...], code: CodeType | None) -> Hashable:
    """What may change where it is: what it holds, where that is told soon enough."""
    kind: Any = type(value)
    if kind not in CHANGING or (code is not None and changes(code, kind)):
        return ById(value)
    if not is_small(value, ITEMS_MAX, BYTES_MAX):
        return ById(value)
    if kind is np.ndarray:
        digest = blake2b(value.tobytes(), digest_size=16).digest()
        return (kind, value.dtype, value.shape, digest)
    if kind is dict:
        items = [
            (_value_key(name, above, code), _value_key(item, above, code))
            for name, item in value.items()
        ]
        return (kind, tuple(items))
    keys = [_value_key(item, above, code) for item in value]
    return (kind, frozenset(keys) if kind is set else tuple(keys))


def is_small(value: Any, items_max: int, bytes_max: int) -> bool:
    """Tell whether containers and arrays, with those inside, hold no more than that."""
    waiting, items, nbytes = [value], 0, 0
    while waiting:  # Each item counts, also again and again.
        one = waiting.pop()
        if isinstance(one, np.ndarray):
            nbytes += one.nbytes
            if nbytes > bytes_max or one.dtype.hasobject:
                return False
        elif isinstance(one, list | tuple | dict | set | frozenset):
            items += len(one)
            if items > items_max:
                return False
            waiting.extend([*one, *one.values()] if isinstance(one, dict) else one)
    return True


@functools.lru_cache(maxsize=4096)
def changes(code: CodeType, kind: Hashable) -> bool:
    """Tell whether code, or code in it, may change something of that kind in place."""
    if any(name in CHANGING[kind] for name in code.co_names):
        return True
    if any(one.opname in _STORING for one in dis.get_instructions(code)):
        return True
    inner = [const for const in code.co_consts if isinstance(const, CodeType)]
    return any(changes(one, kind) for one in inner)


def code_of(fn: Any) -> CodeType | None:
    """Return the code that `fn` runs in the end, None for builtins."""
    for _ in range(100):  # A bound: wrappers may, by mistake, wrap each other.
        if isinstance(fn, Applied):
            return fn.code
        if isinstance(fn, functools.partial):
            fn = fn.func
        elif isinstance(fn, MethodType):
            fn = fn.__func__
        elif isinstance(fn, FunctionType):
            return fn.__code__
        elif hasattr(fn, "__wrapped__"):
            fn = fn.__wrapped__
        else:
            call = type(fn).__call__ if callable(fn) else None
            return call.__code__ if isinstance(call, FunctionType) else None
    return None


@functools.lru_cache(maxsize=4096)
def is_ours(file: str) -> bool:
    """Tell whether a source file is jdag's own, which ready programs are not."""
    return file.startswith(_PACKAGE) and not file.startswith(_PROGRAMS)


def unjitted(fn: Marked) -> Marked:
    """Mark `fn` to be run as it stands, without jit; return it.

    Raises:
        JdagError: `fn` takes no attributes (a builtin, a bound method).
    """
    return _mark(fn, _UNJITTED, "jdag.unjitted")


def is_unjitted(fn: Callable[..., Any]) -> bool:
    """Tell whether `fn`, or what it is a partial of, is marked by `unjitted`."""
    return _is_marked(fn, _UNJITTED)


def program(fn: Marked) -> Marked:
    """Mark `fn` as a program: it takes the context first and is handed refs; return it.

    What is returned is called with a context, here or by `ctx.call`.

    Raises:
        JdagError: `fn` takes no attributes (a builtin, a bound method).
    """
    if type(fn) is not FunctionType:
        return _mark(fn, _PROGRAM, "jdag.program")
    name: str = _mark(fn, _PROGRAM, "jdag.program").__name__

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        # Of a method the first argument is its object.
        first = (*args[:2], *kwargs.values())
        if not any(getattr(type(one), CONTEXT, False) for one in first):
            got = kind_of(args[0]) if args else "none"
            raise ContextError(
                f"{name_of(fn)} is a program, which takes a context first, and got "
                f"{got}: write ctx.call(worker, {name}, ...) to run it on a "
                f"worker, or {name}(ctx, ...)"
            )
        return fn(*args, **kwargs)

    return cast(Marked, run)


def is_program(fn: Callable[..., Any]) -> bool:
    """Tell whether `fn`, or what it is a partial of, is marked by `program`."""
    return _is_marked(fn, _PROGRAM)


def _mark(fn: Marked, mark: str, by: str) -> Marked:
    try:
        setattr(fn, mark, True)
    except (AttributeError, TypeError) as error:
        raise JdagError(
            f"{by} cannot mark {fn!r}, which takes no attributes; "
            "mark a function written with def, or a functools.partial"
        ) from error
    return fn


def _is_marked(fn: Any, mark: str) -> bool:
    while not getattr(fn, mark, False):
        if not isinstance(fn, functools.partial):
            return False
        fn = fn.func
    return True


class CallSite(NamedTuple):
    """Where in the user's code something was asked for."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        # The file by its name alone: a call site travels, so that a path would make
        # the bytes on the wire, and with them the digest, depend on the folder.
        return f"{_base(self.file)}:{self.line} in {self.function}"


@functools.lru_cache(maxsize=4096)
def _base(file: str) -> str:
    return file.replace("\\", "/").rpartition("/")[2]


def call_site() -> CallSite:
    """Return the place of the innermost frame outside of jdag.

    Ready programs (`jdag.programs`) count as outside, as a user's own do. Where all
    frames are jdag's own, the outermost one is named.
    """
    frame = sys._getframe(1)
    while (outer := frame.f_back) is not None:
        file = frame.f_code.co_filename
        if not is_ours(file):
            break
        frame = outer
    code = frame.f_code
    return CallSite(code.co_filename, frame.f_lineno, code.co_qualname)
