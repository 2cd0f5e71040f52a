"""Trainers with data-parallel dense layers, and one embedding on a parameter server.

What users of PyTorch build of DistributedDataParallel and RPC. The table of the
embedding is on the server alone; each trainer looks up the rows of its batch there. Of
the dense layer each trainer has a replica: its gradients are all-reduced, and every
trainer steps by the sum, so that replicas stay equal to the bit.

Inputs are uneven: each trainer has fewer rows than the one before, and the later ones
run out of them while the first goes on; then their batches are empty and their
gradients zero. Each row counts alike, wherever it is. (The mean over trainers of their
means, which DistributedDataParallel takes, is another number.)
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jdag.api.cluster import Cluster
from jdag.api.oracle import pullback
from jdag.collectives.routes import How
from jdag.context.refs import fetch
from jdag.errors import ScenarioError
from jdag.plans.compiling import compile
from jdag.scenario.case import (
    LEFT_OVER,
    SENT,
    Figures,
    Run,
    Traces,
    bits,
    difference,
    left_over,
    sent,
    time_of,
    worst,
)
from jdag.training.optimizer import Optimizer

FIGURES: Mapping[str, str] = {
    "outcome": "how the training ended",
    "gradient_difference": "max|g - g*| / max|g*|, the worst leaf of all steps",
    "gradient_checks": "steps whose gradients were held against the oracle",
    "replicas_equal": "whether all trainers end with the same dense layer, to the bit",
    "first_loss": "mean cross-entropy of the first step, nats",
    "final_loss": "mean cross-entropy over the last epoch, nats",
    "steps": "steps, one context each",
    "rows": "rows of each trainer",
    "gradient_bits": "a hash of all gradients of the first seed",
    "seeds": "seeds played",
    "bit_patterns": "different gradients and parameters, bit by bit, over the seeds",
    "arrival_orders": "different orders in which cotangents arrived, over the seeds",
    **SENT,
    "virtual_time_ns": "of the whole training",
    "wall_time_ns": "of the whole training, on this host's clock",
    **LEFT_OVER,
    "digest": "the digest of the trace; of several seeds, that of their digests",
}
BAG = 3  # Indices that a row has.
CLASSES = 8


def embedded(table: Array, indices: Array) -> Array:
    """The mean of the embeddings of each bag: indices (rows, bag) to (rows, width)."""
    return jnp.mean(table[indices], axis=1)


def loss(dense: Mapping[str, Array], bags: Array, labels: Array, rows: Array) -> Any:
    """A trainer's share of the mean cross-entropy of all rows; of no row, 0."""
    scores = bags @ dense["w"] + dense["b"]
    each = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return jnp.sum(each) / rows


def kept() -> optax.GradientTransformation:
    """Steps by nothing, and keeps the gradient as its state, where its leaf is."""
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(zeros, lambda g, *_: (zeros(g), g))


def descended(leaf: Array, gradient: Array, rate: Array) -> Array:
    """A step of gradient descent."""
    return leaf - rate * gradient


class Batch(NamedTuple):
    """What one trainer has in one step, perhaps no row at all."""

    indices: Any
    labels: Any


def batches(
    number: int, rows: int, steps: int, batch: int, embeddings: int
) -> list[Batch]:
    """Return the batches of a trainer: each row's label is told by its first index."""
    key = jax.random.key(number)
    indices = np.asarray(jax.random.randint(key, (rows, BAG), 0, embeddings), np.int32)
    labels = indices[:, 0] % CLASSES
    cuts = [slice(step * batch, (step + 1) * batch) for step in range(steps)]
    return [Batch(indices[cut], labels[cut]) for cut in cuts]


