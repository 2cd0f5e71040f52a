"""How programs run on a node: each on a thread of its own, and what they wait for.

Told:  `ask` and `give` for what is waited for; `start` for a program.
Gives: `current`, the port of the program that the thread that asks runs; `ended_by`,
       how one ends that cannot be called, or cannot return, as was asked.

A thread cannot be ended from outside: when its session is over, the next thing that a
program asks of its node raises `Over`, which is no Exception, so that programs do not
take it for an error of theirs.
"""

import threading
from collections import deque
from collections.abc import Callable
from itertools import count
from typing import Any

from msgspec.structs import replace

from jdag.compute.machine import failure_of
from jdag.engine.vocabulary import Message, Return, Run, Worker
from jdag.rpc.loop import Timer
from jdag.rpc.port import Port


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
    """What one thread runs, and what it has asked for."""

    def __init__(self) -> None:
        self.port: Port | None = None
        self.asked: deque[int] = deque()


class Programs:
    """The programs of one node, and what they wait for. `main` is that of the user."""

    def __init__(self, main: Port | None) -> None:
        self._main = main
        self._main_thread = threading.get_ident()
        self._local = _Local()
        self._numbers = count(1)
        self._asked: dict[int, str] = {}
        self.given: dict[int, Any] = {}  # What waiters were given, and did not take.
        self._alarms: dict[int, Timer] = {}
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

    # ------------------------------------------------------------------ waiting

    def number(self) -> int:
        """A number that no other waiter of the node has."""
        return next(self._numbers)

    def ask(self, waiter: int, what: str) -> None:
        """A program will wait for this; `what` is the event that it told."""
        self._local.asked.append(waiter)
        self._asked[waiter] = what

    def asked(self, waiter: int) -> str | None:
        """What a waiter asked for; None if nobody is there any more."""
        return self._asked.get(waiter)

    def alarm(self, waiter: int, timer: Timer) -> None:
        """This goes off unless the waiter is given something first."""
        self._alarms[waiter] = timer

    def give(self, waiter: int, result: Any) -> None:
        """What the waiter waits for is here."""
        self.silence(waiter)
        self.given[waiter] = result

    def take(self, waiter: int) -> Any:
        """What the waiter was given."""
        return self.given[waiter]

    def silence(self, waiter: int) -> None:
        """What goes off if the waiter is given nothing is not wanted any more."""
        timer = self._alarms.pop(waiter, None)
        if timer is not None:
            timer.cancel()

    def forget(self, waiter: int) -> None:
        """Who waited has the result, or was interrupted.

        A program waits for what it asked for in that order, so what it asked for before
        is not waited for any more: it was interrupted between asking and waiting.
        """
        asked = self._local.asked
        while asked and asked[0] <= waiter:
            old = asked.popleft()
            self.silence(old)
            self._asked.pop(old, None)
            self.given.pop(old, None)

    def clear(self) -> None:
        """Forget all."""
        for waiter in tuple(self._alarms):
            self.silence(waiter)
        self._asked.clear()
        self.given.clear()
