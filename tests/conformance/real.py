"""The real driver, on which the conformance suite runs: processes, either carrier."""

import atexit
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.conformance import functions
from tests.rpc_workers import Workers
from tests.stream_cases import soon

WORKERS = ("a", "b", "c", "d")


class Real:
    """Processes of this host; those that outlive a test serve the next one.

    A dying function kills the process that runs it; the next test has another one.
    """

    workers_max = 4
    loss_max_s = 10.0

    def __init__(self, carrier: str) -> None:
        self.name = carrier
        self._carrier = carrier
        self._kept: dict[bool, Workers] = {}

    def names(self, count: int) -> Sequence[str]:
        """So many of the four."""
        return WORKERS[:count]

    def cluster(self, workers: Sequence[str] = WORKERS) -> Any:
        """A new session over the processes of all four."""
        assert tuple(workers) == WORKERS[: len(workers)], workers
        return self._connected(troubled=False)

    def _connected(self, *, troubled: bool) -> Any:
        kept = self._kept.get(troubled)
        if kept is None:
            env = {functions.TROUBLED: "1"} if troubled else None
            kept = Workers(WORKERS, carrier=self._carrier, env=env)
            self._kept[troubled] = kept
            atexit.register(kept.close)
        kept.revive()
        return kept.connect()

    def rough(self, workers: Sequence[str], runs: int) -> Iterator[Any]:
        """Real time is other in each run."""
        with self.cluster(workers) as cluster:
            for _ in range(runs):
                yield cluster

    @contextmanager
    def mortal(self, victim: str) -> Iterator[Any]:
        """Processes in which these functions kill; the victim's has ended after that.

        Its peers may know that before it is known here, and the next test begins.
        """
        with self._connected(troubled=True) as cluster:
            yield cluster
        soon(lambda: victim in self._kept[True].dead)

    def slow(self) -> Any:
        """Processes in which a function waits."""
        return self._connected(troubled=True)

    def settle(self, cluster: Any) -> None:
        """All is sent, heard and computed, wherever it goes on."""
        cluster.driver.settle()
