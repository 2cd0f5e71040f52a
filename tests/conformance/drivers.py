"""The drivers on which the conformance suite runs, and what it asks of each.

A body uses the public face of jdag alone, functions of modules (they travel by name),
and what a `Driver` offers here: clusters, a way to wait until all is quiet, and two
kinds of trouble, a worker that dies and one that takes its time. A new driver is one
more entry in `DRIVERS`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import jdag
from jdag import sim
from tests.conformance import functions
from tests.tools.rpc_workers import NAMES, Workers, kept
from tests.tools.stream_cases import soon

WORKERS = ("a", "b", "c", "d")


class Driver(Protocol):
    name: str
    workers_max: int  # How many workers a cluster may well have.
    loss_max_s: float  # In this time a caller has heard that a worker died.

    def names(self, count: int) -> Sequence[str]:
        """Return names for so many workers, at most `workers_max`."""

    def cluster(self, workers: Sequence[str] = WORKERS) -> Any:
        """Return a new cluster; the main program runs on the first worker."""

    def rough(self, workers: Sequence[str], runs: int) -> Iterator[Any]:
        """Give one open cluster a run, each with other timing than the last one."""

    def mortal(self, victim: str) -> Any:
        """Return a cluster in which `victim` dies when one of two functions runs there.

        These are `functions.dies_forward`, and `functions.dies_backward` in its vjp.
        """

    def slow(self) -> Any:
        """Return a cluster where the vjp of `functions.lingers` takes ten seconds."""

    def settle(self, cluster: Any) -> None:
        """Wait until all has happened that is to happen."""


class Simulated:
    """Virtual time: a dying function is one during which its worker crashes."""

    name = "sim"
    workers_max = 25
    loss_max_s = 0.01

    def names(self, count: int) -> Sequence[str]:
        return ["a", *(f"w{number}" for number in range(count - 1))]

    def cluster(self, workers: Sequence[str] = WORKERS) -> jdag.Cluster:
        return jdag.simulate(workers, seed=0)

    def rough(self, workers: Sequence[str], runs: int) -> Iterator[jdag.Cluster]:
        """Links that are uneven and lose messages; no two runs are alike."""
        network = sim.LinkModel(latency_ns=500, jitter_ns=400)
        digests = []
        for seed in range(runs):
            faults = (sim.Drop(0.05), sim.Delay(0.1, 10, 5_000))
            with jdag.simulate(
                workers, seed=seed, network=network, faults=faults
            ) as cluster:
                yield cluster
                digests.append(cluster.trace.digest)
        assert len(dict.fromkeys(digests)) == runs, "some runs were alike"

    def mortal(self, victim: str) -> jdag.Cluster:
        costs = {
            jdag_name(functions.dies_forward): (1_000, 0),
            jdag_name(functions.dies_backward): (0, 1_000),
        }
        return jdag.simulate(
            WORKERS,
            seed=0,
            devices=sim.DeviceModel(functions=costs),
            faults=[sim.Crash(victim, 100_000, at_ns=500)],
        )

    def slow(self) -> jdag.Cluster:
        costs = {jdag_name(functions.lingers): (0, 10_000_000_000)}
        return jdag.simulate(WORKERS, seed=0, devices=sim.DeviceModel(functions=costs))

    def settle(self, cluster: jdag.Cluster) -> None:
        cluster.driver.settle()


class Real:
    """Processes of this host; those that outlive a test serve the next one.

    A dying function kills the process that runs it; the next test has another one.
    """

    name = "socket"
    workers_max = 4
    loss_max_s = 10.0

    def names(self, count: int) -> Sequence[str]:
        return NAMES[:count]

    def cluster(self, workers: Sequence[str] = NAMES) -> Any:
        assert tuple(workers) == NAMES[: len(workers)], workers
        return kept().connect()

    def _troubled(self) -> Workers:
        return kept(**{functions.TROUBLED: "1"})

    def rough(self, workers: Sequence[str], runs: int) -> Iterator[Any]:
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
        return self._troubled().connect()

    def settle(self, cluster: Any) -> None:
        cluster.driver.settle()


def jdag_name(fn: Any) -> str:
    return f"{fn.__module__}:{fn.__qualname__}"


DRIVERS: dict[str, Driver] = {
    "sim": Simulated(),
    "socket": Real(),
}


@contextmanager
def leaving_nothing(driver: Driver, cluster: Any) -> Iterator[None]:
    """Hold that afterwards no worker has a context, a pass, or a value that is new."""
    driver.settle(cluster)
    before = held(cluster)
    yield
    driver.settle(cluster)
    for worker, (contexts, passes, values) in held(cluster).items():
        assert (contexts, passes) == (0, 0), worker
        assert values <= before[worker][2], worker


def held(cluster: Any) -> dict[str, tuple[int, int, int]]:
    """For each worker: live contexts, live passes, values held."""
    return {
        worker: (each["live_contexts"], each["live_passes"], each["values_held"])
        for worker, each in cluster.info().items()
    }
