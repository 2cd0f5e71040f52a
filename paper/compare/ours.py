"""Our side of the comparison: jdag's public API with launched workers.

    python -m paper.compare.ours [--quick] [--pin one] [--mode fast]

After each row it prints a JSON object with all rows so far. The workers import the
functions that they run, like the peer's workers.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jdag
from paper.compare import functions, pinning, rows
from paper.compare.pinning import CALLER

ALLOWED = ("paper.compare.functions", "jax", "jdag", "optax")


class Ours:
    """jdag's implementation of the rows; see `rows.Side`."""

    def __init__(self, cluster: jdag.Cluster, mode: Any) -> None:
        self.cluster = cluster
        self.mode = mode
        self.leaf = cluster.put(CALLER, jnp.asarray(rows.leaf()))
        self.factors = [jnp.asarray(rows.factor(number)) for number in range(7)]
        self.stages: dict[int, list[Any]] = {}
        self.batches: dict[int, tuple[jax.Array, jax.Array]] = {}
        self.optimizers: dict[int, jdag.Optimizer] = {}

    @cached_property
    def calls(self) -> jdag.Context:
        """One context for all calls of `add` and `identity`; it stays open."""
        return self.cluster.context().__enter__()

    def array(self, value: np.ndarray) -> jax.Array:
        return jnp.asarray(value)

    def add(self, one: jax.Array, other: jax.Array) -> jax.Array:
        """Add two arrays on w0, in the open context `calls`."""
        return self._fetched(self.calls.call(rows.WORKERS[0], jnp.add, one, other))

    def identity(self, value: jax.Array) -> jax.Array:
        """Call the identity on w0, in the open context `calls`."""
        return self._fetched(self.calls.call(rows.WORKERS[0], functions.same, value))

    def _fetched(self, ref: jdag.Ref) -> jax.Array:
        value: jax.Array = ref.fetch().block_until_ready()
        return value

    def chain(self, trips: int) -> rows.Phases:
        """Move each product to the caller, then pass it to the next call."""
        with self.cluster.context() as ctx:
            yield None
            loss = chained(ctx, self.leaf, self.factors, trips)
            yield float(loss.fetch())
            ctx.backward(loss, mode=self.mode)
            yield self._fetched(ctx.gradient(self.leaf))

    def fan_out(self, calls: int) -> rows.Phases:
        """Compute products on all workers. The sum's call moves them to the caller."""
        with self.cluster.context() as ctx:
            yield None
            loss = fanned_out(ctx, self.leaf, self.factors, calls)
            yield float(loss.fetch())
            ctx.backward(loss, mode=self.mode)
            yield self._fetched(ctx.gradient(self.leaf))

    def retained(self, passes: int) -> rows.Phases:
        """Run several passes over one retained graph."""
        with self.cluster.context() as ctx:
            loss = chained(ctx, self.leaf, self.factors, 1)
            loss.fetch()
            yield None
            for _ in range(passes):
                ctx.backward(loss, mode=self.mode, retain_graph=True)
            yield self._fetched(ctx.gradient(self.leaf))

    def prepare(self, width: int) -> None:
        """Put each stage's leaves on its worker; make one optimizer for all stages."""
        self.stages[width] = [
            self.cluster.put(rows.place(number), {"weight": weight, "bias": bias})
            for number, (weight, bias) in enumerate(rows.weights(width))
        ]
        x, y = rows.batch(width)
        self.batches[width] = (jnp.asarray(x), jnp.asarray(y))
        self.optimizers[width] = jdag.Optimizer(
            optax.sgd(rows.LEARNING_RATE), self.stages[width]
        )

    def gradients(self, width: int) -> list[np.ndarray]:
        """Fetch all gradients, with one request to each worker."""
        with self.cluster.context() as ctx:
            loss = loss_of(ctx, self.stages[width], *self.batches[width])
            ctx.backward(loss, mode=self.mode)
            found = ctx.gradient([stage["weight"] for stage in self.stages[width]])
            return [np.asarray(value) for value in jdag.fetch(found)]

    def step(self, width: int) -> float:
        """Step, then wait for all new weights by fetching a number of each."""
        with self.cluster.context() as ctx:
            loss = loss_of(ctx, self.stages[width], *self.batches[width])
            ctx.backward(loss, mode=self.mode)
            self.optimizers[width].step(ctx)
            there = [
                ctx.call(stage["weight"].worker, functions.corner, stage["weight"])
                for stage in self.stages[width]
            ]
            value, _ = jdag.fetch((loss, there))
        return float(value)

    def memory(self) -> list[int]:
        """Read the peak memory of each worker process."""
        return [rows.peak_bytes(pid) for pid in self._pids.values()]

    def cores(self) -> dict[str, list[int]]:
        """Read the cores that each worker process may use."""
        return {name: pinning.held(pid) for name, pid in self._pids.items()}

    @property
    def _pids(self) -> dict[str, int]:
        return dict(self.cluster.driver.launch.pids)


def launched() -> jdag.Cluster:
    """Launch the workers, pinned to the workers' cores."""
    jax.devices()  # JAX starts as many threads as this process has cores now.
    with pinning.of_workers():
        return jdag.launch([CALLER, *rows.WORKERS], allow=ALLOWED)


def chained(ctx: jdag.Context, value: Any, factors: Sequence[Any], trips: int) -> Any:
    """Run a chain of calls. Returns its loss."""
    for number in range(trips):
        product = ctx.call(rows.WORKERS[0], jnp.multiply, value, factors[number % 7])
        value = ctx.move(CALLER, product)
    return ctx.call(CALLER, jnp.sum, value)


def fanned_out(ctx: jdag.Context, leaf: Any, factors: Sequence[Any], calls: int) -> Any:
    """Run a fan-out of calls. Returns its loss, the sum of all products."""
    products = [
        ctx.call(rows.place(number), jnp.multiply, leaf, factors[number % 7])
        for number in range(calls)
    ]
    return ctx.call(CALLER, functions.total, products)


def loss_of(ctx: jdag.Context, stages: Sequence[Any], value: Any, y: Any) -> Any:
    """Run all stages of the MLP. Returns its loss."""
    for stage in stages:
        value = ctx.call(stage["weight"].worker, functions.layer, stage, value)
    return ctx.call(CALLER, functions.mse, value, y)


def main() -> None:
    """Launch the workers, measure, and print results after each row."""
    given = rows.asked(__doc__)
    with launched() as cluster:
        side, settings = Ours(cluster, given.mode), {"jax": jax.__version__}
        for found in rows.measure(side, given.repeats, rows.of(rows.JUDGED), given.pin):
            rows.tell({**found, "settings": settings})


if __name__ == "__main__":
    main()
