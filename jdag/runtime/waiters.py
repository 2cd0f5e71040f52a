"""What programs wait for: numbers that their engine resumes."""

from collections.abc import Callable
from itertools import count
from typing import Any

Cancel = Callable[[], object]


class Waiters:
    """The waiters of one driver.

    `given` maps each waiter that was resumed, and whose result was not taken yet, to
    the result and the record of the trace that says so.
    """

    __slots__ = ("_alarms", "_asked", "_numbers", "given")

    def __init__(self) -> None:
        self._numbers = count(1)
        self._asked: dict[int, tuple[str, str]] = {}
        self._alarms: dict[int, Cancel] = {}
        self.given: dict[int, tuple[Any, int]] = {}

    def number(self) -> int:
        """Return a number that no other waiter has."""
        return next(self._numbers)

    def ask(self, waiter: int, worker: str, what: str) -> None:
        """Register a waiter: a program of `worker` waits for the event `what`."""
        self._asked[waiter] = (worker, what)

    def asked(self, waiter: int) -> str | None:
        """Return what a waiter asked for; None if its program no longer waits."""
        found = self._asked.get(waiter)
        return None if found is None else found[1]

    def alarm(self, waiter: int, cancel: Cancel) -> None:
        """Note how to cancel the alarm of a waiter."""
        self._alarms[waiter] = cancel

    def give(self, waiter: int, result: Any, record: int) -> None:
        """Store the result of a waiter."""
        self.given[waiter] = (result, record)

    def silence(self, waiter: int) -> None:
        """Cancel the alarm of a waiter, if it has one."""
        cancel = self._alarms.pop(waiter, None)
        if cancel is not None:
            cancel()

    def forget(self, waiter: int) -> None:
        """Forget a waiter whose result was taken, or whose program was interrupted."""
        self.silence(waiter)
        self._asked.pop(waiter, None)
        self.given.pop(waiter, None)

    def clear(self) -> None:
        """Forget all waiters."""
        for waiter in tuple(self._asked):
            self.forget(waiter)

    def __str__(self) -> str:
        """List who waits for what, in the order of asking."""
        asked = [(w, *of) for w, of in self._asked.items() if w not in self.given]
        waiting = [f"{worker!r} for {what} {w}" for w, worker, what in asked]
        return ", ".join(waiting) or "nobody"
