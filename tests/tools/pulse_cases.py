"""Calls of C that hold Python's interpreter lock for more than two deadlines."""

import ctypes
from itertools import repeat
from typing import Any

import jdag
from jdag.processes.net.loop import clock_ns

DEADLINE_S = 2.0
BUSY_S = 2.2 * DEADLINE_S


def compute() -> None:
    """Compute, in the end in one call that takes `BUSY_S` or more."""
    count, taken_s = 1 << 20, 0.0
    while taken_s < BUSY_S:
        # What takes little is measured badly.
        count = int(count * min(8.0, 1.1 * BUSY_S / max(taken_s, 1e-3)))
        began_ns = clock_ns()
        assert sum(repeat(1, count)) == count
        taken_s = (clock_ns() - began_ns) / 1e9


@jdag.unjitted
def busy(x: Any) -> Any:
    compute()
    return 2.0 * x


@jdag.unjitted
def hung(x: Any) -> Any:
    ctypes.PyDLL(None).usleep(round(BUSY_S * 1e6))
    return 2.0 * x


def doubled(x: Any) -> Any:
    return 2.0 * x
