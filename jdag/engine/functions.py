"""Names of functions, marks on functions (attributes), and call sites."""

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
CONTEXT = "__jdag_context__"  # Attribute of context classes.
TAKEN = "__jdag_taken__"  # Attribute of a class: the functions that accept its objects.
_PACKAGE = os.path.dirname(os.path.abspath(errors.__file__)) + os.sep


class Applied:
    """A callable pytree as a function that receives the pytree as first argument.

    If the pytree is a program, the context comes first and the pytree second. The class
    name of the pytree identifies it; all other state is in the pytree.
    """

    def __init__(
        self, name: str, unjitted: bool, program: bool, code: CodeType | None = None
    ) -> None:
        self.name = name
        self.code = code
        setattr(self, _UNJITTED, unjitted)
        setattr(self, _PROGRAM, program)

    def __call__(self, first: Any, *args: Any, **kwargs: Any) -> Any:
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
    """Return `module:qualname` or `partial(...)`; a nameless `fn`: its class."""
    if isinstance(fn, Applied):
        return fn.name
    if isinstance(fn, functools.partial):
        return f"partial({name_of(fn.func)})"
    name = getattr(fn, "__qualname__", None) or getattr(fn, "__name__", None)
    if name is None:
        return f"{type(fn).__module__}:{type(fn).__qualname__}"
    module = getattr(fn, "__module__", None)  # None for C methods such as [].append.
    return f"{module}:{name}" if module else name


def name_on(pair: Any) -> str:
    name: str = pair.name
    return name if pair.device is None else f"{name}@{pair.device}"


def code_of(fn: Any) -> CodeType | None:
    for _ in range(100):  # A bound, since wrappers may form a cycle.
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
    return file.startswith(_PACKAGE)


def unjitted(fn: Any = None, /, *, shapes: Any = None) -> Any:
    """Mark `fn` to run as plain Python on concrete arrays, untraced; return it.

    Args:
        fn: a function; it may branch on values, use numpy and have side effects. Its
            arguments must be untracked. Without `fn` a decorator is returned.
        shapes: a function with the signature of `fn`. It receives
            `jax.ShapeDtypeStruct`s in place of arrays and returns the structs of the
            results. With it, `ctx.call` returns refs at once; without it, after `fn`
            has run.

    Raises:
        JdagError: attributes cannot be set on `fn` (a builtin, a bound method), or
            `shapes` is not callable.
    """
    if shapes is not None and not callable(shapes):
        raise JdagError(f"jdag.unjitted(shapes=...) takes a function, not {shapes!r}")
    mark: Any = functools.partial(
        _mark, mark=_UNJITTED, decorator="jdag.unjitted", value=shapes or True
    )
    return mark if fn is None else mark(fn)


def shapes_of(fn: Any) -> Callable[..., Any] | None:
    mark = getattr(fn, _UNJITTED, None)
    if mark is None and isinstance(fn, functools.partial):
        shapes = shapes_of(fn.func)
        return shapes and functools.partial(shapes, *fn.args, **fn.keywords)
    return mark if callable(mark) else None


def program(fn: _Marked) -> _Marked:
    """Mark `fn` as a program: a function whose first argument is a context.

    Returns:
        The program; call it with a context, or run it on a worker by `ctx.call`.

    Raises:
        JdagError: attributes cannot be set on `fn` (a builtin, a bound method).
    """
    if type(fn) is not FunctionType:
        return _mark(fn, _PROGRAM, "jdag.program")
    name: str = _mark(fn, _PROGRAM, "jdag.program").__name__

    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any) -> Any:
        # The first argument of a method is the object.
        first = (*args[:2], *kwargs.values())
        if not any(getattr(type(argument), CONTEXT, False) for argument in first):
            got = kind_of(args[0]) if args else "no argument"
            raise ContextError(
                f"{name_of(fn)} is a program: its first argument must be a context, "
                f"not {got}. Write ctx.call(worker, {name}, ...) to run it on a "
                f"worker, or {name}(ctx, ...)"
            )
        return fn(*args, **kwargs)

    return cast(_Marked, run)


def remote(fn: _Marked) -> _Marked:
    return _mark(fn, _REMOTE, "jdag")


def is_remote(fn: Any) -> bool:
    return _REMOTE in getattr(fn, "__dict__", ())


def _mark(fn: _Marked, mark: str, decorator: str, value: Any = True) -> _Marked:
    try:
        setattr(fn, mark, value)
    except (AttributeError, TypeError) as error:
        raise JdagError(
            f"{decorator} cannot mark {fn!r}, since its attributes cannot be set; "
            "mark a function defined with def, or a functools.partial"
        ) from error
    return fn


def _is_marked(mark: str, fn: Any) -> bool:
    while not getattr(fn, mark, False):
        if not isinstance(fn, functools.partial):
            return False
        fn = fn.func
    return True


is_unjitted: Callable[[Any], bool] = functools.partial(_is_marked, _UNJITTED)
is_program: Callable[[Any], bool] = functools.partial(_is_marked, _PROGRAM)


@remote
def transferred(*arrays: Any) -> Any:
    """Return the arrays. `ctx.move` calls this function on the target worker."""
    return arrays


class CallSite(NamedTuple):
    """A place in the user's code: file, line and function."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        # Only the file's name: call sites are part of messages, so with a path the
        # digest of a run would depend on the folder.
        return _site(*self)


@functools.lru_cache(maxsize=4096)
def _site(file: str, line: int, function: str) -> str:
    base = file.replace("\\", "/").rpartition("/")[2]
    return f"{base}:{line} in {function}"


_OUTERMOST: dict[CodeType, None] = {}


def outermost(fn: _Marked) -> _Marked:
    """Mark a function of jdag at which `call_site` ends its search."""
    _OUTERMOST[fn.__code__] = None
    return fn


def call_site(frame: FrameType | None = None) -> CallSite:
    """Find the first call site outside of jdag, from `frame` (or the caller) outwards.

    The search ends at an `outermost` function. If no call site is found, the last frame
    is returned.
    """
    if frame is None:
        frame = sys._getframe(1)
    while is_ours(frame.f_code.co_filename) and frame.f_back is not None:
        if frame.f_code in _OUTERMOST:
            break
        frame = frame.f_back
    code = frame.f_code
    return CallSite(code.co_filename, frame.f_lineno, code.co_qualname)
