"""Re-timing: what a recorded run would take with other links and devices, without it.

Under a schedule, with a control lane that is free and immediate, the order of all that
takes time is fixed, so the run is a graph of longest paths (`jdag.lab.max_plus`): jobs
wait for the one before on their device and for what they read, values for the one
before on their link. Costs alone change: latencies, bandwidths, and times of jobs.

Inputs:  the trace of a run, with its settings (`Trace.settings`); a window of it.
Outputs: `Retimed`: makespans of other settings, to the ns what a run with them takes
         from the begin of the first job of the window to the end of the last; their
         gradient; the critical path.

Invariants: with the recorded settings the graph gives each job the times of the trace,
or the run is refused; so is one whose order may depend on time, by what is missing.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np

from jdag.errors import ScenarioError, unusable
from jdag.lab.max_plus import MaxPlus
from jdag.lab.run_graph import RunGraph, job_named, retiming_error
from jdag.runtime.trace import Trace
from jdag.sim.devices import MOVED, DeviceModel
from jdag.sim.network import LinkModel, LogGP, Network

_SECOND_NS = 1_000_000_000


@dataclass(frozen=True, slots=True)
class CriticalPath:
    """What a run waited for, from the begin of its first job to the end of its last.

    Attributes:
        steps: (what, start_ns, end_ns) of each part that takes time, in order; the
            first job begins at 0.
        makespan_ns: their sum, and the makespan.
        by_worker, by_link, by_kind: ns of each; kinds are "compute", "latency" and
            "transfer".
    """

    steps: tuple[tuple[str, int, int], ...]
    makespan_ns: int
    by_worker: Mapping[str, int]
    by_link: Mapping[str, int]
    by_kind: Mapping[str, int]


class Retimed:
    """A recorded run as a function of its links and devices; `retime` makes it.

    Attributes:
        settings: what the run had, as the argument of `makespan_fn`: by link, as
            "a->b", `latency_ns` and `bandwidth_bytes_per_s` (of links without bound
            there is none), and by "worker: function action" `job_ns`; floats.
    """

    def __init__(self, graph: RunGraph, network: Network):
        self._graph = graph
        self.network = network  # Of the run.
        self._paths = MaxPlus(graph.nodes, [edge for edge, _ in graph.edges])
        links = [f"{a}->{b}" for a, b in graph.links]
        models = [network.model(*link) for link in graph.links]
        pairs = list(zip(links, models, strict=True))
        self.settings: dict[str, dict[str, float]] = {
            "latency_ns": {link: float(model.flight_ns) for link, model in pairs},
            "bandwidth_bytes_per_s": {
                link: float(model.bandwidth_bytes_per_s)
                for link, model in pairs
                if model.bandwidth_bytes_per_s is not None
            },
            "job_ns": {
                job_named(key): float(cost) for key, cost in graph.costs.items()
            },
        }
        self.makespan_fn = _relaxed(self)

    @property
    def nodes(self) -> int:
        """How many nodes the graph has: starts, ends, departures and arrivals."""
        return self._graph.nodes

    def _edge_costs(
        self, network: Network | LinkModel | None, devices: Any, scale: float = 1.0
    ) -> list[int]:
        if isinstance(network, LinkModel):
            network = Network(network, control_lane=True)
        network = network or self.network
        _check_network(network)
        costs: Mapping[Any, int] = self._graph.costs
        if devices is not None:
            costs = _costs_of(self._graph, devices)
        if scale != 1.0:
            costs = {key: round(cost * scale) for key, cost in costs.items()}
        found = []
        for _, cost in self._graph.edges:
            ns = 0
            if cost.kind == "job":
                ns = costs[cost.key]
            elif cost.kind:
                model = network.model(cost.key[0], cost.key[1])
                is_way = cost.kind == "latency"
                ns = model.flight_ns if is_way else model.transfer_ns(cost.nbytes)
            found.append(ns)
        return found

    def makespan(
        self,
        network: Network | LinkModel | None = None,
        devices: DeviceModel | Mapping[str, DeviceModel] | None = None,
    ) -> int:
        """From the first job's begin to the last one's end, in ns, of a run with these.

        Args:
            network: of the same workers; None: that of the run.
            devices: of all workers, or by worker; None: those of the run.

        Raises:
            ScenarioError: a network or devices by which the order of the run would
                depend on time, or is another; names what.
        """
        at, _ = self._times(self._edge_costs(network, devices))
        first_ns = min([at[node] for node in self._graph.starts])
        return max([at[node] for node in self._graph.ends]) - first_ns

    def _times(self, costs: list[int]) -> tuple[list[int], list[int]]:
        """When each node happens, and the edge that it waited for.

        Raises:
            ScenarioError: messages of a link would leave it in another order.
        """
        at, by = self._paths.times(costs)
        for link, sent in self._graph.sent.items():
            for (one, first), (other, second) in pairwise(sent):
                if at[one] > at[other]:
                    raise ScenarioError(
                        f"with these settings the messages of {link[0]} to {link[1]} "
                        f"leave in another order (records {first} and {second}), so "
                        "that times cannot be told from this run: run it; orders are "
                        "fixed where arrays are put on their workers, and fetched "
                        "once, before they are used"
                    )
        return at, by

    def critical_path(
        self,
        network: Network | LinkModel | None = None,
        devices: DeviceModel | Mapping[str, DeviceModel] | None = None,
        *,
        scale: float = 1.0,
    ) -> CriticalPath:
        """What the last job waited for since the first; arguments as `makespan`.

        Jobs take `scale` times as long, rounded to ns.
        """
        costs = self._edge_costs(network, devices, scale)
        at, by = self._times(costs)
        begin_ns = min([at[node] for node in self._graph.starts])
        node = max(self._graph.ends, key=at.__getitem__)
        makespan_ns, steps = at[node] - begin_ns, []
        by_worker, by_link, by_kind = Counter[str](), Counter[str](), Counter[str]()
        while (edge := by[node]) >= 0 and at[node] > begin_ns:
            (source, _), cost = self._graph.edges[edge]
            start_ns = max(at[source], begin_ns)
            if ns := min(costs[edge], at[node] - start_ns):
                if cost.kind == "job":
                    what, kind = job_named(cost.key), "compute"
                    by_worker[cost.key[0]] += ns
                else:
                    link, kind = f"{cost.key[0]}->{cost.key[1]}", cost.kind
                    what = f"{link} {kind}"
                    by_link[link] += ns
                by_kind[kind] += ns
                start_ns -= begin_ns
                steps.append((what, start_ns, start_ns + ns))
            node = source
        shares = by_worker, by_link, by_kind
        return CriticalPath(tuple(reversed(steps)), makespan_ns, *shares)


def retime(trace: Trace, window_ns: tuple[int, int] | None = None) -> Retimed:
    """Take a recorded run as a function of its links and devices.

    What comes before its first job, such as set-up, has no part in its makespan.

    Args:
        trace: `cluster.trace`, or what `jdag.runtime.trace.read_trace` read of a run
            under a schedule with `Network(control_lane=True)`.
        window_ns: `cluster.now_ns` before and after some steps, of which the jobs are
            re-timed; None: all jobs of the schedule.

    Raises:
        JdagError: the order of this run may depend on time, or its trace has no
            settings; names what is missing.
    """
    network = _network_of(trace)
    graph = RunGraph(trace, window_ns)
    run = Retimed(graph, network)
    at, _ = run._paths.times(run._edge_costs(None, None))
    for node, record in graph.checked:
        if at[node] != record.time_ns:
            raise retiming_error(
                f"record {record.index} ({record.kind} {record.named['job']} on "
                f"{record.worker}) came at {record.time_ns} ns, and what it is known "
                f"to wait for at {at[node]} ns; put arrays on their workers, and fetch "
                "them once, before they are used"
            )
    return run


def _network_of(trace: Trace) -> Network:
    held: Any = trace.settings
    if not held:
        raise retiming_error("its trace has no settings, as those of older versions")
    if held.get("driver") == "rpc":
        raise retiming_error("it was a run of processes, whose network is no model")
    if not held["schedule"]:
        raise retiming_error("it has no schedule")
    for key, allowed in (("faults", 0), ("policy", "path"), ("call_ns", 0)):
        if held.get(key, allowed) != allowed:
            raise retiming_error(unusable(key, held[key], repr(allowed)))
    if held["routed"]:
        raise retiming_error("its network has a topology, whose links are shared")
    control = held["control_lane"]
    network = Network(
        _model(held["default"]),
        {(a, b): _model(link) for a, b, link in held["links"]},
        port_bandwidth_bytes_per_s=held["port_bandwidth_bytes_per_s"],
        control_lane=None if control is None else _model(control),
    )
    try:
        _check_network(network)
    except ScenarioError as error:
        raise retiming_error(str(error)) from None
    return network


def _model(held: Mapping[str, Any]) -> LinkModel:
    fields_of = dict(held)
    kind = {"LinkModel": LinkModel, "LogGP": LogGP}[fields_of.pop("kind")]
    return kind(**fields_of)


def _check_network(network: Network) -> None:
    if network.control_lane is None or network.control_lane != LinkModel():
        allowed = "True: messages without values free and immediate"
        raise ScenarioError(unusable("control_lane", network.control_lane, allowed))
    if network.route is not None:
        allowed = "none: paths over shared links have no fixed order"
        raise ScenarioError(unusable("topology", network.route, allowed))
    if (rate := network.port_bandwidth_bytes_per_s) is not None:
        allowed = "none: ports fill gaps, so that orders depend on time"
        raise ScenarioError(unusable("port_bandwidth_bytes_per_s", rate, allowed))
    for model in (network.default, *network.links.values()):
        if model.jitter_ns:
            raise ScenarioError(unusable("jitter_ns", model.jitter_ns, "0"))
        if model.pause_ns:
            raise ScenarioError(unusable("gap_ns", model, "at most overhead_ns"))


def _costs_of(
    graph: RunGraph, devices: DeviceModel | Mapping[str, DeviceModel]
) -> dict[Any, int]:
    """The times of the jobs of a run on other devices."""
    found = {}
    for key in (*graph.costs, *graph.free):
        worker, function, action = key
        model = devices.get(worker) if isinstance(devices, Mapping) else devices
        if not isinstance(model, DeviceModel):
            allowed = f"a DeviceModel, or one for each worker, {worker} too"
            raise ScenarioError(unusable("devices", devices, allowed))
        for name, free in (("sum_ns", 0), ("call_ns", 0), ("overlap_ns", None)):
            if (value := getattr(model, name)) != free:
                allowed = f"{free}: jobs of lists alone take time, each its own"
                raise ScenarioError(unusable(name, value, allowed))
        if typed := [name for name in model.functions if "(" in name]:
            raise ScenarioError(unusable("functions", typed[0], "names without types"))
        found[key] = model.named_ns(function, action)
        found[key] += 0 if function == MOVED else model.job_ns
        if key in graph.free and found.pop(key):
            allowed = f"one on which {job_named(key)}, which is in no list, is free"
            raise ScenarioError(unusable("devices", model, allowed))
    return found


def _relaxed(run: Retimed) -> Any:
    """`makespan` without rounding, as a JAX function of a pytree of settings."""
    names = {key: [*values] for key, values in run.settings.items()}
    places = [(key, name) for key, of in names.items() for name in of]
    number = {place: at for at, place in enumerate(places)}
    rows: list[tuple[int, int, float]] = []
    for edge, (_, cost) in enumerate(run._graph.edges):
        if cost.kind == "job":
            rows.append((edge, number["job_ns", job_named(cost.key)], 1.0))
        elif cost.kind:
            link = f"{cost.key[0]}->{cost.key[1]}"
            if cost.kind == "latency":
                rows.append((edge, number["latency_ns", link], 1.0))
            elif ("bandwidth_bytes_per_s", link) in number:
                at = number["bandwidth_bytes_per_s", link]
                rows.append((edge, at, cost.nbytes * float(_SECOND_NS)))
    columns = [np.array([row[n] for row in rows]) for n in range(3)]
    matrix = (columns[0].astype(int), columns[1].astype(int), columns[2])
    between = run._graph.starts, run._graph.ends
    span = run._paths.span(matrix, len(places), *between)

    def makespan_fn(settings: Mapping[str, Mapping[str, Any]]) -> Any:
        """The makespan in ns of settings like `Retimed.settings`, without rounding.

        For `jax.vmap` and `jax.grad`; in float64 inside, and of JAX's width outside
        (`jax.enable_x64`).
        """
        given = []
        for key, name in places:
            if name not in settings.get(key, {}):
                allowed = f"a number for {name!r}, as in run.settings"
                raise ScenarioError(unusable(key, settings.get(key), allowed))
            value = jnp.asarray(settings[key][name], float)
            given.append(1.0 / value if key.startswith("bandwidth") else value)
        return span(jnp.stack(jnp.broadcast_arrays(*given), -1))

    return makespan_fn
