"""The exceptions of jdag, and the formatting of values in their texts."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, TypeGuard

_NAMES = {
    "ArrayImpl": "JAX array",
    "PRNGKeyArray": "JAX array of keys",
    "ndarray": "numpy array",
}

SHOWN_MAX = 1000  # Characters of a value in an error text.
SAID_MAX = 1 << 16  # Characters of an exception's text, and of its traceback.


def abridged(text: str, length_max: int) -> str:
    """Shorten a long text: keep both ends, and replace the middle by its length."""
    half = length_max // 2
    if len(text) <= length_max:
        return text
    omitted = f"... {len(text) - 2 * half:,} characters are left out here ..."
    return f"{text[:half]}{omitted}{text[-half:]}"


def kind_of(value: object) -> str:
    """Name the type of a value for error texts: `an int`, `a JAX array`."""
    name = _NAMES.get(type(value).__name__, type(value).__name__)
    return f"{'an' if name[0] in 'aeioAEIO' else 'a'} {name}"


def unusable(key: str, value: object, allowed: str) -> str:
    """Return the error text for an invalid setting. All settings share the wording."""
    return f"{key} = {repr_of(value)}: expected {allowed}"


def meant(name: str, names: Iterable[str]) -> str:
    """Return a hint at the most similar of `names`, or "" if no name is similar."""
    near = get_close_matches(name, list(names), 1)
    return f" (did you mean {near[0]}?)" if near else ""


def repr_of(value: object) -> str:
    """Return up to `SHOWN_MAX` characters of a value's repr, or its type on errors."""
    try:
        return abridged(repr(value), 80 if type(value) is int else SHOWN_MAX)
    except Exception:  # An int of 4,300 digits, nested data, or a user's class.
        return kind_of(value)


def text_of(error: BaseException) -> str:
    """Return the text of an exception, even if its `__str__` fails."""
    try:
        return abridged(str(error), SAID_MAX)
    except (Exception, SystemExit) as failure:
        return f"its __str__ raises {type(failure).__name__}"


def named_text(error: BaseException) -> str:
    """Return class and text of an exception, such as `ValueError: no such`."""
    return f"{type(error).__name__}: {text_of(error)}"


def is_own(error: BaseException) -> TypeGuard["JdagError"]:
    """Whether the class of an exception is defined in this module."""
    return isinstance(error, JdagError) and type(error).__module__ == __name__


def is_deeper(
    tree: Any, depth_max: int, children: Callable[[list[Any]], list[Any]]
) -> bool:
    """Whether nested data exceed a depth. Data that contain themselves exceed any.

    `children(nodes)` returns the children of all these nodes in one list.
    """
    level = [tree]
    for _ in range(depth_max):
        level = children(level)
        if not level:
            return False
        if len(level) > 1000:  # Self-references double at each level.
            level = list({id(node): node for node in level}.values())
    return True


def spelled(path: object) -> str:
    """Return a path for error texts. It is quoted if it has unprintable characters."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def reason(error: OSError | ValueError) -> str:
    """Return the text of a file error without the error number."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"no file can have this name: {error}"  # A zero byte, or an empty name.


class JdagError(Exception):
    """Base class of all errors of jdag. Each text says what is allowed instead."""


def other_thread(name: str) -> JdagError:
    """Return the error for the thread `name`, which uses another thread's cluster."""
    return JdagError(
        f"thread {name!r} uses a cluster of another thread: only the thread that "
        "created a cluster may use it; cluster.run runs programs concurrently"
    )


def no_arrays(argument: str) -> JdagError:
    """Return the error for a differentiated argument without arrays."""
    return JdagError(
        f"{argument} has no arrays, so it has no gradient; differentiate with respect "
        "to leaves, and to float or complex arrays"
    )


class GraphError(JdagError):
    """A backward pass would use nodes of the graph that an earlier pass has freed."""


class ContextError(JdagError):
    """A context or one of its refs was used outside its lifetime or its program."""


class RootError(JdagError):
    """A root of a backward pass, or its cotangent, is not valid."""


class _PassError(JdagError):
    """A backward pass did not finish. `sends` has an entry for each unanswered send."""

    def __init__(self, message: str, sends: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.sends = sends


class UnusedSendError(_PassError):
    """A backward pass is stuck: some sends wait for cotangents that never arrive.

    `sends` holds one entry for each of these sends, in program order.
    """


class PassTimeout(_PassError):
    """A backward pass exceeded its time limit.

    `sends` holds one entry for each send that still waited for its cotangent.
    """


class TaskTimeout(JdagError):
    """A task, a program that runs concurrently, did not return within its timeout."""


class CollectiveError(JdagError):
    """A collective cannot complete. The text names the cause and the waiting calls."""


class RemoteError(JdagError):
    """A function failed on a worker. The text names function, worker and call site."""


class WorkerLost(JdagError):
    """A worker is lost, together with the values that it stored."""


class RecoveryError(JdagError):
    """Values of a lost worker cannot be restored. The text names the worker or leaf."""


class ReplayError(JdagError):
    """A replayed run deviates from its journals. The text has the first such event."""


class JournalsEnd(ReplayError):
    """A replay reached the end of its journals without a deviation.

    Journals end where they would exceed `journal_bytes`.
    """


class ProtocolError(JdagError):
    """A peer violated the protocol, or received bytes are not a valid message."""


class JoinError(JdagError):
    """A worker cannot join the session: it is absent, refuses, or does not start.

    Attributes:
        reached: whether the worker answered.
        absent: whether no process listens at the worker's address.
        given_up: whether the worker considers this process lost, which is final.
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
    """A simulated run used something that `jdag.launch` would refuse."""


class CostWarning(UserWarning):
    """`DeviceModel(functions=)` has costs of functions that the run did not call."""


class ScenarioError(JdagError):
    """A scenario or setting is invalid. The text has file, key, value and expectation.

    `args` contains one string for each invalid setting.
    """

    def __str__(self) -> str:
        return "; ".join(map(str, self.args))


class ScheduleError(JdagError):
    """A pipeline schedule cannot be executed. The text names worker and action."""
