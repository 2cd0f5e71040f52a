"""The report of a finished pass, and the error texts of stuck and expired passes."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta

from jdag.context.refs import Ref
from jdag.engine.functions import name_of, transferred
from jdag.engine.protocol import Owed, PassResult
from jdag.errors import JdagError, WorkerLost
from jdag.runtime.waiters import LOSSES_INSTEAD
from jdag.settings.validation import converted

TIMEOUT_S_MAX = 1e15
_SECONDS = f"a number of seconds above 0, or None, and at most {TIMEOUT_S_MAX:g}"
_LIMIT = Meta(gt=0, le=TIMEOUT_S_MAX, description=_SECONDS)
_TIMEOUT_S = Annotated[float, _LIMIT] | None


@dataclass(frozen=True)
class PassReport:
    """The result of `ctx.backward`.

    Attributes:
        number: the number of the pass in its context: 1, 2, ...
        mode: "smart" or "fast".
        stale: has the leaves that were updated after the forward had read them, in the
            order in which they were made. The value of a leaf is the number of its
            newest version at the end of the pass minus that of the oldest version that
            the pass differentiated. The leaf's gradient is the sum of the gradients of
            all versions that the forward read.
    """

    number: int
    mode: str
    stale: Mapping[Ref, int]


def nanoseconds(timeout_s: float | None) -> int | None:
    """Check a time limit in seconds. Return nanoseconds, or None for no limit."""
    if timeout_s is None:
        return None
    seconds: float = converted(_TIMEOUT_S, timeout_s, "timeout_s")
    return max(round(seconds * 1e9), 1)


def remarked(error: JdagError, remarks: Iterable[Callable[[], str]]) -> JdagError:
    """If the error is a WorkerLost, append remarks to its text. Return the error."""
    if isinstance(error, WorkerLost):
        error.args = ("\n".join([str(error), *[remark() for remark in remarks]]),)
    return error


def _owed_lines(owed: tuple[Owed, ...]) -> list[str]:
    users = {name_of(transferred): "ctx.move"}  # The names that users know.
    return [
        f"  call {'.'.join(map(str, send.path))}: {send.worker} -> {send.destination}, "
        f"sent for {users.get(send.function, send.function)}, called at "
        f"{send.call_site}"
        for send in owed
    ]


def expired(result: PassResult, timeout_s: float | None, state: Any = None) -> str:
    """Return the error text of a pass that exceeded its time limit.

    If `state` is the state of a cluster with a schedule, the text also names the
    schedule's actions that workers wait for.
    """
    assert result.failure is not None, result
    info = {} if state is None or state.schedule is None else state.driver.info()
    waits = [entry["waits_for"] for entry in info.values() if entry["waits_for"]]
    text = f"pass {result.number} took longer than timeout_s={timeout_s!r}"
    text = "; ".join([text, *waits, *([LOSSES_INSTEAD] if waits else [])])
    if result.failure.message:
        return f"{text}; it had not begun, since it waited for {result.failure.message}"
    if not result.owed:
        why = "a computation or a transfer has not ended"
        return f"{text}; no send that the pass has reached waits for a cotangent: {why}"
    text = f"{text}; no cotangent has arrived for the values sent by"
    return "\n".join([text, *_owed_lines(result.owed)])


def stuck_pass_text(owed: tuple[Owed, ...]) -> str:
    return (
        "the pass is stuck: no cotangent will ever arrive for the values sent by\n"
        + "\n".join(_owed_lines(owed))
        + "\nIn FAST mode the roots must depend on every tracked value that is sent; "
        "send other values as jdag.stop_gradient(ref), or use mode='smart', which does "
        "not wait for them"
    )
