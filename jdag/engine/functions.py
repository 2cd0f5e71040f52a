"""Names and marks of functions, and call sites."""

import functools
import os
import sys
from collections.abc import Callable
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any, NamedTuple, TypeVar, cast

from jdag import errors
from jdag.errors import ContextError, JdagError, kind_of

_Marked = TypeVar("_Marked", bound=Callable[..., Any])

_UNJITTED = "__jdag_unjitted__"
_PROGRAM = "__jdag_program__"
_REMOTE = "__jdag_remote__"
CONTEXT = "__jdag_context__"  # An attribute of classes of contexts.
TAKEN = "__jdag_taken__"  # Attribute of a class: what accepts its objects.
_PACKAGE = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep


class Applied:
    """A callable pytree as a function of itself, and then of its arguments.

    It is identified by the class name of the pytree; everything else is in the pytree.
    As a program it takes the context first, as programs do.
    """

    def __init__(
        self, name: str, unjitted: bool, program: bool, code: CodeType | None = None
    ) -> None:
        self.name = name
        self.code = code
        setattr(self, _UNJITTED, unjitted)
        setattr(self, _PROGRAM, program)

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
        """Call the pytree: the first argument, or the second if it is a program."""
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
    """Name a function as `module:qualname`; an object without a name goes by its class.

    A partial is named `partial(...)`; objects with a name, such as `jnp.add`, keep it.
    """
    if isinstance(fn, Applied):
        return fn.name
    if isinstance(fn, functools.partial):
        return f"partial({name_of(fn.func)})"
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    if name is None:
        return f"{type(fn).__module__}:{type(fn).__qualname__}"
    module = getattr(fn, "__module__", None)  # None of methods in C, as [].append.
    return f"{module}:{name}" if module else name


def name_on(pair: Any) -> str:
    """The name of a pair's function, with its device if one was given: `m:f@cpu:1`."""
    name: str = pair.name
    return name if pair.device is None else f"{name}@{pair.device}"


def code_of(fn: Any) -> CodeType | None:
    """Return the code that `fn` finally runs; None for builtins."""
    for _ in range(100):  # A bound: wrappers may, by mistake, form a cycle.
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
    """Tell whether a source file is of jdag itself."""
    return file.startswith(_PACKAGE)


def unjitted(fn: Any = None, /, *, shapes: Any = None) -> Any:
    """Mark `fn` to run as Python on real arrays, untraced; return it.

    Args:
        fn: a function; it may branch on values, use numpy and be impure. Its arguments
            are untracked. Without it a decorator is returned.
        shapes: a function that returns a `jax.ShapeDtypeStruct` for each array that
            `fn` returns, and takes them in place of arrays. `ctx.call` then returns
            refs at once; without it, when `fn` has run.

    Raises:
        JdagError: attributes cannot be set on `fn` (a builtin, a bound method), or
            `shapes` is no function.
    """
    if shapes is not None and not callable(shapes):
        raise JdagError(f"jdag.unjitted(shapes=...) takes a function, not {shapes!r}")
    value, by = shapes or True, "jdag.unjitted"
    mark: Any = functools.partial(_mark, mark=_UNJITTED, by=by, value=value)
    return mark if fn is None else mark(fn)


def is_unjitted(fn: Callable[..., Any]) -> bool:
    """Tell whether `fn`, or what it is a partial of, is marked by `unjitted`."""
    return _is_marked(fn, _UNJITTED)


def shapes_of(fn: Any) -> Callable[..., Any] | None:
    """Return the `shapes` of an unjitted function, which takes what that takes."""
    mark = getattr(fn, _UNJITTED, None)
    if mark is None and isinstance(fn, functools.partial):
        shapes = shapes_of(fn.func)
        return shapes and functools.partial(shapes, *fn.args, **fn.keywords)
    return mark if callable(mark) else None


def program(fn: _Marked) -> _Marked:
    """Mark `fn` as a program, which takes a context and then refs; return it.

    The returned function is called with a context, directly or by `ctx.call`.

    Raises:
        JdagError: attributes cannot be set on `fn` (a builtin, a bound method).
    """
    if type(fn) is not FunctionType:
        return _mark(fn, _PROGRAM, "jdag.program")
    name: str = _mark(fn, _PROGRAM, "jdag.program").__name__

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        # In a method the first argument is its object.
        first = (*args[:2], *kwargs.values())
        if not any(getattr(type(one), CONTEXT, False) for one in first):
            got = kind_of(args[0]) if args else "none"
            raise ContextError(
                f"{name_of(fn)} is a program, which takes a context first, and got "
                f"{got}: write ctx.call(worker, {name}, ...) to run it on a "
                f"worker, or {name}(ctx, ...)"
            )
        return fn(*args, **kwargs)

    return cast(_Marked, run)


def remote(fn: _Marked) -> _Marked:
    """Mark one of jdag's own functions or classes as allowed in messages; return it."""
    return _mark(fn, _REMOTE, "jdag")


def is_remote(fn: Any) -> bool:
    """Tell whether `fn` itself is marked by `remote`."""
    return _REMOTE in getattr(fn, "__dict__", ())


def is_program(fn: Callable[..., Any]) -> bool:
    """Tell whether `fn`, or what it is a partial of, is marked by `program`."""
    return _is_marked(fn, _PROGRAM)


def _mark(fn: _Marked, mark: str, by: str, value: Any = True) -> _Marked:
    try:
        setattr(fn, mark, value)
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


@remote
def transferred(*arrays: Any) -> Any:
    """Return the arguments; `ctx.move` calls this on the target worker."""
    return arrays


class CallSite(NamedTuple):
    """A place in the user's code: file, line and function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        # The file by its name alone: a call site travels, so that a path would make
        # the bytes on the wire, and with them the digest, depend on the folder.
        return _site(*self)


@functools.lru_cache(maxsize=4096)
def _site(file: str, line: int, function: str) -> str:
    base = file.replace("\\", "/").rpartition("/")[2]
    return f"{base}:{line} in {function}"


_OUTERMOST: dict[CodeType, None] = {}


def outermost(fn: _Marked) -> _Marked:
    """Mark a function of jdag whose callers are no call site of what it runs."""
    _OUTERMOST[fn.__code__] = None
    return fn


def call_site(frame: FrameType | None = None) -> CallSite:
    """Return the call site of the innermost frame outside of jdag, from `frame` on.

    If all frames are jdag's own, up to one that is marked, the outermost one is used.
    """
    if frame is None:
        frame = sys._getframe(1)
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        if frame.f_code in _OUTERMOST:
            break
        frame = frame.f_back
    code = frame.f_code
    return CallSite(code.co_filename, frame.f_lineno, code.co_qualname)
