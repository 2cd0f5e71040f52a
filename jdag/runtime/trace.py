"""The ordered record of a run: what happened when and where, and what it waited for.

A driver calls `add(...)`, which returns the index by which later events name this one
as a cause. A detail consists of int, str, bool, None and, two deep, tuples of these, so
files round-trip, and the digest covers every bit: equal digests, equal runs. Events are
kept as bytes, which cost the garbage collector nothing; with tuples it took a third of
the time of a long run.

Invariants: indices count from 0 without a gap; causes point backwards.

`DETAIL` lists the fields of each kind's detail, in order:

- path and number (of the pass, 0 for none) place an event in the program, context is
  `owner.counter`;
- `fingerprints` has one number a value that travels, `payload_bytes` their bytes,
  `wire_bytes` those with all headers;
- `by` is the origin of a duplicate: a "fault" sent it, or the "link" dropped it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from msgspec.msgpack import Decoder, Encoder

from jdag.errors import JdagError
from jdag.wire.encoding import encoded

_Row = tuple[int, str, str, tuple[Any, ...], tuple[int, ...]]

_Part = int | str | bool | None
_Parts = tuple[_Part | tuple[_Part | tuple[_Part, ...], ...], ...]
_encode = Encoder().encode
_decode = Decoder(tuple[int, str, str, _Parts, tuple[int, ...]]).decode
_CHUNK = 4096

_PLACE = ("context", "number", "path")
_JOB = ("job", *_PLACE, "function", "action", "cost_ns")

DETAIL: Mapping[str, tuple[str, ...]] = {
    # A program told its engine of something.
    "issue": ("event", *_PLACE),
    # A message left; it was handed on, once and in order, where it went.
    "send": (
        *("destination", "message", *_PLACE),
        *("payload_bytes", "wire_bytes", "fingerprints"),
    ),
    "deliver": ("source", "message", *_PLACE),
    # A frame that went again, or carries nothing but an acknowledgement.
    "resend": ("destination", "message", *_PLACE, "wire_bytes"),
    "ack": ("destination", "wire_bytes"),
    # A frame that was lost, late, or came (or was thrown away as having come) again.
    "drop": ("peer", "why"),
    "delay": ("peer", "delay_ns"),
    "duplicate": ("peer", "by"),
    # A job on a device; `action` is such as 0F3 if its call is tagged; `failure` names
    # the error of one that failed.
    "start": _JOB,
    "finish": (*_JOB, "failure"),
    # A worker stopped; another was told so. It joined anew; another was told so.
    "crash": ("why",),
    "lost": ("peer",),
    "restart": ("incarnation",),
    "joined": ("peer",),
    # A program began, or has what it waited for.
    "spawn": (*_PLACE, "function"),
    "resume": ("waiter", "event"),
}


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One event of a trace.

    `causes` are the indices of the events that it waited for: data (the producers of
    the values that it reads, and the message that asked for it), device (the previous
    job, if it waited for that), link (the previous frame, if it queued behind that).
    """

    index: int
    time_ns: int
    kind: str
    worker: str
    detail: tuple[Any, ...]
    causes: tuple[int, ...]

    @property
    def named(self) -> dict[str, Any]:
        """The detail by the names of `DETAIL`."""
        return dict(zip(DETAIL[self.kind], self.detail, strict=True))


# note(kind, worker, detail, causes) -> the record's index.
Note = Callable[[str, str, tuple[Any, ...], tuple[int, ...]], int]

FIELDS = tuple(field.name for field in fields(TraceRecord))


