"""Concurrent callers, each with many contexts, compute on one server.

Each context makes the same five calls on the server, with two leaves, t1 and t2, which
are on its caller:

    t3 = t1 + t2    t4 = t2 t3    t5 = t3 @ t4    t6 = t4 + t5    loss = sum(t6)

If t1 and t2 are 3 x 3 matrices of ones, the loss is 126, all elements of the gradient
of t1 are 13, and those of t2 are 27, as no context changes another context's gradients.
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
from jdag.scenario.player import (
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
    "contexts": "number of contexts of all callers, by different ids",
    "own_ids": "whether the top 16 bits of each id are the number of its caller",
    "contexts_at_once": "largest number of contexts on the server at one time",
    "losses": "distinct losses of all contexts and seeds",
    "d_t1": "distinct elements of the gradients of t1",
    "d_t2": "distinct elements of the gradients of t2",
    "gradient_bits": "hash of the bits of all losses and gradients, first seed",
    "seeds": "number of seeds",
    "bit_patterns": "number of bitwise different results over the seeds",
    "arrival_orders": "number of arrival orders of cotangents over the seeds",
    **SENT,
    "virtual_time_ns": "virtual time from the start of all callers to their end",
    "wall_time_ns": "the same by the clock of this host",
    **LEFT_OVER,
    "digest": "digest of the trace; for several seeds, of their digests",
}


def add(x: Array, y: Array) -> Array:
    return x + y


def times(x: Array, y: Array) -> Array:
    return x * y


def matmul(x: Array, y: Array) -> Array:
    return x @ y


def total(x: Array) -> Array:
    return jnp.sum(x)


@dataclass(slots=True)
class Callers:
    workers: Sequence[str]
    contexts: int
    size: int
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)

    def play(self, run: Run) -> Figures:
        """Run with each seed. Most metrics are those of the first seed."""
        results: list[dict[str, Any]] = []
        patterns: dict[str, None] = {}
        traces = Traces()
        first: Figures = {}
        for number, seed in enumerate(run.seeds):
            cluster = run.cluster(seed)
            begun_ns = cluster.now_ns
            call = partial(_call, self.workers[0], self.contexts, self.size)
            by_caller = cluster.run({name: call for name in self.workers[1:]})
            window = (begun_ns, cluster.now_ns)
            results += by_caller.values()
            patterns[bits([caller["values"] for caller in by_caller.values()])] = None
            traces.add(cluster)
            if not number:
                run.keep(cluster, window)
                first = {**sent(cluster), **left_over(run, cluster)}
                first |= time_of(run, window[1] - window[0])
                first["gradient_bits"] = next(iter(patterns))
                first |= self._ids({name: c["ids"] for name, c in by_caller.items()})
            run.progress(number + 1, len(run.seeds))
        values = np.stack([caller["values"] for caller in results])
        return {
            "outcome": "finished",
            **first,
            "contexts_at_once": max(caller["at_once"] for caller in results),
            "losses": np.unique(values[:, :, 0]),
            "d_t1": np.unique(values[:, :, 1 : 1 + self.size**2]),
            "d_t2": np.unique(values[:, :, 1 + self.size**2 :]),
            "seeds": len(run.seeds),
            "bit_patterns": len(patterns),
            **traces.figures,
        }

    def _ids(self, ids: Mapping[str, Sequence[int]]) -> Figures:
        numbers = {name: self.workers.index(name) for name in ids}
        own_ids = [id >> 48 == numbers[k] for k, group in ids.items() for id in group]
        distinct = dict.fromkeys(id for group in ids.values() for id in group)
        return {"contexts": len(distinct), "own_ids": all(own_ids)}


def _call(server: str, contexts: int, size: int, cluster: Cluster) -> dict[str, Any]:
    """Run a caller: open its contexts, make all calls, then run all passes."""
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
    """Make the scenario's player. The first worker is the server; others call it.

    Args:
        workers: the server, then the callers.
        contexts: number of contexts that each caller opens at the same time.
        size: number of rows and columns of the matrices.
    """
    if len(workers) < 2:
        raise ScenarioError(
            f"workers = {list(workers)!r}: callers needs a server and at least one "
            "caller"
        )
    return Callers(workers, contexts, size)
