"""Room for so many at once, of whom no one holder may take more than a share."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager


class Room:
    """Room for some at once; thread-safe.

    Args:
        places_max: for how many.
        each_max: for how many of one holder, so that none keeps all others out.
    """

    def __init__(self, places_max: int, each_max: int) -> None:
        self._places_max = places_max
        self._each_max = each_max
        self._held: Counter[str] = Counter()
        self._lock = threading.Lock()

    @contextmanager
    def place(self, holder: str) -> Iterator[bool]:
        """Hold a place meanwhile, if there is one: that is what it gives."""
        with self._lock:
            there_is = (
                self._held.total() < self._places_max
                and self._held[holder] < self._each_max
            )
            self._held[holder] += there_is
            self._tidy(holder)
        try:
            yield there_is
        finally:
            with self._lock:
                self._held[holder] -= there_is
                self._tidy(holder)

    def _tidy(self, holder: str) -> None:
        if not self._held[holder]:  # Nobody is remembered for having been here.
            del self._held[holder]
