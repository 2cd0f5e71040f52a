"""How programs run on a node: each on a thread of its own.

Inputs:  `start` for a program.
Outputs: `here.port`, that of the program which the thread that asks runs; `ended_by`,
         how one ends that cannot be called, or cannot return, as was asked.

A thread cannot be ended from outside: when its session is over, the next thing that a
program asks of its node raises `Over`, which is no Exception, so that programs do not
take it for an error of theirs.
"""

import threading
from collections.abc import Callable

from msgspec.structs import replace

from jdag.engine.protocol import Message, Return, Run, Worker
from jdag.runtime.failures import failure_of
from jdag.runtime.host import Port


def ended_by(error: Exception, message: Message, worker: Worker) -> Return:
    """Return how a program ends whose call, or whose end, cannot be sent.

    Where the message is neither, the error is raised.
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


class Over(BaseException):
    """The session of the program that asked this is over."""


class Programs:
    """The programs of one node. `main` is that of the user."""

    def __init__(self, main: Port | None) -> None:
        self.here = threading.local()  # `port`: of the program that runs on the thread.
        self.here.port = main
        self._running: dict[threading.Thread, None] = {}

    @property
    def alive(self) -> int:
        """How many programs run here, the user's not counted."""
        return len(self._running)

    def start(self, port: Port, body: Callable[[], None]) -> None:
        """Run `body` as the program of `port`."""

        def run() -> None:
            self.here.port = port
            try:
                body()
            except Over:
                return  # There is nobody left to tell.
            finally:
                del self._running[thread]

        name = f"program on {port.worker}"
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._running[thread] = None
        thread.start()
