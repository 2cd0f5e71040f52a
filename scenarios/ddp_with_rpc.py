"""Data-parallel dense layers over a remote embedding, as in PyTorch's ddp_rpc.

Each trainer runs a loop of its own. Its replica of the dense layer is stepped by the
gradients of all trainers, which they all-reduce; the table of embeddings is on a
parameter server, where one optimizer steps it by each trainer's gradient as it comes.
So trainers race for the table, and still their replicas are equal to the bit.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jdag
from jdag.scenario import Figures, Run, Training
from jdag.scenario.case import bits

FIGURES: Mapping[str, str] = {
    "first_loss": "mean cross-entropy of the first batches, nats",
    "final_loss": "mean cross-entropy of the last batches, nats",
    "replicas_equal": "whether all trainers end with the same dense layer, to the bit",
}
BAG, CLASSES = 3, 8


def embedded(table: Array, indices: Array) -> Array:
    """The sum of the embeddings of each bag: indices (rows, bag) to (rows, width)."""
    return jnp.sum(table[indices], axis=1)


def loss(dense: Mapping[str, Array], bags: Array, labels: Array) -> Array:
    """The mean cross-entropy of a batch."""
    scores = bags @ dense["w"] + dense["b"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels))


@jax.jit
@jax.grad
def plain(params: Any, indices: Array, labels: Array) -> Array:
    """The loss of one trainer, of the table and the dense layer."""
    return loss(params[1], embedded(params[0], indices), labels)


def batch_of(number: int, rows: int, embeddings: int) -> tuple[Any, Any]:
    """The batch of a trainer: the first index of each row tells its label."""
    shape = (rows, BAG)
    indices = np.random.default_rng(number).integers(embeddings, size=shape)
    return indices.astype(np.int32), (indices[:, 0] % CLASSES).astype(np.int32)


def made(embeddings: int, width: int) -> tuple[Any, dict[str, Any]]:
    """The table, and the dense layer of every trainer."""
    draw = np.random.default_rng(0).standard_normal
    dense = {"w": 0.3 * draw((width, CLASSES)), "b": np.zeros(CLASSES)}
    return jnp.asarray(draw((embeddings, width))), jax.tree.map(jnp.asarray, dense)


def trained(
    table: Any, optimizer: Any, trainers: Any, sizes: Any, rate: float, cluster: Any
) -> tuple[list[float], Any, Any]:
    """A trainer: (its losses, gradients of the first step, its replica at the end)."""
    rows, embeddings, width, steps = sizes
    indices, labels = batch_of(trainers.index(cluster.here), rows, embeddings)
    dense = cluster.put(cluster.here, made(embeddings, width)[1])
    own = jdag.Optimizer(optax.sgd(rate / len(trainers)), dense)
    losses: list[float] = []
    first = None
    for _ in range(steps):
        with cluster.context() as ctx:
            bags = ctx.call(table.worker, embedded, table, indices)
            value = ctx.call(cluster.here, loss, dense, bags, labels)
            ctx.backward(value)
            sums = cluster.all_reduce(ctx.gradient(dense))
            first = first or (sums, ctx.gradient(table).fetch())
            own.step(ctx, ctx.move(cluster.here, sums))
            optimizer.step(ctx)
            losses.append(float(value.fetch()))
    replica = jdag.fetch(dense)
    cluster.drop(dense)
    return losses, first, replica


def ddp_with_rpc(
    workers: Sequence[str],
    *,
    rows: int = 16,
    embeddings: int = 64,
    width: int = 12,
    steps: int = 30,
    rate: float = 1.0,
) -> Training:
    """A parameter server, which is the master too, and a trainer on each other worker.

    Args:
        workers: the server first, then the trainers.
        rows: of each trainer, all in one batch.
        embeddings: rows of the table.
        width: of an embedding.
        steps: of each trainer.
        rate: of gradient descent.
    """
    server, *trainers = workers
    sizes = rows, embeddings, width, steps

    def train(run: Run, cluster: jdag.Cluster) -> tuple[Figures, Any]:
        before = made(embeddings, width)
        table = cluster.put(server, before[0])
        optimizer = jdag.Optimizer(optax.sgd(rate), table)
        one = partial(trained, table, optimizer, tuple(trainers), sizes, rate)
        found = list(cluster.run(dict.fromkeys(trainers, one)).values())
        first = [gradients for _, gradients, _ in found]
        each = [
            plain(before, *batch_of(number, rows, embeddings))
            for number, _ in enumerate(trainers)
        ]
        dense = jax.tree.map(lambda *of: np.sum(of, axis=0), *[one for _, one in each])
        truth = [(dense, of_table) for of_table, _ in each]
        ends = [bits(jax.tree.leaves(dense)) for _, _, dense in found]
        figures = {
            "first_loss": float(np.mean([losses[0] for losses, _, _ in found])),
            "final_loss": float(np.mean([losses[-1] for losses, _, _ in found])),
            "replicas_equal": ends == ends[:1] * len(ends),
        }
        return figures, list(zip(first, truth, strict=True))

    return Training(train, FIGURES)
