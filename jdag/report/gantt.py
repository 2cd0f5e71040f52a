"""The timeline of a run as data: what the page and the picture both draw.

A row is a worker. Its upper lane is the device, with a bar for each job; two actions of
a schedule that ran as one lie above each other. Its lower lane has the arrays that the
worker is sending. With more than `ROWS_MAX` workers a row is its device alone.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

from jdag.context.graph import dotted
from jdag.report.formatting import formatted
from jdag.report.operations import Operation
from jdag.report.spans import Spans, Window, bubble
from jdag.schedules.actions import OVERLAP

ROWS_MAX = 40
# Top and height, in rows, of the device, its two halves, and the strip below it.
_LANES = ((0.12, 0.56), (0.12, 0.28), (0.40, 0.28), (0.75, 0.13))
_LANES_ALONE = ((0.12, 0.76), (0.12, 0.38), (0.50, 0.38))  # Without a strip.
_LANES_DENSE = ((0.0, 1.0), (0.0, 0.5), (0.5, 0.5))
_STRIP = 3

# By kind: what a bar of it is, and its colour: of those of Okabe and Ito (2008) and of
# Tol, which colour-blind readers tell apart.
KINDS = {
    "forward": ("forward", "#0072b2"),
    "backward": ("backward", "#e07b00"),
    "input_grad": ("input gradients", "#44aa99"),
    "weight_grad": ("weight gradients", "#117733"),
    "sum": ("sums, zeros and ones", "#8a8a5c"),
    "hook": ("hooks", "#aa4499"),
    "update": ("updates of leaves", "#882255"),
    "segment": ("segments of plans", "#332288"),
    "primal": ("primals on their way", "#56b4e9"),
    "cotangent": ("cotangents on their way", "#cc79a7"),
    "hop": ("hops of plans", "#8577d0"),
}
IDLE = "#eef0f2"
_ACTIONS = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
_MESSAGES = {"Cotangent": "cotangent", "Hop": "hop"}
_MARKS = {"drop": "a frame was dropped", "crash": "it crashed"}
_PARTS = re.compile(r"(\d+)([FIWB])(\d+)")


def gantt_of(
    spans: Spans, workers: Sequence[str], window_ns: Window, clock: str
) -> dict[str, Any]:
    """Return the chart of what happened in a window of time, as JSON has it.

    Times are nanoseconds since the begin of the window, whose length is `length_ns`.
    `lanes` are (top, height) in rows. `kinds` has what each kind of bar is and its
    colour, `marks` what each kind of mark is, of those that occur; `idle` is a colour.
    A row has `worker`, `busy` (its share of the window), `bars` of [start, end, kind,
    lane, label, number of its text in `texts`], and `marks` of [time, kind]. In a text
    `{}` stands for the label.
    """
    first_ns, last_ns = window_ns
    inside = spans.within(window_ns)
    is_dense = len(workers) > ROWS_MAX
    idle = bubble(inside.jobs, workers, window_ns)
    texts: dict[str, int] = {}
    rows: dict[str, Any] = {
        worker: {"worker": worker, "busy": f"{float(1 - idle[worker]):.0%} busy"}
        | {"bars": [], "marks": []}
        for worker in workers
    }

    def add(span: Operation, kind: str, lane: int, label: str, text: str) -> None:
        start_ns, end_ns = span.start_ns, span.end_ns
        if max(start_ns, first_ns) < min(end_ns, last_ns) and span.worker in rows:
            said = label, texts.setdefault(text, len(texts))
            times = start_ns - first_ns, end_ns - first_ns
            rows[span.worker]["bars"].append([*times, kind, lane, *said])

    for jobs in _together(inside.jobs):
        for place, job in enumerate(jobs):
            add(job, *_drawn(job, 0 if len(jobs) == 1 else 1 + place))
    for one in () if is_dense else inside.transfers:
        if one.payload_bytes:
            said = f"{one.name} to {one.peer}, {one.payload_bytes:,} bytes"
            add(one, _MESSAGES.get(one.name, "primal"), _STRIP, "", said)
    marks = [m for m in inside.marks if m.kind in _MARKS and m.worker in rows]
    for mark in marks:
        rows[mark.worker]["marks"].append([mark.at_ns - first_ns, mark.kind])
    present = {bar[2] for row in rows.values() for bar in row["bars"]}
    has_strip = any(bar[3] == _STRIP for row in rows.values() for bar in row["bars"])
    lanes = _LANES_DENSE if is_dense else _LANES if has_strip else _LANES_ALONE
    occurred = {mark.kind for mark in marks}
    since = formatted("start_ns", first_ns) if first_ns else "its beginning"
    return {
        "axis": f"{clock} since {since}",
        "length_ns": last_ns - first_ns,
        "is_dense": is_dense,
        "idle": IDLE,
        "lanes": lanes,
        "kinds": {kind: of for kind, of in KINDS.items() if kind in present},
        "marks": {kind: of for kind, of in _MARKS.items() if kind in occurred},
        "texts": [*texts],
        "rows": [*rows.values()],
    }


def lists_of(jobs: Iterable[Operation], workers: Sequence[str]) -> list[list[str]]:
    """The actions of each worker in their order; two that ran as one are one entry."""
    lists: dict[str, list[str]] = {worker: [] for worker in workers}
    for of in _together([job for job in jobs if _PARTS.fullmatch(job.action)]):
        said = ";".join([job.action for job in of])
        lists[of[0].worker].append(f"({said}){OVERLAP}" if len(of) > 1 else said)
    return [*lists.values()]


def _together(jobs: Iterable[Operation]) -> Iterable[list[Operation]]:
    """The jobs in their order; two actions of a worker that ran as one are together."""
    found: list[list[Operation]] = []
    last: dict[str, list[Operation]] = {}
    for job in jobs:
        before = last.get(job.worker)
        is_second = before and before[0].start_ns == job.start_ns < job.end_ns
        if before and is_second and before[0].action and job.action:
            before.append(job)
        else:
            last[job.worker] = [job]
            found.append(last[job.worker])
    return found


def _drawn(job: Operation, lane: int) -> tuple[str, int, str, str]:
    """The kind, lane, label and text of a job's bar."""
    kind = job.drawn_as
    if parts := _PARTS.fullmatch(job.action):
        stage, letter, micro_batch = parts.groups()
        kind = _ACTIONS[letter]
        of = f"{stage}{letter}{{}}: {KINDS[kind][0]} of stage {stage}, micro-batch {{}}"
        return kind, lane, micro_batch, of
    if kind == "segment":
        name = job.name.partition(":")[2].rstrip(")")
        return kind, lane, name, f"segment {job.name}"
    label = dotted(job.path) if job.context else ""
    of = f", call {{}} of context {job.context}" if label else ""
    return kind, lane, label, f"{job.kind} {job.name}{of}"
