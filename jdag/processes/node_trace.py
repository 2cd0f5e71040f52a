"""What a node records of its run, and how main makes one trace of all nodes.

A node records all events and effects of its host (`jdag.runtime.recorder`), what ran
when, and which messages left. Main asks the others for their clocks and rows.
Invariants: a node keeps `events_max` records, and those of the event in which it had as
    many; then it says so and records no more. Rows are sent once, as JSON. A message is
    known by its number on its link, so no frame is larger for being recorded.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from jdag.engine.protocol import Job, Key, Message, incarnated
from jdag.processes.net.connection import Connection
from jdag.processes.net.loop import clock_ns
from jdag.processes.peers import PeerTable
from jdag.processes.session.session_info import SessionInfo
from jdag.runtime.journal import SUFFIX, Journal, head_of
from jdag.runtime.merging import Sample, TracePart, merged, sampled
from jdag.runtime.recorder import NO_CAUSE, Recorder, trace_fields
from jdag.runtime.trace import FIELDS, Trace, row_of

_ROWS_MAX = 4096  # Of one answer.
ANSWER_S = 10.0  # A node that does not answer for so long has no more rows.
EXCHANGES = 8  # To sample a clock; the shortest one counts.

_log = logging.getLogger(__name__)

# When a job was asked for, and what it waits for.
JobRequest = tuple[int, dict[int, None]]


class _Clock:
    now_ns = property(lambda self: clock_ns())


class NodeRecording:
    """The records of one node; `stop` is called when it has `events_max`."""

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
        # Of the two threads that run jobs: when the last job ended, and its record.
        self._last: dict[bool, tuple[int, int]] = {}

    def _look(self, records: int) -> None:
        if records >= self._events_max and not self.full:
            self.full = f"it ends after events_max = {self._events_max} records"
            said = "the trace of worker %r is not complete: %s"
            _log.warning(said, self._worker, self.full)
            self._stop()

    def causes(self, cause: int, keys: Sequence[Key]) -> tuple[int, ...]:
        """Return the causes of a message with the values of these keys."""
        if self.full:
            return ()
        return self.recorder.causes(self._worker, cause, keys) if keys else (cause,)

    def sent(
        self,
        peer: str,
        message: Message,
        nbytes: tuple[int, int],
        causes: tuple[int, ...],
    ) -> None:
        """Record that a message leaves; `nbytes` are those of its values, and all."""
        if not self.full:
            detail = (peer, *trace_fields(message), *nbytes, ())
            self.recorder.note("send", self._worker, detail, causes)

    def asked(self, job: Job, cause: int) -> JobRequest | None:
        """Take what a job waits for, when the engine asks for it."""
        if self.full:
            return None
        return clock_ns(), self.recorder.needs(self._worker, job, cause)

    def ran(
        self, job: Job, asked: JobRequest | None, took_ns: Sequence[int], beside: bool
    ) -> None:
        """Record that a job ran from and until these times, on the loop or beside it.

        Its end is recorded by its Computed, which has to be handled next.
        """
        if self.full or asked is None:
            return
        asked_ns, causes = asked
        before_ns, before = self._last.get(beside, (0, NO_CAUSE))
        if before_ns > asked_ns:
            causes[before] = None
        end = self.recorder.ran(self._worker, job, causes, *took_ns)
        self._last[beside] = took_ns[1], end

    def part(self, began_ns: int) -> TracePart:
        """Return all of it, in time since `began_ns`."""
        rows = [tuple(getattr(one, name) for name in FIELDS[1:]) for one in self.trace]
        clock = [Sample(0, -began_ns, 0)]
        return TracePart(self._worker, rows, clock, self.full)

    def rows(self, start: int) -> dict[str, Any]:
        """Return the next rows as JSON, how many there are, and why if not all."""
        stop = min(start + _ROWS_MAX, len(self.trace))
        found = [self.trace[index] for index in range(start, stop)]
        rows = [(one.time_ns, one.kind, one.detail, one.causes) for one in found]
        return {"rows": rows, "of": len(self.trace), "full": self.full}


def recording_of(
    session: SessionInfo, stop: Callable[[], object]
) -> NodeRecording | None:
    """Return the records of a node, if its session has a trace."""
    if not session.settings.trace:
        return None
    worker = incarnated(session.worker, session.members.incarnation)
    return NodeRecording(worker, session.settings.events_max, stop)


def journal_of(session: SessionInfo) -> Journal | None:
    """Return the journal of a node, if its session has one; may raise ScenarioError."""
    settings = session.settings
    if settings.journal is None:
        return None
    worker = incarnated(session.worker, session.members.incarnation)
    path = Path(settings.journal, worker + SUFFIX)
    head = head_of(worker, settings.workers, session.program)
    if session.members.incarnation:  # What is there is of an attach that failed.
        with suppress(OSError):
            path.unlink()
    return Journal(path, head, settings.journal_bytes)


class TraceCollector:
    """Main's: the parts of all nodes, as far as they have been sent.

    Times of the trace are since `began_ns` of main's clock.
    """

    def __init__(
        self, recording: NodeRecording, peers: PeerTable, began_ns: int
    ) -> None:
        self._recording = recording
        self._peers = peers
        self._began_ns = began_ns
        self._parts: dict[str, TracePart] = {}  # By worker, with its incarnation.
        self._made: tuple[int, Trace] | None = None

    def sample(self) -> None:
        """Sample the clocks of the other nodes."""
        for peer in self._peers.living:
            found = []
            for _ in range(EXCHANGES):
                asked_ns = clock_ns() - self._began_ns
                own_ns = self._ask(peer, {"what": "clock"})
                if type(own_ns) is not int:
                    break
                found.append(sampled(asked_ns, own_ns, clock_ns() - self._began_ns))
            if found:
                best = min(found, key=lambda sample: sample.error_ns)
                part = self._parts.get(peer.worker)
                if part is None:
                    self._parts[peer.worker] = TracePart(peer.worker, clock=[best])
                else:
                    part.clock[1:] = [best]

    def trace(self) -> Trace:
        """Return the trace of all nodes so far; the same object if nothing is new."""
        self.sample()
        for worker, peer in tuple(self._peers.connections.items()):
            self._collect(self._parts.setdefault(worker, TracePart(worker)), peer)
        own = self._recording
        records = len(own.trace) + sum([len(one.rows) for one in self._parts.values()])
        if self._made is None or self._made[0] != records:
            parts = [own.part(self._began_ns), *self._parts.values()]
            for part in parts:
                if part.missing:
                    text = "the trace has no more of worker %r than %d records: %s"
                    _log.warning(text, part.worker, len(part.rows), part.missing)
            self._made = records, merged(parts)
        return self._made[1]

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
        why = self._peers.gone.get(peer.worker, "it does not answer").partition("\n")[0]
        part.missing = part.missing or why

    def _ask(self, peer: Connection, what: dict[str, Any]) -> Any:
        return self._peers.ask_all(what, ANSWER_S, of=[peer]).get(peer.name)
