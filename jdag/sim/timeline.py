"""Virtual time: one queue of actions, in order of (time, priority, sequence).

Inputs:  calls of `push(time_ns, priority, action)` and `cancel(entry)`; a chooser that
         may pick among the actions of one time and priority.
Outputs: `run(...)` executes each action when `now_ns` is the action's time.

An action is a tuple: a function and its arguments, the first of which has the attribute
`worker`. Time is an int of nanoseconds. Actions of the same time and priority run in
the order of pushing, so a run depends on nothing but the pushed actions.

Invariants: `now_ns` never decreases; each action is executed once, or cancelled; at
most `events_max` actions are ever pushed, so every run ends.
"""

from collections import deque
from collections.abc import Container
from heapq import heappop, heappush
from typing import Any

from jdag.engine.functions import name_of
from jdag.errors import JdagError
from jdag.runtime.chooser import Chooser, checked_index

# [time_ns, priority, sequence, action]. It is a list, since the heap compares lists
# without calls of Python code, and since the action of a list can be removed in place.
# Sequence numbers are unique.
Entry = list[Any]
TIME, PRIORITY, SEQUENCE, ACTION = range(4)

# The order of actions of one time: first crashes, then events, then the choices of
# devices (among all jobs that are ready by then). Timers are last, so that data frames
# can carry acknowledgements.
CRASH, EVENT, BEGIN, TIMER = range(4)


class SimTimeline:
    """The queue of actions. `programs` has the last two programs that were started."""

    __slots__ = (
        *("_heap", "_pushed", "_soon", "after", "events_max", "now_ns", "programs"),
    )

    def __init__(self, events_max: int) -> None:
        self.now_ns = 0
        self.events_max = events_max
        self.programs: deque[Any] = deque(maxlen=2)
        # Actions to execute at the end of the current action, or of the main program's.
        self.after: deque[tuple[Any, ...]] = deque()
        self._heap: list[Entry] = []
        self._soon: deque[Entry] = deque()  # Events pushed for now, thus in order.
        self._pushed = 0

    def __len__(self) -> int:
        return sum([e[ACTION] is not None for e in (*self._heap, *self._soon)])

    def push(self, time_ns: int, priority: int, action: tuple[Any, ...]) -> Entry:
        """Queue an action for `time_ns`. At one time, lower priorities run first."""
        assert time_ns >= self.now_ns, (time_ns, self.now_ns)
        if self._pushed >= self.events_max:
            raise self._too_many()
        self._pushed = sequence = self._pushed + 1
        entry = [time_ns, priority, sequence, action]
        if time_ns == self.now_ns and priority == EVENT:
            self._soon.append(entry)
        else:
            heappush(self._heap, entry)
        return entry

    def _too_many(self) -> JdagError:
        names = " and ".join(map(name_of, self.programs)) or "only the main program"
        return JdagError(
            f"the run needs more than events_max = {self.events_max} events"
            f" (reached at {self.now_ns} ns, {len(self)} still waiting;"
            f" programs started last: {names}); raise events_max for a longer run"
        )

    def cancel(self, entry: Entry) -> None:
        entry[ACTION] = None

    def run(self, chooser: Chooser, results: Container[int], waiter: int) -> None:
        heap, soon, picks = self._heap, self._soon, chooser.picks_events
        after = self.after
        self.end_action()
        while (soon or heap) and waiter not in results:  # Bounded by events_max.
            if picks:
                entry = self._picked(chooser)
            elif soon and not (heap and heap[0] < soon[0]):
                entry = soon.popleft()
            else:
                entry = heappop(heap)
            action = entry[ACTION]
            if action is not None:
                entry[ACTION] = None  # A later `cancel` then has no effect.
                self.now_ns = entry[TIME]
                action[0](*action[1:])
                if after:
                    self.end_action()

    def end_action(self) -> None:
        while self.after:
            action = self.after.popleft()
            action[0](*action[1:])

    def _picked(self, chooser: Chooser) -> Entry:
        heap = self._heap
        while self._soon:
            heappush(heap, self._soon.popleft())
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
        picked = tied.pop(checked_index(chooser.pick_event(seen), len(tied)))
        for entry in tied:
            heappush(heap, entry)
        return picked

    def clear(self) -> None:
        self._heap.clear()
        self._soon.clear()
        self.after.clear()
