"""Drivers of a scenario: virtual time ("sim"), or processes of this host ("rpc").

Processes use the network and the devices of the host; the tables `network` and
`devices` are ignored. Keys that processes cannot honor raise an error: `faults`,
abstract `values`, and a `home` other than the first worker.
"""

from typing import Any

from jdag.api.cluster import Cluster
from jdag.api.drivers import launch, simulate
from jdag.errors import JdagError, ScenarioError, unusable
from jdag.processes.session.cluster_file import DEVICES, is_device
from jdag.scenario.player import Figures
from jdag.scenario.scenario_schema import (
    ScenarioTable,
    devices_of,
    network_of,
    schedule_of,
)

DRIVERS = ("sim", "rpc")

# Figures of each worker: (key in `cluster.info()`, description).
BY_WORKER = {
    "peak_bytes": ("bytes_peak", "most bytes that each worker held at one time"),
    "peak_activation_bytes": (
        "activation_bytes_peak",
        "most bytes that each worker held at one time for backward passes",
    ),
    "sent_messages": ("messages_sent", "protocol messages that each worker sent"),
    "sent_bytes": ("bytes_sent", "all bytes that each worker sent"),
}


class Virtual:
    """Runs in virtual time, in this process, with a new cluster for each seed."""

    virtual = True

    def __init__(self, settings: ScenarioTable) -> None:
        self._settings = settings
        self._clusters: list[Cluster] = []

    def cluster(self, seed: int, *, clean: bool) -> Cluster:
        """Make the scenario's cluster. With `clean` it has no faults and no jitter."""
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
        self._clusters.append(cluster)
        return cluster

    def let_go(self, kept: Cluster | None) -> None:
        for cluster in self._clusters:
            if cluster is not kept:
                cluster.close()

    def figures(self) -> Figures:
        """Return more figures, of the cluster that was made last."""
        if not self._clusters:
            return {"peak_activation_bytes": {}}
        return _by_worker(self._clusters[-1], "peak_activation_bytes")

    def close(self) -> None:
        self.let_go(None)


class Real:
    """Runs on processes of this host, with one cluster for all seeds."""

    virtual = False

    def __init__(self, settings: ScenarioTable, *, device: str | None) -> None:
        refuse_virtual(settings)
        self._settings = settings
        self._device = device
        self._cluster: Cluster | None = None

    def cluster(self, seed: int, *, clean: bool) -> Cluster:
        """Return the cluster. The first call starts its processes."""
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
        """Do nothing: there is only one cluster, which stays open until `close`."""

    def figures(self) -> Figures:
        return {} if self._cluster is None else _by_worker(self._cluster, *BY_WORKER)

    def close(self) -> None:
        if self._cluster is not None:
            self._cluster.close()


CaseDriver = Virtual | Real


def _by_worker(cluster: Cluster, *figures: str) -> Figures:
    info = cluster.info()
    return {
        figure: {worker: counts[key] for worker, counts in info.items()}
        for figure in figures
        for key, _ in [BY_WORKER[figure]]
    }


def refuse_virtual(settings: ScenarioTable) -> None:
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
    """Return the driver "sim" or "rpc" of a scenario.

    `device` is the workers' device with "rpc": cpu, gpu, gpu:1, or None for JAX's
    default. Raises ScenarioError if an option is invalid or the scenario needs "sim".
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
