"""What a trace says happened: jobs, messages and marks with a beginning and an end.

Records are read once. A job lasts from its "start" to its "finish" (to the crash of its
worker or the last record, where there is none), a message from its "send" to the
"deliver" that it caused. Of messages, those that carry arrays are transfers.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any, NamedTuple

from jdag.trace import DETAIL, Record

Window = tuple[int, int]

COMPUTE = ("forward", "backward", "sum")
KINDS = (*COMPUTE, "transfer")

# What is drawn as what: a fill makes the zeros or ones that are summed.
KIND_OF_JOB: Mapping[str, str] = {
    "forward": "forward",
    "vjp": "backward",
    "sum": "sum",
    "fill": "sum",
}
MARKS = ("crash", "drop")

_FAILURE = DETAIL["finish"].index("failure")
_PAYLOAD = DETAIL["send"].index("payload_bytes")


class Span(NamedTuple):
    """Something that took from `start_ns` to `end_ns` of virtual time on a worker.

    `kind` is one of `KINDS`. A transfer is on the worker where it arrived.
    """

    start_ns: int
    end_ns: int
    kind: str
    label: str
    worker: str


class Job(NamedTuple):
    """One job of a device."""

    start_ns: int
    end_ns: int
    worker: str
    job: str  # A key of KIND_OF_JOB.
    context: str
    number: int  # Of the pass, 0 for none.
    path: tuple[int, ...]
    function: str
    failure: str

    @property
    def span(self) -> Span:
        """The job as it is drawn."""
        kind = KIND_OF_JOB[self.job]
        name = short_name(self.function)
        return Span(self.start_ns, self.end_ns, kind, name, self.worker)


class Message(NamedTuple):
    """One message; `arrived_ns` None: it was never handed on."""

    sent_ns: int
    arrived_ns: int | None
    source: str
    destination: str
    message: str
    context: str
    number: int
    path: tuple[int, ...]
    payload_bytes: int
    wire_bytes: int


class Mark(NamedTuple):
    """Something that happened at once: `kind` is one of `MARKS`."""

    time_ns: int
    kind: str
    worker: str
    why: str


@dataclass(slots=True)
class History:
    """All jobs, messages and marks of a run, in the order in which they began."""

    jobs: list[Job] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    marks: list[Mark] = field(default_factory=list)
    records: int = 0
    end_ns: int = 0

    def spans(self) -> list[Span]:
        """Jobs and transfers, as they are drawn."""
        return [*(job.span for job in self.jobs), *self._transfers()]

    def _transfers(self) -> Iterator[Span]:
        for one in self.messages:
            if one.payload_bytes and one.arrived_ns is not None:
                label = f"{one.message} from {one.source}"
                at = one.sent_ns, one.arrived_ns
                yield Span(*at, "transfer", label, one.destination)

    def within(self, window: Window) -> "History":
        """What of it overlaps or touches this window."""
        start_ns, end_ns = window
        jobs = [j for j in self.jobs if j.end_ns >= start_ns and j.start_ns <= end_ns]
        messages = [
            m
            for m in self.messages
            if m.sent_ns <= end_ns
            and (m.sent_ns if m.arrived_ns is None else m.arrived_ns) >= start_ns
        ]
        marks = [m for m in self.marks if start_ns <= m.time_ns <= end_ns]
        return History(jobs, messages, marks, self.records, self.end_ns)


def short_name(function: str) -> str:
    """Return the last part of a function's name: of "pkg.mod:f" it is "f"."""
    return function.rpartition(":")[2].rpartition(".")[2]


def dotted(path: tuple[int, ...]) -> str:
    """Return a path as it is written: 3.1."""
    return ".".join(map(str, path))


def history(records: Iterable[Record]) -> History:
    """Read a trace, or the records of one, in order."""
    begun: dict[int, tuple[int, str, tuple[Any, ...]]] = {}
    ended: dict[int, tuple[int, str]] = {}
    sent: dict[int, tuple[int, str, tuple[Any, ...]]] = {}
    arrived: dict[int, int] = {}
    crashed: dict[str, int] = {}
    read = History()
    for record in records:
        kind, detail = record.kind, record.detail
        read.records += 1
        read.end_ns = record.time_ns
        if kind == "send":
            sent[record.index] = record.time_ns, record.worker, detail
        elif kind == "deliver":
            arrived[record.causes[0]] = record.time_ns
        elif kind == "start":
            begun[record.index] = record.time_ns, record.worker, detail
        elif kind == "finish":
            ended[record.causes[0]] = record.time_ns, detail[_FAILURE]
        elif kind in MARKS:
            read.marks.append(Mark(record.time_ns, kind, record.worker, detail[-1]))
            if kind == "crash":
                crashed.setdefault(record.worker, record.time_ns)
    for index, (time_ns, worker, detail) in begun.items():
        cut_ns = crashed.get(worker, read.end_ns)
        end_ns, failure = ended.get(index, (cut_ns, ""))
        read.jobs.append(Job(time_ns, end_ns, worker, *detail[:5], failure))
    for index, (time_ns, source, detail) in sent.items():
        at_ns, said = arrived.get(index), detail[: _PAYLOAD + 2]
        destination, *rest = said
        read.messages.append(Message(time_ns, at_ns, source, destination, *rest))
    return read


def spans(records: Iterable[Record]) -> list[Span]:
    """Return what was computed and transferred, when and where.

    Jobs come first, each kind in the order of the trace. Jobs that take no time are
    there too.
    """
    return history(records).spans()


def bubble(
    spans: Iterable[Span], workers: Sequence[str], window: Window
) -> dict[str, Fraction]:
    """Return for each worker 1 - busy time / length of the window, exactly.

    Busy is a worker that computes; transfers do not count. In a window of no length
    nobody is idle: 0.
    """
    start_ns, end_ns = window
    length_ns = end_ns - start_ns
    busy_ns = dict.fromkeys(workers, 0)
    for span in spans:
        if span.kind != "transfer" and span.worker in busy_ns:
            part_ns = min(span.end_ns, end_ns) - max(span.start_ns, start_ns)
            busy_ns[span.worker] += max(part_ns, 0)
    if length_ns <= 0:
        return dict.fromkeys(workers, Fraction(0))
    return {w: 1 - Fraction(ns, length_ns) for w, ns in busy_ns.items()}
