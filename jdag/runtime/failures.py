"""Conversion between failures in messages and the exceptions that users see."""

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

_COMPILED_ERRORS = (FloatingPointError, jax.errors.JaxRuntimeError)
_FRAME = re.compile(r'  File "(.+)", line \d+, in ').match
_JAX_NOTE = "JAX has removed its internal frames"
_LIBRARIES = (
    os.path.dirname(os.path.abspath(jax.__file__)) + os.sep,
    contextlib.__file__,
)


def failure_of(error: BaseException, worker: str, path: Path, function: str) -> Failure:
    """Convert an error of a user's function to a failure that engines pass on.

    An error of jdag keeps its class and text, a KeyboardInterrupt keeps its class, and
    any other error becomes a RemoteError. A text that is too long for a message loses
    its middle. An error of a segment names the call that raised it.
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
    """Add function, worker and call site to an error. Keep the class of jdag errors."""
    if is_own(error):
        where = f"{name_of(fn)} failed on {worker!r}, called at {site}"
        return type(error)(f"{where}: {text_of(error)}")
    return blamed(error, name_of(fn), worker, site)


def blamed(error: Exception, name: str, worker: str, site: object) -> RemoteError:
    where, text = f"{name} failed on {worker!r}, called at {site}", named_text(error)
    lines = user_traceback(error)
    return RemoteError(f"{where}: {text}\n\n{lines}" if lines else f"{where}: {text}")


def exception_of(failure: Failure) -> JdagError:
    """Convert a failure to an exception, chained to the original exception if local.

    The text has function, worker, call site, the route of workers and the user's
    traceback, as far as they are known.

    Raises:
        KeyboardInterrupt: the failure's function raised one.
    """
    if failure.error == KeyboardInterrupt.__name__:
        raise KeyboardInterrupt(failure.message) from failure.exception
    cls = getattr(errors, failure.error, None)
    kind = cls if isinstance(cls, type) else RemoteError
    text = failure.message
    if failure.function:
        site = f", called at {failure.call_site}" if failure.call_site else ""
        text = f"{failure.function} failed on {failure.worker!r}{site}: {text}"
    elif failure.call_site:
        text = f"the call at {failure.call_site}: {text}"
    if len(failure.route) > 1:
        text += f"\nroute of workers: {' <- '.join(failure.route)}"
    if failure.traceback:
        text += f"\n\n{failure.traceback}"
    exception: JdagError = kind(text)
    exception.__cause__ = failure.exception
    return exception


def user_traceback(error: BaseException) -> str:
    """Format the traceback of `error` without the frames of jdag, JAX and contextlib.

    If there are no other frames, all frames are included: the error is then an internal
    error of jdag or JAX. But the result is "" for a JdagError, whose text is complete;
    for a TypeError, since the user's function does not accept these arguments; for
    errors of compiled code (`jax_debug_nans`, callbacks), whose text has the frames;
    and for errors of JAX, such as that of a function without a backward.
    """
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not is_ours(frame.filename)]
    user_frames = [f for f in outside if not f.filename.startswith(_LIBRARIES)]
    if not user_frames and (
        isinstance(error, (JdagError, TypeError, *_COMPILED_ERRORS))
        or _is_from_jax(error)
    ):
        return ""
    lines = traceback.format_list(user_frames or frames)
    text = "".join(["Traceback (most recent call last):\n", *lines])
    message = error_text(error)
    if is_own(error):  # The failure's text has the other lines.
        jdag_text = text_of(error)
        message = message.replace(jdag_text, jdag_text.partition("\n")[0], 1)
    return abridged(text, SAID_MAX) + message


def _is_from_jax(error: BaseException) -> bool:
    with contextlib.suppress(Exception):  # Notes of a user's exception may fail.
        is_noted = any(_JAX_NOTE in note for note in error.__notes__)
        return is_noted and not isinstance(error, AssertionError)
    return False


def error_text(error: BaseException) -> str:
    """Return the class, text and notes of an exception, without JAX's note on frames.

    A traceback inside the text, such as that of a callback, keeps only the user's
    frames. If the exception cannot be formatted, only its class is returned.
    """
    try:
        formatted = traceback.TracebackException.from_exception(error)
    except Exception:
        return f"{type(error).__module__}.{type(error).__qualname__}"
    notes = getattr(formatted, "__notes__", None) or ()
    formatted.__notes__ = [note for note in notes if _JAX_NOTE not in note]
    text = "".join(formatted.format_exception_only()).rstrip("\n")
    lines = text.split("\n")
    locations = [
        (n, match[1]) for n, text in enumerate(lines) if (match := _FRAME(text))
    ]
    last = max([n for n, file in locations if is_ours(file)], default=-1)
    removed = {n for n, file in locations if n <= last or file.startswith(_LIBRARIES)}
    return abridged(
        "\n".join([line for n, line in enumerate(lines) if n not in removed]), SAID_MAX
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
    try:
        return pair(fn, parts.template, avals, tracked, configured)
    except Exception as error:
        raise remote_error(error, fn, worker, site) from error
