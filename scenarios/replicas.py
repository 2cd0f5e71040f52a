"""Replicas of one set of parameters on workers; their gradients are summed.

The owner sends a copy of the parameters to each other worker, which computes the loss
of its own rows; the numbers of rows differ. The case runs once for each route of copies
and gradients: directly from and to the owner, in a tree, and around a ring.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import Array

from jdag.api.cluster import Cluster
from jdag.collectives.routes import HOW, How
from jdag.errors import ScenarioError
from jdag.scenario import Case, Figures, Run
from jdag.scenario.player import FIGURES as COMMON
from jdag.scenario.player import LEFT_OVER, digest_of

# Figures that have the texts of other scenarios.
_COMMON = (
    *("gradient_bits", "seeds", "bit_patterns", "arrival_orders", "same_bits_as_clean"),
    *("virtual_time_ns", "wall_time_ns", "messages", "payload_bytes"),
)
FIGURES: Mapping[str, str] = {
    "outcome": "how the passes ended",
    "error": "class of the first error, if any",
    "error_message": "message of that error",
    "way": "routes of parameters and gradients, one case for each",
    "gradient_difference": "max|g - g*| / max|g*|; g* by the oracle",
    **{name: COMMON[name] for name in _COMMON},
    "link_bytes": "bytes of arrays on the busiest link",
    "busiest_bytes": "bytes of arrays sent by the busiest worker",
    "resends": COMMON["resends"],
    **LEFT_OVER,
    "digest": "digest of the traces",
}


def loss(params: Mapping[str, Array], x: Array, y: Array, rows: Array) -> Array:
    """Return a worker's summed squared error / `rows`, the number of all rows."""
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.sum(jnp.square(hidden - y)) / rows


_COUNTED = ("messages_sent", "payload_bytes_sent", "resends")
Counts = Mapping[str, Sequence[int]]


def counted(cluster: Cluster) -> Counts:
    """Return each worker's counts so far, in the order of `_COUNTED`."""
    info = cluster.info()
    return {name: [int(counts[k]) for k in _COUNTED] for name, counts in info.items()}


def since(before: Counts, after: Counts) -> Figures:
    """Return the increase of all counts, and the bytes of the busiest worker."""
    messages, payloads, resends = (
        [counts[index] - before[worker][index] for worker, counts in after.items()]
        for index, _ in enumerate(_COUNTED)
    )
    return {
        "messages": sum(messages),
        "payload_bytes": sum(payloads),
        "busiest_bytes": max(payloads),
        "resends": sum(resends),
    }


@dataclass(slots=True)
class Ways:
    """A player that runs one case for each route."""

    cases: Mapping[str, Case]
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)

    def play(self, run: Run) -> Figures:
        """Run all cases. Graph and timeline are those of the last case."""
        results = {how: _played(case, run) for how, case in self.cases.items()}
        failed = [case for case in results.values() if case["outcome"] != "finished"]
        first = next(iter([*failed, *results.values()]))
        figures = {name: first[name] for name in ("outcome", "error", "error_message")}
        for name in FIGURES:
            by_how = {how: case[name] for how, case in results.items() if name in case}
            if by_how and name not in (*figures, "seeds", "digest"):
                figures[name] = by_how
        figures["way"] = list(results)
        figures["seeds"] = len(run.seeds)
        if run.virtual:
            figures["digest"] = digest_of([case["digest"] for case in results.values()])
        return figures


def _played(case: Case, run: Run) -> Figures:
    none: Counts = dict.fromkeys(run.workers, (0,) * len(_COUNTED))
    # On processes, the same cluster has run the previous case.
    before = none if run.virtual else counted(run.cluster(run.seeds[0]))
    figures = case.play(run)
    return {**figures, **since(before, figures["counted"])}


def _more(cluster: Cluster) -> Figures:
    figures: Figures = {"counted": counted(cluster)}
    if cluster.trace is not None:
        links: dict[tuple[str, str], int] = {}
        for record in cluster.trace.of_kind("send"):
            link = record.worker, record.named["destination"]
            links[link] = links.get(link, 0) + record.named["payload_bytes"]
        figures["link_bytes"] = max(links.values())
    return figures


def replicas(
    workers: Sequence[str],
    *,
    width: int = 16,
    rows: int = 2,
    how: tuple[How, ...] = HOW,
) -> Ways:
    """Make the scenario's player. The first worker owns the parameters.

    Args:
        workers: the owner, then the workers of the replicas.
        width: width of a row; the parameters are a matrix and a vector.
        rows: number of rows of the first replica; each further replica has one more.
        how: the routes, with one case for each.
    """
    if len(workers) < 2:
        raise ScenarioError(
            f"workers = {list(workers)!r}: replicas needs an owner and at least one "
            "replica"
        )
    owner, *others = workers
    counts = [rows + number for number in range(len(others))]
    params = {
        "w": jnp.linspace(-1.0, 1.0, width * width).reshape(width, width),
        "b": jnp.linspace(0.0, 0.5, width),
    }

    def program(how: How, ctx: Any, params: Any) -> Any:
        losses = []
        for worker, replica, count in zip(
            others, ctx.replicate(others, params, how), counts, strict=True
        ):
            x = jnp.linspace(-1.0, 1.0, count * width).reshape(count, width)
            y = jnp.cos(float(count) * x)
            losses.append(ctx.call(worker, loss, replica, x, y, float(sum(counts))))
        return losses

    placement = dict.fromkeys(params, owner)
    return Ways(
        {
            each: Case(partial(program, each), params, placement, more=_more)
            for each in how
        }
    )
