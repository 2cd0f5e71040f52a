"""Waiters: numbers by which engines resume blocked programs."""

from collections.abc import Callable, Sequence
from itertools import count
from types import FrameType
from typing import Any

from jdag.engine.functions import call_site

Cancel = Callable[[], object]

_WORDS = {
    "Asked": "an answer from its caller",
    "Awaited": "the arrival of its calls",
    "Collected": "programs that it called",
    "Compiled": "the compilation of a plan",
    "Differentiated": "a backward pass",
    "Fetched": "values that it fetches",
    "Left": "the end of a context",
    "Stepping": "a step of a plan",
}
LOSSES_INSTEAD = (
    "if the root of the pass is a sum of losses, which waits for all of them, pass the "
    "losses as roots: ctx.backward(*losses)"
)


class Waiters:
    """The waiters of one driver.

    Attributes:
        number: returns a new, unique waiter.
        events: by waiter, its worker and the name of the event that created it.
        results: by resumed waiter, its result and trace record, until a program takes
            them.
        alarms: by waiter, the function that cancels its alarm.
    """

    __slots__ = ("alarms", "events", "number", "results")

    def __init__(self) -> None:
        self.number = count(1).__next__
        self.events: dict[int, tuple[str, str]] = {}
        self.alarms: dict[int, Cancel] = {}
        self.results: dict[int, tuple[Any, int]] = {}

    def silence(self, waiter: int) -> None:
        if (cancel := self.alarms.pop(waiter, None)) is not None:
            cancel()

    def forget(self, waiter: int) -> None:
        if self.alarms:
            self.silence(waiter)
        self.events.pop(waiter, None)
        self.results.pop(waiter, None)

    def clear(self) -> None:
        for waiter in tuple(self.events):
            self.forget(waiter)

    def waiting(self, frame_of: Callable[[int], FrameType | None]) -> list[str]:
        """Describe the waiting programs in order of creation, with event and place."""
        waits = []
        for waiter, (worker, event) in self.events.items():
            if waiter not in self.results:
                frame = frame_of(waiter)
                line = "" if frame is None else f" at {call_site(frame)}"
                waits.append(f"{worker!r} for {_WORDS.get(event, event)}{line}")
        return waits


def stuck_wait_text(waits: Sequence[str], lists: Sequence[str]) -> str:
    why = "no engine will ever resume them"
    if lists:
        why = f"the schedule cannot go on: {'; '.join(lists)}"
        if any(_WORDS["Differentiated"] in wait for wait in waits):
            why += f"; {LOSSES_INSTEAD}"
    return f"these programs still wait: {', '.join(waits) or 'none'}; {why}"
