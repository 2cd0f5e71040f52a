"""The real driver, on which the conformance suite runs: processes, either carrier."""

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.conformance import functions
from tests.rpc_workers import Workers

WORKERS = ("a", "b", "c", "d")


class Real:
    """Processes of this host; those that outlive a test serve the next one.

    A dying function kills the process that runs it, of which there are fresh ones.
    """

    workers_max = 4
    loss_max_s = 10.0

    def __init__(self, carrier: str) -> None:
        self.name = carrier
        self._carrier = carrier
        self._kept: dict[tuple[str, ...], Workers] = {}

    def cluster(self, workers: Sequence[str] = WORKERS) -> Any:
        """A new session over processes that are kept."""
        names = tuple(workers)
        kept = self._kept.get(names)
        if kept is None or not kept.alive:
            if kept is not None:
                kept.close()
            kept = self._kept[names] = Workers(names, carrier=self._carrier)
            atexit.register(kept.close)
        return kept.connect()

    def rough(self, workers: Sequence[str], runs: int) -> Iterator[Any]:
        """Real time is other in each run."""
        with self.cluster(workers) as cluster:
            for _ in range(runs):
                yield cluster

    @contextmanager
    def _apart(self, variable: str) -> Iterator[Any]:
        workers = Workers(WORKERS, carrier=self._carrier, env={variable: "1"})
        try:
            with workers.connect() as cluster:
                yield cluster
        finally:
            workers.close()

    def mortal(self, victim: str) -> Any:
        """Processes in which these functions kill."""
        del victim  # Whoever runs them.
        return self._apart(functions.MORTAL)

    def slow(self) -> Any:
        """Processes in which a function waits."""
        return self._apart(functions.SLOW)

    def settle(self, cluster: Any) -> None:
        """All is sent, heard and computed, wherever it goes on."""
        cluster.driver.settle()