@dataclass(slots=True)
class Hybrid:
    """The training, as a scenario plays it."""

    workers: Sequence[str]
    rows: Sequence[int]
    epochs: int
    batch: int
    embeddings: int
    width: int
    rate: float
    how: How
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)
    compiles: ClassVar[bool] = True
    _plan: Any = None  # Of one seed, and the optimizer that keeps its gradients.

    @property
    def server(self) -> str:
        """Where the table is: on the second worker."""
        return self.workers[1]

    @property
    def trainers(self) -> Sequence[str]:
        """All workers but the first, which runs the program, and the server."""
        return self.workers[2:]

    def play(self, run: Run) -> Figures:
        """Train with each seed; the first one is reported."""
        patterns: dict[str, None] = {}
        traces = Traces()
        first: Figures = {}
        for number, seed in enumerate(run.seeds):
            cluster = run.cluster(seed)
            begun_ns = cluster.now_ns
            found, arrays = self._train(cluster, run, first=not number)
            patterns[bits(arrays)] = None
            traces.add(cluster)
            if not number:
                first = {**found, **sent(cluster), **left_over(run, cluster)}
                first |= time_of(run, cluster.now_ns - begun_ns)
                first["gradient_bits"] = bits(arrays)
            run.progress(number + 1, len(run.seeds))
        return {
            "outcome": "finished",
            **first,
            "rows": list(self.rows),
            "seeds": len(run.seeds),
            "bit_patterns": len(patterns),
            **traces.figures,
        }

    # --------------------------------------------------------------------- one seed

    def _train(
        self, cluster: Cluster, run: Run, *, first: bool
    ) -> tuple[Figures, list[Any]]:
        """Train; return what the training comes to, and all that bits are taken of."""
        steps = -(-max(self.rows) // self.batch)
        data = [
            batches(number, rows, steps, self.batch, self.embeddings)
            for number, rows in enumerate(self.rows)
        ]
        table, dense = self._put(cluster)
        if run.compile:
            keeping = Optimizer(kept(), {"table": table, "dense": dense})
            self._plan = compile(self._forward, cluster, keeping), keeping
        losses: list[float] = []
        apart: list[float] = []
        seen: list[Any] = []
        for step in range(steps * self.epochs):
            begun_ns = cluster.now_ns
            now = [of_trainer[step % steps] for of_trainer in data]
            check = first and step < steps  # Of one seed, one epoch.
            value, arrays, found = self._step(cluster, run, table, dense, now, check)
            losses.append(value)
            seen += arrays
            apart += found
            if first:
                run.keep(cluster, (begun_ns, cluster.now_ns))
        ends = [bits(jax.tree.leaves(fetch(dense[one]))) for one in self.trainers]
        seen += jax.tree.leaves(fetch((table, dense[self.trainers[0]])))
        if run.compile:
            keeping.drop()
            self._plan = None
        figures = {
            "gradient_difference": worst(apart),
            "gradient_checks": steps,
            "replicas_equal": ends == ends[:1] * len(ends),
            "first_loss": losses[0],
            "final_loss": float(np.mean(losses[-steps:])),
            "steps": len(losses),
        }
        return figures, seen

    def _put(self, cluster: Cluster) -> tuple[Any, dict[str, Any]]:
        """Make the table on the server, and equal dense layers on all trainers."""
        one, other = jax.random.split(jax.random.key(self.width))
        dense = {
            "w": 0.3 * jax.random.normal(other, (self.width, CLASSES)),
            "b": jnp.zeros(CLASSES),
        }
        table = jax.random.normal(one, (self.embeddings, self.width))
        return (
            cluster.put(self.server, table),
            {trainer: cluster.put(trainer, dense) for trainer in self.trainers},
        )

    def _forward(
        self, ctx: Any, table: Any, dense: Mapping[str, Any], now: Sequence[Batch]
    ) -> list[Any]:
        """The losses of all trainers, each on the trainer."""
        rows = float(sum(len(labels) for _, labels in now))
        losses = []
        for trainer, (indices, labels) in zip(self.trainers, now, strict=True):
            bags = ctx.call(self.server, embedded, table, indices)
            losses.append(ctx.call(trainer, loss, dense[trainer], bags, labels, rows))
        return losses

    def _step(
        self,
        cluster: Cluster,
        run: Run,
        table: Any,
        dense: Mapping[str, Any],
        now: Sequence[Batch],
        check: bool,
    ) -> tuple[float, list[Any], list[float]]:
        """One context; return the loss, the gradients, how far they are from right."""
        with cluster.context() as ctx:
            if self._plan is None:
                losses = self._forward(ctx, table, dense, now)
                ctx.backward(*losses)
                value = float(np.sum(fetch(losses)))
                own = {one: ctx.gradient(dense[one]) for one in self.trainers}
                lookups = ctx.gradient(table)
            else:
                step, keeping = self._plan
                value = float(np.sum(step(table, dense, now)))
                own, lookups = keeping.states["dense"], keeping.states["table"]
            sums = ctx.all_reduce(own, self.how)
            gradients = fetch({"dense": sums[self.trainers[0]], "table": lookups})
            apart = []
            if check:
                before = {"dense": dense[self.trainers[0]], "table": table}
                apart = self._apart(fetch(before), gradients, now)
                run.draw(step.plan.graph() if run.compile else ctx.graph())
            for trainer in self.trainers:
                cluster.update(descended, dense[trainer], sums[trainer], self.rate)
            cluster.update(descended, table, lookups, self.rate)
        return value, jax.tree.leaves(gradients), apart

    def _apart(self, params: Any, gradients: Any, now: Sequence[Batch]) -> list[float]:
        """How far gradients are from plain JAX's, of one dense layer that all use."""

        def roots(ctx: Any, params: Any) -> list[Any]:
            dense = dict.fromkeys(self.trainers, params["dense"])
            return self._forward(ctx, params["table"], dense, now)

        _, truth = pullback(roots)(params)
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(truth), strict=True)
        return [difference(got, expected) for got, expected in pairs]


def hybrid(
    workers: Sequence[str],
    *,
    rows: int = 12,
    epochs: int = 4,
    batch: int = 4,
    embeddings: int = 100,
    width: int = 16,
    rate: float = 1.0,
    how: How = "ring",
) -> Hybrid:
    """A main program, a parameter server, and a trainer on each other worker.

    Args:
        workers: where the program runs, the server, then the trainers.
        rows: of the first trainer; the next has half, then a third, and so on.
        epochs: passes over the rows.
        batch: the rows of a trainer in a step, as long as it has so many.
        embeddings: rows of the table.
        width: of an embedding.
        rate: of gradient descent.
        how: the way of the all-reduce.
    """
    if len(workers) < 3:
        raise ScenarioError(
            f"workers = {list(workers)!r}: hybrid needs one for the program, a server "
            "and at least one trainer"
        )
    uneven = [rows // (number + 1) for number, _ in enumerate(workers[2:])]
    return Hybrid(workers, uneven, epochs, batch, embeddings, width, rate, how)
