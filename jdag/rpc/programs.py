"""How programs end on a node, where each has a thread of its own.

A thread cannot be ended from outside: when its session is over, the next thing that a
program asks of its node raises `Over`, which is no Exception, so that programs do not
take it for an error of theirs.
"""

from msgspec.structs import replace

from jdag.engine.protocol import Message, Return, Run, Worker
from jdag.runtime.failures import failure_of


class Over(BaseException):
    """Raised in a program whose session is over."""


def ended_by(error: Exception, message: Message, worker: Worker) -> Return:
    """Return the end of a program whose Run or Return cannot be sent.

    For any other message, the error is raised.
    """
    if not isinstance(message, Run | Return):
        raise error
    failure = failure_of(error, worker, message.path, "")
    how = "is given" if isinstance(message, Run) else "returned"
    said = f"what a program {how} cannot travel: {failure.message}"
    failure = replace(failure, message=said)
    if isinstance(message, Return):
        return replace(message, result=None, failure=failure)
    return Return(message.context, message.path, None, failure, (), ())
