"""The results of a scenario's program; a `Case` is one context with one pass.

A scenario names `module:function`. jdag calls that function with the workers and the
scenario's `[settings]` by keyword:

    from jdag.scenario import Case

    def chain(workers, *, length: int = 4) -> Case:
        def program(ctx, params):
            ...                      # calls, as in any context
            return loss              # a ref, or a list of refs: the roots

        return Case(program, params={"w": array}, placement={"w": workers[1]})

jdag runs a `Case` for each seed, compares its gradient with the oracle's and counts
messages. For more control return any object with `figures` (name to what it is) and
`play(run)`, which returns those figures; `scenarios/digits.py` does so.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import wraps
from typing import Annotated, Any, ClassVar, Literal, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from jdag.api.cluster import Cluster
from jdag.api.oracle import pullback
from jdag.compute.pytrees import NUMBERS
from jdag.context.graph import Graph
from jdag.context.refs import Ref, fetch
from jdag.errors import (
    ContextError,
    JdagError,
    RootError,
    ScenarioError,
    UnusedSendError,
    text_of,
    unusable,
)
from jdag.plans.compiling import compile
from jdag.settings.validation import NS, converted, where
from jdag.sim.simulation import Simulation

_WINDOW = Annotated[
    tuple[NS, NS],
    where(
        lambda window: window[0] <= window[1],
        "two integers of nanoseconds, 0 <= from_ns <= until_ns",
    ),
]

# What a play gives, by name: numbers, fractions, texts, flags, None; lists of these,
# and mappings from workers to these.
Figures = dict[str, Any]


@dataclass(slots=True)
class Run:
    """One run of a scenario, as its program sees it.

    Attributes:
        workers: the names of the workers.
        seeds: the seeds to play with; the first is the one that is reported.
        abstract: whether values are shapes alone.
        troubled: whether the scenario has faults or jitter.
        virtual: whether time is virtual; on processes seeds change nothing.
        driver: makes the clusters.
        compile: whether steps are to be those of plans, by `jdag.compile`.
        show: called with the progress of the run.
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
        """Return the scenario's cluster; `clean` leaves out its faults and jitter.

        In virtual time a new one for each seed. Of processes it is the same one again.
        """
        self.driver.let_go(self.kept)
        made: Cluster = self.driver.cluster(seed, clean=clean)
        self.last = made
        return made

    def progress(self, done: int, total: int, **numbers: float) -> None:
        """Show the progress of the run."""
        self.show(done, total, numbers)

    def keep(self, cluster: Cluster, window: tuple[int, int]) -> None:
        """Report on this cluster; draw its timeline in this window of nanoseconds."""
        if not isinstance(cluster, Cluster):
            raise ScenarioError(unusable("run.keep: cluster", cluster, "a cluster"))
        window = converted(_WINDOW, window, "run.keep: window")
        self.kept, self.window = cluster, window

    def draw(self, drawings: Any) -> None:
        """Report this graph, as `ctx.graph()` or `step.plan.graph()` gives it."""
        if not isinstance(drawings, Mapping | Graph):
            allowed = "what ctx.graph() or step.plan.graph() gives"
            raise ScenarioError(unusable("run.draw: drawings", drawings, allowed))
        self.drawings = drawings


class Player(Protocol):
    """What a scenario's program returns.

    One whose `play` obeys `run.compile` says so by an attribute `compiles = True`.
    """

    @property
    def figures(self) -> Mapping[str, str]:
        """The meaning of each of its figures."""

    def play(self, run: Run) -> Figures:
        """Run, and return the figures."""


# By figure its name in `cluster.info()`, and its meaning.
_SENT = {
    "messages": ("messages_sent", "protocol messages"),
    "payload_bytes": ("payload_bytes_sent", "bytes of arrays in them"),
    "wire_bytes": ("bytes_sent", "all bytes: headers, acknowledgements, resends too"),
    "resends": ("resends", "frames that were sent again"),
    "duplicates": ("duplicates", "frames that were thrown away, having come before"),
}
SENT: Mapping[str, str] = {figure: text for figure, (_, text) in _SENT.items()}
_HELD = ("live_contexts", "live_passes", "values_held")
LEFT_OVER: Mapping[str, str] = {
    "live_contexts": "contexts that some worker holds afterwards",
    "live_passes": "passes that some worker holds afterwards",
    "values_left": "values held afterwards that are not leaves",
}