class Trace:
    """The records of one run, in order; indexing and iteration give `TraceRecord`s."""

    __slots__ = ("_hash", "_hashed", "_rows", "settings")

    def __init__(self) -> None:
        self._rows: list[bytes] = []
        self._hash = hashlib.sha256()
        self._hashed = 0  # How many rows the hash has taken in.
        # Of the run, as far as re-timing needs them: data of JSON, not in the digest.
        self.settings: dict[str, Any] = {}

    def add(
        self,
        time_ns: int,
        kind: str,
        worker: str,
        detail: tuple[Any, ...],
        causes: tuple[int, ...],
    ) -> int:
        """Append an event; return its index.

        Raises:
            ProtocolError: the detail holds an unsupported type.
        """
        rows = self._rows
        rows.append(encoded((time_ns, kind, worker, detail, causes)))
        return len(rows) - 1

    def at(self, clock: Any) -> Note:
        """Return `add` for a driver, at the time `now_ns` of its clock."""
        rows = self._rows
        append = rows.append

        def note(
            kind: str, worker: str, detail: tuple[Any, ...], causes: tuple[int, ...]
        ) -> int:
            row = (clock.now_ns, kind, worker, detail, causes)
            try:
                append(_encode(row))
            except ValueError:
                append(encoded(row))  # Text that is not Unicode is escaped.
            return len(rows) - 1

        return note

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> TraceRecord:
        place = range(len(self._rows))[index]
        return TraceRecord(place, *_decode(self._rows[place]))

    def __iter__(self) -> Iterator[TraceRecord]:
        for index, row in enumerate(self._rows):
            yield TraceRecord(index, *_decode(row))

    def of_kind(self, *kinds: str) -> Iterator[TraceRecord]:
        """The records of these kinds, in order."""
        return (record for record in self if record.kind in kinds)

    @property
    def digest(self) -> str:
        """The SHA-256 of all records so far, in hexadecimal; computed on access."""
        rows = self._rows
        for start in range(self._hashed, len(rows), _CHUNK):
            self._hash.update(b"".join(rows[start : start + _CHUNK]))
        self._hashed = len(rows)
        return self._hash.hexdigest()

    def write(self, path: str | Path) -> None:
        """Write one JSON object a line; each has the fields of `TraceRecord`.

        The settings, if there are any, are the first line.

        Raises:
            OSError: the file cannot be written.
        """
        with Path(path).open("w", encoding="utf-8") as file:
            if self.settings:
                head = {"settings": self.settings}
                file.write(json.dumps(head, separators=(",", ":")) + "\n")
            for record in self:
                held = {name: getattr(record, name) for name in FIELDS}
                file.write(json.dumps(held, separators=(",", ":")) + "\n")


def read_trace(path: str | Path) -> Trace:
    """Read what `Trace.write` wrote; it has the same records and the same digest.

    Raises:
        JdagError: a line is no record, or not the next one; names file and line.
        OSError: the file cannot be read.
    """
    trace = Trace()
    with Path(path).open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                if number == 1 and line.startswith('{"settings":'):
                    trace.settings = dict(json.loads(line)["settings"])
                else:
                    trace.add(*_row(line, len(trace)))
            except (ValueError, KeyError, TypeError, RecursionError) as error:
                raise JdagError(
                    f"{path}, line {number}: {error!s} is wrong;"
                    f" a trace has one JSON object a line, with {', '.join(FIELDS)}"
                ) from error
    return trace


def _row(line: str, index: int) -> _Row:
    held = json.loads(line)
    if held["index"] != index:
        raise ValueError(f"index {held['index']} in place of {index}")
    row = row_of(*[held[name] for name in FIELDS[1:]])
    if not all(type(cause) is int and 0 <= cause < index for cause in row[4]):
        raise ValueError(f"causes {row[4]}")
    return row


def row_of(time_ns: Any, kind: Any, worker: Any, detail: Any, causes: Any) -> _Row:
    """Return a row of JSON with tuples in place of lists.

    Raises:
        ValueError: the kind is unknown, or has another detail.
    """
    if kind not in DETAIL:
        raise ValueError(f"kind {kind!r}")
    detail = _tupled(detail)
    if len(detail) != len(DETAIL[kind]):
        raise ValueError(f"a detail of {len(detail)} parts")
    return time_ns, kind, worker, detail, _tupled(causes)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
