"""Trains a classifier of handwritten digits, data parallel over devices of one worker.

The worker keeps all parameters. A step is one call of it, which cuts its batch over so
many of the worker's devices (`jdag.parallel.data_parallel`), one pass and one step of
an optimizer. Steps take each number of replicas in turn; now and then all of them take
the gradients of the same parameters and rows, which are held against each other and
against the oracle's.
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
from jdag.scenario.case import (
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
    "replicas": "the numbers of replicas that steps take in turn",
    "replicas_difference": "max|g - g1| / max|g1|, the worst leaf of all checks; g1 by "
    "the first number of replicas",
    "gradient_difference": "the same, against the oracle",
    "gradient_checks": "steps whose gradients were held against each other",
    "rows_per_s": "throughput of a step, for each number of replicas, on this host",
    "wall_time_per_step_ns": "the median of the steps, for each number of replicas",
    "test_accuracy": "right answers among 360 images kept aside",
    "first_loss": "mean cross-entropy of the first step, nats",
    "final_loss": "mean cross-entropy over the last epoch, nats",
    "steps": "steps, one context each",
    "gradient_bits": "a hash of the gradients that were held against each other",
    **SENT,
    "virtual_time_ns": "of the whole training",
    "wall_time_ns": "of the whole training, on this host's clock",
    **LEFT_OVER,
    "digest": "the digest of the trace",
}


def entropies(params: Mapping[str, Array], rows: tuple[Array, Array]) -> Array:
    """What one replica computes: the cross-entropy of each of its rows."""
    x, labels = rows
    scores = logits(params, x)
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def loss(params: Mapping[str, Array], x: Array, labels: Array, replicas: int) -> Array:
    """The mean cross-entropy, the rows over the first so many devices."""
    devices = jax.local_devices()[:replicas]
    return jnp.mean(data_parallel(entropies, params, (x, labels), devices))


@dataclass(slots=True)
class ParallelDigits:
    """The training, as a scenario plays it."""

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
        check = {len(batches) * place // self.checks for place in range(self.checks)}
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
        """The rows of each step, drawn anew in each epoch."""
        size = len(self.images.train_x)
        found: list[Any] = []
        for epoch in range(self.epochs):
            order = jax.random.permutation(jax.random.fold_in(key, epoch), size)
            whole = np.asarray(order)[: size // self.batch * self.batch]
            found.extend(whole.reshape(-1, self.batch))
        return found

    def _forward(self, ctx: Any, params: Any, rows: Any, count: int) -> Any:
        x, labels = self.images.train_x[rows], self.images.train_y[rows]
        return ctx.call(self.worker, loss, params, x, labels, static(count))

    def _step(
        self, cluster: Cluster, refs: Any, optimizer: Optimizer, rows: Any, count: int
    ) -> float:
        """One context: forward, backward, the optimizer's step; return the loss."""
        with cluster.context() as ctx:
            found = self._forward(ctx, refs, rows, count)
            ctx.backward(found)
            optimizer.step(ctx)
            return float(found.fetch())

    def _gradients(self, cluster: Cluster, run: Run, refs: Any, rows: Any) -> list[Any]:
        """The gradients by each number of replicas, and last the oracle's."""
        found = []
        for count in self.replicas:
            with cluster.context() as ctx:
                ctx.backward(self._forward(ctx, refs, rows, count))
                found.append(fetch(ctx.gradient(refs)))
                run.draw(ctx.graph())

        def roots(ctx: Any, params: Any) -> list[Any]:
            return [self._forward(ctx, params, rows, self.replicas[0])]

        _, truth = pullback(roots)(fetch(refs))
        return [*found, truth]

    def _accuracy(self, params: Any) -> float:
        """Right answers on the images kept aside."""
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
        # The first step of each compiles.
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
    """What came of the gradients that were compared."""

    apart: list[float] = field(default_factory=list)
    from_truth: list[float] = field(default_factory=list)
    digests: list[str] = field(default_factory=list)

    def add(self, gradients: Sequence[Any]) -> None:
        """Compare those of all numbers of replicas; the last are the oracle's."""
        *found, truth = [jax.tree.leaves(one) for one in gradients]
        self.apart.append(worst([_difference(one, found[0]) for one in found]))
        self.from_truth.append(worst([_difference(one, truth) for one in found]))
        self.digests.append(bits([leaf for one in found for leaf in one]))

    @property
    def figures(self) -> Figures:
        """The worst of all."""
        return {
            "replicas_difference": worst(self.apart),
            "gradient_difference": worst(self.from_truth),
            "gradient_checks": len(self.apart),
            "gradient_bits": digest_of(self.digests),
        }


def _difference(one: Sequence[Any], other: Sequence[Any]) -> float:
    return worst([difference(*pair) for pair in zip(one, other, strict=True)])


def data_parallel_digits(  # noqa: PLR0913 - each is a setting of its own, by keyword.
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
    """A program on the first worker, and all that it trains on the last.

    Args:
        workers: where the program runs, and who trains.
        folder: where the scenario is.
        data: the file of digits, from there.
        replicas: the numbers of devices that steps take in turn.
        epochs: passes over the images to train on.
        batch: images in a step.
        hidden: the width of the hidden layer.
        learning_rate: of Adam.
        checks: steps whose gradients are held against each other.
    """
    counts, most = tuple(replicas), len(jax.local_devices())
    if not counts or min(counts) < 1 or max(counts) > most:
        raise ScenarioError(
            f"settings.replicas = {list(counts)!r}: allowed are integers from 1 to the "
            f"devices of a worker, here {most}; host_devices = N asks for N of the CPU"
        )
    images = load(folder / data)
    return ParallelDigits(
        workers[-1], images, counts, epochs, batch, hidden, learning_rate, checks
    )
