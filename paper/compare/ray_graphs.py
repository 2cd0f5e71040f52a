"""Ray's side of the rows of graphs: its Compiled Graph, an actor for each worker.

    PYTHON -m paper.compare.ray_graphs [--quick]

Run by the Python of an environment that has Ray; prints a JSON object after each row,
of all so far.
"""

import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray.dag import InputNode

from paper.compare import rows

SPARE_BYTES = 1 << 16  # Of a channel, beside the array that passes.
LOCAL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


class Worker:
    """An actor: a process of its own."""

    def same(self, value: np.ndarray) -> np.ndarray:
        """There and back."""
        return value

    def multiply(self, value: np.ndarray, factor: Any) -> Any:
        """One call of a chain."""
        return value * factor


class Graphs:
    """Ray's side; see `rows.measure_graphs`."""

    array = staticmethod(np.asarray)
    compiled: Any = None

    def __init__(self) -> None:
        self.actors = [ray.remote(Worker).remote() for _ in rows.WORKERS]

    def graph(self, value: np.ndarray, calls: int) -> Callable[[Any], Any]:
        """One at a time; its channels are large enough for such a value."""
        if self.compiled is not None:
            self.compiled.teardown()
        with InputNode() as given:
            made = given if calls else self.actors[0].same.bind(given)
            for number in range(calls):
                actor = self.actors[number % len(self.actors)]
                made = actor.multiply.bind(made, rows.factor(number)[0, 0])
        size = value.nbytes + SPARE_BYTES
        self.compiled = made.experimental_compile(_buffer_size_bytes=size)
        return lambda value: ray.get(self.compiled.execute(value))


def main(arguments: Sequence[str]) -> None:
    """Start Ray on this machine and measure."""
    os.environ.update(LOCAL)
    ray.init(
        num_cpus=len(rows.WORKERS),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    for found in rows.measure_graphs(Graphs(), rows.repeats(arguments), {}):
        rows.tell({**found, "settings": {"ray": ray.__version__}})
    ray.shutdown()


if __name__ == "__main__":
    main(sys.argv[1:])
