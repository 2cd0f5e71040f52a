"""Trains a classifier of handwritten digits over several workers.

Each worker but the first owns a stage: the parameters of one layer. A step is one
context: the batch is split into micro-batches, which are all in flight at once, one
pass starts from all their losses, and an optimizer updates the parameters on their
owners.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jdag.api.cluster import Cluster
from jdag.api.oracle import pullback
from jdag.context.refs import fetch
from jdag.errors import ScenarioError
from jdag.plans.compiling import CompiledStep, compile
from jdag.scenario.player import (
    Figures,
    Run,
    bits,
    difference,
    digest_of,
    total,
    worst,
)
from jdag.training.optimizer import Optimizer

KEPT_ASIDE = 360
CLASSES = 10

FIGURES: Mapping[str, str] = {
    "outcome": "how the training ended",
    "test_accuracy": "accuracy on 360 test images",
    "train_accuracy": "accuracy on the training images during the last epoch",
    "final_loss": "mean cross-entropy over the last epoch, nats",
    "gradient_difference": "max|g - g*| / max|g*| of the worst leaf of all checks",
    "gradient_checks": "number of steps whose gradients are compared with the oracle's",
    "steps": "number of steps, one context each",
    "micro_batches": "number of micro-batches of a step, all in flight at once",
    "messages": "protocol messages",
    "payload_bytes": "bytes of the arrays in those messages",
    "wire_bytes": "all bytes, with headers, acks and resends",
    "resends": "frames sent again",
    "virtual_time_ns": "virtual time of the training",
    "virtual_time_per_step_ns": "median virtual time of a step",
    "bubble": "1 - busy time / step time of the last step, of each worker",
    "live_contexts": "contexts that still exist on a worker after the run",
    "live_passes": "passes that still exist on a worker after the run",
    "wall_time_ns": "time of all steps by the clock of this host",
    "wall_time_per_step_ns": "median time of a step by that clock",
    "gradient_bits": "hash of the bits of the compared gradients",
    "digest": "digest of the trace",
}


def stage(params: Mapping[str, Array], x: Array) -> Array:
    """Compute a hidden stage, tanh(x w + b): (rows, in) to (rows, out)."""
    return jnp.tanh(x @ params["w"] + params["b"])


def logits(params: Mapping[str, Array], x: Array) -> Array:
    """Compute the last stage without its loss: (rows, in) to (rows, 10)."""
    return jnp.tanh(x @ params["w"] + params["b"]) @ params["out"]


def loss(params: Mapping[str, Array], x: Array, labels: Array, rows: float) -> Any:
    """Return the sum of cross-entropies / `rows`, and the number of right answers."""
    scores = logits(params, x)
    each = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    right = jnp.sum(jnp.argmax(scores, axis=-1) == labels)
    return jnp.sum(each) / rows, right


@dataclass(frozen=True, slots=True)
class Images:
    """Images as rows of 64 numbers from 0 to 1, and their labels."""

    train_x: Any
    train_y: Any
    test_x: Any
    test_y: Any


def load(path: Path) -> Images:
    """Read the digits. A fixed permutation selects the 360 test images.

    Raises:
        ScenarioError: the file is missing or does not contain the digits.
    """
    try:
        with np.load(path) as data:
            images, labels = data["images"], data["labels"]
    except (OSError, KeyError, ValueError) as error:
        raise ScenarioError(
            f"settings.data = {str(path)!r}: not a file of digits ({error}); "
            "expected the digits.npz in scenarios/data"
        ) from error
    rows = (images.reshape(len(images), -1) / 16.0).astype(np.float32)
    order = np.argsort([pow(5, number, 1_801) for number in range(len(rows))])
    rows, labels = rows[order], labels[order].astype(np.int32)
    cut = len(rows) - KEPT_ASIDE
    return Images(rows[:cut], labels[:cut], rows[cut:], labels[cut:])


@dataclass(slots=True)
class Digits:
    workers: Sequence[str]
    images: Images
    epochs: int
    batch: int
    micro_batches: int
    hidden: int
    learning_rate: float
    checks: int
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)
    compiles: ClassVar[bool] = True
    _apart: list[float] = field(default_factory=list)
    _bits: list[str] = field(default_factory=list)

    def play(self, run: Run) -> Figures:
        """Train with the first seed."""
        self._apart, self._bits = [], []
        cluster = run.cluster(run.seeds[0])
        refs = self._put(cluster, run.seeds[0])
        optimizer = Optimizer(optax.adam(self.learning_rate), refs)
        plan = compile(self._losses, cluster, optimizer) if run.compile else None
        steps = self.epochs * (len(self.images.train_x) // self.batch)
        check = {steps * place // self.checks for place in range(self.checks)}
        order = np.arange(len(self.images.train_x))
        shuffle = jax.random.key(run.seeds[0])
        times_ns: list[int] = []
        sums = np.zeros(2)
        epoch_of = steps // self.epochs
        busy: Mapping[str, int] = {}
        for step in range(steps):
            if step % epoch_of == 0:
                order = np.asarray(
                    jax.random.permutation(
                        jax.random.fold_in(shuffle, step), len(order)
                    )
                )
                sums[:] = 0
            place = step % epoch_of * self.batch
            rows = order[place : place + self.batch]
            before, start_ns = _busy(cluster), cluster.now_ns
            truth = step in check
            if plan is None:
                got = self._step(cluster, run, refs, optimizer, rows, truth)
            else:
                got = self._planned(plan, run, refs, rows, truth)
            times_ns.append(cluster.now_ns - start_ns)
            busy = {name: ns - before[name] for name, ns in _busy(cluster).items()}
            sums += got
            seen = (step % epoch_of + 1) * self.batch
            run.progress(
                step + 1,
                steps,
                loss=float(sums[0]) / (step % epoch_of + 1),
                accuracy=float(sums[1]) / seen,
            )
        window = (cluster.now_ns - times_ns[-1], cluster.now_ns)
        run.keep(cluster, window)
        figures = self._figures(run, cluster, times_ns, busy)
        figures["test_accuracy"] = self._accuracy(refs)
        figures["final_loss"] = float(sums[0]) / epoch_of
        figures["train_accuracy"] = float(sums[1]) / (epoch_of * self.batch)
        return figures

    # ------------------------------------------------------------------ one step

    def _put(self, cluster: Cluster, seed: int) -> list[Any]:
        """Create each stage's parameters on its owner."""
        widths = [self.images.train_x.shape[1], *[self.hidden] * len(self.owners)]
        key = jax.random.key(seed)
        refs = []
        for number, owner in enumerate(self.owners):
            last = number + 1 == len(self.owners)
            refs.append(
                cluster.make(
                    owner,
                    made_last if last else made,
                    jax.random.fold_in(key, number),
                    jnp.zeros((widths[number], widths[number + 1])),
                )
            )
        return refs

    @property
    def owners(self) -> Sequence[str]:
        """The owners of the stages: all workers except the first, the trainer."""
        return self.workers[1:]

    def _cut(self, rows: Any) -> list[Any]:
        """Split rows into micro-batches of (images, labels)."""
        parts = np.array_split(rows, self.micro_batches)
        return [(self.images.train_x[p], self.images.train_y[p]) for p in parts]

    def _forward(self, ctx: Any, params: Sequence[Any], parts: Any) -> list[Any]:
        """Call all stages. Returns refs (loss, right answers) for each micro-batch."""
        results = []
        size = float(sum(len(labels) for _, labels in parts))
        for images, labels in parts:
            value = images
            for owner, layer in zip(self.owners[:-1], params[:-1], strict=True):
                value = ctx.call(owner, stage, layer, value)
            results.append(
                ctx.call(self.owners[-1], loss, params[-1], value, labels, size)
            )
        return results

    def _losses(self, ctx: Any, params: Sequence[Any], parts: Any) -> Any:
        """Return (losses, numbers of right answers). A plan differentiates losses."""
        results = self._forward(ctx, params, parts)
        return [loss for loss, _ in results], [right for _, right in results]

    def _step(
        self,
        cluster: Cluster,
        run: Run,
        refs: list[Any],
        optimizer: Optimizer,
        rows: Any,
        check: bool,
    ) -> Any:
        """Run one step in a context. Returns its loss and number of right answers."""
        with cluster.context() as ctx:
            results = self._forward(ctx, refs, self._cut(rows))
            ctx.backward(*[loss for loss, _ in results])
            sums = np.asarray(fetch(results), dtype=np.float64).sum(axis=0)
            if check:
                self._compare(fetch(refs), fetch(ctx.gradient(refs)), rows)
                run.draw(ctx.graph())
            optimizer.step(ctx)
        return sums

    def _planned(
        self, step: CompiledStep, run: Run, refs: list[Any], rows: Any, check: bool
    ) -> Any:
        """Run one step of a plan. If `check`, first compare its gradients."""
        parts = self._cut(rows)
        if check:
            _, gradients = step.value_and_grad(refs, parts)
            self._compare(fetch(refs), gradients, rows)
        results = step(refs, parts)
        run.draw(step.plan.graph())
        return np.asarray(results, dtype=np.float64).sum(axis=1)

    def _compare(self, params: Any, gradients: Any, rows: Any) -> None:
        """Record the bits of gradients, and their difference from the oracle's."""

        def roots(ctx: Any, params: Any) -> list[Any]:
            return self._losses(ctx, params, self._cut(rows))[0]

        _, truth = pullback(roots)(params)
        self._bits.append(bits(jax.tree.leaves(gradients)))
        pairs = zip(jax.tree.leaves(gradients), jax.tree.leaves(truth), strict=True)
        self._apart.append(worst([difference(got, g) for got, g in pairs]))

    # ------------------------------------------------------------------- figures

    def _accuracy(self, refs: list[Any]) -> float:
        """Return the accuracy on the test images."""
        *front, last = fetch(refs)
        value = jnp.asarray(self.images.test_x)
        for params in front:
            value = stage(params, value)
        answers = jnp.argmax(logits(last, value), axis=-1)
        return float(jnp.mean(answers == self.images.test_y))

    def _figures(
        self,
        run: Run,
        cluster: Cluster,
        times_ns: list[int],
        busy: Mapping[str, int],
    ) -> Figures:
        if not run.virtual:
            cluster.driver.settle()
        info = cluster.info().values()
        figures = {
            "outcome": "finished",
            "gradient_difference": worst(self._apart),
            "gradient_checks": len(self._apart),
            "gradient_bits": digest_of(self._bits),
            "steps": len(times_ns),
            "micro_batches": self.micro_batches,
            "messages": total(cluster, "messages_sent"),
            "payload_bytes": total(cluster, "payload_bytes_sent"),
            "wire_bytes": total(cluster, "bytes_sent"),
            "resends": total(cluster, "resends"),
            "live_contexts": sum(int(worker["live_contexts"]) for worker in info),
            "live_passes": sum(int(worker["live_passes"]) for worker in info),
        }
        if not run.virtual:
            figures["wall_time_ns"] = sum(times_ns)
            figures["wall_time_per_step_ns"] = int(np.median(times_ns))
            return figures
        last = times_ns[-1]
        idle = {
            name: Fraction(last - ns, last) if last else Fraction(0)
            for name, ns in busy.items()
        }
        return {
            **figures,
            "virtual_time_ns": cluster.now_ns,
            "virtual_time_per_step_ns": int(np.median(times_ns)),
            "bubble": idle,
            "digest": cluster.trace.digest,
        }


