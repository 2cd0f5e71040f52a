"""Failures as messages carry them, and the exceptions that users see."""

import contextlib
import os
import re
import traceback
from collections.abc import Callable
from typing import Any

import jax

from jdag import errors
from jdag.compute.avals import Aval
from jdag.compute.configuration import Configuration
from jdag.compute.pairs import Pair, pair
from jdag.compute.pytrees import Split
from jdag.compute.segments import failed_call
from jdag.engine.functions import is_ours, name_of
from jdag.engine.protocol import Failure, Path
from jdag.errors import (
    SAID_MAX,
    JdagError,
    RemoteError,
    abridged,
    is_own,
    named_text,
    text_of,
)

_OF_COMPILED = (FloatingPointError, jax.errors.JaxRuntimeError)
_FRAME = re.compile(r'  File "(.+)", line \d+, in ').match
_JAX_NOTE = "JAX has removed its internal frames"
_THEIRS = os.path.dirname(os.path.abspath(jax.__file__)) + os.sep, contextlib.__file__


def failure_of(error: BaseException, worker: str, path: Path, function: str) -> Failure:
    """What a user's function raised on `worker`, as a value for engines to hand on.

    An error of jdag keeps its class and text, a KeyboardInterrupt its class; any other
    is a RemoteError. Of a text that is too long for a message the middle is left out.
    An error of a segment names the call there that raised it.
    """
    is_ours = is_own(error)
    function, call_site = failed_call(error) or (function, "")
    keeps_class = is_ours or isinstance(error, KeyboardInterrupt)
    return Failure(
        error=type(error).__name__ if keeps_class else "RemoteError",
        message=text_of(error) if is_ours else error_text(error),
        worker=worker,
        path=path,
        function=function,
        call_site=call_site,
        traceback=user_traceback(error),
        exception=error,
    )


def remote_error(
    error: Exception, fn: Callable[..., Any], worker: str, site: object
) -> JdagError:
    """Return an error that names the function, worker and call site.

    Errors of jdag keep their class and get no traceback.
    """
    if is_own(error):
        where = f"{name_of(fn)} failed on {worker!r}, called at {site}"
        return type(error)(f"{where}: {text_of(error)}")
    return blamed(error, name_of(fn), worker, site)


def blamed(error: Exception, name: str, worker: str, site: object) -> RemoteError:
    """Return an error that names what failed, with the user's own traceback."""
    where, said = f"{name} failed on {worker!r}, called at {site}", named_text(error)
    lines = user_traceback(error)
    return RemoteError(f"{where}: {said}\n\n{lines}" if lines else f"{where}: {said}")


def exception_of(failure: Failure) -> JdagError:
    """Return the exception that a failure names, chained to the original if it is here.

    The text has function, worker, call site, the route of workers and the user's own
    traceback, as far as the failure knows them.

    Raises:
        KeyboardInterrupt: the failure is one, as where its function ran.
    """
    if failure.error == KeyboardInterrupt.__name__:
        raise KeyboardInterrupt(failure.message) from failure.exception
    known = getattr(errors, failure.error, None)
    kind = known if isinstance(known, type) else RemoteError
    text = failure.message
    if failure.function:
        site = f", called at {failure.call_site}" if failure.call_site else ""
        text = f"{failure.function} failed on {failure.worker!r}{site}: {text}"
    elif failure.call_site:
        text = f"the call at {failure.call_site}: {text}"
    if len(failure.route) > 1:
        text += f"\nit came along {' <- '.join(failure.route)}"
    if failure.traceback:
        text += f"\n\n{failure.traceback}"
    exception: JdagError = kind(text)
    exception.__cause__ = failure.exception
    return exception


def user_traceback(error: BaseException) -> str:
    """The traceback of `error` without the frames of jdag, JAX and contextlib.

    Where there are no others all are shown: the error is then jdag's or JAX's own. But
    none are if it is a JdagError, which says all by itself; a TypeError: then the
    user's function could not be called with these arguments; of compiled code, such as
    that of `jax_debug_nans` and of callbacks, whose text has their frames; or of JAX,
    as of a function without a backward.
    """
    frames = traceback.extract_tb(error.__traceback__)
    others = [frame for frame in frames if not is_ours(frame.filename)]
    kept = [frame for frame in others if not frame.filename.startswith(_THEIRS)]
    if not kept and (
        isinstance(error, (JdagError, TypeError, *_OF_COMPILED)) or _of_jax(error)
    ):
        return ""
    lines = traceback.format_list(kept or frames)
    text = "".join(["Traceback (most recent call last):\n", *lines])
    told = error_text(error)
    if is_own(error):  # The failure's own text has the other lines.
        own = text_of(error)
        told = told.replace(own, own.partition("\n")[0], 1)
    return abridged(text, SAID_MAX) + told


def _of_jax(error: BaseException) -> bool:
    """Whether JAX raised it, and removed its frames; asserts there are jdag's own."""
    with contextlib.suppress(Exception):  # A user's may fail where it is asked.
        is_noted = any(_JAX_NOTE in note for note in error.__notes__)
        return is_noted and not isinstance(error, AssertionError)
    return False


def error_text(error: BaseException) -> str:
    """Return the class, text and notes of an exception, without JAX's note on frames.

    A traceback in its text, as of a callback that raised, has the user's frames alone.
    If formatting the exception itself fails, only its class is returned.
    """
    try:
        told = traceback.TracebackException.from_exception(error)
    except Exception:
        return f"{type(error).__module__}.{type(error).__qualname__}"
    notes = getattr(told, "__notes__", None) or ()
    told.__notes__ = [note for note in notes if _JAX_NOTE not in note]
    text = "".join(told.format_exception_only()).rstrip("\n")
    lines = text.split("\n")
    named = [(n, match[1]) for n, one in enumerate(lines) if (match := _FRAME(one))]
    last = max([n for n, file in named if is_ours(file)], default=-1)
    gone = {n for n, file in named if n <= last or file.startswith(_THEIRS)}
    return abridged(
        "\n".join([x for n, x in enumerate(lines) if n not in gone]), SAID_MAX
    )


def traced(
    fn: Callable[..., Any],
    parts: Split,
    avals: tuple[Aval, ...],
    tracked: tuple[bool, ...],
    worker: str,
    site: str,
    *,
    configured: Configuration | None = None,
) -> Pair:
    """Return the forward/vjp pair of a call; raise RemoteError if `fn` raises."""
    try:
        return pair(fn, parts.template, avals, tracked, configured)
    except Exception as error:
        raise remote_error(error, fn, worker, site) from error
