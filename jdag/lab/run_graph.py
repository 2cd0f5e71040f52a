"""A recorded run as a graph: the dependencies of each job and each value.

Inputs:  the trace of a run under a schedule, whose messages without values take no
         time.
Outputs: a `RunGraph`: nodes, and edges with their costs.

A job waits for the job before it on its device, for its inputs, and for its request. A
value waits for the value before it on its link, and a message for earlier messages of
its context (`jdag.wire.order`). A job is listed if it is in its worker's list of the
schedule. Unlisted jobs (fills and sums) take no time and occupy no device. Jobs that
read the results of unlisted jobs start after everything that these may wait for.

Invariants: edges point forward, and are sorted by the node that they enter. A run whose
order may change with its costs is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jdag.errors import JdagError
from jdag.runtime.trace import Trace, TraceRecord

_TROUBLE = ("resend", "drop", "delay", "duplicate", "crash", "lost", "restart", "spawn")
_FRAMES = ("send", "resend", "ack")
# Messages that need no order on their link; messages that keep their order relative to
# all other messages.
_FREE = ("Reading", "Hop", "Stepped", "Acknowledge")
_BARRIER = ("Assign", "Forget", "Step", "Settle")
_Link = tuple[str, str]


class Cost(NamedTuple):
    """The cost of an edge.

    `kind` is "" (no cost), "latency" or "transfer" of a value of `nbytes` bytes, or
    "job". `key` is the link, or (worker, function, action) of the job.
    """

    kind: str = ""
    key: tuple[str, ...] = ()
    nbytes: int = 0


_NO_COST = Cost()


def job_named(key: Sequence[str]) -> str:
    worker, function, action = key
    return f"{worker}: {function.rpartition(':')[2]} {action}"


def retiming_error(why: str) -> JdagError:
    return JdagError(f"this run cannot be re-timed: {why}")


@dataclass(slots=True)
class _Device:
    starts: list[int] = field(default_factory=list)  # Records of the batch.
    end: int = -1  # The node at which the last batch ended; -1: no batch has ended.


class RunGraph:
    """The graph of a trace.

    `edges` are sorted by target. `starts` and `ends` are the nodes at which listed jobs
    start and end, of jobs that start in `window_ns` (None: of all listed jobs).
    `checked` has each node whose time must equal that of a trace record, with the
    record. `costs` has the times of jobs by (worker, function, action). `free` has the
    unlisted jobs that precede a listed job. `links` has the links that carry values.
    `sent` has (node, record index) of each message of a link.
    """

    def __init__(self, trace: Trace, window_ns: tuple[int, int] | None = None) -> None:
        self.nodes = 0
        self.edges: list[tuple[tuple[int, int], Cost]] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.checked: list[tuple[int, TraceRecord]] = []
        self.costs: dict[tuple[str, str, str], int] = {}
        self.free: dict[tuple[str, str, str], None] = {}
        # Unlisted jobs since the last listed job.
        self._between: dict[tuple[str, str, str], None] = {}
        self.links: dict[_Link, None] = {}
        self._window_ns = window_ns
        self._record_nodes: list[int] = []  # The node of each record.
        self._records: list[TraceRecord] = []
        # The node at which a value has been sent: of a link's last value, and by the
        # trace record of the send.
        self._link_free: dict[_Link, int] = {}
        self._carried: dict[int, int] = {}
        self._lanes: dict[_Link, dict[str, int]] = {}
        self._devices: dict[str, _Device] = {}
        self._requests: dict[tuple[str, str, Any], list[int]] = {}
        # Since the last pass: nodes of finished jobs and of values in plan steps.
        self._pass_ends: list[int] = []
        self._answers: dict[tuple[str, str, int], int] = {}
        self._loose: dict[int, None] = {}  # Records of jobs that no device orders.
        self._running: dict[tuple[str, int], None] = {}  # Passes with a started job.
        self._readings: list[int] = []  # Values read since the last fetch ended.
        self.sent: dict[_Link, list[tuple[int, int]]] = {}
        self._since: dict[str, int] = {}  # By worker, jobs since the last pass ended.
        # By worker and context: whether one of these jobs belonged to a pass.
        self._followed: dict[str, dict[str, bool]] = {}
        for record in trace:
            self._records.append(record)
            if record.kind in _TROUBLE:
                raise retiming_error(f"its trace has {record.kind} on {record.worker}")
            handle = getattr(self, f"_{record.kind}", self._event)
            self._record_nodes.append(handle(record))
        if not self.ends:
            where = "" if window_ns is None else f" that begin in {window_ns} ns"
            raise retiming_error(f"its trace has no jobs of its schedule{where}")

    def _node(self, *entering: tuple[int, Cost]) -> int:
        node = self.nodes
        self.nodes += 1
        for source, cost in dict.fromkeys(entering):
            self.edges.append(((source, node), cost))
        return node

    def _waits(self, records: Any) -> list[tuple[int, Cost]]:
        return [(self._record_nodes[index], _NO_COST) for index in records]

    def _event(self, record: TraceRecord) -> int:
        node = self._node(*self._waits(record.causes))
        if record.kind == "issue":
            fields = record.named
            key = record.worker, fields["context"], fields["path"]
            self._requests.setdefault(key, []).append(node)
        return node

    def _resume(self, record: TraceRecord) -> int:
        waits = self._waits(record.causes)
        if record.named["event"] in ("Differentiated", "Stepping"):  # A pass ended.
            waits += [(node, _NO_COST) for node in self._pass_ends]
            self._pass_ends.clear()
            self._since.clear()
            self._followed.clear()
        elif record.named["event"] == "Fetched":
            waits += [(node, _NO_COST) for node in self._readings]
            self._readings.clear()
        return self._node(*waits)

    def _send(self, record: TraceRecord) -> int:
        fields, worker = record.named, record.worker
        causes = [i for i in record.causes if self._records[i].kind not in _FRAMES]
        waits = self._waits(causes)
        if fields["message"] == "Primal":  # Requested by a Ship, or on this worker.
            key = worker, fields["context"], fields["path"]
            waits += [(node, _NO_COST) for node in self._requests.get(key, ())]
        if fields["message"] == "End":  # Sent after all jobs of the pass.
            waits += [(node, _NO_COST) for node in self._pass_ends]
        if fields["payload_bytes"]:
            self._check_order(record, causes)
        node = self._node(*waits)
        link = worker, fields["destination"]
        if not self._is_apart(fields):
            self.sent.setdefault(link, []).append((node, record.index))
        if fields["payload_bytes"]:
            self.links[link] = None
            transfer = Cost("transfer", link, fields["payload_bytes"])
            waits = [(node, transfer)]
            if link in self._link_free:
                waits.append((self._link_free[link], transfer))
            self._link_free[link] = self._carried[record.index] = self._node(*waits)
        return node

    def _is_apart(self, fields: Mapping[str, Any]) -> bool:
        """Whether the order of a message relative to other messages has no effect.

        Only the end of its pass waits for the Answer of a running pass. No job waits
        for a Listing if the list already has everything that it waits for.
        """
        is_answer = fields["message"] == "Answer" and _pass(fields) in self._running
        return is_answer or fields["message"] == "Listing"

    def _check_order(self, record: TraceRecord, causes: list[int]) -> None:
        """Refuse a message if its position in the order of its link depends on time."""
        event = self._records[causes[0]]
        is_local = event.kind == "finish" and event.worker == record.worker
        if is_local and causes[0] not in self._loose:
            return
        if self._since.get(record.worker):
            raise retiming_error(
                f"the values of a {record.named['message']} (record {record.index}) "
                f"are sent by {record.worker} when a message arrives, so their order "
                "on the link depends on time"
            )

    def _deliver(self, record: TraceRecord) -> int:
        fields = record.named
        link = fields["source"], record.worker
        sent = record.causes[0]
        waits = self._waits([sent])
        if self._is_apart(fields):
            return self._node(*waits)
        if sent in self._carried:
            waits.append((self._carried[sent], Cost("latency", link)))
        lanes, kind = self._lanes.setdefault(link, {}), fields["message"]
        if kind in _BARRIER:
            waits += [(node, _NO_COST) for node in lanes.values()]
        elif kind not in _FREE:
            before = lanes.get(fields["context"], lanes.get("all"))
            waits += [] if before is None else [(before, _NO_COST)]
        pass_key = record.worker, *_pass(fields)
        if kind == "Answer" and pass_key in self._answers:
            waits.append((self._answers[pass_key], _NO_COST))
        node = self._node(*waits)
        if kind == "Answer":
            self._answers[pass_key] = node
        if kind in ("Reading", "Hop"):
            (self._readings if kind == "Reading" else self._pass_ends).append(node)
        if kind in _BARRIER:
            lanes.clear()
            lanes["all"] = node
        elif kind not in _FREE:
            lanes[fields["context"]] = node
        if kind in ("Call", "Ship", "Start", "Go"):
            path = fields["number"] if kind in ("Start", "Go") else fields["path"]
            request = record.worker, fields["context"], path
            self._requests.setdefault(request, []).append(node)
        return node

    def _start(self, record: TraceRecord) -> int:
        fields, worker = record.named, record.worker
        device = self._devices.setdefault(worker, _Device())
        waits = self._waits(record.causes)
        path = fields["path"] if fields["job"] == "forward" else fields["number"]
        key_of_request = worker, fields["context"], path
        waits += [(node, _NO_COST) for node in self._requests.get(key_of_request, ())]
        if not fields["action"]:
            return self._unlisted(record, waits)
        self._check_turn(record)
        self._since[worker] = self._since.get(worker, 0) + 1
        if fields["number"]:
            self._running[_pass(fields)] = None
        if not device.starts and device.end >= 0:
            waits.append((device.end, _NO_COST))
        if device.starts:  # Jobs that run as one start together.
            waits.append((self._record_nodes[device.starts[0]], _NO_COST))
        node = self._node(*waits)
        if self._is_within(record):
            self.starts.append(node)
        self.free |= self._between
        self._between.clear()
        device.starts.append(record.index)
        key = worker, fields["function"], _kind(fields)
        cost_ns = fields["cost_ns"]
        if self.costs.setdefault(key, cost_ns) != cost_ns:
            raise retiming_error(
                f"{job_named(key)} takes {self.costs[key]} ns and {cost_ns} ns; each "
                "job of a function must take the same time"
            )
        return node

    def _check_turn(self, record: TraceRecord) -> None:
        """Refuse a job if jobs of two contexts alternate in an order by time."""
        context, in_pass = record.named["context"], bool(record.named["number"])
        followed = self._followed.setdefault(record.worker, {})
        last = next(reversed(followed), context)
        if last != context and (followed[last] or context in followed):
            raise retiming_error(
                f"contexts {last} and {context} are computed at the same time on "
                f"{record.worker} (record {record.index}); start one after the pass of "
                "the other has ended"
            )
        followed[context] = followed.get(context, False) or in_pass

    def _is_within(self, start: TraceRecord) -> bool:
        first_ns, last_ns = self._window_ns or (0, start.time_ns)
        return first_ns <= start.time_ns <= last_ns

    def _unlisted(self, record: TraceRecord, waits: list[tuple[int, Cost]]) -> int:
        fields = record.named
        if fields["cost_ns"]:
            raise retiming_error(
                f"{fields['function']} on {record.worker} (record {record.index}) "
                f"takes {fields['cost_ns']} ns but is not in the schedule"
            )
        if kind := {"forward": "F", "vjp": "B"}.get(fields["job"]):
            self._between[record.worker, fields["function"], kind] = None
        cause = self._records[record.causes[0]]
        if cause.kind != "finish" or cause.worker != record.worker:
            self._loose[record.index] = None
        return self._node(*waits)

    def _finish(self, record: TraceRecord) -> int:
        fields, worker = record.named, record.worker
        (start,) = record.causes
        if not fields["action"]:
            if start in self._loose:
                self._loose[record.index] = None
            return self._node((self._record_nodes[start], _NO_COST))
        device = self._devices[worker]
        if start in device.starts:  # The first of the jobs that end together.
            node = start_node = self._record_nodes[device.starts[-1]]
            for index in device.starts:
                self.checked.append((start_node, self._records[index]))
                job = self._records[index].named
                key = worker, job["function"], _kind(job)
                node = self._node((node, Cost("job", key)))
            device.starts.clear()
            device.end = node
        node = device.end
        self.checked.append((node, record))
        if self._is_within(self._records[start]):
            self.ends.append(node)
        self._pass_ends.append(node)
        return node


def _kind(fields: Mapping[str, Any]) -> str:
    """Return an action without its numbers, such as F for 0F3."""
    kind: str = fields["action"].strip("0123456789")
    return kind


def _pass(fields: Mapping[str, Any]) -> tuple[str, int]:
    return fields["context"], fields["number"]
