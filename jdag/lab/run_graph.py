"""A recorded run as a graph: what each job and each value waited for.

Inputs:  the trace of a run under a schedule, whose messages without values are free and
         immediate.
Outputs: `RunGraph`: nodes, and edges with what they cost.

A job waits for the one before on its device, for what it reads, and for what asked for
it; a value for the one before on its link; a message for those of its context before it
(`jdag.wire.order`). Jobs of no list (fills and sums) are free, and occupy no device:
what reads them there comes after the job that they may have to wait for.

Invariants: edges point forward, and enter nodes in their order. A run is refused whose
order may be another at other costs.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jdag.errors import JdagError
from jdag.runtime.trace import Trace, TraceRecord

_TROUBLE = ("resend", "drop", "delay", "duplicate", "crash", "lost", "restart", "spawn")
_FRAMES = ("send", "resend", "ack")
# Messages of these kinds are ordered with no others on their link, or with all.
_FREE = ("Reading", "Hop", "Stepped")
_BARRIER = ("Assign", "Forget", "Step", "Settle")
_Link = tuple[str, str]


class Cost(NamedTuple):
    """What an edge of the graph costs: nothing, a value's way, or a job's time.

    `kind` is "", "latency", "transfer" (of so many bytes) or "job"; `key` is the link,
    or (worker, function, action) of the job.
    """

    kind: str = ""
    key: tuple[str, ...] = ()
    nbytes: int = 0


_NO_COST = Cost()


def job_named(key: Sequence[str]) -> str:
    """A job by worker, function and action."""
    worker, function, action = key
    return f"{worker}: {function.rpartition(':')[2]} {action}"


def retiming_error(why: str) -> JdagError:
    """The error for a run that cannot be re-timed."""
    return JdagError(f"this run cannot be re-timed: {why}")


@dataclass(slots=True)
class _Device:
    """The jobs that a worker's device runs now, and when it is free."""

    starts: list[int] = field(default_factory=list)  # Records of the batch.
    end: int = -1  # The node at which the batch ends.


