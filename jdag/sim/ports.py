"""Ports: what one worker sends, or receives, over all of its links together.

A port passes one frame at a time. A frame takes the first long enough gap after its
arrival at the port, so a frame that waits for its link does not delay others.

Inputs:  `reserve(from_ns, takes_ns, now_ns)`, for each frame, in order of `now_ns`.
Outputs: when it begins to pass.

Invariants: what is reserved does not overlap, and does not move.
"""

from bisect import bisect_right


class NetworkPort:
    """One direction of one worker's port; `record` is the last frame that passed it."""

    __slots__ = ("_ends", "_starts", "record")

    def __init__(self) -> None:
        self._starts: list[int] = []  # Of what is reserved, in order.
        self._ends: list[int] = []
        self.record = -1

    def reserve(self, from_ns: int, takes_ns: int, now_ns: int) -> int:
        """When a frame that is there at `from_ns`, not before now, begins to pass."""
        starts, ends = self._starts, self._ends
        over = bisect_right(ends, now_ns)
        del starts[:over], ends[:over]
        place = bisect_right(ends, from_ns)
        start_ns = from_ns
        while place < len(starts) and starts[place] < start_ns + takes_ns:
            start_ns = ends[place]
            place += 1
        if place and ends[place - 1] == start_ns:  # It goes on from the one before.
            ends[place - 1] = start_ns + takes_ns
        else:
            starts.insert(place, start_ns)
            ends.insert(place, start_ns + takes_ns)
        return start_ns
