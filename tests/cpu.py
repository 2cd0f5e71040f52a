"""Runs a command and prints the CPU-minutes that it took, beside this machine's speed.

    python -m tests.cpu make lint suite

CPU time of one and the same work differs between machines and with what else they do,
so that a calibrator runs before and after: a loop of plain Python over a heap.
"""

import heapq
import os
import subprocess
import sys

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


def main(command: list[str]) -> int:
    """Run the command; return its exit code."""
    speeds = [events_per_s()]
    code = subprocess.run(command, check=False).returncode
    used = os.times()
    speeds.append(events_per_s())
    minutes = (used.children_user + used.children_system) / 60
    speed = sum(speeds) / len(speeds) / 1e6
    print(
        f"{minutes:.1f} CPU-minutes, where a queue takes {speed:.2f} million events "
        "a second of CPU time",
        flush=True,
    )
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
