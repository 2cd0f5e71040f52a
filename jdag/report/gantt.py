"""The Gantt chart of a run under a schedule, as data of the page that draws it."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jdag.report.spans import Job, Window

# By action: how it is called, and its colour; those of idle time are the page's.
ACTIONS = {
    "F": ("forward", "#0072b2"),
    "I": ("input gradients", "#44aa99"),
    "W": ("weight gradients", "#117733"),
    "B": ("backward", "#e07b00"),
}
_PARTS = re.compile(r"(\d+)([FIWB])(\d+)")


def gantt_of(
    jobs: Iterable[Job], workers: Sequence[str], window_ns: Window
) -> dict[str, Any] | None:
    """Return the chart of the jobs that are actions; None if none in the window is.

    `bars` has for each worker, in order of time, [start_ns, end_ns, kind, stage,
    micro-batch], times since the begin of the window.
    """
    first_ns, last_ns = window_ns
    rows: dict[str, list[list[Any]]] = {worker: [] for worker in workers}
    for job in jobs:
        parts = _PARTS.fullmatch(job.action)
        if parts and job.start_ns < last_ns and job.end_ns > first_ns:
            stage, kind, micro_batch = parts.groups()
            times = [job.start_ns - first_ns, job.end_ns - first_ns]
            rows[job.worker].append([*times, kind, int(stage), int(micro_batch)])
    drawn = [worker for worker in workers if rows[worker]]
    if not drawn:
        return None
    kinds = {bar[2]: None for row in rows.values() for bar in row}
    return {
        "length_ns": last_ns - first_ns,
        "workers": drawn,
        "kinds": {k: of for k, of in ACTIONS.items() if k in kinds},
        "bars": [rows[worker] for worker in drawn],
    }


def lists_of(jobs: Iterable[Job], workers: Sequence[str]) -> list[list[str]]:
    """The actions of each worker in their order; two that ran as one are one entry."""
    lists: dict[str, list[list[Job]]] = {worker: [] for worker in workers}
    for job in jobs:
        if _PARTS.fullmatch(job.action):
            entries = lists[job.worker]
            if entries and entries[-1][0].start_ns == job.start_ns < job.end_ns:
                entries[-1].append(job)
            else:
                entries.append([job])
    return [
        [
            f"({';'.join([job.action for job in of])})OVERLAP_F_B"
            if len(of) > 1
            else of[0].action
            for of in lists[worker]
        ]
        for worker in workers
    ]
