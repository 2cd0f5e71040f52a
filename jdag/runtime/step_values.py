"""How steps of plans use the values of a worker: what both drivers share."""

from collections.abc import Callable, Sequence
from typing import Any

from jdag.compute.avals import is_deleted
from jdag.compute.machine import Machine, deleted_failure, segment_sizes
from jdag.compute.values import nbytes_of
from jdag.engine.protocol import Failure, LeafKey
from jdag.engine.tables import Hop, StepState, TableRow


class StepValues:
    """A `StepDriver` that leaves rows and frames to the effects of the engine."""

    def __init__(self, machine: Machine, has_keys: bool = True) -> None:
        self.has_keys, values = has_keys, machine.values
        self.get, self.put, self.account = values.get, values.put, values.account
        self.nbytes, self.sizes = nbytes_of, segment_sizes
        self.run: Callable[[StepState, TableRow, list[Any]], bool] = lambda *_: False

    def refusal(self, step: StepState) -> Failure | None:
        for leaf in step.table.passed_on:
            value = self.get(step.versions[leaf].stored)
            if is_deleted(value):
                return deleted_failure(value, LeafKey(None, leaf, 0), leaf.worker)
        return None

    def send(self, hop: Hop, number: int, base: int, values: Sequence[Any]) -> bool:
        return False
