"""The report of a finished pass, and the error texts of stuck and expired ones."""

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
        number: of the pass, in its context: 1, 2, ...
        mode: "smart" or "fast".
        stale: the leaves that were updated since forward read them, in the order in
            which they were made, and by how many versions the newest at the pass's end
            is newer than the oldest that it differentiated. The gradient is the sum for
            the versions that were read; a leaf that is not here was read as its newest.
    """

    number: int
    mode: str
    stale: Mapping[Ref, int]


def nanoseconds(timeout_s: float | None) -> int | None:
    """Return the time limit of a pass in nanoseconds, None for no limit.

    Raises:
        JdagError: it is not a number above 0 and at most `TIMEOUT_S_MAX`.
    """
    seconds = converted(_TIMEOUT_S, timeout_s, "timeout_s")
    return None if seconds is None else max(round(seconds * 1e9), 1)


def remarked(error: JdagError, remarks: Iterable[Callable[[], str]]) -> JdagError:
    """Add remarks to the text of a WorkerLost; return the same exception."""
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

    `state`, that of a cluster, tells which actions of a schedule are waited for.
    """
    assert result.failure is not None, result
    info = {} if state is None or state.schedule is None else state.driver.info()
    waits = [one["waits_for"] for one in info.values() if one["waits_for"]]
    text = f"pass {result.number} took longer than timeout_s={timeout_s!r}"
    text = "; ".join([text, *waits, *([LOSSES_INSTEAD] if waits else [])])
    if result.failure.message:
        return f"{text}; it had not begun: it waited for {result.failure.message}"
    if not result.owed:
        why = "something is being computed, or is on its way"
        return f"{text}; no send that it has reached waits for a cotangent: {why}"
    text = f"{text}; no cotangent has come for what was sent by"
    return "\n".join([text, *_owed_lines(result.owed)])


def stuck_pass_text(owed: tuple[Owed, ...]) -> str:
    """Return the error text of a stuck FAST pass: its owed sends, and the remedy."""
    return (
        "the pass is stuck: no cotangent will ever come for what was sent by\n"
        + "\n".join(_owed_lines(owed))
        + "\nIn FAST mode every tracked value that is sent has to be part of what the "
        "roots are computed from; jdag.stop_gradient(ref) sends one that is not, and "
        "mode='smart' waits for no such send"
    )
