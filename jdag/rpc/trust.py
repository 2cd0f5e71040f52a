"""What a peer may say: of contexts, only what its part in them allows.

A peer that is in the session may say what it likes of its own contexts, and lies about
those alone. A context's end and its passes are its owner's to begin and to end, owners
are known, and what a worker sends is from that worker.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jdag.engine.vocabulary import (
    Answer,
    End,
    Ended,
    Go,
    Message,
    Primal,
    Release,
    Released,
    Start,
    Worker,
    incarnated,
)
from jdag.errors import ProtocolError

_FROM_OWNER = (Start, Go, End, Release)
_TO_OWNER = (Answer, Ended, Released)


def check(
    message: Message,
    sender: Worker,
    here: Worker,
    names: Sequence[str],
    incarnations: Mapping[str, int],
) -> None:
    """See that this peer may say this, here.

    Args:
        message: what it says; its numbers of workers are in range.
        sender: who says it.
        here: whom it is said to.
        names: of all workers.
        incarnations: which is known of each worker that has joined anew.

    Raises:
        ProtocolError: it may not.
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
            return  # Who was to send them is lost, and another tells it.
        raise ProtocolError(f"values of {message.source!r} came from {sender!r}")
