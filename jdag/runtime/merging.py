"""Merging the traces of several processes into one, in the time of main's clock.

Inputs:  a `TracePart` of each worker: rows by its clock, and samples of that clock.
Outputs: `merged`: a `Trace` whose causes cross workers, ordered by time.
Invariants: a record follows its causes, even against the clocks: times of two workers
    are comparable only within the sum of their `error_ns`. The records of a worker keep
    their relative times, except for the drift of its clock.

In a part a cause is the index of a row of that part. The cause of a "deliver" is a
number instead: the count of messages from that sender to this worker, including this
message. Frames without messages ("Acknowledge") have numbers of their own, from -1 on.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jdag.runtime.trace import Trace

_UNSEEN, _BEGUN = -2, -1  # Records without an index in the merged trace.


class Sample(NamedTuple):
    """At `own_ns` of a clock, main's clock was `offset_ns` ahead, +- `error_ns`.

    Source: the exchange of NTP (RFC 5905, section 8): the answer is assumed to be sent
    midway between request and receipt. The error is at most half of that time.
    """

    own_ns: int
    offset_ns: int
    error_ns: int


def sampled(sent_ns: int, own_ns: int, received_ns: int) -> Sample:
    trip_ns = received_ns - sent_ns
    return Sample(own_ns, sent_ns + trip_ns // 2 - own_ns, -(-trip_ns // 2))


@dataclass(slots=True)
class TracePart:
    """The records of one worker, each a tuple (time_ns, kind, worker, detail, causes).

    `missing` is the reason why rows, or all later rows, are missing. A clock with two
    samples is assumed to drift evenly between them.
    """

    worker: str
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    clock: list[Sample] = field(default_factory=lambda: [Sample(0, 0, 0)])
    missing: str = ""

    def to_main_ns(self, own_ns: int) -> int:
        first, last = self.clock[0], self.clock[-1]
        offset_ns, span_ns = first.offset_ns, last.own_ns - first.own_ns
        if span_ns > 0:
            drift_ns = last.offset_ns - first.offset_ns
            offset_ns += drift_ns * (own_ns - first.own_ns) // span_ns
        return own_ns + offset_ns

    @property
    def error_ns(self) -> int:
        return max([sample.error_ns for sample in self.clock])


def merged(parts: Sequence[TracePart]) -> Trace:
    """Return the trace of all parts.

    A "deliver" without its "send" in any part has no cause. A worker with a missing
    part gets a "crash" before the first record of its loss. The settings of the trace
    have `clocks`, with the offset and error of each worker's clock, and `missing`.
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
            "clocks": {part.worker: _clock_settings(part) for part in parts},
            "missing": dict(self._missing),
        }
        order: list[tuple[int, int, int]] = []
        for number, part in enumerate(parts):
            counts: Counter[tuple[str, bool]] = Counter()
            for row, (time_ns, kind, _, detail, _) in enumerate(part.rows):
                order.append((part.to_main_ns(time_ns), number, row))
                if kind == "send":
                    kind_of = detail[0], detail[1] == "Acknowledge"
                    counts[kind_of] += 1
                    sent = -counts[kind_of] if kind_of[1] else counts[kind_of]
                    self._sent[part.worker, detail[0], sent] = number, row
        for _, number, row in sorted(order):
            self._add((number, row))

    def _add(self, record: tuple[int, int]) -> None:
        place, pending = self._place, [record]
        while pending:
            number, row = pending[-1]
            causes = self._causes(number, row)
            ahead = [(n, r) for n, r in causes if place[n][r] == _UNSEEN]
            if place[number][row] == _UNSEEN and ahead:
                place[number][row] = _BEGUN
                pending += ahead
                continue
            pending.pop()
            if place[number][row] < 0:
                place[number][row] = self._append(number, row, causes)

    def _causes(self, number: int, row: int) -> list[tuple[int, int]]:
        _, kind, worker, detail, causes = self._parts[number].rows[row]
        if kind != "deliver":
            return [(number, cause) for cause in causes]
        links = [(detail[0], worker, cause) for cause in causes]
        return [self._sent[link] for link in links if link in self._sent]

    def _append(self, number: int, row: int, causes: Sequence[tuple[int, int]]) -> int:
        part, place = self._parts[number], self._place
        time_ns, kind, worker, detail, _ = part.rows[row]
        main_ns = part.to_main_ns(time_ns)
        if kind == "lost" and (why := self._missing.pop(detail[0], "")):
            text = f"{why}; its part of the trace is missing"
            self.trace.add(main_ns, "crash", detail[0], (text,), ())
        indices = [place[n][r] for n, r in causes]
        added = tuple([index for index in indices if index >= 0])
        return self.trace.add(main_ns, kind, worker, detail, added)


def _clock_settings(part: TracePart) -> Mapping[str, int]:
    offset_ns = part.to_main_ns(part.clock[-1].own_ns) - part.clock[-1].own_ns
    return {"offset_ns": offset_ns, "error_ns": part.error_ns}
