"""Export of a run in Perfetto's own format, TrackEvent packets, with exact times.

Each worker is a process with three kinds of tracks. The first is its device. The second
is a queue to each other worker, with a slice for each message from send to delivery.
The third is its inbox, with a slice of 1 ns for each message. An arrow (flow) joins the
two slices of a message. Slices of a Perfetto track must nest, so overlapping slices are
on additional tracks ("lanes") with the same name. A message that did not arrive is an
instant event. Times are nanoseconds.

A flow cannot join a slice of duration 0, so a slice lasts at least 1 ns. Its annotation
`duration_ns` has the exact duration. Causes other than messages are not represented.

Source: Perfetto, protos/perfetto/trace (trace_packet, track_descriptor, track_event).
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from jdag.context.graph import dotted
from jdag.report.operations import Operation
from jdag.report.protobuf import fixed64, nested, number
from jdag.report.spans import SpanMark

_BEGIN, _END, _INSTANT = 1, 2, 3
_SEQUENCE = 1
_BY_NAME = 1  # The tracks of a worker are sorted by name.
_Event = tuple[int, int, bytes]  # (time, rank among the events of that time, packet).


class _Tracks:
    """The tracks of all workers. A track's id is its index in `packets` plus 1."""

    def __init__(self, workers: Sequence[str]) -> None:
        self.packets: list[bytes] = []
        self._ends: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._processes: dict[str, int] = {}
        for pid, worker in enumerate(workers, 1):
            process = nested(3, number(1, pid) + nested(6, worker))
            self._processes[worker] = self._add(process + number(11, _BY_NAME))

    def lane(self, worker: str, name: str, start_ns: int, end_ns: int) -> int:
        lanes = self._ends.setdefault((worker, name), [])
        for index, (track, free_ns) in enumerate(lanes):
            if free_ns <= start_ns:
                lanes[index] = track, end_ns
                return track
        title = name if not lanes else f"{name}, lane {len(lanes) + 1}"
        parent = number(5, self._processes[worker])
        lanes.append((self._add(nested(2, title) + parent), end_ns))
        return lanes[-1][0]

    def _add(self, fields: bytes) -> int:
        track = len(self.packets) + 1
        self.packets.append(_packet(nested(60, number(1, track) + fields)))
        return track


def track_events(
    operations: Iterable[Operation],
    marks: Iterable[SpanMark],
    workers: Sequence[str],
) -> bytes:
    tracks = _Tracks(workers)
    events: list[_Event] = []
    for operation in sorted(operations, key=lambda each: each.start_ns):
        events += _events_of(tracks, operation)
    for mark in marks:
        track = tracks.lane(mark.worker, "network", mark.at_ns, mark.at_ns)
        fields = nested(23, mark.kind) + _annotation("peer", mark.peer)
        events.append((mark.at_ns, 1, _event(mark.at_ns, _INSTANT, track, fields)))
    # At equal times, slices end before others begin, and sends come before receives.
    events.sort(key=lambda event: event[:2])
    return b"".join([*tracks.packets, *[packet for *_, packet in events]])


def _events_of(tracks: _Tracks, operation: Operation) -> list[_Event]:
    kind, worker, peer = operation.kind, operation.worker, operation.peer
    lane, suffix = {
        "send": (f"queue to {peer}", f" to {peer}"),
        "recv": ("inbox", f" from {peer}"),
    }.get(kind, ("device", ""))
    name = operation.name.rpartition(":")[2] + suffix
    fields = nested(22, kind) + nested(23, name) + _annotations(operation)
    start_ns = operation.start_ns
    if operation.end_ns < 0:
        track = tracks.lane(worker, lane, start_ns, start_ns)
        return [(start_ns, 1, _event(start_ns, _INSTANT, track, fields))]
    end_ns = max(operation.end_ns, start_ns + 1)
    track = tracks.lane(worker, lane, start_ns, end_ns)
    if operation.pair >= 0:
        fields += fixed64(47 if kind == "send" else 48, operation.pair + 1)
    rank = 2 if kind == "recv" else 1
    return [
        (start_ns, rank, _event(start_ns, _BEGIN, track, fields)),
        (end_ns, 0, _event(end_ns, _END, track, b"")),
    ]


def _annotations(operation: Operation) -> bytes:
    values: dict[str, int | str] = {
        "id": operation.id,
        "function" if operation.pair < 0 else "message": operation.name,
        "context": operation.context,
        "pass": operation.number,
        "path": dotted(operation.path),
    }
    if operation.end_ns >= 0:
        values["duration_ns"] = operation.end_ns - operation.start_ns
    if operation.pair >= 0:
        values["payload_bytes"] = operation.payload_bytes
        values["wire_bytes"] = operation.wire_bytes
    return b"".join(_annotation(name, value) for name, value in values.items())


@lru_cache(1 << 14)
def _annotation(name: str, value: int | str) -> bytes:
    data = nested(6, value) if isinstance(value, str) else number(3, value)
    return nested(4, nested(10, name) + data)


def _event(at_ns: int, kind: int, track: int, fields: bytes) -> bytes:
    event = nested(11, number(9, kind) + number(11, track) + fields)
    return _packet(number(8, at_ns) + event)


def _packet(fields: bytes) -> bytes:
    return nested(1, fields + number(10, _SEQUENCE))
