"""Waiters: numbers by which engines resume blocked programs."""

from collections.abc import Callable, Sequence
from itertools import count
from types import FrameType
from typing import Any

from jdag.engine.functions import call_site

Cancel = Callable[[], object]

_WORDS = {
    "Asked": "an answer of its caller",
    "Awaited": "the arrival of its calls",
    "Collected": "programs that it called",
    "Compiled": "the compilation of a plan",
    "Differentiated": "a backward pass",
    "Fetched": "values that it fetches",
    "Left": "the end of a context",
    "Stepping": "a step of a plan",
}
LOSSES_INSTEAD = (
    "if the pass is from a sum of losses, which waits for all of them, make it from "
    "the losses: ctx.backward(*losses)"
)


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

    def waiting(self, frame_of: Callable[[int], FrameType | None]) -> list[str]:
        """List whose programs wait, for what and where, in the order of asking.

        `frame_of` returns what a waiter's program runs, if that is known.
        """
        found = []
        for waiter, (worker, what) in self.asked.items():
            if waiter not in self.given:
                frame = frame_of(waiter)
                line = "" if frame is None else f" at {call_site(frame)}"
                found.append(f"{worker!r} for {_WORDS.get(what, what)}{line}")
        return found


def stuck_wait_text(waits: Sequence[str], lists: Sequence[str]) -> str:
    """Return the text of a wait without end: programs, then lists of a schedule."""
    why = "no engine will ever resume them"
    if lists:
        why = f"the schedule cannot go on: {'; '.join(lists)}"
        if any(_WORDS["Differentiated"] in wait for wait in waits):
            why += f"; {LOSSES_INSTEAD}"
    return f"these still wait: {', '.join(waits) or 'nobody'}; {why}"
