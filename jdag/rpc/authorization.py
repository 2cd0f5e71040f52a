"""Authorization of messages: a peer may act on contexts only as its role allows.

A peer may send any message about its own contexts and plans. Only the owner of one
begins and ends it, its passes and its steps. The owner must be a known incarnation.
Values must come from the worker that the message names as their source.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jdag.engine.protocol import (
    Answer,
    End,
    Ended,
    Go,
    Message,
    Prepare,
    Primal,
    Release,
    Released,
    Settle,
    Start,
    Step,
    Stepped,
    Worker,
    incarnated,
)
from jdag.errors import ProtocolError

_FROM_OWNER = (Start, Go, End, Release, Prepare, Step, Settle)
_TO_OWNER = (Answer, Ended, Released, Stepped)


def check(
    message: Message,
    sender: Worker,
    here: Worker,
    names: Sequence[str],
    incarnations: Mapping[str, int],
) -> None:
    """Refuse a message that its sender may not send.

    Args:
        message: decoded; its worker numbers are in range.
        sender: the worker that sent it.
        here: the worker that received it.
        names: of all workers.
        incarnations: the current incarnation of each worker that has rejoined.

    Raises:
        ProtocolError: names the message, the context and the worker.
    """
    kind = message.__class__
    context: Any = getattr(message, "context", None)
    if context is None:
        return
    name = names[context.number]
    if context.incarnation > incarnations.get(name, 0):
        raise ProtocolError(
            f"a {kind.__name__} of {context}: incarnation {context.incarnation} of "
            f"{name!r} is not known here"
        )
    if kind in _FROM_OWNER or kind in _TO_OWNER:
        owner = incarnated(name, context.incarnation)
        if owner != (sender if kind in _FROM_OWNER else here):
            raise ProtocolError(
                f"a {kind.__name__} of {context} from {sender!r} to {here!r}: its owner"
                f" is {owner!r}"
            )
    elif isinstance(message, Primal) and message.source != sender:
        if all(message.failures):
            return  # The source is lost and another worker reports that.
        raise ProtocolError(f"values of {message.source!r} came from {sender!r}")
