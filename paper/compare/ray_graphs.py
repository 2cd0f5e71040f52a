"""Ray's side of the rows of graphs: its Compiled Graph, an actor for each worker.

    PYTHON -m paper.compare.ray_graphs [--quick] [--pin one]

Run by the Python of an environment that has Ray; prints a JSON object after each row,
of all so far.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import ray
from ray.dag import InputNode

from paper.compare import pinning, rows

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

    def cores(self) -> list[int]:
        """Those of this process."""
        return pinning.held()


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

    def cores(self) -> dict[str, list[int]]:
        """Each actor reads its own."""
        if self.compiled is not None:  # Until then actors do nothing else.
            self.compiled.teardown()
        read = [actor.cores.remote() for actor in self.actors]
        return dict(zip(rows.WORKERS, ray.get(read), strict=True))


def main() -> None:
    """Start Ray on this machine and measure."""
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
        side.cores()  # So they have started.
    for found in rows.measure(side, given.repeats, wanted, given.pin):
        rows.tell({**found, "settings": {"ray": ray.__version__}})
    ray.shutdown()


if __name__ == "__main__":
    main()
