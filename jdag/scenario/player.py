"""The interface of scenario programs: `Run`, `Player` and the figures they share."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import numpy as np

from jdag.api.cluster import Cluster
from jdag.context.graph import Graph
from jdag.errors import JdagError, ScenarioError, UnusedSendError, text_of, unusable
from jdag.settings.validation import NS, converted, where
from jdag.sim.simulation import Simulation

_WINDOW = Annotated[
    tuple[NS, NS],
    where(
        lambda window: window[0] <= window[1],
        "two integers of nanoseconds, 0 <= from_ns <= until_ns",
    ),
]

# Results of a run by name: numbers, fractions, strings, bools or None, lists of these,
# and mappings from worker to these.
Figures = dict[str, Any]


@dataclass(slots=True)
class Run:
    """One run of a scenario, the argument of `Player.play`.

    Attributes:
        workers: names of the workers.
        seeds: seeds to run with. The report describes the run with the first seed.
        abstract: whether values are shapes without data.
        troubled: whether the scenario has faults or jitter.
        virtual: whether time is virtual. Seeds have no effect on processes.
        driver: creates the clusters.
        compile: whether the program runs compiled steps, by `jdag.compile`.
        show: progress callback, called as `show(done, total, numbers)`.
        kept: the cluster to report on, set by `keep`.
        window: the period of the run to draw, (from_ns, until_ns), set by `keep`.
        drawings: the graph to draw, set by `draw`.
        last: the cluster created last.
    """

    workers: tuple[str, ...]
    seeds: tuple[int, ...]
    abstract: bool
    troubled: bool
    virtual: bool
    driver: Any
    show: Callable[[int, int, Mapping[str, float]], None]
    kept: Cluster | None = None
    window: tuple[int, int] = (0, 0)
    drawings: Any = None
    compile: bool = False
    last: Cluster | None = None

    def cluster(self, seed: int, *, clean: bool = False) -> Cluster:
        """Return the scenario's cluster. With `clean` it has no faults and no jitter.

        In virtual time, each call returns a new cluster and closes the earlier ones,
        except for the one passed to `keep`. On processes, all calls return one cluster.
        """
        self.driver.let_go(self.kept)
        cluster: Cluster = self.driver.cluster(seed, clean=clean)
        self.last = cluster
        return cluster

    def progress(self, done: int, total: int, **numbers: float) -> None:
        """Report that `done` of `total` steps are done. `numbers` are displayed."""
        self.show(done, total, numbers)

    def keep(self, cluster: Cluster, window: tuple[int, int]) -> None:
        """Select the cluster to report on and the window of its timeline.

        Args:
            cluster: a cluster of this run.
            window: (from_ns, until_ns), in nanoseconds of the cluster's clock.

        Raises:
            ScenarioError: an argument has another type, or the window is reversed.
        """
        if not isinstance(cluster, Cluster):
            raise ScenarioError(unusable("run.keep: cluster", cluster, "a cluster"))
        window = converted(_WINDOW, window, "run.keep: window")
        self.kept, self.window = cluster, window

    def draw(self, drawings: Any) -> None:
        """Select the graph to report: the result of ctx.graph() or step.plan.graph().

        Raises:
            ScenarioError: `drawings` is something else.
        """
        if not isinstance(drawings, Mapping | Graph):
            allowed = "the result of ctx.graph() or step.plan.graph()"
            raise ScenarioError(unusable("run.draw: drawings", drawings, allowed))
        self.drawings = drawings


class Player(Protocol):
    """Interface of the object that a scenario's program returns.

    A player whose `play` supports `run.compile` has the attribute `compiles = True`.
    """

    @property
    def figures(self) -> Mapping[str, str]:
        """A description of each figure, by name."""

    def play(self, run: Run) -> Figures:
        """Run, and return the values of the figures by name."""


# Figure: (key in `cluster.info()`, description).
_SENT = {
    "messages": ("messages_sent", "protocol messages"),
    "payload_bytes": ("payload_bytes_sent", "bytes of the arrays in those messages"),
    "wire_bytes": ("bytes_sent", "all bytes, with headers, acks and resends"),
    "resends": ("resends", "frames sent again"),
    "duplicates": ("duplicates", "frames received more than once, and discarded"),
}
SENT: Mapping[str, str] = {figure: text for figure, (_, text) in _SENT.items()}
_HELD = ("live_contexts", "live_passes", "values_held")
LEFT_OVER: Mapping[str, str] = {
    "live_contexts": "contexts that still exist on a worker after the run",
    "live_passes": "passes that still exist on a worker after the run",
    "values_left": "values other than leaves that exist after the run",
}

FIGURES: Mapping[str, str] = {
    "outcome": "how the pass ended: finished, failed or stuck",
    "error": "class of the error that ended the pass, if any",
    "error_message": "message of that error",
    "owed_sends": "number of sends without a cotangent in a stuck pass",
    "owed_functions": "functions whose values these sends carried",
    "owed_workers": "workers of these sends",
    "owed_call_sites": "source lines that called these functions",
    "gradient_difference": "max|g - g*| / max|g*| of the worst leaf; g* by the oracle",
    "gradient_bits": "hash of the bits of the gradients",
    "loss": "sum of the roots",
    "seeds": "number of seeds",
    "bit_patterns": "number of bitwise different gradients over the seeds",
    "arrival_orders": "number of arrival orders of cotangents over the seeds",
    "same_bits_as_clean": "whether a run without faults and jitter has the same bits",
    **SENT,
    "virtual_time_ns": "virtual time from opening the context to the end of the pass",
    "wall_time_ns": "the same by the clock of this host",
    "bubble": "1 - busy time / virtual time, of each worker",
    "bubble_min": "smallest bubble of a worker",
    "bubble_max": "largest bubble of a worker",
    **LEFT_OVER,
    "digest": "digest of the trace; for several seeds, of their digests",
}

# Figures that only a run in virtual time has.
VIRTUAL = (
    *("arrival_orders", "same_bits_as_clean", "resends", "duplicates", "digest"),
    *("virtual_time_ns", "virtual_time_per_step_ns", "bubble"),
    *("bubble_min", "bubble_max", "link_bytes"),
)


@dataclass(slots=True)
class Traces:
    """Digests and arrival orders of the runs with several seeds, in virtual time."""

    digests: list[str] = field(default_factory=list)
    orders: dict[str, None] = field(default_factory=dict)

    def add(self, cluster: Cluster) -> None:
        if isinstance(cluster.driver, Simulation) and cluster.trace is not None:
            self.orders[arrivals(cluster)] = None
            self.digests.append(cluster.trace.digest)

    @property
    def figures(self) -> Figures:
        if not self.digests:
            return {}
        return {"arrival_orders": len(self.orders), "digest": digest_of(self.digests)}


def time_of(run: Run, ns: int) -> Figures:
    return {"virtual_time_ns" if run.virtual else "wall_time_ns": ns}


def ended(error: JdagError | None) -> Figures:
    if error is None:
        return {"outcome": "finished", "error": None, "error_message": None}
    return {
        "outcome": "stuck" if isinstance(error, UnusedSendError) else "failed",
        "error": type(error).__name__,
        "error_message": text_of(error),
    }


def difference(gradient: Any, truth: Any) -> float:
    """Return max|g - g*| / max|g*|; if g* is zero everywhere, max|g - g*|.

    None, a missing gradient, counts as zeros.
    """
    expected = np.asarray(truth)
    got = np.zeros_like(expected) if gradient is None else np.asarray(gradient)
    if expected.size == 0:
        return 0.0
    scale = float(np.max(np.abs(expected)))
    return float(np.max(np.abs(got - expected))) / (scale or 1.0)


def worst(differences: Sequence[float]) -> float:
    """Return the largest difference, or nan if one is nan: then no bound is met."""
    return float(np.max(differences)) if len(differences) else 0.0


def digest_of(digests: Sequence[str]) -> str:
    """Combine the digests of several runs. A single digest is returned unchanged."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def bits(gradients: Sequence[Any]) -> str:
    """Return a hash of the arrays' bits. None stands for a missing gradient."""
    digest = hashlib.sha256()
    for gradient in gradients:
        if gradient is None:
            digest.update(b"none")
            continue
        array = np.asarray(gradient)
        digest.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return digest.hexdigest()


def arrivals(cluster: Cluster) -> str:
    """Return a hash of the order in which values arrived.

    These are cotangents or, in compiled steps, outputs of segments (`Hop`).
    """
    digest = hashlib.sha256()
    for record in cluster.trace.of_kind("deliver"):
        detail = record.named
        if detail["message"] in ("Cotangent", "Hop"):
            arrival = f"{record.worker} {detail['source']} {detail['path']};"
            digest.update(arrival.encode())
    return digest.hexdigest()


def total(cluster: Cluster, name: str) -> int:
    return sum(int(worker[name]) for worker in cluster.info().values())


def sent(cluster: Cluster) -> Figures:
    return {figure: total(cluster, name) for figure, (name, _) in _SENT.items()}


def left_over(run: Run, cluster: Cluster) -> Figures:
    if run.compile:
        cluster.drop(())  # Also discards plans without references.
    if run.compile or not run.virtual:
        cluster.driver.settle()
    info = cluster.info()
    alive = [worker for worker in info.values() if not worker["lost"]]
    counts = {name: sum(int(worker[name]) for worker in alive) for name in _HELD}
    counts["values_left"] = counts.pop("values_held") - len(cluster.state.living(info))
    return counts
