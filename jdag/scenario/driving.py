"""Drivers of a scenario: virtual time, or real processes.

On processes the tables of network and devices are ignored: these are those of the host.
What is impossible there, or would change the question, is refused by its key: faults,
values that are shapes, a home that is not the first worker.
"""

from typing import Any

from jdag.api.cluster import Cluster
from jdag.api.drivers import launch, simulate
from jdag.errors import JdagError, ScenarioError, unusable
from jdag.processes.session.cluster_file import DEVICES, is_device
from jdag.scenario.case import Figures
from jdag.scenario.scenario_schema import (
    ScenarioTable,
    devices_of,
    network_of,
    schedule_of,
)

DRIVERS = ("sim", "rpc")

# Figures of each worker in a run without a trace: the name in `cluster.info()`, the
# meaning.
BY_WORKER = {
    "peak_bytes": ("bytes_peak", "the most that each worker held at one time"),
    "peak_activation_bytes": (
        "activation_bytes_peak",
        "the most that each worker held for backward passes at one time",
    ),
    "sent_messages": ("messages_sent", "protocol messages that each worker sent"),
    "sent_bytes": ("bytes_sent", "all bytes that each worker sent"),
}


class Virtual:
    """Plays in virtual time, in this process: a cluster for each seed."""

    virtual = True

    def __init__(self, settings: ScenarioTable) -> None:
        self._settings = settings
        self._made: list[Cluster] = []

    def cluster(self, seed: int, *, clean: bool) -> Cluster:
        """Make the cluster that the file describes; a clean one has no faults."""
        settings = self._settings
        cluster = simulate(
            settings.names,
            seed=seed,
            home=settings.home,
            values=settings.values,
            network=network_of(settings, clean=clean),
            devices=devices_of(settings),
            faults=() if clean else settings.faults,
            policy=settings.policy,
            schedule=schedule_of(settings),
            link=settings.link,
            events_max=settings.events_max,
            nesting_max=settings.nesting_max,
        )
        self._made.append(cluster)
        return cluster

    def let_go(self, kept: Cluster | None) -> None:
        """Close the clusters that were made before, but for one."""
        for cluster in self._made:
            if cluster is not kept:
                cluster.close()

    def figures(self) -> Figures:
        """Return further figures of the run: what its last cluster counted."""
        info = self._made[-1].info() if self._made else {}
        figure = "peak_activation_bytes"
        name, _ = BY_WORKER[figure]
        return {figure: {worker: one[name] for worker, one in info.items()}}

    def close(self) -> None:
        """Close everything."""
        self.let_go(None)


class Real:
    """Plays on processes of this host: one cluster, for all seeds."""

    virtual = False

    def __init__(self, settings: ScenarioTable, *, device: str | None) -> None:
        refuse_virtual(settings)
        self._settings = settings
        self._device = device
        self._cluster: Cluster | None = None

    def cluster(self, seed: int, *, clean: bool) -> Cluster:
        """Return the cluster; its processes start when it is first asked for."""
        del seed, clean
        settings = self._settings
        if self._cluster is None:
            try:
                self._cluster = launch(
                    settings.names,
                    device=self._device,
                    allow=[settings.program.partition(":")[0]],
                    nesting_max=settings.nesting_max,
                    schedule=schedule_of(settings),
                    trace=True,
                )
            except JdagError as error:
                raise ScenarioError(f"--driver rpc: {error}") from error
        return self._cluster

    def let_go(self, kept: Cluster | None) -> None:
        """Do nothing: there is one cluster."""

    def figures(self) -> Figures:
        """Return what each worker held and sent."""
        if self._cluster is None:
            return {}
        info = self._cluster.info()
        return {
            figure: {worker: one[name] for worker, one in info.items()}
            for figure, (name, _) in BY_WORKER.items()
        }

    def close(self) -> None:
        """End all processes."""
        if self._cluster is not None:
            self._cluster.close()


CaseDriver = Virtual | Real


def refuse_virtual(settings: ScenarioTable) -> None:
    """Raise ScenarioError for settings that only virtual time has."""
    first = settings.names[0]
    if settings.values != "real":
        _refuse("values", settings.values, '"real"')
    for number, fault in enumerate(settings.faults):
        _refuse(f"faults[{number}].kind", fault.kind, "no faults")
    if settings.home not in (None, first):
        _refuse("home", settings.home, f"the first worker, {first}")


def _refuse(key: str, value: Any, allowed: str) -> None:
    raise ScenarioError(unusable(key, value, f"{allowed} with --driver rpc"))


def driver_of(
    settings: ScenarioTable, driver: str, *, device: str | None
) -> CaseDriver:
    """Return the driver of a scenario.

    Args:
        settings: what the file says.
        driver: "sim" or "rpc".
        device: with rpc, where workers compute: cpu, gpu or gpu:1; None: as JAX does.

    Raises:
        ScenarioError: names what is unusable, its value and what is allowed.
    """
    if driver not in DRIVERS:
        allowed = "one of " + ", ".join(DRIVERS)
        raise ScenarioError(unusable("--driver", driver, allowed))
    if driver == "sim":
        if device not in (None, "cpu"):
            allowed = "cpu; with --driver rpc also gpu, gpu:1"
            raise ScenarioError(unusable("--device", device, allowed))
        return Virtual(settings)
    if device is not None and not is_device(device):
        raise ScenarioError(unusable("--device", device, DEVICES))
    return Real(settings, device=device)