FIGURES: Mapping[str, str] = {
    "outcome": "how the pass ended: finished, failed or stuck",
    "error": "the class of the error, if there was one",
    "error_message": "what the error said",
    "owed_sends": "sends that a stuck pass names",
    "owed_functions": "the functions that those were sent for",
    "owed_workers": "where those sends are",
    "owed_call_sites": "where those functions were called",
    "gradient_difference": "max|g - g*| / max|g*|, the worst leaf; g* by the oracle",
    "gradient_bits": "a hash of the gradients, bit by bit",
    "loss": "the sum of the roots",
    "seeds": "seeds played",
    "bit_patterns": "different gradients, bit by bit, over the seeds",
    "arrival_orders": "different orders in which cotangents arrived, over the seeds",
    "same_bits_as_clean": "whether faults and jitter left the gradient as it was",
    **SENT,
    "virtual_time_ns": "from opening the context, or recording, to the end of the pass",
    "wall_time_ns": "from beginning to end, on this host's clock",
    "bubble": "1 - busy time / virtual time, by worker",
    "bubble_min": "the smallest bubble of a worker",
    "bubble_max": "the largest bubble of a worker",
    **LEFT_OVER,
    "digest": "the digest of the trace; of several seeds, that of their digests",
}


# Of these only a run in virtual time has any.
VIRTUAL = (
    *("arrival_orders", "same_bits_as_clean", "resends", "duplicates", "digest"),
    *("virtual_time_ns", "virtual_time_per_step_ns", "bubble"),
    *("bubble_min", "bubble_max", "link_bytes"),
)


@dataclass(slots=True)
class Traces:
    """Digests and orders of arrival of the runs of several seeds in virtual time."""

    digests: list[str] = field(default_factory=list)
    orders: dict[str, None] = field(default_factory=dict)

    def add(self, cluster: Cluster) -> None:
        """Add the trace of a run."""
        if isinstance(cluster.driver, Simulation) and cluster.trace is not None:
            self.orders[arrivals(cluster)] = None
            self.digests.append(cluster.trace.digest)

    @property
    def figures(self) -> Figures:
        """The number of orders of arrival, and the digest of all runs."""
        if not self.digests:
            return {}
        digest = digest_of(self.digests)
        return {"arrival_orders": len(self.orders), "digest": digest}


