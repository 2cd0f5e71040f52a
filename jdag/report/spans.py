"""Time in a trace: when each job ran, and when each message was in flight.

Jobs and transfers are operations (`jdag.report.operations`), in order of start time; a
transfer is a send whose message was handed on.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from jdag.report.operations import Operation, operations_of
from jdag.runtime.trace import Trace

Window = tuple[int, int]  # From when to when, nanoseconds.


class SpanMark(NamedTuple):
    """An event without duration: a drop, a resend, a duplicate, a crash, a loss."""

    worker: str
    kind: str
    peer: str
    at_ns: int


_MARKS = ("drop", "resend", "duplicate", "crash", "lost")


@dataclass(frozen=True, slots=True)
class Spans:
    """The jobs, transfers and marks of a run, or of a part of it."""

    jobs: tuple[Operation, ...]
    transfers: tuple[Operation, ...]
    marks: tuple[SpanMark, ...]

    def within(self, window_ns: Window) -> "Spans":
        """Return the part that overlaps or touches a window of time."""
        first_ns, last_ns = window_ns

        def overlaps(span: Operation) -> bool:
            return span.end_ns >= first_ns and span.start_ns <= last_ns

        return Spans(
            tuple(job for job in self.jobs if overlaps(job)),
            tuple(one for one in self.transfers if overlaps(one)),
            tuple(mark for mark in self.marks if first_ns <= mark.at_ns <= last_ns),
        )


def spans_of(trace: Trace) -> Spans:
    """Return the jobs, transfers and marks of a trace."""
    jobs: list[Operation] = []
    transfers: list[Operation] = []
    for one in sorted(operations_of(trace), key=lambda one: one.start_ns):
        if one.pair < 0:
            jobs.append(one)
        elif one.kind == "send" and one.end_ns >= 0:
            transfers.append(one)
    marks: list[SpanMark] = []
    for record in trace:
        if record.kind in _MARKS:
            said = record.named
            peer = said.get("peer", said.get("destination", ""))
            marks.append(SpanMark(record.worker, record.kind, peer, record.time_ns))
    return Spans(tuple(jobs), tuple(transfers), tuple(marks))


def bubble(
    jobs: Iterable[Operation], workers: Sequence[str], window: Window
) -> dict[str, Fraction]:
    """Return for each worker 1 - busy time / length of the window, exactly.

    A worker is busy while it computes: jobs, in order of their starts, that run at one
    time count once. The bubble of an empty window is 0.
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
