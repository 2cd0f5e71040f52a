"""Time in a trace: when each job ran, and when each message was in flight.

Jobs and transfers are in order of start time. A job without an end in the trace ends
when its worker crashed, or with the last record; undelivered messages are left out.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from jdag.runtime.trace import Record

Window = tuple[int, int]  # From when to when, nanoseconds.
# What is none of these is for a sum.
_DRAWN_AS = {
    **{"vjp": "backward", "vjpinputs": "input_grad", "vjpweights": "weight_grad"},
    **{"apply": "hook", "runsegment": "segment"},
}


class Job(NamedTuple):
    """A job on the device of a worker; `kind` is the name of its class."""

    worker: str
    kind: str
    function: str
    context: str
    number: int  # Of the pass, 0 in forward.
    path: tuple[int, ...]
    start_ns: int
    end_ns: int
    action: str = ""  # Of a pipeline, such as 0F3.

    @property
    def drawn_as(self) -> str:
        """What it is for: one of the kinds of `jdag.report.timeline`.

        A forward outside of contexts makes new versions of leaves; what makes zeros or
        ones makes them for a sum.
        """
        if self.kind == "forward":
            return "forward" if self.context else "update"
        return _DRAWN_AS.get(self.kind, "sum")


class Transfer(NamedTuple):
    """A message on its way: from its sending till it was handed on."""

    worker: str
    destination: str
    message: str
    context: str
    number: int
    path: tuple[int, ...]
    payload_bytes: int
    wire_bytes: int
    start_ns: int
    end_ns: int


class SpanMark(NamedTuple):
    """An event without duration: a drop, a resend, a duplicate, a crash, a loss."""

    worker: str
    kind: str
    peer: str
    at_ns: int


MARKS = ("drop", "resend", "duplicate", "crash", "lost")


@dataclass(frozen=True, slots=True)
class Spans:
    """The jobs, transfers and marks of a run, or of a part of it."""

    jobs: tuple[Job, ...]
    transfers: tuple[Transfer, ...]
    marks: tuple[SpanMark, ...]

    def within(self, window_ns: Window) -> "Spans":
        """Return the part that overlaps or touches a window of time."""
        first_ns, last_ns = window_ns

        def overlaps(span: Job | Transfer) -> bool:
            return span.end_ns >= first_ns and span.start_ns <= last_ns

        return Spans(
            tuple(job for job in self.jobs if overlaps(job)),
            tuple(one for one in self.transfers if overlaps(one)),
            tuple(mark for mark in self.marks if first_ns <= mark.at_ns <= last_ns),
        )


def spans_of(records: Iterable[Record]) -> Spans:
    """Pair the starts and ends of jobs and transfers in a trace."""
    began: dict[int, Record] = {}
    crashed: dict[str, int] = {}
    jobs: list[Job] = []
    transfers: list[Transfer] = []
    marks: list[SpanMark] = []
    last_ns = 0
    for record in records:
        last_ns = record.time_ns
        match record.kind:
            case "start" | "send":
                began[record.index] = record
            case "finish":
                jobs.append(_job(began.pop(record.causes[0]), record.time_ns))
            case "deliver":
                # Of processes it may be missing, and their clocks differ a little.
                if record.causes:
                    sent = began.pop(record.causes[0])
                    end_ns = max(sent.time_ns, record.time_ns)
                    transfers.append(_transfer(sent, end_ns))
            case kind if kind in MARKS:
                said = record.named
                peer = said.get("peer", said.get("destination", ""))
                marks.append(SpanMark(record.worker, kind, peer, record.time_ns))
                if kind == "crash":
                    crashed[record.worker] = record.time_ns
    for record in began.values():
        if record.kind == "start":
            jobs.append(_job(record, crashed.get(record.worker, last_ns)))
    jobs.sort(key=lambda job: job.start_ns)
    transfers.sort(key=lambda one: one.start_ns)
    return Spans(tuple(jobs), tuple(transfers), tuple(marks))


def _job(start: Record, end_ns: int) -> Job:
    # The detail as it lies, for there may be hundreds of thousands: DETAIL["start"].
    context, number, path, function, action = start.detail[1:6]
    at = start.time_ns, end_ns, action
    return Job(start.worker, start.detail[0], function, context, number, path, *at)


def _transfer(send: Record, end_ns: int) -> Transfer:
    # The same: DETAIL["send"], which has the fields of a Transfer in their order.
    return Transfer._make((send.worker, *send.detail[:7], send.time_ns, end_ns))


def bubble(
    jobs: Iterable[Job], workers: Sequence[str], window: Window
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
