"""The exceptions of jdag, and the formatting of values in their texts."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, TypeGuard

_NAMES = {
    "ArrayImpl": "JAX array",
    "PRNGKeyArray": "JAX array of keys",
    "ndarray": "numpy array",
}

SHOWN_MAX = 1000  # Characters of a value.
SAID_MAX = 1 << 16  # Characters of an exception's text, and of its frames.


def abridged(text: str, most: int) -> str:
    """Shorten a text to its two ends, and the number of characters left out."""
    half = most // 2
    if len(text) <= most:
        return text
    gone = f"... {len(text) - 2 * half:,} characters are left out here ..."
    return f"{text[:half]}{gone}{text[-half:]}"


def kind_of(value: object) -> str:
    """Name the kind of a value: `an int`, `a JAX array`."""
    name = _NAMES.get(type(value).__name__, type(value).__name__)
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def unusable(key: str, value: object, allowed: str) -> str:
    """Return the error text of a setting; all settings have this wording."""
    return f"{key} = {repr_of(value)}: allowed is {allowed}"


def meant(name: str, names: Iterable[str]) -> str:
    """Return a hint at the most similar name, or nothing if none is similar."""
    near = get_close_matches(name, list(names), 1)
    return f" (do you mean {near[0]}?)" if near else ""


def repr_of(value: object) -> str:
    """The repr of a value, at most `SHOWN_MAX` characters; its kind if it has none."""
    try:
        return abridged(repr(value), 80 if type(value) is int else SHOWN_MAX)
    except Exception:  # Of an int of 4,300 digits, of deep data, of a user's class.
        return kind_of(value)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, also if its `__str__` fails."""
    try:
        return abridged(str(error), SAID_MAX)
    except (Exception, SystemExit) as failure:
        return f"its __str__ raises {type(failure).__name__}"


def named_text(error: BaseException) -> str:
    """Return class and text of an exception: `ValueError: no such`."""
    return f"{type(error).__name__}: {text_of(error)}"


def is_own(error: BaseException) -> TypeGuard["JdagError"]:
    """Tell whether an exception is of a class of this module, not of a user's."""
    return isinstance(error, JdagError) and type(error).__module__ == __name__


def is_deeper(tree: Any, most: int, parts: Callable[[list[Any]], list[Any]]) -> bool:
    """Tell whether data are nested more than `most` deep, or contain themselves.

    `parts` gives what several items hold together; a leaf holds nothing.
    """
    level = [tree]
    for _ in range(most):
        level = parts(level)
        if not level:
            return False
        if len(level) > 1000:  # What contains itself twice would double each time.
            level = list({id(part): part for part in level}.values())
    return True


def spelled(path: object) -> str:
    """Return a path for a message: quoted if a character in it is not printable."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def reason(error: OSError | ValueError) -> str:
    """Return the error's text without the error number."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"no file can have this name: {error}"  # It has a zero byte, or no bytes.


class JdagError(Exception):
    """Base of all errors that jdag raises; the text says what would be right."""


def other_thread(name: str) -> JdagError:
    """Return the error of a thread that uses another thread's cluster."""
    return JdagError(
        f"thread {name!r} uses a cluster that another thread made: a cluster is for "
        "the thread that makes it; cluster.run runs programs at the same time"
    )


def no_arrays(what: str) -> JdagError:
    """Return the error of a differentiated argument without arrays."""
    return JdagError(
        f"{what} has no arrays, and so no gradient; differentiate by "
        "leaves, and by float and complex arrays"
    )


class GraphError(JdagError):
    """The recorded graph does not allow this: spent nodes, double backward."""


class ContextError(JdagError):
    """A context, or a ref of one, was used outside its lifetime or its program."""


class RootError(JdagError):
    """A root of a backward pass, or its cotangent, is not valid."""


class _PassError(JdagError):
    """A pass that did not end, with an entry for each send that it waits for."""

    def __init__(self, message: str, sends: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.sends = sends


class UnusedSendError(_PassError):
    """A pass is stuck: sends wait for cotangents that will never be sent.

    `sends` holds one entry for each owed send, those owed first in program order first.
    """


class PassTimeout(_PassError):
    """A pass exceeded its time limit.

    `sends` holds one entry for each send that still waited for its cotangent.
    """


class TaskTimeout(JdagError):
    """A program that was started has not returned within the time limit."""


class CollectiveError(JdagError):
    """A collective cannot be completed; names the cause and where members wait."""


class RemoteError(JdagError):
    """A function failed on a worker; the text names function, worker and call site."""


class WorkerLost(JdagError):
    """A worker is lost, and its values with it."""


class RecoveryError(JdagError):
    """What a lost worker held cannot be made again; names the worker or the leaf."""


class ReplayError(JdagError):
    """A run deviates from its journals; names the first event that does."""


class JournalsEnd(ReplayError):
    """All that journals have, up to `journal_bytes`, was repeated: no deviation."""


class ProtocolError(JdagError):
    """A peer broke the protocol, or bytes on the wire are not a message."""


class JoinError(JdagError):
    """Workers cannot be joined: one is absent, refuses, or died at its start.

    `reached`: the worker answered. `absent`: no process listens at its address.
    `given_up`: the worker counts this process as lost and does not take it back.
    """

    def __init__(
        self,
        message: str,
        *,
        reached: bool = True,
        absent: bool = False,
        given_up: bool = False,
    ) -> None:
        super().__init__(message)
        self.reached = reached
        self.absent = absent
        self.given_up = given_up


class PortabilityWarning(UserWarning):
    """`jdag.simulate` has run what `jdag.launch` would refuse."""


class CostWarning(UserWarning):
    """`DeviceModel(functions=)` has costs for other functions than a run has called."""


class ScenarioError(JdagError):
    """A scenario or a setting is not usable: file, key, value and what is allowed.

    `args` has a text for each setting that is wrong.
    """

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class ScheduleError(JdagError):
    """A pipeline schedule cannot be followed; names worker and action."""
