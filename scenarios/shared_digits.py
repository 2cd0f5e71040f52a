"""Trainers that share a classifier of digits, as in PyTorch's rpc/parameter_server.

The net and the states of its optimizer live on the parameter server. Each trainer has a
share of the images; it has the loss of a batch computed and differentiated on the
server, and steps the optimizer, whenever it is ready. Which step comes first is a race,
but none is lost, and each gradient is that of the parameters that its context has read.
At the first batch no one has stepped yet: those gradients no race can change.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jdag
from digits import load
from jdag.scenario import Figures, Run, Training
from jdag.scenario.case import difference, worst

FIGURES: Mapping[str, str] = {
    "test_accuracy": "right answers among 360 images kept aside",
    "updates": "steps that the optimizer has counted, of all trainers",
    "raced_difference": "of gradients after the first step; g* by what they have read",
}


def scores(net: Mapping[str, Array], x: Array) -> Array:
    """Two dense layers: (rows, 64) to the scores of ten classes."""
    return jax.nn.relu(x @ net["w0"] + net["b0"]) @ net["w1"] + net["b1"]


def loss(net: Mapping[str, Array], x: Array, labels: Array) -> Array:
    """The mean cross-entropy of a batch."""
    each = optax.softmax_cross_entropy_with_integer_labels(scores(net, x), labels)
    return jnp.mean(each)


plain = jax.jit(jax.grad(loss))


def made(hidden: int) -> dict[str, Any]:
    """The parameters."""
    draw = np.random.default_rng(0).standard_normal
    return {
        "w0": jnp.asarray(0.1 * draw((64, hidden))),
        "b0": jnp.zeros(hidden),
        "w1": jnp.asarray(0.1 * draw((hidden, 10))),
        "b1": jnp.zeros(10),
    }


def trained(
    net: Any, optimizer: Any, trainers: Any, data: str, sizes: Any, cluster: Any
) -> list[tuple[Any, Any]]:
    """A trainer: some of its gradients, each with plain JAX's of what it has read."""
    (batch, steps, check_every), images = sizes, load(Path(data))
    share = np.arange(trainers.index(cluster.here), len(images.train_x), len(trainers))
    checks = []
    for step in range(steps):
        rows = np.take(share, np.arange(step * batch, (step + 1) * batch), mode="wrap")
        x, labels = images.train_x[rows], images.train_y[rows]
        with cluster.context() as ctx:
            ctx.backward(ctx.call(net["w0"].worker, loss, net, x, labels))
            if step % check_every == 0:
                gradients = jdag.fetch(ctx.gradient(net))
                read = jdag.fetch(ctx.move(cluster.here, net))
                checks.append((gradients, plain(read, x, labels)))
            if not step:
                cluster.barrier()
            optimizer.step(ctx)
    return checks


def shared_digits(
    workers: Sequence[str],
    *,
    folder: Path,
    data: str = "data/digits.npz",
    hidden: int = 32,
    batch: int = 32,
    steps: int = 40,
    rate: float = 0.01,
    check_every: int = 10,
) -> Training:
    """A parameter server, and a trainer on each other worker.

    Args:
        workers: the server first, then the trainers.
        folder: where the scenario is.
        data: the file of digits, from there.
        hidden: the width of the hidden layer.
        batch: images of a trainer in a step.
        steps: of each trainer.
        rate: of Adam.
        check_every: of how many batches one is held against plain JAX.
    """
    server, *trainers = workers
    images, path = load(folder / data), str(folder / data)

    def train(run: Run, cluster: jdag.Cluster) -> tuple[Figures, Any]:
        net = cluster.put(server, made(hidden))
        optimizer = jdag.Optimizer(optax.adam(rate), net)
        sizes = batch, steps, check_every
        one = partial(trained, net, optimizer, tuple(trainers), path, sizes)
        found = cluster.run(dict.fromkeys(trainers, one)).values()
        answers = jnp.argmax(scores(jdag.fetch(net), images.test_x), axis=-1)
        counts = jdag.fetch(optimizer.states)["w0"][0].count
        later = [check for checks in found for check in checks[1:]]
        raced = jax.tree.leaves(jax.tree.map(difference, *zip(*later, strict=True)))
        figures = {
            "test_accuracy": float(jnp.mean(answers == images.test_y)),
            "updates": int(counts),
            "raced_difference": worst(raced),
        }
        return figures, [checks[0] for checks in found]

    return Training(train, FIGURES)
