"""Trainers that share a classifier of digits, as in PyTorch's rpc/parameter_server.

The net and the states of its optimizer are on the parameter server. Each trainer has a
share of the images. It calls the loss of a batch on the server, differentiates it, and
steps the optimizer. Steps of the trainers race, but no step is lost, and each gradient
is computed at the parameters that its context has read. The gradients of all first
batches are computed before any step, so they do not depend on the order of steps.
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
from jdag.scenario.player import difference, worst

FIGURES: Mapping[str, str] = {
    "test_accuracy": "accuracy on 360 test images",
    "updates": "number of optimizer steps of all trainers",
    "raced_difference": "gradient difference of later steps; g* at the parameters read",
}


def scores(net: Mapping[str, Array], x: Array) -> Array:
    """Compute both dense layers of the net: (rows, 64) to (rows, 10)."""
    return jax.nn.relu(x @ net["w0"] + net["b0"]) @ net["w1"] + net["b1"]


def loss(net: Mapping[str, Array], x: Array, labels: Array) -> Array:
    """Return the mean cross-entropy of a batch."""
    each = optax.softmax_cross_entropy_with_integer_labels(scores(net, x), labels)
    return jnp.mean(each)


plain = jax.jit(jax.grad(loss))


def made(hidden: int) -> dict[str, Any]:
    """Return the initial parameters."""
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
    """Run a trainer. Returns (gradients, plain JAX's gradients) of some steps."""
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
    """Make the scenario's player, with a parameter server and trainers.

    Args:
        workers: the server, then the trainers.
        folder: the folder of the scenario.
        data: path of the file of digits, relative to `folder`.
        hidden: width of the hidden layer.
        batch: number of images of a trainer in a step.
        steps: number of steps of each trainer.
        rate: learning rate of Adam.
        check_every: number of steps from one comparison with plain JAX to the next.
    """
    server, *trainers = workers
    images, path = load(folder / data), str(folder / data)

    def train(run: Run, cluster: jdag.Cluster) -> tuple[Figures, Any]:
        net = cluster.put(server, made(hidden))
        optimizer = jdag.Optimizer(optax.adam(rate), net)
        sizes = batch, steps, check_every
        program = partial(trained, net, optimizer, tuple(trainers), path, sizes)
        checks_of = cluster.run(dict.fromkeys(trainers, program)).values()
        answers = jnp.argmax(scores(jdag.fetch(net), images.test_x), axis=-1)
        counts = jdag.fetch(optimizer.states)["w0"][0].count
        later = [check for checks in checks_of for check in checks[1:]]
        raced = jax.tree.leaves(jax.tree.map(difference, *zip(*later, strict=True)))
        figures = {
            "test_accuracy": float(jnp.mean(answers == images.test_y)),
            "updates": int(counts),
            "raced_difference": worst(raced),
        }
        return figures, [checks[0] for checks in checks_of]

    return Training(train, FIGURES)
