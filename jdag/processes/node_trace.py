"""The trace of a node, and how main merges the traces of all nodes.

A node records all events and effects of its `WorkerRuntime` (`jdag.runtime.recorder`),
the start and end of each job, and each message that it sends. Main queries the clocks
and the records of the other nodes.

Invariants: a node stops recording after the event that brings it to `events_max`
records, and reports that. A record is sent once, as JSON. A message is identified by
its number on its link, so recording does not make any frame larger.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jdag.engine.protocol import Job, Key, incarnated
from jdag.processes.net.connection import Connection
from jdag.processes.net.loop import clock_ns
from jdag.processes.peers import PeerTable
from jdag.processes.session.session_info import SessionInfo
from jdag.runtime.journal import SUFFIX, Journal, head_of
from jdag.runtime.merging import Sample, TracePart, merged, sampled
from jdag.runtime.recorder import NO_CAUSE, Recorder
from jdag.runtime.trace import FIELDS, Trace, row_of

_ROWS_MAX = 4096  # Records per reply.
ANSWER_S = 10.0  # Time limit of a reply. After it, a node's trace stays incomplete.
EXCHANGES = 8  # Queries per estimate of a clock; the fastest exchange is used.

_log = logging.getLogger(__name__)

# The time at which a job was requested, and the records that the job waits for.
JobRequest = tuple[int, dict[int, None]]


class _Clock:
    now_ns = property(lambda self: clock_ns())


class NodeRecording:
    """The records of one node. Calls `stop` when there are `events_max` records."""

    def __init__(
        self, worker: str, events_max: int, stop: Callable[[], object]
    ) -> None:
        self.trace = Trace()
        self.recorder = Recorder(self.trace, _Clock())
        self.recorder.watch(self._look)
        self.full = ""
        self._worker = worker
        self._events_max = events_max
        self._stop = stop
        # For the job thread (True) and the loop's thread (False): the end of its last
        # job, and the record of that job.
        self._last: dict[bool, tuple[int, int]] = {}

    def _look(self, records: int) -> None:
        if records >= self._events_max and not self.full:
            self.full = f"recording stopped at events_max = {self._events_max} records"
            text = "the trace of worker %r is not complete: %s"
            _log.warning(text, self._worker, self.full)
            self._stop()

    def causes(self, cause: int, keys: Sequence[Key]) -> tuple[int, ...]:
        if self.full:
            return ()
        return self.recorder.causes(self._worker, cause, keys) if keys else (cause,)

    def sent(
        self,
        peer: str,
        fields: tuple[Any, ...],
        nbytes: tuple[int, int],
        causes: tuple[int, ...],
    ) -> None:
        """Record that a message is sent. `nbytes` is (bytes of values, total bytes)."""
        if not self.full:
            detail = (peer, *fields, *nbytes, ())
            self.recorder.note("send", self._worker, detail, causes)

    def requested(self, job: Job, cause: int) -> JobRequest | None:
        """Return the argument `request` of `ran` for a job that is now requested."""
        if self.full:
            return None
        return clock_ns(), self.recorder.needs(self._worker, job, cause)

    def ran(
        self,
        job: Job,
        request: JobRequest | None,
        took_ns: Sequence[int],
        on_thread: bool,
    ) -> None:
        """Record the start and end of a job, just before `Computed` is handled."""
        if self.full or request is None:
            return
        requested_ns, causes = request
        before_ns, before = self._last.get(on_thread, (0, NO_CAUSE))
        if before_ns > requested_ns:
            causes[before] = None
        end = self.recorder.ran(self._worker, job, causes, *took_ns)
        self._last[on_thread] = took_ns[1], end

    def part(self, began_ns: int) -> TracePart:
        rows = [tuple(getattr(r, name) for name in FIELDS[1:]) for r in self.trace]
        clock = [Sample(0, -began_ns, 0)]
        return TracePart(self._worker, rows, clock, self.full)

    def rows(self, start: int) -> dict[str, Any]:
        stop = min(start + _ROWS_MAX, len(self.trace))
        records = [self.trace[index] for index in range(start, stop)]
        rows = [(r.time_ns, r.kind, r.detail, r.causes) for r in records]
        return {"rows": rows, "of": len(self.trace), "full": self.full}


def recording_of(
    session: SessionInfo, stop: Callable[[], object]
) -> NodeRecording | None:
    if not session.settings.trace:
        return None
    worker = incarnated(session.worker, session.members.incarnation)
    return NodeRecording(worker, session.settings.events_max, stop)


def journal_of(session: SessionInfo) -> Journal | None:
    settings = session.settings
    if settings.journal is None:
        return None
    worker = incarnated(session.worker, session.members.incarnation)
    path = Path(settings.journal, worker + SUFFIX)
    head = head_of(worker, settings.workers, session.program)
    if session.members.incarnation:  # A failed attach may have left a file.
        with suppress(OSError):
            path.unlink()
    return Journal(path, head, settings.journal_bytes)


class TraceCollector:
    """Merges the traces of all nodes. Time 0 is `began_ns` of main's clock."""

    def __init__(
        self, recording: NodeRecording, peers: PeerTable, began_ns: int
    ) -> None:
        self._recording = recording
        self._peers = peers
        self._began_ns = began_ns
        self._parts: dict[str, TracePart] = {}  # Keys: names of incarnations.
        self._merged: tuple[int, Trace] | None = None

    def sample(self) -> None:
        for peer in self._peers.living:
            samples = []
            for _ in range(EXCHANGES):
                asked_ns = clock_ns() - self._began_ns
                peer_ns = self._ask(peer, {"what": "clock"})
                if type(peer_ns) is not int:
                    break
                samples.append(sampled(asked_ns, peer_ns, clock_ns() - self._began_ns))
            if samples:
                best = min(samples, key=lambda sample: sample.error_ns)
                fresh = TracePart(peer.worker, clock=[])
                self._parts.setdefault(peer.worker, fresh).clock[1:] = [best]

    def trace(self) -> Trace:
        """Return the trace of all nodes so far, as the same object until it grows."""
        self.sample()
        for worker, peer in tuple(self._peers.connections.items()):
            self._collect(self._parts.setdefault(worker, TracePart(worker)), peer)
        recording, parts = self._recording, [*self._parts.values()]
        count = len(recording.trace) + sum([len(part.rows) for part in parts])
        if self._merged is None or self._merged[0] != count:
            parts = [recording.part(self._began_ns), *parts]
            for part in parts:
                if part.missing:
                    text = "the trace of worker %r is incomplete after %d records: %s"
                    _log.warning(text, part.worker, len(part.rows), part.missing)
            self._merged = count, merged(parts)
        return self._merged[1]

    def _collect(self, part: TracePart, peer: Connection) -> None:
        rows = part.rows
        while not peer.lost:
            answer = self._ask(peer, {"what": "trace", "from": len(rows)})
            if answer is None:
                break
            for row in answer["rows"]:
                time_ns, kind, detail, causes = row
                rows.append(row_of(time_ns, kind, part.worker, detail, causes))
            part.missing = answer["full"]
            if len(rows) >= answer["of"]:
                return
        why = self._peers.losses.get(peer.worker, "it does not answer")
        part.missing = part.missing or why.partition("\n")[0]

    def _ask(self, peer: Connection, query: dict[str, Any]) -> Any:
        return self._peers.ask_all(query, ANSWER_S, peers=[peer]).get(peer.name)