def made(key: Array, like: Array) -> dict[str, Array]:
    """Draw parameters of a hidden stage, as in Glorot and Bengio (2010)."""
    return {
        "w": jax.nn.initializers.glorot_normal()(key, like.shape, like.dtype),
        "b": jnp.zeros(like.shape[1], like.dtype),
    }


def made_last(key: Array, like: Array) -> dict[str, Array]:
    """Draw parameters of the last stage: a hidden layer and the output layer."""
    hidden_key, out_key = jax.random.split(key)
    shape = (like.shape[1], CLASSES)
    out = jax.nn.initializers.glorot_normal()(out_key, shape, like.dtype)
    return {**made(hidden_key, like), "out": out}


def _busy(cluster: Cluster) -> dict[str, int]:
    return {name: int(worker["busy_ns"]) for name, worker in cluster.info().items()}


def digits(  # noqa: PLR0913 - each is a separate keyword setting.
    workers: Sequence[str],
    *,
    folder: Path,
    data: str = "data/digits.npz",
    epochs: int = 12,
    batch: int = 64,
    micro_batches: int = 4,
    hidden: int = 64,
    learning_rate: float = 0.003,
    checks: int = 8,
) -> Digits:
    """Make the scenario's player. The first worker trains; the others own stages.

    Args:
        workers: the trainer, then the owners of the stages.
        folder: the folder of the scenario.
        data: path of the file of digits, relative to `folder`.
        epochs: number of passes over the training images.
        batch: number of images in a step.
        micro_batches: number of micro-batches of a step, all in flight at once.
        hidden: width of the output of each stage.
        learning_rate: learning rate of Adam.
        checks: number of steps whose gradients are compared with the oracle's.
    """
    if len(workers) < 2:
        raise ScenarioError(
            f"workers = {list(workers)!r}: digits needs a trainer and at least one "
            "owner of a stage"
        )
    images = load(folder / data)
    return Digits(
        workers, images, epochs, batch, micro_batches, hidden, learning_rate, checks
    )
