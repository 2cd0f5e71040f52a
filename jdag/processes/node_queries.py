"""What the nodes of a session ask each other beside their engines.

Invariants: what is asked changes nothing; a node answers with the loop lock held, so
    between two events of its engine.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jdag.engine.graph_snapshot import GraphSnapshot
from jdag.engine.protocol import ContextId, named
from jdag.errors import JdagError, ProtocolError
from jdag.processes.jobs import Jobs
from jdag.processes.net.loop import clock_ns
from jdag.processes.node_trace import NodeRecording
from jdag.processes.peers import PeerTable
from jdag.runtime.stats import info, total_sent
from jdag.runtime.worker_runtime import WorkerRuntime
from jdag.wire.encoding import encoded

SETTLE_S, SETTLE_LOOK_S = 3600.0, 0.001


class NodeQueries:
    """The questions and answers of one node, which `check_open` raises if closed."""

    def __init__(
        self,
        host: WorkerRuntime,
        peers: PeerTable,
        jobs: Jobs,
        check_open: Callable[[], None],
        recording: NodeRecording | None,
    ) -> None:
        self._name = named(host.worker)
        self._host = host
        self.peers = peers
        self.jobs = jobs
        self._loop = peers.loop
        self._codec = peers.codec
        self._workers = peers.workers
        self._check_open = check_open
        self._recording = recording

    def info(self, within_s: float | None) -> Mapping[str, Mapping[str, Any]]:
        """Return what each worker holds, and what it has sent and computed so far.

        Without `within_s` peers are waited for until they are lost.
        """
        found = self.peers.ask_all({"what": "info"}, within_s)
        with self._loop:
            found[self._name] = own = self._own_info()
        nothing = {**dict.fromkeys(own, 0), "waits_for": ""}
        living = [peer.name for peer in self.peers.living]
        return {
            worker: found.get(worker) or {**nothing, "lost": worker not in living}
            for worker in self._workers
        }

    def times(self) -> dict[str, Sequence[Any]]:
        """Return durations of jobs since this was asked last; see `Recent.take`."""
        found = self.peers.ask_all({"what": "times"}, or_raise=True)
        with self._loop:
            return {self._name: self.jobs.recent.take(), **found}

    def graph(self, context: ContextId) -> dict[str, GraphSnapshot]:
        """Return the current graph of a context, by worker."""
        of = (context.number, context.counter, context.incarnation)
        answers = self.peers.ask_all({"what": "graph", "of": of}, or_raise=True)
        with self._loop:
            drawn: dict[str, Any] = {self._name: self._host.engine.graph(context)}
        for worker, data in answers.items():
            drawn[worker] = self._codec.decode_drawing(bytes.fromhex(data))
        return {w: drawn[w] for w in self._workers if drawn.get(w) is not None}

    def settle(self) -> None:
        """Wait until everything is sent, received and computed on all workers.

        Raises:
            JdagError: something still goes on after `SETTLE_S`.
        """
        before: object = None
        due_ns = clock_ns() + round(SETTLE_S * 1e9)
        now: list[tuple[str, dict[str, Any]]] = []
        while clock_ns() < due_ns:
            self._check_open()
            asked = self.peers.ask_all({"what": "quiet"})
            now = sorted({**asked, "": self.quiet()}.items())
            under_way = sum(one["sent"] - one["got"] for _, one in now)
            idle = all(one["idle"] for _, one in now)
            if idle and now == before and (self.peers.gone or not under_way):
                return
            self.peers.stopping.wait(0 if idle else SETTLE_LOOK_S)
            before = now
        busy = [name or "the worker that waits" for name, o in now if not o["idle"]]
        raise JdagError(
            f"the cluster has not settled within {SETTLE_S:g} s: something goes on, or "
            f"is under way, on {', '.join(busy) or 'its connections'}"
        )

    def quiet(self) -> dict[str, Any]:
        """Return whether this node is idle, and its counts of messages."""
        with self._loop:
            return self.quiet_now()

    def answer(self, asked: Mapping[str, Any]) -> Any:
        """Answer another node; raises ProtocolError if that is no question."""
        answers: dict[str, Callable[[], Any]]
        answers = {"info": self._own_info, "quiet": self.quiet_now, "clock": clock_ns}
        answers["times"] = self.jobs.recent.take
        match asked:
            case {"what": str(what)} if what in answers:
                return answers[what]()
            case {"what": "trace", "from": int(start)} if self._recording is not None:
                return self._recording.rows(start)
            case {"what": "graph", "of": [int(number), int(counter), int(incarnation)]}:
                drawing = self._host.engine.graph(
                    ContextId(number, counter, incarnation)
                )
                return encoded(drawing).hex()
            case _:
                raise ProtocolError(f"{asked!r} is no question for a node")

    def quiet_now(self) -> dict[str, Any]:
        """Return what `quiet` does; requires the lock."""
        living = self.peers.living
        return {
            "idle": self.jobs.idle and all(peer.idle for peer in living),
            "sent": sum(peer.sent.messages for peer in living),
            "got": sum(peer.reader.assembler.messages for peer in living),
        }

    def _own_info(self) -> dict[str, Any]:
        sent = total_sent(peer.sent for peer in self.peers.connections.values())
        jobs, waits_for = self.jobs, self.jobs.waits_for
        return info(self._host, sent, jobs.busy_ns, lost=False, waits_for=waits_for)
