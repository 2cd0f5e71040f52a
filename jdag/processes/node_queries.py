"""Queries between the nodes of a session, separate from engine messages.

Invariants: a query does not change the state of an engine. A node computes its reply
with the loop lock held, so the reply describes the state between two engine events.
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
    """Queries and replies of a node. `check_open` raises if the node is closed."""

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
        self._workers = peers.workers
        self._check_open = check_open
        self._recording = recording

    def info(self, within_s: float | None) -> Mapping[str, Mapping[str, Any]]:
        """Return the statistics of all workers.

        Wait for replies for at most `within_s`; if it is None, wait for all peers.
        """
        infos = self.peers.ask_all({"what": "info"}, within_s)
        with self._loop:
            infos[self._name] = local = self._local_info()
        nothing = {**dict.fromkeys(local, 0), "waits_for": ""}
        living = [peer.name for peer in self.peers.living]
        return {
            worker: infos.get(worker) or {**nothing, "lost": worker not in living}
            for worker in self._workers
        }

    def times(self) -> dict[str, Sequence[Any]]:
        """Return job durations since the last call; see `RecentDurations.take`."""
        times = self.peers.ask_all({"what": "times"}, or_raise=True)
        with self._loop:
            return {self._name: self.jobs.recent.take(), **times}

    def graph(self, context: ContextId) -> dict[str, GraphSnapshot]:
        fields = (context.number, context.counter, context.incarnation)
        answers = self.peers.ask_all({"what": "graph", "of": fields}, or_raise=True)
        with self._loop:
            graphs: dict[str, Any] = {self._name: self._host.engine.graph(context)}
        for worker, data in answers.items():
            graphs[worker] = self.peers.codec.decode_drawing(bytes.fromhex(data))
        return {w: graphs[w] for w in self._workers if graphs.get(w) is not None}

    def settle(self) -> None:
        before: object = None
        due_ns = clock_ns() + round(SETTLE_S * 1e9)
        nodes: list[tuple[str, dict[str, Any]]] = []
        while clock_ns() < due_ns:
            self._check_open()
            answers = self.peers.ask_all({"what": "quiet"})
            nodes = sorted({**answers, "": self.quiet()}.items())
            under_way = sum(node["sent"] - node["got"] for _, node in nodes)
            idle = all(node["idle"] for _, node in nodes)
            if idle and nodes == before and (self.peers.losses or not under_way):
                return
            self.peers.stopping.wait(0 if idle else SETTLE_LOOK_S)
            before = nodes
        busy = [name or "this worker" for name, node in nodes if not node["idle"]]
        raise JdagError(
            f"the cluster still had pending jobs or messages after {SETTLE_S:g} s, on "
            f"{', '.join(busy) or 'some connection'}"
        )

    def quiet(self) -> dict[str, Any]:
        with self._loop:
            return self.quiet_now()

    def answer(self, query: Mapping[str, Any]) -> Any:
        answers: dict[str, Callable[[], Any]]
        answers = {"info": self._local_info, "quiet": self.quiet_now, "clock": clock_ns}
        answers["times"] = self.jobs.recent.take
        match query:
            case {"what": str(what)} if what in answers:
                return answers[what]()
            case {"what": "trace", "from": int(start)} if self._recording is not None:
                return self._recording.rows(start)
            case {"what": "graph", "of": [int(number), int(counter), int(incarnation)]}:
                context = ContextId(number, counter, incarnation)
                return encoded(self._host.engine.graph(context)).hex()
            case _:
                raise ProtocolError(f"unknown query {query!r}")

    def quiet_now(self) -> dict[str, Any]:
        """Return the result of `quiet`, for a caller that holds the loop lock.

        Acknowledgements of messages count as messages.
        """
        living = self.peers.living
        return {
            "idle": self.jobs.idle and all(peer.idle for peer in living),
            "sent": sum(peer.sent.messages + peer.bundles.told for peer in living),
            "got": sum(p.reader.assembler.messages + p.reader.handled for p in living),
        }

    def _local_info(self) -> dict[str, Any]:
        sent = total_sent(peer.sent for peer in self.peers.connections.values())
        jobs, waits_for = self.jobs, self.jobs.waits_for
        return info(self._host, sent, jobs.busy_ns, lost=False, waits_for=waits_for)
