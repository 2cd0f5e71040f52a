"""The traces of several processes as one, in the time of the main one.

Inputs:  of each worker a `TracePart`: rows by its own clock, and samples of that clock.
Outputs: `merged`: a `Trace` whose causes cross workers, ordered by time.
Invariants: a record comes after its causes, also where the clocks say otherwise: the
    times of two workers compare only within the `error_ns` of both. The records of a
    worker keep their times relative to each other, but for the drift of its clock.

In a part a cause is the index of a row of that part. The cause of a "deliver" is a
number instead: how many messages that sender had sent to this worker, with that one.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jdag.runtime.trace import Trace

_UNSEEN, _BEGUN = -2, -1  # A record without an index in the whole yet.


class Sample(NamedTuple):
    """At `own_ns` of a clock, main's was ahead by `offset_ns`, give or take an error.

    Source: the exchange of NTP (RFC 5905, section 8): the answer is assumed to be of
    the middle between asking and hearing it, and cannot be off by more than half.
    """

    own_ns: int
    offset_ns: int
    error_ns: int


def sampled(asked_ns: int, own_ns: int, heard_ns: int) -> Sample:
    """Return what an exchange says of a clock that showed `own_ns` within it."""
    trip_ns = heard_ns - asked_ns
    return Sample(own_ns, asked_ns + trip_ns // 2 - own_ns, -(-trip_ns // 2))


@dataclass(slots=True)
class TracePart:
    """What one worker has recorded: (time_ns, kind, worker, detail, causes) each.

    `missing` is why rows, or all after these, are not there. A clock that was sampled
    at two times is taken to drift evenly from one to the other.
    """

    worker: str
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    clock: list[Sample] = field(default_factory=lambda: [Sample(0, 0, 0)])
    missing: str = ""

    def at(self, own_ns: int) -> int:
        """Return a time of this worker's clock in that of main."""
        first, last = self.clock[0], self.clock[-1]
        offset_ns, span_ns = first.offset_ns, last.own_ns - first.own_ns
        if span_ns > 0:
            drift_ns = last.offset_ns - first.offset_ns
            offset_ns += drift_ns * (own_ns - first.own_ns) // span_ns
        return own_ns + offset_ns

    @property
    def error_ns(self) -> int:
        """How far off its times are at most, if its clock drifts evenly."""
        return max([sample.error_ns for sample in self.clock])


def merged(parts: Sequence[TracePart]) -> Trace:
    """Return the trace of all parts.

    A "deliver" whose "send" is in no part has no cause. A worker whose part is missing
    gets a "crash" before the first record of its loss. The settings of the trace have
    `clocks`, with the offset and error of each worker's clock, and `missing`.
    """
    return _Merge(parts).trace


class _Merge:
    def __init__(self, parts: Sequence[TracePart]) -> None:
        self._parts = parts
        self._place = [[_UNSEEN] * len(part.rows) for part in parts]
        self._sent: dict[tuple[str, str, int], tuple[int, int]] = {}
        self._missing = {part.worker: part.missing for part in parts if part.missing}
        self.trace = Trace()
        self.trace.settings = {
            "driver": "rpc",
            "clocks": {part.worker: _said(part) for part in parts},
            "missing": dict(self._missing),
        }
        order: list[tuple[int, int, int]] = []
        for number, part in enumerate(parts):
            counts: Counter[str] = Counter()
            for row, (time_ns, kind, _, detail, _) in enumerate(part.rows):
                order.append((part.at(time_ns), number, row))
                if kind == "send":
                    counts[detail[0]] += 1
                    link = part.worker, detail[0], counts[detail[0]]
                    self._sent[link] = number, row
        for _, number, row in sorted(order):
            self._add((number, row))

    def _add(self, record: tuple[int, int]) -> None:
        """Add a record after its causes, unless it is there."""
        place, waiting = self._place, [record]
        while waiting:
            number, row = waiting[-1]
            causes = self._causes(number, row)
            ahead = [one for one in causes if place[one[0]][one[1]] == _UNSEEN]
            if place[number][row] == _UNSEEN and ahead:
                place[number][row] = _BEGUN
                waiting += ahead
                continue
            waiting.pop()
            if place[number][row] < 0:
                place[number][row] = self._put(number, row, causes)

    def _causes(self, number: int, row: int) -> list[tuple[int, int]]:
        _, kind, worker, detail, causes = self._parts[number].rows[row]
        if kind != "deliver":
            return [(number, cause) for cause in causes]
        links = [(detail[0], worker, cause) for cause in causes]
        return [self._sent[link] for link in links if link in self._sent]

    def _put(self, number: int, row: int, causes: Sequence[tuple[int, int]]) -> int:
        part, place = self._parts[number], self._place
        time_ns, kind, worker, detail, _ = part.rows[row]
        at_ns = part.at(time_ns)
        if kind == "lost" and (why := self._missing.pop(detail[0], "")):
            said = f"{why}; its part of the trace is missing"
            self.trace.add(at_ns, "crash", detail[0], (said,), ())
        before = [place[one[0]][one[1]] for one in causes]
        there = tuple([index for index in before if index >= 0])
        return self.trace.add(at_ns, kind, worker, detail, there)


def _said(part: TracePart) -> Mapping[str, int]:
    offset_ns = part.at(part.clock[-1].own_ns) - part.clock[-1].own_ns
    return {"offset_ns": offset_ns, "error_ns": part.error_ns}
