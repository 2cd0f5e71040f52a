"""Trainers with data-parallel dense layers, and embeddings on a parameter server.

PyTorch users build this with DistributedDataParallel and RPC. The server has the table
of embeddings, and each trainer looks up the rows of its batch there. Each trainer has a
replica of the dense layer. The gradients of all replicas are all-reduced and all
trainers apply the sum, so that the replicas stay bitwise equal.

Inputs are uneven: each trainer has fewer rows than the one before. A trainer without
rows has empty batches and zero gradients. All rows have the same weight, unlike in
DistributedDataParallel, which averages the means of the trainers.
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
from jdag.scenario.player import (
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
    "gradient_difference": "max|g - g*| / max|g*| of the worst leaf of all steps",
    "gradient_checks": "number of steps whose gradients are compared with the oracle's",
    "replicas_equal": "whether all trainers end with bitwise equal dense layers",
    "first_loss": "mean cross-entropy of the first step, nats",
    "final_loss": "mean cross-entropy over the last epoch, nats",
    "steps": "number of steps, one context each",
    "rows": "number of rows of each trainer",
    "gradient_bits": "hash of the bits of all gradients, first seed",
    "seeds": "number of seeds",
    "bit_patterns": "number of bitwise different results over the seeds",
    "arrival_orders": "number of arrival orders of cotangents over the seeds",
    **SENT,
    "virtual_time_ns": "virtual time of the training",
    "wall_time_ns": "time of the training by the clock of this host",
    **LEFT_OVER,
    "digest": "digest of the trace; for several seeds, of their digests",
}
BAG = 3  # Number of indices in a row.
CLASSES = 8


def embedded(table: Array, indices: Array) -> Array:
    """Average the embeddings of each row's indices: (rows, BAG) to (rows, width)."""
    return jnp.mean(table[indices], axis=1)


def loss(dense: Mapping[str, Array], bags: Array, labels: Array, rows: Array) -> Any:
    """Return a trainer's summed cross-entropy / `rows`, the number of all rows."""
    scores = bags @ dense["w"] + dense["b"]
    each = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return jnp.sum(each) / rows


def kept() -> optax.GradientTransformation:
    """Make an optimizer that keeps the gradient as its state, and changes nothing."""
    zeros = partial(jax.tree.map, jnp.zeros_like)
    return optax.GradientTransformation(zeros, lambda g, *_: (zeros(g), g))


def descended(leaf: Array, gradient: Array, rate: Array) -> Array:
    """Return the parameters after a step of gradient descent."""
    return leaf - rate * gradient


class Batch(NamedTuple):
    """The rows of one trainer in one step; there may be none."""

    indices: Any
    labels: Any


def batches(
    number: int, rows: int, steps: int, batch: int, embeddings: int
) -> list[Batch]:
    """Draw a trainer's batches. The first index of a row determines its label."""
    key = jax.random.key(number)
    indices = np.asarray(jax.random.randint(key, (rows, BAG), 0, embeddings), np.int32)
    labels = indices[:, 0] % CLASSES
    cuts = [slice(step * batch, (step + 1) * batch) for step in range(steps)]
    return [Batch(indices[cut], labels[cut]) for cut in cuts]