def time_of(run: Run, ns: int) -> Figures:
    """Return the time of a run as a figure, virtual or of the host's clock."""
    return {"virtual_time_ns" if run.virtual else "wall_time_ns": ns}


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One play of a case with one seed."""

    error: JdagError | None
    gradients: tuple[Any, ...] | None
    loss: float | None
    window: tuple[int, int]
    cluster: Cluster


@dataclass(frozen=True, slots=True)
class Case:
    """A program of one context, its parameters and where they live.

    Args:
        program: takes a context and the parameters; returns a ref or a list of refs.
        params: arrays, or pytrees of arrays, by name (`jax.ShapeDtypeStruct`s will do
            for abstract values).
        placement: the worker of each parameter, by name.
        passes: how often the pass is repeated; the graph is retained till the last.
        mode: of the passes, "smart" or "fast".
        more: further figures, of the cluster of the first seed.
    """

    program: Callable[[Any, Any], Any]
    params: Mapping[str, Any]
    placement: Mapping[str, str]
    passes: int = 1
    mode: Literal["smart", "fast"] = "smart"
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)
    more: Callable[[Cluster], Figures] = lambda cluster: {}
    compiles: ClassVar[bool] = True

    def put(self, cluster: Cluster) -> dict[str, Any]:
        """Put the parameters on their workers; return refs by name."""
        placed = self.placement
        return {k: cluster.put(placed[k], value) for k, value in self.params.items()}

    def roots(self, ctx: Any, params: Any) -> list[Ref]:
        """Call the program; return what it returns as a list."""
        result = self.program(ctx, params)
        return list(result) if isinstance(result, list | tuple) else [result]

    def backward(self, ctx: Any, roots: Sequence[Ref]) -> None:
        """Run all passes."""
        for number in range(self.passes):
            retain = number + 1 < self.passes
            ctx.backward(*roots, retain_graph=retain, mode=self.mode)

    def gradients(self, ctx: Any, refs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Fetch the gradients of the leaves; None where no root depends on one."""
        found, leaves = ctx.gradients(), jax.tree.leaves(refs)
        return tuple(fetch(found[ref]) if ref in found else None for ref in leaves)

    def play(self, run: Run) -> Figures:
        """Play with each seed; the first one is reported.

        Raises:
            RootError: the program does not return roots that a pass can start from.
        """
        patterns: dict[str, None] = {}
        traces = Traces()
        first: CaseResult | None = None
        counts: Figures = {}
        for number, seed in enumerate(run.seeds):
            played = self._once(run, seed, clean=False)
            if played.gradients is not None:
                patterns[bits(played.gradients)] = None
            traces.add(played.cluster)
            if first is None:
                first = played
                run.keep(played.cluster, played.window)
                counts = {**_counts(run, first), **left_over(run, first.cluster)}
                counts |= self.more(first.cluster)
            run.progress(number + 1, len(run.seeds))
        assert first is not None, run.seeds
        return {
            **self._outcome(first),
            **self._truth(run, first),
            **counts,
            "seeds": len(run.seeds),
            "bit_patterns": len(patterns),
            "same_bits_as_clean": self._same_as_clean(run, first),
            **traces.figures,
        }

    def _once(self, run: Run, seed: int, *, clean: bool) -> CaseResult:
        cluster = run.cluster(seed, clean=clean)
        refs = self.put(cluster)
        error: JdagError | None = None
        gradients = loss = None
        opened_ns = ended_ns = cluster.now_ns
        try:
            if run.compile:
                loss, gradients = self._compiled(run, cluster, refs)
                window = opened_ns, cluster.now_ns
                return CaseResult(None, gradients, loss, window, cluster)
            with cluster.context() as ctx:
                try:
                    roots = self.roots(ctx, refs)
                    self.backward(ctx, roots)
                finally:
                    ended_ns = cluster.now_ns
                    if not clean and seed == run.seeds[0]:
                        run.draw(ctx.graph())
                if not run.abstract:
                    gradients = self.gradients(ctx, refs)
                    total_loss = sum(np.sum(root.fetch()) for root in roots)
                    loss = float(np.real(total_loss))
        except RootError:
            raise
        except JdagError as raised:
            if run.compile and isinstance(raised, ScenarioError):
                raise  # It cannot be recorded.
            error = raised
        return CaseResult(error, gradients, loss, (opened_ns, ended_ns), cluster)

    def _compiled(
        self, run: Run, cluster: Cluster, refs: Any
    ) -> tuple[float | None, tuple[Any, ...] | None]:
        """Return the loss and the gradients; all passes are steps of one plan."""

        @wraps(self.program)
        def program(ctx: Any, params: Any) -> list[Ref]:
            return self.roots(ctx, params)

        step = compile(program, cluster)
        try:
            played = [step.value_and_grad(refs) for _ in range(self.passes)]
        except JdagError as error:
            if type(error) not in (JdagError, ContextError):
                raise
            allowed = f"false for this program; {error}"
            raise ScenarioError(unusable("compile", True, allowed)) from error
        run.draw(step.plan.graph())
        if run.abstract:
            return None, None
        gradients = [jax.tree.leaves(one) for _, one in played]
        total_loss = sum(map(np.sum, played[0][0]))
        sums = [sum(of[1:], of[0]) for of in zip(*gradients, strict=True)]
        return float(np.real(total_loss)), tuple(sums)

    def _outcome(self, played: CaseResult) -> Figures:
        error = played.error
        owed: Any = error.sends if isinstance(error, UnusedSendError) else ()
        return {
            **ended(error),
            "owed_sends": len(owed),
            "owed_functions": [send.function for send in owed],
            "owed_workers": [send.worker for send in owed],
            "owed_call_sites": [send.call_site for send in owed],
            "loss": played.loss,
        }

    def _truth(self, run: Run, played: CaseResult) -> Figures:
        if played.gradients is None:
            return {"gradient_difference": None, "gradient_bits": None}

        apart = [
            difference(gradient, expected)
            for gradient, expected in zip(played.gradients, self.truth(), strict=True)
        ]
        return {
            "gradient_difference": worst(apart),
            "gradient_bits": bits(played.gradients),
        }

    def truth(self) -> list[Any]:
        """The gradients of the parameters by the oracle, over all passes."""
        params = {  # A number is put by itself, and is a leaf; in a dict it is none.
            name: jnp.asarray(value) if type(value) in NUMBERS else value
            for name, value in self.params.items()
        }
        found = jax.tree.leaves(pullback(self.roots)(params)[1])
        return [np.asarray(expected) * self.passes for expected in found]

    def _same_as_clean(self, run: Run, played: CaseResult) -> bool | None:
        if played.gradients is None or not (run.troubled and run.virtual):
            return None
        clean = self._once(run, run.seeds[0], clean=True)
        assert clean.gradients is not None, clean.error
        same = bits(clean.gradients) == bits(played.gradients)
        clean.cluster.close()
        return same


