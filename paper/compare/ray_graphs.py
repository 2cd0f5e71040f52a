"""Ray's side of the rows of graphs: a Compiled Graph with an actor for each worker.

    PYTHON -m paper.compare.ray_graphs [--quick] [--pin one]

It runs in a Python environment with Ray. After each row it prints a JSON object with
all rows so far.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray.dag import InputNode

from paper.compare import pinning, rows

SPARE_BYTES = 1 << 16  # A channel is larger than the array by this size.
LOCAL = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}


class Worker:
    """A Ray actor, which runs in its own process."""

    def same(self, value: np.ndarray) -> np.ndarray:
        return value

    def multiply(self, value: np.ndarray, factor: Any) -> Any:
        """Multiply by a factor: one call of a chain."""
        return value * factor

    def cores(self) -> list[int]:
        """Return the cores of this process."""
        return pinning.held()


class Graphs:
    """Ray's implementation of `rows.GRAPHS`; see `rows.Side`."""

    array = staticmethod(np.asarray)
    compiled: Any = None

    def __init__(self) -> None:
        self.actors = [ray.remote(Worker).remote() for _ in rows.WORKERS]

    def graph(self, value: np.ndarray, calls: int) -> Callable[[Any], Any]:
        """Compile a new graph, whose channels are large enough for `value`."""
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

    def cores(self) -> dict[str, list[int]]:
        """Call each actor, which reads its own cores."""
        if self.compiled is not None:  # Actors in a graph take no other calls.
            self.compiled.teardown()
        read = [actor.cores.remote() for actor in self.actors]
        return dict(zip(rows.WORKERS, ray.get(read), strict=True))


def main() -> None:
    """Start Ray on this machine, measure, and print results after each row."""
    given, wanted = rows.asked(__doc__), rows.of(rows.RAY)
    os.environ.update(LOCAL)
    with pinning.of_workers():
        ray.init(
            num_cpus=len(rows.WORKERS),
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
        side = Graphs()
        side.cores()  # Waits until the actors have started.
    for found in rows.measure(side, given.repeats, wanted, given.pin):
        rows.tell({**found, "settings": {"ray": ray.__version__}})
    ray.shutdown()


if __name__ == "__main__":
    main()