@dataclass(slots=True)
class Hybrid:
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
    _plan: Any = None  # The compiled step and its optimizer, for the current seed.

    @property
    def server(self) -> str:
        """The second worker, which has the table."""
        return self.workers[1]

    @property
    def trainers(self) -> Sequence[str]:
        """All workers from the third on."""
        return self.workers[2:]

    def play(self, run: Run) -> Figures:
        """Train with each seed. Most metrics are those of the first seed."""
        patterns: dict[str, None] = {}
        traces = Traces()
        first: Figures = {}
        for number, seed in enumerate(run.seeds):
            cluster = run.cluster(seed)
            begun_ns = cluster.now_ns
            figures, arrays = self._train(cluster, run, first=not number)
            patterns[bits(arrays)] = None
            traces.add(cluster)
            if not number:
                first = {**figures, **sent(cluster), **left_over(run, cluster)}
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
        """Train with one seed. Returns metrics, and all gradients and parameters."""
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
        differences: list[float] = []
        results: list[Any] = []
        for step in range(steps * self.epochs):
            begun_ns = cluster.now_ns
            current = [trainer[step % steps] for trainer in data]
            check = first and step < steps  # The first epoch of the first seed.
            value, arrays, apart = self._step(
                cluster, run, table, dense, current, check
            )
            losses.append(value)
            results += arrays
            differences += apart
            if first:
                run.keep(cluster, (begun_ns, cluster.now_ns))
        ends = [bits(jax.tree.leaves(fetch(dense[name]))) for name in self.trainers]
        results += jax.tree.leaves(fetch((table, dense[self.trainers[0]])))
        if run.compile:
            keeping.drop()
            self._plan = None
        figures = {
            "gradient_difference": worst(differences),
            "gradient_checks": steps,
            "replicas_equal": ends == ends[:1] * len(ends),
            "first_loss": losses[0],
            "final_loss": float(np.mean(losses[-steps:])),
            "steps": len(losses),
        }
        return figures, results

    def _put(self, cluster: Cluster) -> tuple[Any, dict[str, Any]]:
        """Put the table on the server, and equal dense layers on all trainers."""
        table_key, dense_key = jax.random.split(jax.random.key(self.width))
        dense = {
            "w": 0.3 * jax.random.normal(dense_key, (self.width, CLASSES)),
            "b": jnp.zeros(CLASSES),
        }
        table = jax.random.normal(table_key, (self.embeddings, self.width))
        return (
            cluster.put(self.server, table),
            {trainer: cluster.put(trainer, dense) for trainer in self.trainers},
        )

    def _forward(
        self, ctx: Any, table: Any, dense: Mapping[str, Any], current: Sequence[Batch]
    ) -> list[Any]:
        """Run the forward of all trainers. Returns a loss on each trainer."""
        rows = float(sum(len(labels) for _, labels in current))
        losses = []
        for trainer, (indices, labels) in zip(self.trainers, current, strict=True):
            bags = ctx.call(self.server, embedded, table, indices)
            losses.append(ctx.call(trainer, loss, dense[trainer], bags, labels, rows))
        return losses

    def _step(
        self,
        cluster: Cluster,
        run: Run,
        table: Any,
        dense: Mapping[str, Any],
        current: Sequence[Batch],
        check: bool,
    ) -> tuple[float, list[Any], list[float]]:
        """Run one step. Returns loss, gradients, and differences from the oracle."""
        with cluster.context() as ctx:
            if self._plan is None:
                losses = self._forward(ctx, table, dense, current)
                ctx.backward(*losses)
                value = float(np.sum(fetch(losses)))
                gradients = {n: ctx.gradient(dense[n]) for n in self.trainers}
                lookups = ctx.gradient(table)
            else:
                step, keeping = self._plan
                value = float(np.sum(step(table, dense, current)))
                gradients, lookups = keeping.states["dense"], keeping.states["table"]
            sums = ctx.all_reduce(gradients, self.how)
            gradients = fetch({"dense": sums[self.trainers[0]], "table": lookups})
            differences = []
            if check:
                before = {"dense": dense[self.trainers[0]], "table": table}
                differences = self._differences(fetch(before), gradients, current)
                run.draw(step.plan.graph() if run.compile else ctx.graph())
            for trainer in self.trainers:
                cluster.update(descended, dense[trainer], sums[trainer], self.rate)
            cluster.update(descended, table, lookups, self.rate)
        return value, jax.tree.leaves(gradients), differences

    def _differences(
        self, params: Any, gradients: Any, current: Sequence[Batch]
    ) -> list[float]:
        """Compare gradients with the oracle's, where trainers share a dense layer."""

        def roots(ctx: Any, params: Any) -> list[Any]:
            dense = dict.fromkeys(self.trainers, params["dense"])
            return self._forward(ctx, params["table"], dense, current)

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
    """Make the scenario's player, with a main program, a server and trainers.

    Args:
        workers: the worker of the main program, the server, then the trainers.
        rows: number of rows of the first trainer; trainer n has 1/n as many.
        epochs: number of passes over the rows.
        batch: maximum number of rows of a trainer in a step.
        embeddings: number of rows of the table.
        width: width of an embedding.
        rate: learning rate of gradient descent.
        how: the route of the all-reduce: "owner", "tree" or "ring".
    """
    if len(workers) < 3:
        raise ScenarioError(
            f"workers = {list(workers)!r}: hybrid needs one for the program, a server "
            "and at least one trainer"
        )
    uneven = [rows // (number + 1) for number, _ in enumerate(workers[2:])]
    return Hybrid(workers, uneven, epochs, batch, embeddings, width, rate, how)
