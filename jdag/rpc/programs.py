"""How programs run on a node: each on a thread of its own.

Told:  `start` for a program.
Gives: `current`, the port of the program that the thread that asks runs; `ended_by`,
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


class _Local(threading.local):
    """What one thread runs."""

    port: Port | None = None


class Programs:
    """The programs of one node. `main` is that of the user."""

    def __init__(self, main: Port | None) -> None:
        self._main = main
        self._main_thread = threading.get_ident()
        self._local = _Local()
        self._running: dict[Port, None] = {}

    @property
    def current(self) -> Port | None:
        """The port of the program that runs on this thread, None where none does."""
        port = self._local.port
        if port is None and threading.get_ident() == self._main_thread:
            return self._main
        return port

    @property
    def alive(self) -> int:
        """How many programs run here, the user's not counted."""
        return len(self._running)

    def start(self, port: Port, body: Callable[[], None]) -> None:
        """Run `body` as the program of `port`."""

        def run() -> None:
            self._local.port = port
            try:
                body()
            except Over:
                return  # Nobody is left who would have to be told.
            finally:
                del self._running[port]

        self._running[port] = None
        name = f"program on {port.worker}"
        threading.Thread(target=run, name=name, daemon=True).start()
