"""Virtual time: one queue of actions, in order of (time, priority, sequence).

Inputs:  `push(time_ns, priority, action)`, `cancel(entry)`; a chooser that may pick
         among the actions of one time and priority.
Outputs: `run(...)` carries the actions out, each with `now_ns` at its time.

An action is a tuple: a function, and the arguments that it is called with, the first
of which has a `worker`. Time is an int of nanoseconds. What has the same time and
priority comes in the order of pushing, so a run depends on nothing but what was pushed.

Invariants: `now_ns` never decreases; each action that was pushed is carried out once,
or cancelled; at most `events_max` are ever pushed, so every run ends.
"""

from collections import deque
from collections.abc import Container
from heapq import heappop, heappush
from typing import Any

from jdag.engine.functions import name_of
from jdag.errors import JdagError
from jdag.runtime.chooser import Chooser, checked_index

# [time_ns, priority, sequence, action]: a list, so that the heap compares it without a
# call to Python and its action can be taken out in place. No two have one sequence.
Entry = list[Any]
TIME, PRIORITY, SEQUENCE, ACTION = range(4)

# At one time: crashes first, then what happens, then devices choose among all that is
# ready by then, and timers last, so that acknowledgements can still ride on answers.
CRASH, EVENT, BEGIN, TIMER = range(4)


class SimTimeline:
    """The ordered queue of one simulated run; `now_ns` starts at 0.

    `events_max` bounds the number of events that the whole run may push; `programs` are
    the last two that were started, which an error names.
    """

    __slots__ = ("_heap", "_pushed", "events_max", "now_ns", "programs")

    def __init__(self, events_max: int) -> None:
        self.now_ns = 0
        self.events_max = events_max
        self.programs: deque[Any] = deque(maxlen=2)
        self._heap: list[Entry] = []
        self._pushed = 0

    def __len__(self) -> int:
        """How many actions wait."""
        return sum([entry[ACTION] is not None for entry in self._heap])

    def push(self, time_ns: int, priority: int, action: tuple[Any, ...]) -> Entry:
        """Queue `action` at `time_ns`, which is not past; lower priorities come first.

        Raises:
            JdagError: this is one event more than `events_max`.
        """
        assert time_ns >= self.now_ns, (time_ns, self.now_ns)
        if self._pushed >= self.events_max:
            raise self._too_many()
        self._pushed = sequence = self._pushed + 1
        entry = [time_ns, priority, sequence, action]
        heappush(self._heap, entry)
        return entry

    def _too_many(self) -> JdagError:
        names = " and ".join(map(name_of, self.programs)) or "none but main's"
        return JdagError(
            f"the run needs more than events_max = {self.events_max} events"
            f" (reached at {self.now_ns} ns, {len(self)} still waiting;"
            f" programs that began last: {names}); a longer run must ask for more"
        )

    def cancel(self, entry: Entry) -> None:
        """Have `entry` not happen, if it has not; it stays queued, empty."""
        entry[ACTION] = None

    def run(self, chooser: Chooser, given: Container[int], waiter: int) -> None:
        """Carry out actions until `waiter` is given something, or none is left."""
        heap = self._heap
        while heap and waiter not in given:  # Bounded by events_max.
            entry = self._picked(chooser) if chooser.picks_events else heappop(heap)
            action = entry[ACTION]
            if action is not None:
                entry[ACTION] = None  # So that a late cancel finds nothing to do.
                self.now_ns = entry[TIME]
                action[0](*action[1:])

    def _picked(self, chooser: Chooser) -> Entry:
        """Remove the entry that the chooser picks among those of one time."""
        heap = self._heap
        first = heap[0]
        tied = []
        while heap and heap[0][:SEQUENCE] == first[:SEQUENCE]:
            entry = heappop(heap)
            if entry[ACTION] is not None:
                tied.append(entry)
        if not tied:
            return first
        actions = [entry[ACTION] for entry in tied]
        seen = tuple([(a[0].__name__.lstrip("_"), a[1].worker) for a in actions])
        index = checked_index(chooser.pick_event(seen), len(tied))
        picked = tied.pop(index)
        for entry in tied:
            heappush(heap, entry)
        return picked

    def clear(self) -> None:
        """Drop all queued actions."""
        self._heap.clear()
