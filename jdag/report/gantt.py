"""The Gantt chart of a run under a schedule, as data of the page that draws it."""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jdag.report.spans import Job, Window
from jdag.schedules.actions import OVERLAP

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

    `bars` has for each worker, in order of time, [start_ns, end_ns, (stage, kind,
    micro-batch), ...], with two actions if they ran as one; times are since the begin
    of the window.
    """
    first_ns, last_ns = window_ns
    inside = [job for job in jobs if job.start_ns < last_ns and job.end_ns > first_ns]
    rows = _steps(inside, workers)
    drawn = [worker for worker in workers if rows[worker]]
    if not drawn:
        return None
    bars: list[list[Any]] = [
        [
            [of[0].start_ns - first_ns, of[0].end_ns - first_ns, *map(_parts, of)]
            for of in rows[worker]
        ]
        for worker in drawn
    ]
    kinds = {kind for row in bars for bar in row for _, kind, _ in bar[2:]}
    return {
        "length_ns": last_ns - first_ns,
        "workers": drawn,
        "kinds": {kind: of for kind, of in ACTIONS.items() if kind in kinds},
        "bars": bars,
    }


def lists_of(jobs: Iterable[Job], workers: Sequence[str]) -> list[list[str]]:
    """The actions of each worker in their order; two that ran as one are one entry."""
    return [
        [
            f"({';'.join([job.action for job in of])}){OVERLAP}"
            if len(of) > 1
            else of[0].action
            for of in steps
        ]
        for steps in _steps(jobs, workers).values()
    ]


def _steps(jobs: Iterable[Job], workers: Sequence[str]) -> dict[str, list[list[Job]]]:
    """The actions of each worker in their order; two that ran as one are together."""
    found: dict[str, list[list[Job]]] = {worker: [] for worker in workers}
    for job in jobs:
        if _PARTS.fullmatch(job.action):
            steps = found[job.worker]
            if steps and steps[-1][0].start_ns == job.start_ns < job.end_ns:
                steps[-1].append(job)
            else:
                steps.append([job])
    return found


def _parts(job: Job) -> tuple[int, str, int]:
    ((stage, kind, micro_batch),) = _PARTS.findall(job.action)
    return int(stage), kind, int(micro_batch)
