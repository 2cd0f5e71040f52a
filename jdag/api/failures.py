"""Failures, which travel as values, turned into the exceptions that users see."""

from collections.abc import Callable
from typing import Any

from msgspec.structs import replace

from jdag import errors
from jdag.compute.machine import failure_of, user_traceback
from jdag.engine.functions import name_of
from jdag.engine.vocabulary import Failure, Path
from jdag.errors import JdagError, RemoteError, is_own, named_text, text_of


def remote_error(
    error: Exception, fn: Callable[..., Any], worker: str, site: object
) -> JdagError:
    """Say that a user's function raised `error`: which, where, called from where.

    What jdag itself said of the function needs no more than the place.
    """
    where = f"{name_of(fn)} failed on {worker!r}, called at {site}"
    if is_own(error):
        return type(error)(f"{where}: {text_of(error)}")
    said = named_text(error)
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


def program_failure(
    error: BaseException, worker: str, path: Path, fn: Callable[..., Any], site: str
) -> Failure:
    """Return what a program raised as a value: see `failure_of`."""
    return replace(failure_of(error, worker, path, name_of(fn)), call_site=site)
