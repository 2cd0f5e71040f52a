"""A convolutional net in two shards on two workers, as in PyTorch's dist_pipeline.

The master cuts each batch of digits into micro-batches, sends each through both shards,
and computes the loss of them all itself. Calls return at once, so that both shards work
at the same time. A master that waits for each micro-batch before it sends the next has
the same gradients to the bit, later.
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
from jdag.scenario.case import bits

FIGURES: Mapping[str, str] = {
    "test_accuracy": "right answers among 360 images kept aside",
    "same_bits_as_waiting": "whether a master that waits has the same gradients",
    "virtual_time_per_step_ns": "a batch in flight at once, and waiting for each part",
}


def convolved(kernel: Array, x: Array) -> Array:
    """A convolution of 3 x 3: x (rows, height, width, channels)."""
    axes, x = ("NHWC", "HWIO", "NHWC"), x.astype(kernel.dtype)
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", None, None, axes)


def first_shard(shard: Mapping[str, Array], x: Array) -> Array:
    """Images (rows, 64) to maps (rows, 4, 4, 8), each the mean of 2 x 2."""
    maps = convolved(shard["kernel"], x.reshape(-1, 8, 8, 1)) + shard["bias"]
    return jnp.mean(jax.nn.relu(maps).reshape(-1, 4, 2, 4, 2, 8), axis=(2, 4))


def second_shard(shard: Mapping[str, Array], maps: Array) -> Array:
    """Maps to the scores of ten classes."""
    maps = jax.nn.relu(convolved(shard["kernel"], maps) + shard["bias"])
    return maps.reshape(len(maps), -1) @ shard["out"]


def loss(scores: Sequence[Array], labels: Array) -> Array:
    """The mean cross-entropy of all micro-batches."""
    each = optax.softmax_cross_entropy_with_integer_labels
    return jnp.mean(each(jnp.concatenate(scores), labels))


@jax.jit
def classified(net: Any, x: Array) -> Array:
    """The scores of both shards, on one machine."""
    return second_shard(net["second"], first_shard(net["first"], x))


@jax.jit
@jax.grad
def plain(net: Any, x: Array, labels: Array) -> Array:
    """The loss on one machine, of a batch that is not cut."""
    return loss([classified(net, x)], labels)


def made(seed: int) -> dict[str, dict[str, Any]]:
    """The parameters of both shards."""
    draw = np.random.default_rng(seed).standard_normal
    kernels = 0.5 * draw((3, 3, 1, 8)), 0.2 * draw((3, 3, 8, 16))
    first, second = (
        {"kernel": jnp.asarray(kernel), "bias": jnp.zeros(kernel.shape[-1])}
        for kernel in kernels
    )
    second["out"] = jnp.asarray(0.1 * draw((4 * 4 * 16, 10)))
    return {"first": first, "second": second}


def timed(cluster: jdag.Cluster, step: Any, *args: Any) -> tuple[Any, int]:
    """(The gradients of a step, how long it takes)."""
    begun_ns = cluster.now_ns
    _, gradients = step(*args)
    return gradients, cluster.now_ns - begun_ns


def same_bits(one: Any, other: Any) -> bool:
    """Whether two pytrees have the same bits."""
    return bits(jax.tree.leaves(one)) == bits(jax.tree.leaves(other))


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
    """A master, and two workers that have a shard each."""
    images: Images = load(folder / data)
    master, one, other = workers

    def program(ctx: Any, net: Any, x: Any, labels: Any, waits: bool = False) -> Any:
        scores = []
        for part in np.array_split(x, micro_batches):
            maps = ctx.call(one, first_shard, net["first"], part)
            scores.append(ctx.call(other, second_shard, net["second"], maps))
            if waits:
                scores[-1].fetch()
        return ctx.call(master, loss, scores, labels)

    def train(run: Run, cluster: jdag.Cluster) -> tuple[Figures, Any]:
        places = {"first": one, "second": other}
        net = {name: cluster.put(places[name], of) for name, of in made(0).items()}
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
            "same_bits_as_waiting": same_bits([of for of, _ in checks], waited),
        }
        if run.virtual:
            figures["virtual_time_per_step_ns"] = [at_once_ns, waiting_ns]
        return figures, checks

    return Training(train, FIGURES)
