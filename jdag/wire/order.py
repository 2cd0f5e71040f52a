"""FIFO for now."""

from collections import deque
from collections.abc import Sequence
from typing import Any


class Order:
    """Messages in order."""

    def __init__(self) -> None:
        self._waiting: deque[list[Any]] = deque()

    def arrived(self, one: Any, whole: bool) -> Sequence[Any]:
        """A message arrived."""
        if whole and not self._waiting:
            return (one,)
        self._waiting.append([one, whole])
        return ()

    def completed(self, one: Any) -> Sequence[Any]:
        """Whole now."""
        for entry in self._waiting:
            if entry[0] is one:
                entry[1] = True
        ready = []
        while self._waiting and self._waiting[0][1]:
            ready.append(self._waiting.popleft()[0])
        return ready
