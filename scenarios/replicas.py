"""Replicas on workers: one set of parameters, used by all, whose gradients add up.

The owner of the parameters replicates them; each other worker computes the loss of rows
of its own, no two of them as many. It is played once for each way in which copies go
out and gradients come back: straight from the owner, in a tree, around a ring.
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
from jdag.scenario.case import Case, Figures, Run, digest_of

FIGURES: Mapping[str, str] = {
    "outcome": "how the passes ended",
    "error": "the class of the first error, if there was one",
    "error_message": "what it said",
    "way": "how parameters go out and gradients come back, one after the other",
    "gradient_difference": "max|g - g*| / max|g*|; g* by the oracle",
    "gradient_bits": "a hash of the gradients, bit by bit",
    "seeds": "seeds played",
    "bit_patterns": "different gradients, bit by bit, over the seeds",
    "arrival_orders": "different orders in which cotangents arrived",
    "same_bits_as_clean": "whether faults and jitter left the gradient as it was",
    "virtual_time_ns": "from opening the context to the end of the pass",
    "wall_time_ns": "from beginning to end, on this host's clock",
    "messages": "protocol messages",
    "payload_bytes": "bytes of arrays in them",
    "link_bytes": "bytes of arrays on the link that had most of them",
    "busiest_bytes": "bytes of arrays that the worker sent that sent most",
    "resends": "frames that were sent again",
    "live_contexts": "contexts that some worker holds afterwards",
    "live_passes": "passes that some worker holds afterwards",
    "values_left": "values held afterwards that are not leaves",
    "digest": "the digest of the traces",
}


def loss(params: Mapping[str, Array], x: Array, y: Array, rows: Array) -> Array:
    """A share of the mean square error of all rows: x (some rows, width) to y."""
    hidden = jnp.tanh(x @ params["w"] + params["b"])
    return jnp.sum(jnp.square(hidden - y)) / rows


_COUNTED = ("messages_sent", "payload_bytes_sent", "resends")
Counts = Mapping[str, Sequence[int]]


def counted(cluster: Cluster) -> Counts:
    """What each worker has sent so far: messages, bytes of arrays, frames again."""
    info = cluster.info()
    return {one: [int(of[name]) for name in _COUNTED] for one, of in info.items()}


def since(before: Counts, now: Counts) -> Figures:
    """What was sent between two counts."""
    messages, payloads, resends = (
        [counts[place] - before[one][place] for one, counts in now.items()]
        for place, _ in enumerate(_COUNTED)
    )
    return {
        "messages": sum(messages),
        "payload_bytes": sum(payloads),
        "busiest_bytes": max(payloads),
        "resends": sum(resends),
    }


@dataclass(slots=True)
class Ways:
    """A case for each way, as a scenario plays them."""

    cases: Mapping[str, Case]
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)

    def play(self, run: Run) -> Figures:
        """Play one after another; graph and timeline are of the last one."""
        found = {how: _played(case, run) for how, case in self.cases.items()}
        failed = [one for one in found.values() if one["outcome"] != "finished"]
        first = next(iter([*failed, *found.values()]))
        figures = {name: first[name] for name in ("outcome", "error", "error_message")}
        for name in FIGURES:
            ways = {how: one[name] for how, one in found.items() if name in one}
            if ways and name not in (*figures, "seeds", "digest"):
                figures[name] = ways
        figures["way"] = list(found)
        figures["seeds"] = len(run.seeds)
        if run.virtual:
            figures["digest"] = digest_of([one["digest"] for one in found.values()])
        return figures


def _played(case: Case, run: Run) -> Figures:
    none: Counts = dict.fromkeys(run.workers, (0,) * len(_COUNTED))
    # Of processes the cluster is the one that played the way before.
    before = none if run.virtual else counted(run.cluster(run.seeds[0]))
    figures = case.play(run)
    return {**figures, **since(before, figures["counted"])}


def _more(cluster: Cluster) -> Figures:
    found: Figures = {"counted": counted(cluster)}
    if cluster.trace is not None:
        links: dict[tuple[str, str], int] = {}
        for record in cluster.trace.of_kind("send"):
            link = record.worker, record.named["destination"]
            links[link] = links.get(link, 0) + record.named["payload_bytes"]
        found["link_bytes"] = max(links.values())
    return found


def replicas(
    workers: Sequence[str],
    *,
    width: int = 16,
    rows: int = 2,
    how: tuple[How, ...] = HOW,
) -> Ways:
    """An owner of the parameters, and a replica on each other worker.

    Args:
        workers: the owner first, then where the replicas are.
        width: of a row; the parameters are a matrix and a vector.
        rows: of the first replica; each has one more than the one before.
        how: the ways to play.
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

    def program(way: How, ctx: Any, params: Any) -> Any:
        losses = []
        for worker, replica, count in zip(
            others, ctx.replicate(others, params, way), counts, strict=True
        ):
            x = jnp.linspace(-1.0, 1.0, count * width).reshape(count, width)
            y = jnp.cos(float(count) * x)
            losses.append(ctx.call(worker, loss, replica, x, y, float(sum(counts))))
        return losses

    placement = dict.fromkeys(params, owner)
    return Ways(
        {way: Case(partial(program, way), params, placement, more=_more) for way in how}
    )
