"""Virtual time: one queue of what is to happen, in order of (time, priority, sequence).

Inputs:  `push(time_ns, priority, action)`, `cancel(entry)`.
Outputs: `pop()`, the next action, with `now_ns` moved to its time; or, for a chooser
         that picks among events, `tied()`, all those that could come next, and
         `take(entry)`.

Time is an int of nanoseconds and never goes back. What has the same time and priority
comes in the order of pushing, so a run depends on nothing but what was pushed. Actions
are opaque here, and never None.

Invariants: `now_ns` never decreases; each action that was pushed is handed out once, or
cancelled; at most `events_max` are ever pushed, so every run ends.
"""

from collections import deque
from heapq import heappop, heappush
from typing import Any

from jdag.engine.functions import name_of
from jdag.errors import JdagError

# [time_ns, priority, sequence, action]: a list, so that the heap compares it without a
# call to Python and its action can be taken out in place. No two have one sequence.
Entry = list[Any]
_TIME, _PRIORITY, _SEQUENCE, _ACTION = range(4)


class Timeline:
    """The ordered queue of one simulated run; `now_ns` starts at 0.

    `events_max` bounds the number of events that the whole run may push; `programs` are
    the last two that were started, which an error names.
    """

    __slots__ = ("_heap", "_pushed", "_taken_out", "events_max", "now_ns", "programs")

    def __init__(self, events_max: int) -> None:
        self.now_ns = 0
        self.events_max = events_max
        self.programs: deque[Any] = deque(maxlen=2)
        self._heap: list[Entry] = []
        self._pushed = 0
        self._taken_out = 0  # Entries still in the heap whose action is gone.

    def __len__(self) -> int:
        """How many actions wait."""
        return len(self._heap) - self._taken_out

    def push(self, time_ns: int, priority: int, action: Any) -> Entry:
        """Queue `action` at `time_ns`, which is not past; lower priorities come first.

        Raises:
            JdagError: this is one event more than `events_max`.
        """
        assert time_ns >= self.now_ns, (time_ns, self.now_ns)
        assert action is not None, "None marks what is gone"
        if self._pushed >= self.events_max:
            names = " and ".join(map(name_of, self.programs)) or "none but main's"
            raise JdagError(
                f"the run needs more than events_max = {self.events_max} events"
                f" (reached at {self.now_ns} ns, {len(self)} still waiting;"
                f" programs that began last: {names}); a longer run must ask for more"
            )
        self._pushed = sequence = self._pushed + 1
        entry = [time_ns, priority, sequence, action]
        heappush(self._heap, entry)
        return entry

    def pop(self) -> Any:
        """The next action, None when none waits; `now_ns` is then its time."""
        heap = self._heap
        while heap:  # Bounded: each turn takes one out.
            entry = heappop(heap)
            action = entry[_ACTION]
            if action is not None:
                entry[_ACTION] = None  # So that a late cancel finds nothing to do.
                self.now_ns = entry[_TIME]
                return action
            self._taken_out -= 1
        return None

    def cancel(self, entry: Entry) -> bool:
        """Whether `entry` still waited; it will not happen any more.

        Constant time: the entry stays in the heap, empty, until its turn comes.
        """
        if entry[_ACTION] is None:
            return False
        entry[_ACTION] = None
        self._taken_out += 1
        return True

    def next_ns(self) -> int | None:
        """The time of the next action, None when none waits."""
        heap = self._heap
        while heap and heap[0][_ACTION] is None:
            heappop(heap)
            self._taken_out -= 1
        return heap[0][_TIME] if heap else None

    def tied(self) -> tuple[Entry, ...]:
        """All entries that share the next time and priority, in the order of pushing.

        `entry[-1]` is an entry's action. Costs what is tied, not what waits: in a heap
        those that equal the first hang together below it.
        """
        heap = self._heap
        if self.next_ns() is None:
            return ()
        time_ns, priority = heap[0][_TIME], heap[0][_PRIORITY]
        tied, places = [], [0]
        for place in places:  # Grows while it is walked; each place comes once.
            entry = heap[place]
            if entry[_TIME] != time_ns or entry[_PRIORITY] != priority:
                continue
            if entry[_ACTION] is not None:
                tied.append(entry)
            below = 2 * place + 1
            places.extend(range(below, min(below + 2, len(heap))))
        tied.sort()  # By sequence, as that is all in which they differ.
        return tuple(tied)

    def take(self, entry: Entry) -> Any:
        """The action of one of the `tied()` entries, in place of `pop()`'s."""
        action = entry[_ACTION]
        assert action is not None, entry
        assert entry[_TIME] == self.next_ns(), (entry, self.next_ns())
        self.cancel(entry)
        self.now_ns = entry[_TIME]
        return action
