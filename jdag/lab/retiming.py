"""Re-timing: the duration of a recorded run with other links and devices.

Under a schedule, with a control lane without delay, the order of all timed events is
fixed, so the run is a graph of longest paths (`jdag.lab.max_plus`): a job waits for the
job before it on its device and for its inputs, and a value waits for the value before
it on its link. Only costs change: latencies, bandwidths, and times of jobs.

Inputs:  the trace of a run, with its settings (`Trace.settings`); a window of it.
Outputs: `Retimed`: makespans with other settings, equal to the ns to those of real
         runs; their gradient; the critical path. A makespan lasts from the start of the
         window's first job to the end of its last.

Invariants: with the recorded settings the graph reproduces the times of all jobs in the
trace. A run for which this fails, or whose order of events may depend on time, is
refused with the reason.
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
    """The chain of events that determines the makespan.

    Attributes:
        steps: (name, start_ns, end_ns) of each part that takes time, in order, relative
            to the start of the first job.
        makespan_ns: the makespan: the sum of the parts.
        by_worker, by_link, by_kind: the part of the makespan in ns of each worker, link
            and kind; kinds are "compute", "latency" and "transfer".
    """

    steps: tuple[tuple[str, int, int], ...]
    makespan_ns: int
    by_worker: Mapping[str, int]
    by_link: Mapping[str, int]
    by_kind: Mapping[str, int]


class Retimed:
    """A recorded run as a function of its links and devices; `retime` returns it.

    Attributes:
        settings: the run's settings, in the form that `makespan_fn` takes: tables of
            floats, `latency_ns` and `bandwidth_bytes_per_s` by link, such as "a->b",
            and `job_ns` by "worker: function action". A link without limit has no
            bandwidth.
        network: the run's network.
        makespan_fn: a JAX function from settings of this form to the makespan in ns.
    """

    def __init__(self, graph: RunGraph, network: Network):
        self._graph = graph
        self.network = network
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
        edge_costs = []
        for _, cost in self._graph.edges:
            ns = 0
            if cost.kind == "job":
                ns = costs[cost.key]
            elif cost.kind:
                model = network.model(cost.key[0], cost.key[1])
                is_latency = cost.kind == "latency"
                ns = model.flight_ns if is_latency else model.transfer_ns(cost.nbytes)
            edge_costs.append(ns)
        return edge_costs

    def makespan(
        self,
        network: Network | LinkModel | None = None,
        devices: DeviceModel | Mapping[str, DeviceModel] | None = None,
    ) -> int:
        """Return the makespan in ns with these links and devices.

        Args:
            network: a network of the same workers. None: the network of the run.
            devices: a model for all devices, or a mapping from workers to models. None:
                the devices of the run.

        Raises:
            ScenarioError: with these settings the order of events would differ, or
                depend on time; the error names the reason.
        """
        times, _ = self._times(self._edge_costs(network, devices))
        first_ns = min([times[node] for node in self._graph.starts])
        return max([times[node] for node in self._graph.ends]) - first_ns

    def _times(self, costs: list[int]) -> tuple[list[int], list[int]]:
        """Return `MaxPlus.times`. ScenarioError if messages change their order."""
        times, edges = self._paths.times(costs)
        for link, sent in self._graph.sent.items():
            for (node, record), (later_node, later_record) in pairwise(sent):
                if times[node] > times[later_node]:
                    raise ScenarioError(
                        f"with these settings the messages of {link[0]} to {link[1]} "
                        f"are sent in another order (records {record} and"
                        f" {later_record}), so the times cannot be derived from this"
                        " run: simulate it. Orders are fixed if arrays are put on their"
                        " workers, and fetched once, before use"
                    )
        return times, edges

    def critical_path(
        self,
        network: Network | LinkModel | None = None,
        devices: DeviceModel | Mapping[str, DeviceModel] | None = None,
        *,
        scale: float = 1.0,
    ) -> CriticalPath:
        """Return the chain of events that determines the makespan.

        Arguments and errors are those of `makespan`; jobs take `scale` times as long,
        rounded to ns.
        """
        costs = self._edge_costs(network, devices, scale)
        times, edges = self._times(costs)
        begin_ns = min([times[node] for node in self._graph.starts])
        node = max(self._graph.ends, key=times.__getitem__)
        makespan_ns, steps = times[node] - begin_ns, []
        by_worker, by_link, by_kind = Counter[str](), Counter[str](), Counter[str]()
        while (edge := edges[node]) >= 0 and times[node] > begin_ns:
            (source, _), cost = self._graph.edges[edge]
            start_ns = max(times[source], begin_ns)
            if ns := min(costs[edge], times[node] - start_ns):
                if cost.kind == "job":
                    name, kind = job_named(cost.key), "compute"
                    by_worker[cost.key[0]] += ns
                else:
                    link, kind = f"{cost.key[0]}->{cost.key[1]}", cost.kind
                    name = f"{link} {kind}"
                    by_link[link] += ns
                by_kind[kind] += ns
                start_ns -= begin_ns
                steps.append((name, start_ns, start_ns + ns))
            node = source
        shares = by_worker, by_link, by_kind
        return CriticalPath(tuple(reversed(steps)), makespan_ns, *shares)


def retime(trace: Trace, window_ns: tuple[int, int] | None = None) -> Retimed:
    """Return a recorded run as a function of its links and devices.

    Events before the first job, such as the set-up, do not count.

    Args:
        trace: `cluster.trace`, or the result of `jdag.runtime.trace.read_trace`, of a
            run under a schedule with `Network(control_lane=True)`.
        window_ns: `cluster.now_ns` before and after the steps whose jobs are re-timed.
            None: all jobs of the schedule are re-timed.

    Returns:
        A `Retimed`.

    Raises:
        JdagError: the order of the run may depend on time, or the trace has no
            settings; the error names the reason.
    """
    network = _network_of(trace)
    graph = RunGraph(trace, window_ns)
    run = Retimed(graph, network)
    times, _ = run._paths.times(run._edge_costs(None, None))
    for node, record in graph.checked:
        if times[node] != record.time_ns:
            raise retiming_error(
                f"record {record.index} ({record.kind} {record.named['job']} on "
                f"{record.worker}) occurred at {record.time_ns} ns, but its known "
                f"dependencies ended at {times[node]} ns; put arrays on their workers, "
                "and fetch them once, before they are used"
            )
    return run


def _network_of(trace: Trace) -> Network:
    settings: Any = trace.settings
    if not settings:
        raise retiming_error("its trace was written by an older jdag, without settings")
    if settings.get("driver") == "rpc":
        raise retiming_error("it ran on processes, whose network has no model")
    if not settings["schedule"]:
        raise retiming_error("it has no schedule")
    for key, allowed in (("faults", 0), ("policy", "path"), ("call_ns", 0)):
        if settings.get(key, allowed) != allowed:
            raise retiming_error(unusable(key, settings[key], repr(allowed)))
    if settings["routed"]:
        raise retiming_error("its network has a topology, whose links are shared")
    control = settings["control_lane"]
    network = Network(
        _model(settings["default"]),
        {(a, b): _model(link) for a, b, link in settings["links"]},
        port_bandwidth_bytes_per_s=settings["port_bandwidth_bytes_per_s"],
        control_lane=None if control is None else _model(control),
    )
    try:
        _check_network(network)
    except ScenarioError as error:
        raise retiming_error(str(error)) from None
    return network


def _model(description: Mapping[str, Any]) -> LinkModel:
    fields_of = dict(description)
    kind = {"LinkModel": LinkModel, "LogGP": LogGP}[fields_of.pop("kind")]
    return kind(**fields_of)


def _check_network(network: Network) -> None:
    if network.control_lane is None or network.control_lane != LinkModel():
        allowed = "True, by which messages without values take no time"
        raise ScenarioError(unusable("control_lane", network.control_lane, allowed))
    if network.route is not None:
        allowed = "None, since messages on shared links have no fixed order"
        raise ScenarioError(unusable("topology", network.route, allowed))
    if (rate := network.port_bandwidth_bytes_per_s) is not None:
        allowed = "None, since the order of messages at a port depends on time"
        raise ScenarioError(unusable("port_bandwidth_bytes_per_s", rate, allowed))
    for model in (network.default, *network.links.values()):
        if model.jitter_ns:
            raise ScenarioError(unusable("jitter_ns", model.jitter_ns, "0"))
        if model.pause_ns:
            raise ScenarioError(unusable("gap_ns", model, "at most overhead_ns"))


def _costs_of(
    graph: RunGraph, devices: DeviceModel | Mapping[str, DeviceModel]
) -> dict[Any, int]:
    costs = {}
    for key in (*graph.costs, *graph.free):
        worker, function, action = key
        model = devices.get(worker) if isinstance(devices, Mapping) else devices
        if not isinstance(model, DeviceModel):
            allowed = f"a DeviceModel, or one for each worker, including {worker}"
            raise ScenarioError(unusable("devices", devices, allowed))
        for name, free in (("sum_ns", 0), ("call_ns", 0), ("overlap_ns", None)):
            if (value := getattr(model, name)) != free:
                allowed = f"{free}: only single jobs of the schedule may take time"
                raise ScenarioError(unusable(name, value, allowed))
        if typed := [name for name in model.functions if "(" in name]:
            raise ScenarioError(unusable("functions", typed[0], "names without types"))
        costs[key] = model.named_ns(function, action)
        costs[key] += 0 if function == MOVED else model.job_ns
        if key in graph.free and costs.pop(key):
            allowed = f"no cost of {job_named(key)}, which is not in the schedule"
            raise ScenarioError(unusable("devices", model, allowed))
    return costs


def _relaxed(run: Retimed) -> Any:
    """Return the makespan without rounding, as a JAX function of settings."""
    names = {key: [*values] for key, values in run.settings.items()}
    places = [(key, name) for key, group in names.items() for name in group]
    number = {place: parameter for parameter, place in enumerate(places)}
    rows: list[tuple[int, int, float]] = []
    for edge, (_, cost) in enumerate(run._graph.edges):
        if cost.kind == "job":
            rows.append((edge, number["job_ns", job_named(cost.key)], 1.0))
        elif cost.kind:
            link = f"{cost.key[0]}->{cost.key[1]}"
            if cost.kind == "latency":
                rows.append((edge, number["latency_ns", link], 1.0))
            elif ("bandwidth_bytes_per_s", link) in number:
                parameter = number["bandwidth_bytes_per_s", link]
                rows.append((edge, parameter, cost.nbytes * float(_SECOND_NS)))
    columns = [np.array([row[n] for row in rows]) for n in range(3)]
    matrix = (columns[0].astype(int), columns[1].astype(int), columns[2])
    graph = run._graph
    span = run._paths.span(matrix, len(places), graph.starts, graph.ends)

    def makespan_fn(settings: Mapping[str, Mapping[str, Any]]) -> Any:
        """Return the makespan in ns, without rounding, with these `Retimed.settings`.

        `jax.vmap` and `jax.grad` may transform this function. It computes in float64,
        and returns JAX's default float type (see `jax.enable_x64`).
        """
        parameters = []
        for key, name in places:
            if name not in settings.get(key, {}):
                allowed = f"a number for {name!r}, as in run.settings"
                raise ScenarioError(unusable(key, settings.get(key), allowed))
            value = jnp.asarray(settings[key][name], float)
            parameters.append(1.0 / value if key.startswith("bandwidth") else value)
        return span(jnp.stack(jnp.broadcast_arrays(*parameters), -1))

    return makespan_fn
