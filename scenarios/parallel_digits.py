"""Trains a classifier of handwritten digits, data parallel over devices of one worker.

The worker has all parameters. A step is one call, which splits the batch over devices
of the worker (`jdag.parallel.data_parallel`), one pass and one step of an optimizer.
Successive steps use different numbers of replicas. Some steps also compute the
gradients with every number of replicas, and compare these gradients with each other and
with the oracle's.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from digits import Images, load, logits, made_last
from jdag.api.cluster import Cluster
from jdag.api.oracle import pullback
from jdag.compute.pytrees import static
from jdag.context.refs import fetch
from jdag.errors import ScenarioError
from jdag.parallel import data_parallel
from jdag.scenario.player import (
    LEFT_OVER,
    SENT,
    Figures,
    Run,
    bits,
    difference,
    digest_of,
    left_over,
    sent,
    time_of,
    worst,
)
from jdag.training.optimizer import Optimizer

FIGURES: Mapping[str, str] = {
    "outcome": "how the training ended",
    "replicas": "numbers of replicas, which the steps use in turn",
    "replicas_difference": "max|g - g1| / max|g1| of the worst leaf; g1 by the first "
    "number of replicas",
    "gradient_difference": "the same difference from the oracle's gradients",
    "gradient_checks": "number of steps whose gradients are compared",
    "rows_per_s": "throughput on this host, for each number of replicas",
    "wall_time_per_step_ns": "median time of a step, for each number of replicas",
    "test_accuracy": "accuracy on 360 test images",
    "first_loss": "mean cross-entropy of the first step, nats",
    "final_loss": "mean cross-entropy over the last epoch, nats",
    "steps": "number of steps, one context each",
    "gradient_bits": "hash of the bits of the compared gradients",
    **SENT,
    "virtual_time_ns": "virtual time of the training",
    "wall_time_ns": "time of the training by the clock of this host",
    **LEFT_OVER,
    "digest": "digest of the trace",
}


def entropies(params: Mapping[str, Array], rows: tuple[Array, Array]) -> Array:
    """Compute the cross-entropy of each row. Each replica runs this on its rows."""
    x, labels = rows
    scores = logits(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def loss(params: Mapping[str, Array], x: Array, labels: Array, replicas: int) -> Array:
    """Return the mean cross-entropy, data parallel over `replicas` devices."""
    devices = jax.local_devices()[:replicas]
    return jnp.mean(data_parallel(entropies, params, (x, labels), devices))


@dataclass(slots=True)
class ParallelDigits:
    worker: str
    images: Images
    replicas: tuple[int, ...]
    epochs: int
    batch: int
    hidden: int
    learning_rate: float
    checks: int
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)

    def play(self, run: Run) -> Figures:
        """Train with the first seed."""
        cluster = run.cluster(run.seeds[0])
        key = jax.random.key(run.seeds[0])
        like = jnp.zeros((self.images.train_x.shape[1], self.hidden))
        refs = cluster.make(self.worker, made_last, key, like)
        optimizer = Optimizer(optax.adam(self.learning_rate), refs)
        batches = self._batches(key)
        check = {len(batches) * index // self.checks for index in range(self.checks)}
        checked = _Checked()
        start_ns, losses = cluster.now_ns, []
        times_ns: dict[int, list[int]] = {count: [] for count in self.replicas}
        for number, rows in enumerate(batches):
            if number in check:
                checked.add(self._gradients(cluster, run, refs, rows))
            count = self.replicas[number % len(self.replicas)]
            before_ns = cluster.now_ns
            losses.append(self._step(cluster, refs, optimizer, rows, count))
            times_ns[count].append(cluster.now_ns - before_ns)
            run.progress(number + 1, len(batches), loss=losses[-1])
        run.keep(cluster, (cluster.now_ns - times_ns[count][-1], cluster.now_ns))
        return {
            "outcome": "finished",
            "replicas": list(self.replicas),
            **checked.figures,
            "test_accuracy": self._accuracy(fetch(refs)),
            "first_loss": losses[0],
            "final_loss": float(np.mean(losses[-(len(losses) // self.epochs) :])),
            "steps": len(losses),
            **self._times(run, cluster, start_ns, times_ns),
            **sent(cluster),
            **left_over(run, cluster),
        }

    def _batches(self, key: Array) -> list[Any]:
        """Return the row numbers of each step. Each epoch shuffles the rows."""
        size = len(self.images.train_x)
        batches: list[Any] = []
        for epoch in range(self.epochs):
            order = jax.random.permutation(jax.random.fold_in(key, epoch), size)
            used = np.asarray(order)[: size // self.batch * self.batch]
            batches.extend(used.reshape(-1, self.batch))
        return batches

    def _forward(self, ctx: Any, params: Any, rows: Any, count: int) -> Any:
        x, labels = self.images.train_x[rows], self.images.train_y[rows]
        return ctx.call(self.worker, loss, params, x, labels, static(count))

    def _step(
        self, cluster: Cluster, refs: Any, optimizer: Optimizer, rows: Any, count: int
    ) -> float:
        """Run one step in a context. Returns the loss."""
        with cluster.context() as ctx:
            value = self._forward(ctx, refs, rows, count)
            ctx.backward(value)
            optimizer.step(ctx)
            return float(value.fetch())

    def _gradients(self, cluster: Cluster, run: Run, refs: Any, rows: Any) -> list[Any]:
        """Compute gradients with each number of replicas, and last by the oracle."""
        gradients = []
        for count in self.replicas:
            with cluster.context() as ctx:
                ctx.backward(self._forward(ctx, refs, rows, count))
                gradients.append(fetch(ctx.gradient(refs)))
                run.draw(ctx.graph())

        def roots(ctx: Any, params: Any) -> list[Any]:
            return [self._forward(ctx, params, rows, self.replicas[0])]

        _, truth = pullback(roots)(fetch(refs))
        return [*gradients, truth]

    def _accuracy(self, params: Any) -> float:
        scores = logits(params, jnp.asarray(self.images.test_x))
        return float(jnp.mean(jnp.argmax(scores, axis=-1) == self.images.test_y))

    def _times(
        self,
        run: Run,
        cluster: Cluster,
        start_ns: int,
        times_ns: Mapping[int, Sequence[int]],
    ) -> Figures:
        all_ns = cluster.now_ns - start_ns
        if run.virtual:
            return {**time_of(run, all_ns), "digest": cluster.trace.digest}
        # The first step with each number of replicas includes compilation.
        each_ns = {
            str(count): int(np.median(times[1:] or times))
            for count, times in times_ns.items()
        }
        return {
            **time_of(run, all_ns),
            "wall_time_per_step_ns": each_ns,
            "rows_per_s": {
                count: round(self.batch * 1e9 / ns) for count, ns in each_ns.items()
            },
        }


@dataclass(slots=True)
class _Checked:
    """Compares gradients of some steps, and collects the results."""

    from_first: list[float] = field(default_factory=list)
    from_truth: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def add(self, gradients: Sequence[Any]) -> None:
        """Compare the gradients of one step, as `_gradients` returned them."""
        *leaves, truth = map(jax.tree.leaves, gradients)
        self.from_first.append(worst([_difference(g, leaves[0]) for g in leaves]))
        self.from_truth.append(worst([_difference(g, truth) for g in leaves]))
        self.digests.append(bits([leaf for g in leaves for leaf in g]))

    @property
    def figures(self) -> Figures:
        return {
            "replicas_difference": worst(self.from_first),
            "gradient_difference": worst(self.from_truth),
            "gradient_checks": len(self.from_first),
            "gradient_bits": digest_of(self.digests),
        }


def _difference(leaves: Sequence[Any], truth: Sequence[Any]) -> float:
    return worst([difference(*pair) for pair in zip(leaves, truth, strict=True)])


def data_parallel_digits(  # noqa: PLR0913 - each is a separate keyword setting.
    workers: Sequence[str],
    *,
    folder: Path,
    data: str = "data/digits.npz",
    replicas: Sequence[int] = (1, 2, 4),
    epochs: int = 4,
    batch: int = 64,
    hidden: int = 64,
    learning_rate: float = 0.003,
    checks: int = 8,
) -> ParallelDigits:
    """Make the scenario's player. Its program trains on the last worker.

    Args:
        workers: the worker of the program, then the worker that trains.
        folder: the folder of the scenario.
        data: path of the file of digits, relative to `folder`.
        replicas: numbers of devices, which alternate from step to step.
        epochs: number of passes over the training images.
        batch: number of images in a step.
        hidden: width of the hidden layer.
        learning_rate: learning rate of Adam.
        checks: number of steps whose gradients are compared.
    """
    counts, most = tuple(replicas), len(jax.local_devices())
    if not counts or min(counts) < 1 or max(counts) > most:
        raise ScenarioError(
            f"settings.replicas = {list(counts)!r}: expected integers from 1 to the "
            f"devices of a worker, here {most}; host_devices = N makes N CPU devices"
        )
    images = load(folder / data)
    return ParallelDigits(
        workers[-1], images, counts, epochs, batch, hidden, learning_rate, checks
    )
