"""Waiters: numbers by which engines resume blocked programs."""

from collections.abc import Callable
from itertools import count
from typing import Any

Cancel = Callable[[], object]


class Waiters:
    """The waiters of one driver.

    Attributes:
        number: returns a new, unique waiter.
        asked: waiter to its worker and the name of the event that created it.
        given: resumed waiter, until its result is taken, to result and trace record.
        alarms: waiter to the function that cancels its alarm.
    """

    __slots__ = ("alarms", "asked", "given", "number")

    def __init__(self) -> None:
        self.number = count(1).__next__
        self.asked: dict[int, tuple[str, str]] = {}
        self.alarms: dict[int, Cancel] = {}
        self.given: dict[int, tuple[Any, int]] = {}

    def silence(self, waiter: int) -> None:
        """Cancel the alarm of a waiter, if it has one."""
        if (cancel := self.alarms.pop(waiter, None)) is not None:
            cancel()

    def forget(self, waiter: int) -> None:
        """Forget a waiter whose result was taken, or whose program was interrupted."""
        if self.alarms:
            self.silence(waiter)
        self.asked.pop(waiter, None)
        self.given.pop(waiter, None)

    def clear(self) -> None:
        """Forget all waiters."""
        for waiter in tuple(self.asked):
            self.forget(waiter)

    def __str__(self) -> str:
        """List workers whose programs wait, and for what, in the order of asking."""
        asked = [(w, *of) for w, of in self.asked.items() if w not in self.given]
        waiting = [f"{worker!r} for {what} {w}" for w, worker, what in asked]
        return ", ".join(waiting) or "nobody"
