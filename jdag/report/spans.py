"""What a trace says of time: which job ran when, and what was on its way when.

Reads the records of `jdag.trace` and nothing else. Jobs and transfers keep the order of
their starts; what began and did not end in the trace (its worker crashed, its frames
were all lost) is left out of both.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from jdag.trace import Record


class Job(NamedTuple):
    """A job on the device of a worker; `kind` is forward, vjp, sum or fill."""

    worker: str
    kind: str
    function: str
    context: str
    number: int  # Of the pass, 0 in forward.
    path: tuple[int, ...]
    start_ns: int
    end_ns: int


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


class Mark(NamedTuple):
    """What happened in no time: a drop, a resend, a duplicate, a crash."""

    worker: str
    kind: str
    peer: str
    at_ns: int


MARKS = ("drop", "resend", "duplicate", "crash", "lost")


@dataclass(frozen=True, slots=True)
class Spans:
    """All that took time in a run, or in a part of it."""

    jobs: tuple[Job, ...]
    transfers: tuple[Transfer, ...]
    marks: tuple[Mark, ...]

    def within(self, window_ns: tuple[int, int]) -> "Spans":
        """What overlaps a window of time, or lies on its edge."""
        first_ns, last_ns = window_ns

        def overlaps(span: Job | Transfer) -> bool:
            return span.end_ns >= first_ns and span.start_ns <= last_ns

        return Spans(
            tuple(job for job in self.jobs if overlaps(job)),
            tuple(one for one in self.transfers if overlaps(one)),
            tuple(mark for mark in self.marks if first_ns <= mark.at_ns <= last_ns),
        )


def spans_of(records: Iterable[Record]) -> Spans:
    """Pair the beginnings and the ends that a trace records."""
    began: dict[int, Record] = {}
    jobs: list[Job] = []
    transfers: list[Transfer] = []
    marks: list[Mark] = []
    for record in records:
        match record.kind:
            case "start" | "send":
                began[record.index] = record
            case "finish":
                jobs.append(_job(began.pop(record.causes[0]), record))
            case "deliver":
                transfers.append(_transfer(began.pop(record.causes[0]), record))
            case kind if kind in MARKS:
                marks.append(_mark(record))
    jobs.sort(key=lambda job: job.start_ns)
    transfers.sort(key=lambda one: one.start_ns)
    return Spans(tuple(jobs), tuple(transfers), tuple(marks))


def _job(start: Record, finish: Record) -> Job:
    said = start.named
    return Job(
        start.worker,
        said["job"],
        said["function"],
        said["context"],
        said["number"],
        said["path"],
        start.time_ns,
        finish.time_ns,
    )


def _transfer(send: Record, deliver: Record) -> Transfer:
    said = send.named
    return Transfer(
        send.worker,
        said["destination"],
        said["message"],
        said["context"],
        said["number"],
        said["path"],
        said["payload_bytes"],
        said["wire_bytes"],
        send.time_ns,
        deliver.time_ns,
    )


def _mark(record: Record) -> Mark:
    said = record.named
    peer = said.get("peer", said.get("destination", ""))
    return Mark(record.worker, record.kind, peer, record.time_ns)