class RunGraph:
    """The graph of a trace: `edges` by the node that they enter, with their costs.

    `starts` and `ends` are the nodes of starts and finishes of the jobs that begin in
    `window_ns` (None: of all), `checked` nodes with the record whose time they have,
    `costs` the times of jobs by (worker, function, action), and `free` those of no list
    before the last one, which take no time.
    """

    def __init__(self, trace: Trace, window_ns: tuple[int, int] | None = None) -> None:
        self.nodes = 0
        self.edges: list[tuple[tuple[int, int], Cost]] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.checked: list[tuple[int, TraceRecord]] = []
        self.costs: dict[tuple[str, str, str], int] = {}
        self.free: dict[tuple[str, str, str], None] = {}
        self._between: dict[tuple[str, str, str], None] = {}  # No listed job came yet.
        self.links: dict[_Link, None] = {}
        self._window_ns = window_ns
        self._at: list[int] = []  # The node of each record.
        self._records: list[TraceRecord] = []
        self._left: dict[_Link, int] = {}  # Where the last value has left.
        self._carried: dict[int, int] = {}  # By send, where its values have left.
        self._lanes: dict[_Link, dict[str, int]] = {}
        self._devices: dict[str, _Device] = {}
        self._asked: dict[tuple[str, str, Any], list[int]] = {}
        # Of jobs, and arrivals of values in steps of plans, since the last pass ended.
        self._pass_ends: list[int] = []
        self._answers: dict[tuple[str, str, int], int] = {}
        self._loose: dict[int, None] = {}  # Records of jobs that no device orders.
        self._running: dict[
            tuple[str, int], None
        ] = {}  # Passes of which a job has begun.
        self._readings: list[int] = []  # Since a program went on by values it read.
        # By link, the nodes of its messages in their order, with their records.
        self.sent: dict[_Link, list[tuple[int, int]]] = {}
        self._since: dict[str, int] = {}  # By worker, jobs since the last pass ended.
        # The same by context: whether one of them was of a pass.
        self._followed: dict[str, dict[str, bool]] = {}
        for record in trace:
            self._records.append(record)
            if record.kind in _TROUBLE:
                raise retiming_error(f"it has a {record.kind} on {record.worker}")
            handle = getattr(self, f"_{record.kind}", self._event)
            self._at.append(handle(record))
        if not self.ends:
            where = "" if window_ns is None else f" that begin in {window_ns} ns"
            raise retiming_error(f"it has no jobs of its schedule{where}")

    def _node(self, *entering: tuple[int, Cost]) -> int:
        node = self.nodes
        self.nodes += 1
        for source, cost in dict.fromkeys(entering):
            self.edges.append(((source, node), cost))
        return node

    def _waits(self, records: Any) -> list[tuple[int, Cost]]:
        return [(self._at[index], _NO_COST) for index in records]

    def _event(self, record: TraceRecord) -> int:
        """An issue, or a record that nothing waits for."""
        node = self._node(*self._waits(record.causes))
        if record.kind == "issue":
            said = record.named
            of = record.worker, said["context"], said["path"]
            self._asked.setdefault(of, []).append(node)
        return node

    def _resume(self, record: TraceRecord) -> int:
        waits = self._waits(record.causes)
        if record.named["event"] in ("Differentiated", "Stepping"):  # All is done.
            waits += [(node, _NO_COST) for node in self._pass_ends]
            self._pass_ends.clear()
            self._since.clear()
            self._followed.clear()
        elif record.named["event"] == "Fetched":
            waits += [(node, _NO_COST) for node in self._readings]
            self._readings.clear()
        return self._node(*waits)

    def _send(self, record: TraceRecord) -> int:
        said, worker = record.named, record.worker
        causes = [i for i in record.causes if self._records[i].kind not in _FRAMES]
        waits = self._waits(causes)
        if said["message"] == "Primal":  # It was asked for by a Ship, or here.
            of = worker, said["context"], said["path"]
            waits += [(node, _NO_COST) for node in self._asked.get(of, ())]
        if said["message"] == "End":  # Of the pass, when all of it is done.
            waits += [(node, _NO_COST) for node in self._pass_ends]
        if said["payload_bytes"]:
            self._check_order(record, causes)
        node = self._node(*waits)
        link = worker, said["destination"]
        if not self._is_apart(said):
            self.sent.setdefault(link, []).append((node, record.index))
        if said["payload_bytes"]:
            self.links[link] = None
            takes = Cost("transfer", link, said["payload_bytes"])
            before = [(self._left[link], takes)] if link in self._left else []
            left = self._node((node, takes), *before)
            self._left[link] = self._carried[record.index] = left
        return node

    def _is_apart(self, said: Mapping[str, Any]) -> bool:
        """Whether a message's place among others does not matter.

        Only the end of its pass waits for the answer of one that runs, and no job for
        word of what its list will not have, where the list has all that it waits for.
        """
        is_answer = said["message"] == "Answer" and _pass(said) in self._running
        return is_answer or said["message"] == "Listing"

    def _check_order(self, record: TraceRecord, causes: list[int]) -> None:
        """Refuse values whose place in the order of their link depends on time."""
        event = self._records[causes[0]]
        here = event.kind == "finish" and event.worker == record.worker
        if here and causes[0] not in self._loose:
            return
        if self._since.get(record.worker):
            raise retiming_error(
                f"the values of a {record.named['message']} (record {record.index}) "
                f"leave {record.worker} when a message comes, so that their place on "
                "the link depends on time"
            )

    def _deliver(self, record: TraceRecord) -> int:
        said = record.named
        link = said["source"], record.worker
        sent = record.causes[0]
        waits = self._waits([sent])
        if self._is_apart(said):
            return self._node(*waits)
        if sent in self._carried:
            waits.append((self._carried[sent], Cost("latency", link)))
        lanes, kind = self._lanes.setdefault(link, {}), said["message"]
        if kind in _BARRIER:
            waits += [(node, _NO_COST) for node in lanes.values()]
        elif kind not in _FREE and (kind != "Acknowledge" or said["context"]):
            before = lanes.get(said["context"], lanes.get("all"))
            waits += [] if before is None else [(before, _NO_COST)]
        of = record.worker, *_pass(said)
        if kind == "Answer":
            waits += [(self._answers[of], _NO_COST)] if of in self._answers else []
        node = self._node(*waits)
        if kind == "Answer":
            self._answers[of] = node
        if kind in ("Reading", "Hop"):
            (self._readings if kind == "Reading" else self._pass_ends).append(node)
        if kind in _BARRIER:
            lanes.clear()
            lanes["all"] = node
        elif kind not in _FREE and (kind != "Acknowledge" or said["context"]):
            lanes[said["context"]] = node
        if kind in ("Call", "Ship", "Start", "Go"):
            path = said["number"] if kind in ("Start", "Go") else said["path"]
            asked = record.worker, said["context"], path
            self._asked.setdefault(asked, []).append(node)
        return node

    def _start(self, record: TraceRecord) -> int:
        said, worker = record.named, record.worker
        device = self._devices.setdefault(worker, _Device())
        waits = self._waits(record.causes)
        path = said["path"] if said["job"] == "forward" else said["number"]
        of = worker, said["context"], path
        waits += [(node, _NO_COST) for node in self._asked.get(of, ())]
        if not said["action"]:
            return self._unlisted(record, waits)
        self._check_turn(record)
        self._since[worker] = self._since.get(worker, 0) + 1
        if said["number"]:
            self._running[_pass(said)] = None
        if not device.starts and device.end >= 0:
            waits.append((device.end, _NO_COST))
        if device.starts:  # Two that run as one begin at once.
            waits.append((self._at[device.starts[0]], _NO_COST))
        node = self._node(*waits)
        if self._is_within(record):
            self.starts.append(node)
        self.free |= self._between
        self._between.clear()
        device.starts.append(record.index)
        key = worker, said["function"], _kind(said)
        cost_ns = said["cost_ns"]
        if self.costs.setdefault(key, cost_ns) != cost_ns:
            raise retiming_error(
                f"{job_named(key)} takes {self.costs[key]} ns and {cost_ns} ns; each "
                "job of a function must take the same time"
            )
        return node

    def _check_turn(self, record: TraceRecord) -> None:
        """Refuse contexts whose jobs go as they are ready, those of either first."""
        context, in_pass = record.named["context"], bool(record.named["number"])
        followed = self._followed.setdefault(record.worker, {})
        last = next(reversed(followed), context)
        if last != context and (followed[last] or context in followed):
            raise retiming_error(
                f"contexts {last} and {context} are computed at once on "
                f"{record.worker} (record {record.index}); call one when the pass of "
                "the other has ended"
            )
        followed[context] = followed.get(context, False) or in_pass

    def _is_within(self, start: TraceRecord) -> bool:
        first_ns, last_ns = self._window_ns or (0, start.time_ns)
        return first_ns <= start.time_ns <= last_ns

    def _unlisted(self, record: TraceRecord, waits: list[tuple[int, Cost]]) -> int:
        said = record.named
        if said["cost_ns"]:
            raise retiming_error(
                f"{said['function']} on {record.worker} (record {record.index}) takes "
                f"{said['cost_ns']} ns and is in no list"
            )
        if kind := {"forward": "F", "vjp": "B"}.get(said["job"]):
            self._between[record.worker, said["function"], kind] = None
        asked = self._records[record.causes[0]]
        if asked.kind != "finish" or asked.worker != record.worker:
            self._loose[record.index] = None
        return self._node(*waits)

    def _finish(self, record: TraceRecord) -> int:
        said, worker = record.named, record.worker
        (start,) = record.causes
        if not said["action"]:
            if start in self._loose:
                self._loose[record.index] = None
            return self._node((self._at[start], _NO_COST))
        device = self._devices[worker]
        if start in device.starts:  # The first of those that end at once.
            node = self._at[device.starts[-1]]
            for index in device.starts:
                self.checked.append((self._at[device.starts[-1]], self._records[index]))
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


def _kind(said: Mapping[str, Any]) -> str:
    """The kind of an action such as 0F3, which may be a segment of a plan."""
    kind: str = said["action"].strip("0123456789")
    return kind


def _pass(said: Mapping[str, Any]) -> tuple[str, int]:
    return said["context"], said["number"]