def ended(error: JdagError | None) -> Figures:
    """Return how a pass ended, or a run, and which error ended it."""
    if error is None:
        return {"outcome": "finished", "error": None, "error_message": None}
    return {
        "outcome": "stuck" if isinstance(error, UnusedSendError) else "failed",
        "error": type(error).__name__,
        "error_message": text_of(error),
    }


def difference(gradient: Any, truth: Any) -> float:
    """max|g - g*| / max|g*|; a gradient that is absent counts as zeros.

    Where g* is zero throughout, the difference itself.
    """
    expected = np.asarray(truth)
    got = np.zeros_like(expected) if gradient is None else np.asarray(gradient)
    if expected.size == 0:
        return 0.0
    scale = float(np.max(np.abs(expected)))
    return float(np.max(np.abs(got - expected))) / (scale or 1.0)


def worst(differences: Sequence[float]) -> float:
    """Return the largest; nan, which meets no bound, if one is nan."""
    return float(np.max(differences)) if len(differences) else 0.0


def digest_of(digests: Sequence[str]) -> str:
    """Return the digest of several runs; of one, its own."""
    if len(digests) == 1:
        return digests[0]
    return hashlib.sha256(" ".join(digests).encode()).hexdigest()


def bits(gradients: Sequence[Any]) -> str:
    """Return a hash of arrays, bit by bit; None is one that is absent."""
    taken = hashlib.sha256()
    for gradient in gradients:
        if gradient is None:
            taken.update(b"none")
            continue
        array = np.asarray(gradient)
        taken.update(f"{array.dtype}{array.shape}".encode() + array.tobytes())
    return taken.hexdigest()


def arrivals(cluster: Cluster) -> str:
    """Return a hash of the order in which cotangents, or hops of plans, arrived."""
    taken = hashlib.sha256()
    for record in cluster.trace.of_kind("deliver"):
        said = record.named
        if said["message"] in ("Cotangent", "Hop"):
            taken.update(f"{record.worker} {said['source']} {said['path']};".encode())
    return taken.hexdigest()


def total(cluster: Cluster, name: str) -> int:
    """Return the sum of one number of `cluster.info()` over all workers."""
    return sum(int(worker[name]) for worker in cluster.info().values())


def _counts(run: Run, played: CaseResult) -> Figures:
    start_ns, end_ns = played.window
    taken_ns = end_ns - start_ns
    counted = {**sent(played.cluster), **time_of(run, taken_ns)}
    if run.virtual:
        bubbles = {  # Nothing was computed before the context was opened.
            name: Fraction(taken_ns - int(worker["busy_ns"]), taken_ns or 1)
            for name, worker in played.cluster.info().items()
        }
        counted["bubble"] = bubbles
        counted["bubble_min"] = min(bubbles.values())
        counted["bubble_max"] = max(bubbles.values())
    return counted


def sent(cluster: Cluster) -> Figures:
    """Return the figures of what was sent so far."""
    return {figure: total(cluster, name) for figure, (name, _) in _SENT.items()}


def left_over(run: Run, cluster: Cluster) -> Figures:
    """Return what the workers that are alive still hold, without leaves."""
    if run.compile:
        cluster.drop(())  # With this go plans that no program names any more.
    if run.compile or not run.virtual:
        cluster.driver.settle()
    info = cluster.info()
    living = [one for one in info.values() if not one["lost"]]
    held = {name: sum(int(one[name]) for one in living) for name in _HELD}
    held["values_left"] = held.pop("values_held") - len(cluster.state.living(info))
    return held
