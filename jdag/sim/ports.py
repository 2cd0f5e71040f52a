"""A port: the capacity that all links of a worker share, in one direction.

A port passes one frame at a time. A frame takes the first gap after its arrival at the
port that is long enough, so a frame that waits for its link does not delay others.

Inputs:  calls `reserve(from_ns, takes_ns, now_ns)`, for each frame, in order of
         `now_ns`.
Outputs: the time at which the frame starts to pass.

Invariants: reservations do not overlap, and do not move.
"""

from bisect import bisect_right


class NetworkPort:
    """The state of one port. `record` is the last frame's trace record (-1: none)."""

    __slots__ = ("_ends", "_starts", "record")

    def __init__(self) -> None:
        self._starts: list[int] = []  # Starts and ends of reservations, ascending.
        self._ends: list[int] = []
        self.record = -1

    def reserve(self, from_ns: int, takes_ns: int, now_ns: int) -> int:
        """Reserve the earliest start for a frame that arrives at `from_ns`; return it.

        `from_ns` must not be before `now_ns`.
        """
        starts, ends = self._starts, self._ends
        past_count = bisect_right(ends, now_ns)
        del starts[:past_count], ends[:past_count]
        index = bisect_right(ends, from_ns)
        start_ns = from_ns
        while index < len(starts) and starts[index] < start_ns + takes_ns:
            start_ns = ends[index]
            index += 1
        if index and ends[index - 1] == start_ns:  # Extend the reservation before it.
            ends[index - 1] = start_ns + takes_ns
        else:
            starts.insert(index, start_ns)
            ends.insert(index, start_ns + takes_ns)
        return start_ns
