"""How fast this machine takes events off a queue, to compare CPU times by."""

import heapq
import os

EVENTS = 1_000_000


def events_per_s() -> float:
    """Return how many events of a queue this machine takes in a second of CPU time."""
    heap = [(number * 7919 % 1009, number) for number in range(1000)]
    heapq.heapify(heap)
    begin = os.times()
    for number in range(EVENTS):
        at, _ = heap[0]
        heapq.heapreplace(heap, (at + number * 7919 % 1009, number))
    end = os.times()
    return EVENTS / (end.user + end.system - begin.user - begin.system)
