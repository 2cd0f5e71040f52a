"""Several callers at once, each with many contexts, on one worker that computes.

In each context the same five calls on the server, of two leaves of the caller's:

    t3 = t1 + t2    t4 = t2 t3    t5 = t3 @ t4    t6 = t4 + t5    loss = sum(t6)

For t1 = t2 = ones of 3 x 3 the loss is 126, its gradients 13 and 27 everywhere; in
general they follow by hand, and nothing of one context is in those of another.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

from jdag.api.cluster import Cluster
from jdag.context.refs import fetch
from jdag.errors import ScenarioError
from jdag.scenario.case import (
    LEFT_OVER,
    SENT,
    Figures,
    Run,
    Traces,
    bits,
    left_over,
    sent,
    time_of,
)

FIGURES: Mapping[str, str] = {
    "outcome": "how the last pass ended",
    "contexts": "contexts of all callers, with ids that are all different",
    "own_ids": "whether the top 16 bits of each id are its caller's number",
    "contexts_at_once": "the most contexts that the server held at one time",
    "losses": "the losses of all contexts and seeds, each different one once",
    "d_t1": "the elements of the gradients of t1, each different one once",
    "d_t2": "the elements of the gradients of t2, each different one once",
    "gradient_bits": "a hash of all losses and gradients of the first seed",
    "seeds": "seeds played",
    "bit_patterns": "different losses and gradients, bit by bit, over the seeds",
    "arrival_orders": "different orders in which cotangents arrived, over the seeds",
    **SENT,
    "virtual_time_ns": "from the first caller's begin to the last one's end",
    "wall_time_ns": "from beginning to end, on this host's clock",
    **LEFT_OVER,
    "digest": "the digest of the trace; of several seeds, that of their digests",
}


def add(x: Array, y: Array) -> Array:
    """A sum of arrays."""
    return x + y


def times(x: Array, y: Array) -> Array:
    """A product, element by element."""
    return x * y


def matmul(x: Array, y: Array) -> Array:
    """A matrix product."""
    return x @ y


def total(x: Array) -> Array:
    """The sum of an array."""
    return jnp.sum(x)


@dataclass(slots=True)
class Callers:
    """The callers and their server, as a scenario plays them."""

    workers: Sequence[str]
    contexts: int
    size: int
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)

    def play(self, run: Run) -> Figures:
        """Play with each seed; the first one is reported."""
        all_found: list[dict[str, Any]] = []
        patterns: dict[str, None] = {}
        traces = Traces()
        first: Figures = {}
        for number, seed in enumerate(run.seeds):
            cluster = run.cluster(seed)
            begun_ns = cluster.now_ns
            call = partial(_call, self.workers[0], self.contexts, self.size)
            found = cluster.run({name: call for name in self.workers[1:]})
            window = (begun_ns, cluster.now_ns)
            all_found += found.values()
            patterns[bits([one["values"] for one in found.values()])] = None
            traces.add(cluster)
            if not number:
                run.keep(cluster, window)
                first = {**sent(cluster), **left_over(run, cluster)}
                first |= time_of(run, window[1] - window[0])
                first["gradient_bits"] = next(iter(patterns))
                first |= self._ids({name: one["ids"] for name, one in found.items()})
            run.progress(number + 1, len(run.seeds))
        values = np.stack([one["values"] for one in all_found])
        return {
            "outcome": "finished",
            **first,
            "contexts_at_once": max(one["at_once"] for one in all_found),
            "losses": np.unique(values[:, :, 0]),
            "d_t1": np.unique(values[:, :, 1 : 1 + self.size**2]),
            "d_t2": np.unique(values[:, :, 1 + self.size**2 :]),
            "seeds": len(run.seeds),
            "bit_patterns": len(patterns),
            **traces.figures,
        }

    def _ids(self, ids: Mapping[str, Sequence[int]]) -> Figures:
        numbers = {name: self.workers.index(name) for name in ids}
        own = [id >> 48 == numbers[name] for name, some in ids.items() for id in some]
        every = dict.fromkeys(id for some in ids.values() for id in some)
        return {"contexts": len(every), "own_ids": all(own)}


def _call(server: str, contexts: int, size: int, cluster: Cluster) -> dict[str, Any]:
    """Open all contexts of one caller, call in each, then differentiate each."""
    ones = jnp.ones((size, size))
    t1, t2 = cluster.put(cluster.here, (ones, ones))
    with ExitStack() as stack:
        opened = [stack.enter_context(cluster.context()) for _ in range(contexts)]
        losses = [_forward(server, ctx, t1, t2) for ctx in opened]
        values = [np.ravel(loss.fetch()) for loss in losses]
        at_once = cluster.info()[server]["live_contexts"]
        for ctx, loss in zip(opened, losses, strict=True):
            ctx.backward(loss)
        for place, ctx in enumerate(opened):
            gradients = map(np.ravel, fetch(ctx.gradient([t1, t2])))
            values[place] = np.concatenate([values[place], *gradients])
        ids = [ctx.id for ctx in opened]
    cluster.drop([t1, t2])
    return {"values": np.stack(values), "ids": ids, "at_once": at_once}


def _forward(server: str, ctx: Any, t1: Any, t2: Any) -> Any:
    t3 = ctx.call(server, add, t1, t2)
    t4 = ctx.call(server, times, t2, t3)
    t5 = ctx.call(server, matmul, t3, t4)
    return ctx.call(server, total, ctx.call(server, add, t4, t5))


def callers(workers: Sequence[str], *, contexts: int = 10, size: int = 3) -> Callers:
    """A server, and a caller on each other worker.

    Args:
        workers: the server first, then the callers.
        contexts: how many each caller has open at once.
        size: of the matrices.
    """
    if len(workers) < 2:
        raise ScenarioError(
            f"workers = {list(workers)!r}: callers needs a server and at least one "
            "caller"
        )
    return Callers(workers, contexts, size)
