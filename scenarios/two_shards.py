"""A convolutional net in two shards on two workers, as in PyTorch's dist_pipeline.

The master splits each batch of digits into micro-batches, sends them through both
shards, and computes their mean loss. Calls return immediately, so both shards work at
the same time. If the master waits for each micro-batch before it sends the next, the
gradients are bitwise equal, but a step takes longer.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import jdag
from digits import Images, load
from jdag.scenario import Figures, Run, Training
from jdag.scenario.player import bits

FIGURES: Mapping[str, str] = {
    "test_accuracy": "accuracy on 360 test images",
    "same_bits_as_waiting": "whether a master that waits gets bitwise equal gradients",
    "virtual_time_per_step_ns": "with micro-batches in flight at once, and one by one",
}


def convolved(kernel: Array, x: Array) -> Array:
    """Convolve with a 3 x 3 kernel; x is (rows, height, width, channels)."""
    axes, x = ("NHWC", "HWIO", "NHWC"), x.astype(kernel.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, axes)


def first_shard(shard: Mapping[str, Array], x: Array) -> Array:
    """Convolve, then average 2 x 2 pixels: (rows, 64) to (rows, 4, 4, 8)."""
    maps = convolved(shard["kernel"], x.reshape(-1, 8, 8, 1)) + shard["bias"]
    return jnp.mean(jax.nn.relu(maps).reshape(-1, 4, 2, 4, 2, 8), axis=(2, 4))


def second_shard(shard: Mapping[str, Array], maps: Array) -> Array:
    """Compute scores of ten classes from the first shard's output."""
    maps = jax.nn.relu(convolved(shard["kernel"], maps) + shard["bias"])
    return maps.reshape(len(maps), -1) @ shard["out"]


def loss(scores: Sequence[Array], labels: Array) -> Array:
    """Return the mean cross-entropy of all micro-batches."""
    each = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(each(jnp.concatenate(scores), labels))


@jax.jit
def classified(net: Any, x: Array) -> Array:
    """Compute both shards by plain JAX."""
    return second_shard(net["second"], first_shard(net["first"], x))


@jax.jit
@jax.grad
def plain(net: Any, x: Array, labels: Array) -> Array:
    """Compute the gradient of a whole batch's loss by plain JAX."""
    return loss([classified(net, x)], labels)


def made(seed: int) -> dict[str, dict[str, Any]]:
    """Return the initial parameters of both shards."""
    draw = np.random.default_rng(seed).standard_normal
    kernels = 0.5 * draw((3, 3, 1, 8)), 0.2 * draw((3, 3, 8, 16))
    first, second = (
        {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(kernel.shape[-1])}
        for kernel in kernels
    )
    second["out"] = jnp.asarray(0.1 * draw((4 * 4 * 16, 10)))
    return {"first": first, "second": second}


def timed(cluster: jdag.Cluster, step: Any, *args: Any) -> tuple[Any, int]:
    """Run a step. Returns (its gradients, its duration in nanoseconds)."""
    begun_ns = cluster.now_ns
    _, gradients = step(*args)
    return gradients, cluster.now_ns - begun_ns


def same_bits(a: Any, b: Any) -> bool:
    return bits(jax.tree.leaves(a)) == bits(jax.tree.leaves(b))


def two_shards(
    workers: Sequence[str],
    *,
    folder: Path,
    data: str = "data/digits.npz",
    steps: int = 36,
    batch: int = 96,
    micro_batches: int = 4,
    rate: float = 0.01,
    check_every: int = 12,
) -> Training:
    """Make the scenario's player: a master, and two workers with a shard each."""
    images: Images = load(folder / data)
    master, first, second = workers

    def program(ctx: Any, net: Any, x: Any, labels: Any, waits: bool = False) -> Any:
        scores = []
        for part in np.array_split(x, micro_batches):
            maps = ctx.call(first, first_shard, net["first"], part)
            scores.append(ctx.call(second, second_shard, net["second"], maps))
            if waits:
                scores[-1].fetch()
        return ctx.call(master, loss, scores, labels)

    def train(run: Run, cluster: jdag.Cluster) -> tuple[Figures, Any]:
        places = {"first": first, "second": second}
        net = {name: cluster.put(places[name], p) for name, p in made(0).items()}
        optimizer = jdag.Optimizer(optax.adam(rate), net)
        step = jdag.value_and_grad(program, cluster)
        size, checks, waited = len(images.train_x), [], []
        for number in range(steps):
            rows = np.random.default_rng(number).permutation(size)[:batch]
            x, labels = images.train_x[rows], images.train_y[rows]
            if number % check_every == 0:
                gradients, at_once_ns = timed(cluster, step, net, x, labels)
                checks.append((gradients, plain(jdag.fetch(net), x, labels)))
                gradients, waiting_ns = timed(cluster, step, net, x, labels, True)
                waited.append(gradients)
            begun_ns = cluster.now_ns
            with cluster.context() as ctx:
                ctx.backward(program(ctx, net, x, labels))
                optimizer.step(ctx)
                run.draw(ctx.graph())
            run.keep(cluster, (begun_ns, cluster.now_ns))
            run.progress(number + 1, steps)
        answers = jnp.argmax(classified(jdag.fetch(net), images.test_x), axis=-1)
        figures: Figures = {
            "test_accuracy": float(jnp.mean(answers == images.test_y)),
            "same_bits_as_waiting": same_bits([g for g, _ in checks], waited),
        }
        if run.virtual:
            figures["virtual_time_per_step_ns"] = [at_once_ns, waiting_ns]
        return figures, checks

    return Training(train, FIGURES)
