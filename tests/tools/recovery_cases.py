"""A training that repeats what a loss has interrupted, on any cluster."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdag
from jdag.api.cluster import Cluster
from jdag.errors import WorkerLost

WORKERS = ("a", "b", "c", "d")


def drawn(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(3, 3)).astype(np.float32)


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def mean_square(y: Any) -> Any:
    return jnp.mean(y**2)


def added(*xs: Any) -> Any:
    return sum(xs)


@jdag.program
def inner(ctx: Any, w: Any, x: Any) -> Any:
    y = ctx.call("c", layer, w, x)
    return ctx.call("b", added, y, ctx.call("d", layer, w, y), y)


def more(ref: Any, cluster: Any) -> Any:
    cluster.update(jnp.add, ref, 1.0)
    return cluster.here


def chained(ctx: Any, refs: Any, x: Any) -> Any:
    for ref in refs:
        x = ctx.call(ref.worker, layer, ref, x)
    return ctx.call("d", mean_square, x)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


class Patient:
    """Repeats what a loss has interrupted, after `recover`; `losses` counts these."""

    def __init__(self, recover: Callable[[], object]) -> None:
        self.losses = 0
        self._recover = recover

    def __call__(self, do: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return do(*args, **kwargs)
            except WorkerLost:
                self.losses += 1
                self._recover()


def train(
    cluster: Cluster,
    patient: Patient,
    steps: int = 4,
    begins: Callable[[int], object] = lambda step: None,
    to: str | None = None,
) -> list[bytes]:
    patient(cluster.replicate_leaves, to=to)
    refs = [patient(cluster.put, worker, drawn(n)) for n, worker in enumerate("bc")]
    tx = optax.sgd(0.1, momentum=0.9)
    optimizer = patient(jdag.Optimizer, tx, refs, clip_norm=0.5)
    plan = jdag.compile(chained, cluster, optimizer)
    state = patient(cluster.put, "d", drawn(3), tracked=False)
    found: dict[int, Any] = {}

    def train_on() -> None:
        while optimizer.steps < steps:
            begins(optimizer.steps)
            step(optimizer.steps)

    def step(number: int) -> None:
        nonlocal state
        if number % 2:
            found[number] = plan(refs, drawn(5 + number))
            return
        with cluster.context() as ctx:
            y = ctx.call("b", layer, refs[0], state)
            z = ctx.call("c", added, y, ctx.call("d", inner, refs[1], y), y)
            loss = ctx.call("d", mean_square, z)
            ctx.backward(loss)
            found[number] = jdag.fetch([loss, *ctx.gradient(refs)])
            kept = cluster.keep(z)
            optimizer.step(ctx)
            state = kept

    patient(train_on)
    here = patient(
        cluster.run, {"b": partial(more, refs[1]), "c": partial(more, state)}
    )
    assert [*here] == ["b", "c"]
    return bits([found, patient(jdag.fetch, [refs, state, optimizer.states])])
