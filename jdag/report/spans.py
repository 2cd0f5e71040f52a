"""The times in a trace: when each job ran, and when each message was in flight.

Jobs and transfers are operations (`jdag.report.operations`) in order of start time. A
transfer is a send whose message arrived.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from jdag.report.operations import Operation, operations_of
from jdag.runtime.trace import Trace

Window = tuple[int, int]  # (from_ns, until_ns).


class SpanMark(NamedTuple):
    """An event without duration, of a kind in `_MARKS`."""

    worker: str
    kind: str
    peer: str
    at_ns: int


_MARKS = ("drop", "resend", "duplicate", "crash", "lost")


@dataclass(frozen=True, slots=True)
class Spans:
    jobs: tuple[Operation, ...]
    transfers: tuple[Operation, ...]
    marks: tuple[SpanMark, ...]

    def within(self, window_ns: Window) -> "Spans":
        first_ns, last_ns = window_ns

        def overlaps(span: Operation) -> bool:
            return span.end_ns >= first_ns and span.start_ns <= last_ns

        return Spans(
            tuple(job for job in self.jobs if overlaps(job)),
            tuple(send for send in self.transfers if overlaps(send)),
            tuple(mark for mark in self.marks if first_ns <= mark.at_ns <= last_ns),
        )


def spans_of(trace: Trace) -> Spans:
    jobs: list[Operation] = []
    transfers: list[Operation] = []
    for operation in sorted(operations_of(trace), key=lambda each: each.start_ns):
        if operation.pair < 0:
            jobs.append(operation)
        elif operation.kind == "send" and operation.end_ns >= 0:
            transfers.append(operation)
    marks: list[SpanMark] = []
    for record in trace:
        if record.kind in _MARKS:
            detail = record.named
            peer = detail.get("peer", detail.get("destination", ""))
            marks.append(SpanMark(record.worker, record.kind, peer, record.time_ns))
    return Spans(tuple(jobs), tuple(transfers), tuple(marks))


def bubble(
    jobs: Iterable[Operation], workers: Sequence[str], window: Window
) -> dict[str, Fraction]:
    """Return the exact bubble of each worker: 1 - busy time / length of the window.

    `jobs` must be in order of start time. The time of overlapping jobs of a worker
    counts once. The bubble of an empty window is 0.
    """
    first_ns, last_ns = window
    busy_ns, until_ns = dict.fromkeys(workers, 0), dict.fromkeys(workers, first_ns)
    for job in jobs:
        if job.worker in busy_ns:
            from_ns = max(job.start_ns, until_ns[job.worker])
            to_ns = min(job.end_ns, last_ns)
            if from_ns < to_ns:
                busy_ns[job.worker] += to_ns - from_ns
                until_ns[job.worker] = to_ns
    length_ns = last_ns - first_ns
    if length_ns <= 0:
        return dict.fromkeys(workers, Fraction(0))
    return {worker: 1 - Fraction(ns, length_ns) for worker, ns in busy_ns.items()}
