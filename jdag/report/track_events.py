"""A run as Perfetto's own format, TrackEvent packets: exact and whole.

A worker is a process. Its tracks are its device, the queue to each other worker, with
a slice from the sending of a message till it was handed on, and its inbox, with a slice
of 1 ns for each message. An arrow joins the two slices of a message. Slices of a track
nest, so what overlaps lies on further lanes of the same name. Times are nanoseconds.

Source: Perfetto, protos/perfetto/trace (trace_packet, track_descriptor, track_event).

TrackEvent cannot say: causes other than messages; and a duration of 0 that an arrow may
join, so a slice has at least 1 ns, and its annotation `duration_ns` the exact length. A
message that did not arrive is an instant.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from jdag.context.graph import dotted
from jdag.report.operations import Operation
from jdag.report.protobuf import fixed64, nested, number
from jdag.report.spans import SpanMark

_BEGIN, _END, _INSTANT = 1, 2, 3
_SEQUENCE = 1
_BY_NAME = 1  # The order of a worker's tracks.
_Event = tuple[int, int, bytes]  # Time, rank among those of one time, packet.


class _Tracks:
    """The tracks of all workers; a track's number is its place, from 1."""

    def __init__(self, workers: Sequence[str]) -> None:
        self.packets: list[bytes] = []
        self._ends: dict[tuple[str, str], list[tuple[int, int]]] = {}
        self._processes: dict[str, int] = {}
        for pid, worker in enumerate(workers, 1):
            process = nested(3, number(1, pid) + nested(6, worker))
            self._processes[worker] = self._described(process + number(11, _BY_NAME))

    def lane(self, worker: str, name: str, start_ns: int, end_ns: int) -> int:
        """Return the first lane of this name that is free at a time; take it."""
        lanes = self._ends.setdefault((worker, name), [])
        for place, (track, free_ns) in enumerate(lanes):
            if free_ns <= start_ns:
                lanes[place] = track, end_ns
                return track
        said = name if not lanes else f"{name}, lane {len(lanes) + 1}"
        parent = number(5, self._processes[worker])
        lanes.append((self._described(nested(2, said) + parent), end_ns))
        return lanes[-1][0]

    def _described(self, fields: bytes) -> int:
        track = len(self.packets) + 1
        self.packets.append(_packet(nested(60, number(1, track) + fields)))
        return track


def track_events(
    operations: Iterable[Operation],
    marks: Iterable[SpanMark],
    workers: Sequence[str],
) -> bytes:
    """Return the file of all operations and marks of these workers."""
    tracks = _Tracks(workers)
    events: list[_Event] = []
    for one in sorted(operations, key=lambda one: one.start_ns):
        events += _of_operation(tracks, one)
    for mark in marks:
        track = tracks.lane(mark.worker, "network", mark.at_ns, mark.at_ns)
        fields = nested(23, mark.kind) + _annotation("peer", mark.peer)
        events.append((mark.at_ns, 1, _event(mark.at_ns, _INSTANT, track, fields)))
    # At one time slices end first, then others begin, sends before receives.
    events.sort(key=lambda event: event[:2])
    return b"".join([*tracks.packets, *[packet for *_, packet in events]])


def _of_operation(tracks: _Tracks, one: Operation) -> list[_Event]:
    names = {"send": f"queue to {one.peer}", "recv": "inbox"}
    ways = {"send": f" to {one.peer}", "recv": f" from {one.peer}"}
    lane = names.get(one.kind, "device")
    name = one.name.rpartition(":")[2] + ways.get(one.kind, "")
    fields = nested(22, one.kind) + nested(23, name) + _said(one)
    start_ns = one.start_ns
    if one.end_ns < 0:
        track = tracks.lane(one.worker, lane, start_ns, start_ns)
        return [(start_ns, 1, _event(start_ns, _INSTANT, track, fields))]
    end_ns = max(one.end_ns, start_ns + 1)
    track = tracks.lane(one.worker, lane, start_ns, end_ns)
    if one.pair >= 0:
        fields += fixed64(47 if one.kind == "send" else 48, one.pair + 1)
    rank = 2 if one.kind == "recv" else 1
    return [
        (start_ns, rank, _event(start_ns, _BEGIN, track, fields)),
        (end_ns, 0, _event(end_ns, _END, track, b"")),
    ]


def _said(one: Operation) -> bytes:
    said: dict[str, int | str] = {
        "id": one.id,
        "function" if one.pair < 0 else "message": one.name,
        "context": one.context,
        "pass": one.number,
        "path": dotted(one.path),
    }
    if one.end_ns >= 0:
        said["duration_ns"] = one.end_ns - one.start_ns
    if one.pair >= 0:
        said["payload_bytes"] = one.payload_bytes
        said["wire_bytes"] = one.wire_bytes
    return b"".join(_annotation(name, value) for name, value in said.items())


@lru_cache(1 << 14)
def _annotation(name: str, value: int | str) -> bytes:
    held = nested(6, value) if isinstance(value, str) else number(3, value)
    return nested(4, nested(10, name) + held)


def _event(at_ns: int, kind: int, track: int, fields: bytes) -> bytes:
    event = nested(11, number(9, kind) + number(11, track) + fields)
    return _packet(number(8, at_ns) + event)


def _packet(fields: bytes) -> bytes:
    return nested(1, fields + number(10, _SEQUENCE))
