"""Steps of plans on a node: short rows and all frames at once, without effects."""

from collections.abc import Sequence
from typing import Any

from jdag.compute.duals import JaxArray
from jdag.engine.tables import Hop
from jdag.processes.jobs import Jobs
from jdag.processes.net.connection import JOINED_BYTES
from jdag.processes.peers import PeerTable
from jdag.runtime.step_values import StepValues
from jdag.runtime.worker_runtime import WorkerRuntime
from jdag.wire.arrays import type_of
from jdag.wire.messages import STEP


class StepRunner(StepValues):
    """Runs rows that are short as jobs without keys; the others become jobs."""

    def __init__(self, host: WorkerRuntime, jobs: Jobs, peers: PeerTable) -> None:
        super().__init__(host.machine)
        self._resume = host.resume
        self.has_keys = jobs.rows_are_jobs
        if not self.has_keys:
            self.run, self.send, self.finish = jobs.run_row, self._send, self._finish
            self.flush = jobs.send_out
        self._peers = peers
        self._connections = peers.connections

    def _send(self, hop: Hop, number: int, base: int, values: Sequence[Any]) -> bool:
        peer = self._connections.get(hop.to) or self._peers.peer(hop.to)
        # A head has the types of the values. Those of inputs may differ in width, since
        # a plan takes 64-bit values of numpy for the 32-bit ones of JAX.
        types = [v.aval if v.__class__ is JaxArray else type_of(v) for v in values]
        if hop.encoded is None or hop.encoded[0] != types:
            kinds = list(map(type_of, values))
            sizes = [kind.nbytes for kind in kinds]
            head = self._peers.codec.encode(hop.frame, kinds)
            hop.encoded = types, head, sizes, sum(sizes)
        _, head, sizes, nbytes = hop.encoded
        numbers, data = STEP.pack(number, base), b""
        if nbytes <= JOINED_BYTES:
            try:
                data = b"".join((numbers, head, *values))
            except (TypeError, ValueError, BufferError):  # As in `parts`.
                data = b""
        if len(data) == STEP.size + len(head) + nbytes:
            peer.step(data, (), (), nbytes)
        else:
            peer.step(numbers + head, sizes, values, nbytes)
        self._peers.hurries = True
        return True

    def _finish(self, waiter: int, results: tuple[Any, ...]) -> bool:
        self._resume(waiter, results)
        return True
