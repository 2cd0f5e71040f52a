"""Data-parallel dense layers over a remote embedding, as in PyTorch's ddp_rpc.

Each trainer runs its own loop. It updates its replica of the dense layer with the
all-reduced gradients of all trainers. The table of embeddings is on a parameter server,
where one optimizer applies the gradient of each trainer when it arrives. So updates of
the table race, but the replicas stay bitwise equal.
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
from jdag.scenario.player import bits

FIGURES: Mapping[str, str] = {
    "first_loss": "mean cross-entropy of the first batches, nats",
    "final_loss": "mean cross-entropy of the last batches, nats",
    "replicas_equal": "whether all trainers end with bitwise equal dense layers",
}
BAG, CLASSES = 3, 8


def embedded(table: Array, indices: Array) -> Array:
    """Sum the embeddings of each row's indices: (rows, BAG) to (rows, width)."""
    return jnp.sum(table[indices], axis=1)


def loss(dense: Mapping[str, Array], bags: Array, labels: Array) -> Array:
    """Return the mean cross-entropy of a batch."""
    scores = bags @ dense["w"] + dense["b"]
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, labels))


@jax.jit
@jax.grad
def plain(params: Any, indices: Array, labels: Array) -> Array:
    """Compute a trainer's gradient by plain JAX; `params` is (table, dense)."""
    return loss(params[1], embedded(params[0], indices), labels)


def batch_of(number: int, rows: int, embeddings: int) -> tuple[Any, Any]:
    """Draw a trainer's batch. The first index of a row determines its label."""
    shape = (rows, BAG)
    indices = np.random.default_rng(number).integers(embeddings, size=shape)
    return indices.astype(np.int32), (indices[:, 0] % CLASSES).astype(np.int32)


def made(embeddings: int, width: int) -> tuple[Any, dict[str, Any]]:
    """Return initial parameters: the table, and the dense layer of each trainer."""
    draw = np.random.default_rng(0).standard_normal
    dense = {"w": 0.3 * draw((width, CLASSES)), "b": np.zeros(CLASSES)}
    return jnp.asarray(draw((embeddings, width))), jax.tree.map(jnp.asarray, dense)


def trained(
    table: Any, optimizer: Any, trainers: Any, sizes: Any, rate: float, cluster: Any
) -> tuple[list[float], Any, Any]:
    """Run a trainer. Returns (losses, gradients of the first step, final replica)."""
    rows, embeddings, width, steps = sizes
    indices, labels = batch_of(trainers.index(cluster.here), rows, embeddings)
    dense = cluster.put(cluster.here, made(embeddings, width)[1])
    dense_optimizer = jdag.Optimizer(optax.sgd(rate / len(trainers)), dense)
    losses: list[float] = []
    first = None
    for _ in range(steps):
        with cluster.context() as ctx:
            bags = ctx.call(table.worker, embedded, table, indices)
            value = ctx.call(cluster.here, loss, dense, bags, labels)
            ctx.backward(value)
            sums = cluster.all_reduce(ctx.gradient(dense))
            first = first or (sums, ctx.gradient(table).fetch())
            dense_optimizer.step(ctx, ctx.move(cluster.here, sums))
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
    """Make the scenario's player, with a parameter server and trainers.

    Args:
        workers: the server, then the trainers.
        rows: number of rows of each trainer, which are its only batch.
        embeddings: number of rows of the table.
        width: width of an embedding.
        steps: number of steps of each trainer.
        rate: learning rate of gradient descent.
    """
    server, *trainers = workers
    sizes = rows, embeddings, width, steps

    def train(run: Run, cluster: jdag.Cluster) -> tuple[Figures, Any]:
        before = made(embeddings, width)
        table = cluster.put(server, before[0])
        optimizer = jdag.Optimizer(optax.sgd(rate), table)
        program = partial(trained, table, optimizer, tuple(trainers), sizes, rate)
        results = list(cluster.run(dict.fromkeys(trainers, program)).values())
        first = [gradients for _, gradients, _ in results]
        each = [
            plain(before, *batch_of(number, rows, embeddings))
            for number, _ in enumerate(trainers)
        ]
        dense = jax.tree.map(
            lambda *g: np.sum(g, axis=0), *[dense for _, dense in each]
        )
        truth = [(dense, table_gradient) for table_gradient, _ in each]
        ends = [bits(jax.tree.leaves(dense)) for _, _, dense in results]
        figures = {
            "first_loss": float(np.mean([losses[0] for losses, _, _ in results])),
            "final_loss": float(np.mean([losses[-1] for losses, _, _ in results])),
            "replicas_equal": ends == ends[:1] * len(ends),
        }
        return figures, list(zip(first, truth, strict=True))

    return Training(train, FIGURES)
