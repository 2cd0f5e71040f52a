"""The exceptions of jdag, and how values are shown in them."""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from typing import Any, TypeGuard

_NAMES = {
    "ArrayImpl": "JAX array",
    "PRNGKeyArray": "JAX array of keys",
    "ndarray": "numpy array",
}

SHOWN_MAX = 1000  # Of a value: more would hide what is wrong with it.
SAID_MAX = 1 << 16  # Characters of what an exception says, and of its frames.


def cut(text: str, most: int) -> str:
    """Return the two ends of a text, and between them how much is left out."""
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
    """The one wording in which a setting is refused."""
    return f"{key} = {repr_of(value)}: allowed is {allowed}"


def meant(name: str, names: Iterable[str]) -> str:
    """Ask whether one of the names is meant, if one is like it."""
    near = get_close_matches(name, list(names), 1)
    return f" (do you mean {near[0]}?)" if near else ""


def repr_of(value: object) -> str:
    """The repr of a value, at most `SHOWN_MAX` characters; its kind if it has none."""
    try:
        return cut(repr(value), 80 if type(value) is int else SHOWN_MAX)
    except Exception:  # Of an int of 4,300 digits, of deep data, of a user's class.
        return kind_of(value)


def text_of(error: BaseException) -> str:
    """The text of an exception; its class may be a user's, whose `__str__` fails."""
    try:
        return cut(str(error), SAID_MAX)
    except (Exception, SystemExit) as failure:
        return f"its __str__ raises {type(failure).__name__}"


def named_text(error: BaseException) -> str:
    """The class of an exception and its text: `ValueError: no such`."""
    return f"{type(error).__name__}: {text_of(error)}"


def is_own(error: BaseException) -> TypeGuard["JdagError"]:
    """Tell whether an exception is of a class of this module, not of a user's."""
    return isinstance(error, JdagError) and type(error).__module__ == __name__


def is_deeper(tree: Any, most: int, parts: Callable[[Any], Iterable[Any]]) -> bool:
    """Tell whether data are nested more than `most` deep, or contain themselves.

    `parts` gives what an item holds: nothing, if it is a leaf.
    """
    level = [tree]
    for _ in range(most):
        level = [part for one in level for part in parts(one)]
        if not level:
            return False
        if len(level) > 1000:  # What contains itself twice would double each time.
            level = list({id(part): part for part in level}.values())
    return True


def spelled(path: object) -> str:
    """A path as messages have it: quoted if a sign in it would not be seen."""
    text = str(path)
    return text if text.isprintable() else repr(text)


def reason(error: OSError | ValueError) -> str:
    """Return the system's text, or Python's of a path, without a number."""
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return f"no file can have this name: {error}"  # It has a zero byte, or no bytes.


class JdagError(Exception):
    """An error that jdag raises on purpose; it says what would have been right."""


def other_thread(name: str) -> JdagError:
    """The error of a thread that uses a cluster which is another one's."""
    return JdagError(
        f"thread {name!r} uses a cluster that another thread made: a cluster is for "
        "the thread that makes it; cluster.run runs programs at the same time"
    )


def no_arrays(what: str) -> JdagError:
    """The error of an argument that is to be differentiated by, with nothing to it."""
    return JdagError(
        f"{what} has no arrays, and so no gradient; differentiate by "
        "leaves, and by float and complex arrays"
    )


class GraphError(JdagError):
    """The recorded graph cannot give what was asked: spent nodes, double backward."""


class ContextError(JdagError):
    """A context, or a ref of one, was used where or when it has no meaning."""


class RootError(JdagError):
    """A root of a backward pass, or its cotangent, is not one that can be used."""


class _PassError(JdagError):
    """A pass that did not end, with an entry for each send that it waits for."""

    def __init__(self, message: str, sends: tuple[object, ...] = ()) -> None:
        super().__init__(message)
        self.sends = sends


class UnusedSendError(_PassError):
    """A pass is stuck: sends wait for cotangents that nobody will ever send.

    `sends` holds one entry for each owed send, those owed first in program order first.
    """


class PassTimeout(_PassError):
    """A pass took longer than it was given.

    `sends` holds one entry for each send that still waited for its cotangent.
    """


class RemoteError(JdagError):
    """A function failed on a worker: which one, on which, called from where."""


class WorkerLost(JdagError):
    """A worker is gone: what it held cannot be had any more."""


class ProtocolError(JdagError):
    """A peer broke the protocol, or bytes on the wire are not a message."""


class JoinError(JdagError):
    """Workers cannot be joined: one is not there, refuses, or died at its start.

    `reached` tells whether the worker answered at all, and `absent` whether it is known
    that no process is at its address; `given_up`, that it has given the asker up, and
    will not have it back.
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


class ScenarioError(JdagError):
    """A scenario or a setting is not usable: file, key, value and what is allowed."""
