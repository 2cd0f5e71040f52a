"""A program that uses all that recovery replays, and a training, on any cluster."""

from collections.abc import Callable, Sequence
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


def doubled(x: Any) -> Any:
    return 2 * x


@jdag.program
def inner(ctx: Any, w: Any, x: Any) -> Any:
    """Calls on three workers, with sums of three addends."""
    y = ctx.call("c", layer, w, x)
    return ctx.call("b", added, y, ctx.call("d", layer, w, y), y)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(tree)]


class Patient:
    """Repeats what a loss has interrupted, after `recover`; `losses` counts these."""

    def __init__(self, cluster: Cluster, recover: Callable[[], object]) -> None:
        self.losses = 0
        self._recover = recover

    def __call__(self, do: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return do(*args, **kwargs)
            except WorkerLost:
                self.losses += 1
                self._recover()

    def left(self, context: Any) -> None:
        """Leave a context, once."""
        try:
            context.__exit__(None, None, None)
        except WorkerLost:
            self.losses += 1
            self._recover()


def live(cluster: Cluster, patient: Patient, every: int, to: str | None) -> Any:
    """Two contexts that stay open: calls, a program, a hook, passes, steps, a keep."""
    w = patient(cluster.put, "b", drawn(1))
    v = patient(cluster.put, "c", drawn(2))
    optimizer = patient(jdag.Optimizer, optax.sgd(0.1, momentum=0.9), [w, v])
    patient(cluster.replicate_leaves, every=every, to=to)
    state = patient(cluster.put, "d", drawn(3), tracked=False)
    found: list[Any] = []
    other = cluster.context().__enter__()
    early = patient(other.call, "b", layer, w, drawn(4))
    for _ in range(2):
        ctx = cluster.context().__enter__()
        y = patient(ctx.call, "b", layer, w, state)
        z = patient(ctx.call, "c", layer, v, y)
        task = patient(ctx.start, "d", inner, v, z)
        called = patient(ctx.call, "d", inner, v, y)
        patient(ctx.on_cotangent, z, doubled)
        total = patient(ctx.call, "d", added, patient(task.result), called, z, y)
        loss = patient(ctx.call, "d", mean_square, total)
        patient(ctx.backward, loss, retain_graph=True)
        patient(ctx.backward, loss)
        found.append(patient(jdag.fetch, ctx.gradient([w, v])))
        patient(optimizer.step, ctx)
        state = patient(cluster.keep, z)
        newer = patient(ctx.call, "b", layer, w, drawn(5))
        found.append([*patient(jdag.fetch, [loss, newer]), patient(early.fetch)])
        patient.left(ctx)
    patient(other.backward, patient(other.call, "b", mean_square, early))
    found.append(patient(other.gradient(w).fetch))
    patient.left(other)
    found.append(patient(jdag.fetch, [w, v, state, optimizer.states]))
    return bits(found)


def train(
    cluster: Cluster,
    steps: int,
    begins: Callable[[int], object] = lambda step: None,
    patient: Callable[..., Any] = lambda do, *args: do(*args),
    recover: Callable[[], object] | None = None,
) -> tuple[Sequence[bytes], int]:
    """The training of the docstring of `recover`; return its bits, and its losses."""
    refs = [patient(cluster.put, worker, drawn(n)) for n, worker in enumerate("bc")]
    optimizer = patient(jdag.Optimizer, optax.adam(0.1), refs)
    patient(cluster.replicate_leaves)
    values: dict[int, Any] = {}
    losses = 0
    while (step := optimizer.steps) < steps:
        try:
            with cluster.context() as ctx:
                begins(step)
                x: Any = drawn(10 + step)
                for ref in refs:
                    x = ctx.call(ref.worker, layer, ref, x)
                loss = ctx.call("d", mean_square, x)
                ctx.backward(loss)
                values[step] = loss.fetch()
                optimizer.step(ctx)
        except WorkerLost:
            losses += 1
            (recover or cluster.recover)()
    return bits([values, patient(jdag.fetch, [refs, optimizer.states])]), losses
