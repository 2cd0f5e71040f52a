"""How steps of plans use the values of a worker: what both drivers share."""

from typing import Any

from jdag.compute.machine import Machine, segment_sizes
from jdag.compute.values import nbytes_of


class StepValues:
    """A `StepDriver` that leaves rows and frames to the effects of the engine."""

    has_keys = True

    def __init__(self, machine: Machine) -> None:
        values = machine.values
        self.get, self.put, self.account = values.get, values.put, values.account
        self.nbytes, self.sizes = nbytes_of, segment_sizes
        self.run = self.send = self.finish = self.flush = self._as_effect

    def _as_effect(self, *_: Any) -> Any:
        return False
