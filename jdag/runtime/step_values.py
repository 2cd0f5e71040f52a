"""How steps of plans use the values of a worker: what both drivers share."""

from collections.abc import Callable, Sequence
from typing import Any

from jdag.compute.machine import Machine, segment_sizes
from jdag.compute.values import nbytes_of
from jdag.engine.tables import Hop, StepState, TableRow


class StepValues:
    """A `StepDriver` that leaves rows and frames to the effects of the engine."""

    has_keys = True

    def __init__(self, machine: Machine) -> None:
        values = machine.values
        self.get, self.put, self.account = values.get, values.put, values.account
        self.nbytes, self.sizes = nbytes_of, segment_sizes
        self.run: Callable[[StepState, TableRow, list[Any]], Any] = lambda *_: False

    def send(self, hop: Hop, number: int, base: int, values: Sequence[Any]) -> bool:
        return False

    def finish(self, waiter: int, results: tuple[Any, ...]) -> bool:
        return False
