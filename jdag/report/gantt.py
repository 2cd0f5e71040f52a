"""The timeline of a run as JSON data, drawn by both the page and the picture.

Each row is a worker. Its upper lane is the device, with a bar for each job. Overlapped
actions of a schedule are drawn one above the other. Its lower lane has a bar for each
array that the worker is sending. With more than `ROWS_MAX` workers, rows have no lower
lane.
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
# (top, height) as fractions of a row, for four lanes: the device, its upper half, its
# lower half, and the strip below it.
_LANES = ((0.12, 0.56), (0.12, 0.28), (0.40, 0.28), (0.75, 0.13))
_LANES_ALONE = ((0.12, 0.76), (0.12, 0.38), (0.50, 0.38))  # Lanes without a strip.
_LANES_DENSE = ((0.0, 1.0), (0.0, 0.5), (0.5, 0.5))
_STRIP = 3

# Maps each kind of bar to (description, colour). The colours are those of Okabe and Ito
# (2008) and of Tol, which colour-blind readers can distinguish.
KINDS = {
    "forward": ("forward", "#0072b2"),
    "backward": ("backward", "#e07b00"),
    "input_grad": ("input gradients", "#44aa99"),
    "weight_grad": ("weight gradients", "#117733"),
    "sum": ("sums, zeros and ones", "#8a8a5c"),
    "hook": ("hooks", "#aa4499"),
    "update": ("updates of leaves", "#882255"),
    "segment": ("segments of plans", "#332288"),
    "primal": ("primals in flight", "#56b4e9"),
    "cotangent": ("cotangents in flight", "#cc79a7"),
    "hop": ("hops of plans in flight", "#8577d0"),
}
IDLE = "#eef0f2"
_ACTIONS = {"F": "forward", "B": "backward", "I": "input_grad", "W": "weight_grad"}
_MESSAGES = {"Cotangent": "cotangent", "Hop": "hop"}
_MARKS = {"drop": "a frame was dropped", "crash": "the worker crashed"}
_PARTS = re.compile(r"(\d+)([FIWB])(\d+)")


def gantt_of(
    spans: Spans, workers: Sequence[str], window_ns: Window, clock: str
) -> dict[str, Any]:
    """Return the chart of a window of time as JSON data.

    Times are nanoseconds since the start of the window; `length_ns` is its length.
    `lanes` has the (top, height) of each lane as fractions of a row. `kinds` maps each
    kind of bar that occurs to (description, colour). `marks` maps each kind of mark
    that occurs to its description. `idle` is a colour. A row has `worker`, `busy` (a
    string), `bars` and `marks`. A bar is [start, end, kind, lane, label, index into
    `texts`], and a mark is [time, kind]. In `texts`, `{}` stands for the label.
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
            times = start_ns - first_ns, end_ns - first_ns
            index = texts.setdefault(text, len(texts))
            rows[span.worker]["bars"].append([*times, kind, lane, label, index])

    for jobs in _together(inside.jobs):
        for half, job in enumerate(jobs, 1):
            add(job, *_bar(job, 0 if len(jobs) == 1 else half))
    for send in () if is_dense else inside.transfers:
        if send.payload_bytes:
            text = f"{send.name} to {send.peer}, {send.payload_bytes:,} bytes"
            add(send, _MESSAGES.get(send.name, "primal"), _STRIP, "", text)
    marks = [m for m in inside.marks if m.kind in _MARKS and m.worker in rows]
    for mark in marks:
        rows[mark.worker]["marks"].append([mark.at_ns - first_ns, mark.kind])
    present = {bar[2] for row in rows.values() for bar in row["bars"]}
    has_strip = any(bar[3] == _STRIP for row in rows.values() for bar in row["bars"])
    lanes = _LANES_DENSE if is_dense else _LANES if has_strip else _LANES_ALONE
    occurred = {mark.kind for mark in marks}
    since = formatted("start_ns", first_ns) if first_ns else "the start of the run"
    return {
        "axis": f"{clock} since {since}",
        "length_ns": last_ns - first_ns,
        "is_dense": is_dense,
        "idle": IDLE,
        "lanes": lanes,
        "kinds": {kind: pair for kind, pair in KINDS.items() if kind in present},
        "marks": {kind: text for kind, text in _MARKS.items() if kind in occurred},
        "texts": [*texts],
        "rows": [*rows.values()],
    }


def lists_of(jobs: Iterable[Operation], workers: Sequence[str]) -> list[list[str]]:
    """Return the schedule actions of each worker, in order.

    Overlapped actions are one entry.
    """
    lists: dict[str, list[str]] = {worker: [] for worker in workers}
    for group in _together([job for job in jobs if _PARTS.fullmatch(job.action)]):
        entry = ";".join([job.action for job in group])
        entry = f"({entry}){OVERLAP}" if len(group) > 1 else entry
        lists[group[0].worker].append(entry)
    return [*lists.values()]


def _together(jobs: Iterable[Operation]) -> Iterable[list[Operation]]:
    """Group the overlapped actions of a worker. Any other job is a separate group."""
    groups: list[list[Operation]] = []
    last: dict[str, list[Operation]] = {}
    for job in jobs:
        before = last.get(job.worker)
        is_second = before and before[0].start_ns == job.start_ns < job.end_ns
        if before and is_second and before[0].action and job.action:
            before.append(job)
        else:
            last[job.worker] = [job]
            groups.append(last[job.worker])
    return groups


def _bar(job: Operation, lane: int) -> tuple[str, int, str, str]:
    kind = job.drawn_as
    if parts := _PARTS.fullmatch(job.action):
        stage, letter, micro_batch = parts.groups()
        kind = _ACTIONS[letter]
        text = f"{KINDS[kind][0]} of stage {stage}, micro-batch {{}}"
        return kind, lane, micro_batch, f"{stage}{letter}{{}}: {text}"
    if kind == "segment":
        name = job.name.partition(":")[2].rstrip(")")
        return kind, lane, name, f"segment {job.name}"
    label = dotted(job.path) if job.context else ""
    call = f", call {{}} of context {job.context}" if label else ""
    return kind, lane, label, f"{job.kind} {job.name}{call}"
