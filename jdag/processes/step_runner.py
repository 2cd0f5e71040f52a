"""Steps of plans on a node: short rows and all frames at once, without effects."""

from collections.abc import Sequence
from typing import Any

from jdag.compute.machine import Machine
from jdag.engine.tables import Hop
from jdag.processes.jobs import Jobs
from jdag.processes.peers import PeerTable
from jdag.runtime.step_values import StepValues


class StepRunner(StepValues):
    """Runs rows that are short as jobs without keys; the others become jobs."""

    def __init__(self, machine: Machine, jobs: Jobs, peers: PeerTable) -> None:
        super().__init__(machine)
        self.run, self.has_keys = jobs.add_row, jobs.rows_are_jobs
        self._peers = peers
        self._connections = peers.connections

    def send(self, hop: Hop, number: int, base: int, values: Sequence[Any]) -> bool:
        if self.has_keys:
            return False
        peer = self._connections.get(hop.to) or self._peers.peer(hop.to)
        hop.encoded = peer.step(hop.frame, number, base, values, hop.encoded)
        self._peers.hurries = True
        return True
