"""The ordered record of a run: events with their time, worker and causes.

A driver calls `add(...)`, which returns an index; later events name their causes by
index. A detail consists of int, str, bool, None, and tuples of these that are nested at
most two deep, so files round-trip. The digest covers every bit: equal digests mean
equal runs. All but the newest events are stored as bytes, many to a pack, which cost
the garbage collector nothing; tuples took a third of the time of a long run.

Invariants: indices count from 0 without a gap; causes have smaller indices.

`DETAIL` lists the fields of each kind's detail, in order:

- path and number (of the pass, 0 for none) place an event in the program, context is
  `owner.counter`;
- `fingerprints` has one number per value sent, `payload_bytes` the size of these
  values, `wire_bytes` the size with all headers;
- `by` is the origin of a duplicate: a "fault" sent it, or the "link" dropped it.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

from msgspec.msgpack import Decoder

from jdag.errors import JdagError
from jdag.wire.encoding import encoded

_Row = tuple[int, str, str, tuple[Any, ...], tuple[int, ...]]

_Part = int | str | bool | None
_Parts = tuple[_Part | tuple[_Part | tuple[_Part, ...], ...], ...]
_decode = Decoder(list[tuple[int, str, str, _Parts, tuple[int, ...]]]).decode
_read = lru_cache(2)(_decode)  # Records are read in order.
_PACK = 64  # Number of rows in a pack, which is a list of msgpack.
_HEADER_BYTES = 3  # The length of that list.

_PLACE = ("context", "number", "path")
_JOB = ("job", *_PLACE, "function", "action", "cost_ns")

DETAIL: Mapping[str, tuple[str, ...]] = {
    # A program issued an event to its engine.
    "issue": ("event", *_PLACE),
    # A message was sent; it was delivered, once and in order, at its destination.
    "send": (
        *("destination", "message", *_PLACE),
        *("payload_bytes", "wire_bytes", "fingerprints"),
    ),
    "deliver": ("source", "message", *_PLACE),
    # A frame was sent again, or carries only an acknowledgement.
    "resend": ("destination", "message", *_PLACE, "wire_bytes"),
    "ack": ("destination", "wire_bytes"),
    # A frame was lost, delayed, or duplicated (or dropped as a duplicate).
    "drop": ("peer", "why"),
    "delay": ("peer", "delay_ns"),
    "duplicate": ("peer", "by"),
    # A job on a device. `action`, such as 0F3, is set for tagged calls; `failure` is
    # the name of an error.
    "start": _JOB,
    "finish": (*_JOB, "failure"),
    # A worker crashed, a peer noticed, the worker joined again, a peer noticed.
    "crash": ("why",),
    "lost": ("peer",),
    "restart": ("incarnation",),
    "joined": ("peer",),
    # A program began, or was resumed.
    "spawn": (*_PLACE, "function"),
    "resume": ("waiter", "event"),
}


@dataclass(frozen=True, slots=True)
class TraceRecord:
    """One event of a trace.

    `causes` are the indices of the events that it waited for: data (the producers of
    the values that it reads, and the message that requested it), device (the previous
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
        """The detail as a dict whose keys are the names in `DETAIL`."""
        return dict(zip(DETAIL[self.kind], self.detail, strict=True))


# note(kind, worker, detail, causes) -> the record's index.
Note = Callable[[str, str, tuple[Any, ...], tuple[int, ...]], int]

FIELDS = tuple(field.name for field in fields(TraceRecord))


class Trace:
    """The records of one run, in order. Indexing and iteration give `TraceRecord`s."""

    __slots__ = ("_hash", "_hashed", "_packs", "_rows", "settings")

    def __init__(self) -> None:
        self._packs: list[bytes] = []
        self._rows: list[_Row] = []  # The newest, fewer than a pack.
        self._hash = hashlib.sha256()
        self._hashed = 0  # The number of packs in the hash.
        # The run's settings that re-timing needs, as JSON data. Not in the digest.
        self.settings: dict[str, Any] = {}

    def add(
        self,
        time_ns: int,
        kind: str,
        worker: str,
        detail: tuple[Any, ...],
        causes: tuple[int, ...],
    ) -> int:
        """Append an event, and return its index.

        Raises:
            ProtocolError: the detail holds an unsupported type.
        """
        row = (time_ns, kind, worker, detail, causes)
        encoded(row)
        self._rows.append(row)
        self._pack()
        return len(self) - 1

    def at(self, clock: Any) -> Note:
        """Return `add` for a driver, with the time `now_ns` of its clock."""
        rows, packs, pack = self._rows, self._packs, self._pack
        append = rows.append

        def note(
            kind: str, worker: str, detail: tuple[Any, ...], causes: tuple[int, ...]
        ) -> int:
            append((clock.now_ns, kind, worker, detail, causes))
            if len(rows) >= _PACK:
                pack()
            return len(packs) * _PACK + len(rows) - 1

        return note

    def _pack(self) -> None:
        while len(self._rows) >= _PACK:
            pack = encoded(tuple(self._rows[:_PACK]))
            try:
                self._packs.append(pack)
            finally:  # Also if Ctrl-C comes here.
                del self._rows[:_PACK]

    def _read(self, number: int) -> Sequence[_Row]:
        """Return the rows of a pack. The last may be incomplete."""
        is_full = number < len(self._packs)
        return _read(self._packs[number] if is_full else encoded(tuple(self._rows)))

    def __len__(self) -> int:
        return len(self._packs) * _PACK + len(self._rows)

    def __getitem__(self, index: int) -> TraceRecord:
        place = range(len(self))[index]
        return TraceRecord(place, *self._read(place // _PACK)[place % _PACK])

    def __iter__(self) -> Iterator[TraceRecord]:
        for start in range(0, len(self), _PACK):
            for index, row in enumerate(self._read(start // _PACK), start):
                yield TraceRecord(index, *row)

    def of_kind(self, *kinds: str) -> Iterator[TraceRecord]:
        return (record for record in self if record.kind in kinds)

    @property
    def digest(self) -> str:
        """The SHA-256 of all records so far, in hexadecimal. Computed on access."""
        for pack in self._packs[self._hashed :]:
            self._hash.update(pack[_HEADER_BYTES:])
        self._hashed = len(self._packs)
        digest = self._hash.copy()
        digest.update(b"".join(map(encoded, self._rows)))
        return digest.hexdigest()

    def write(self, path: str | Path) -> None:
        """Write one JSON object per line, with the fields of `TraceRecord`.

        The settings, if there are any, are the first line.

        Raises:
            OSError: the file cannot be written.
        """
        with Path(path).open("w", encoding="utf-8") as file:
            if self.settings:
                head = {"settings": self.settings}
                file.write(json.dumps(head, separators=(",", ":")) + "\n")
            for record in self:
                fields = {name: getattr(record, name) for name in FIELDS}
                file.write(json.dumps(fields, separators=(",", ":")) + "\n")


def read_trace(path: str | Path) -> Trace:
    """Read a file written by `Trace.write`. Records and digest are the same.

    Raises:
        JdagError: a line is not a record, or its index is wrong.
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
                    f"{path}, line {number} is not a trace record: {error!s};"
                    f" each line is a JSON object with {', '.join(FIELDS)}"
                ) from error
    return trace


def _row(line: str, index: int) -> _Row:
    fields = json.loads(line)
    if fields["index"] != index:
        raise ValueError(f"the index is {fields['index']}, expected {index}")
    row = row_of(*[fields[name] for name in FIELDS[1:]])
    if not all(type(cause) is int and 0 <= cause < index for cause in row[4]):
        raise ValueError(
            f"the causes are {row[4]}, expected smaller indices than {index}"
        )
    return row


def row_of(time_ns: Any, kind: Any, worker: Any, detail: Any, causes: Any) -> _Row:
    if kind not in DETAIL:
        raise ValueError(f"unknown kind {kind!r}")
    detail = _tupled(detail)
    if len(detail) != len(DETAIL[kind]):
        raise ValueError(
            f"the detail of {kind} has {len(detail)} parts: "
            f"expected {len(DETAIL[kind])}"
        )
    return time_ns, kind, worker, detail, _tupled(causes)


def _tupled(value: Any) -> Any:
    return tuple(map(_tupled, value)) if isinstance(value, list) else value
