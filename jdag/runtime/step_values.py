"""How steps of plans use the values of a worker: what both drivers share."""

from typing import Any

from jdag.compute.avals import is_deleted
from jdag.compute.machine import Machine, deleted_failure, segment_sizes
from jdag.compute.values import nbytes_of
from jdag.engine.protocol import Failure, LeafKey
from jdag.engine.tables import StepState


class StepValues:
    """A `StepDriver` that leaves rows and frames to the effects of the engine."""

    def __init__(self, machine: Machine, has_keys: bool = True) -> None:
        self.has_keys, values = has_keys, machine.values
        self.get, self.put, self.account = values.get, values.put, values.account
        self.nbytes, self.sizes = nbytes_of, segment_sizes
        self.run = self.send = self.finish = self.flush = self._as_effect

    def refusal(self, step: StepState) -> Failure | None:
        for leaf in step.table.passed_on:
            value = self.get(step.versions[leaf].stored)
            if is_deleted(value):
                return deleted_failure(value, LeafKey(None, leaf, 0), leaf.worker)
        return None

    def _as_effect(self, *_: Any) -> Any:
        return False
