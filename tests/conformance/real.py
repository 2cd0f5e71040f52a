"""The real driver, on which the conformance suite runs: processes on sockets."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from tests.conformance import functions
from tests.tools.rpc_workers import NAMES, Workers, kept
from tests.tools.stream_cases import soon


class Real:
    """Processes of this host; those that outlive a test serve the next one.

    A dying function kills the process that runs it; the next test has another one.
    """

    name = "socket"
    workers_max = 4
    loss_max_s = 10.0

    def names(self, count: int) -> Sequence[str]:
        """So many of the four."""
        return NAMES[:count]

    def cluster(self, workers: Sequence[str] = NAMES) -> Any:
        """A new session over the processes of all four."""
        assert tuple(workers) == NAMES[: len(workers)], workers
        return kept().connect()

    def _troubled(self) -> Workers:
        return kept(**{functions.TROUBLED: "1"})

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
        workers = self._troubled()
        with workers.connect() as cluster:
            yield cluster
        soon(lambda: victim in workers.dead)

    def slow(self) -> Any:
        """Processes in which a function waits."""
        return self._troubled().connect()

    def settle(self, cluster: Any) -> None:
        """All is sent, heard and computed, wherever it goes on."""
        cluster.driver.settle()
