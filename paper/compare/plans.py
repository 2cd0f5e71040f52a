"""Our side as plans: compiles the programs of `paper.compare.ours`.

    python -m paper.compare.plans [--quick] [--pin one]

After each row it prints a JSON object with all rows so far. Factors and batches are
inputs of a step, since they are arguments of the peer's calls. In rows compared with
Ray, the factors are constants, as in Ray's graphs.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdag
from paper.compare import functions, ours, rows


class Plans(ours.Ours):
    """The rows as plans; see `rows.Side`. Forward and backward are one phase."""

    def __init__(self, cluster: jdag.Cluster) -> None:
        super().__init__(cluster, "fast")
        self.plan = cache(partial(made, cluster))

    def add(self, one: jax.Array, other: jax.Array) -> Any:
        """Run a plan that has no backward pass."""
        return jax.block_until_ready(self.plan(added)(one, other))

    def identity(self, value: jax.Array) -> Any:
        """Run a plan that has no backward pass. It is recorded again for each size."""
        return jax.block_until_ready(self.plan(lined, 0)(value))

    def chain(self, trips: int) -> rows.Phases:
        """Run `ours.chained` as one step of a plan."""
        yield None
        yield self._passed(ours.chained, trips)

    def fan_out(self, calls: int) -> rows.Phases:
        """Run `ours.fanned_out` as one step of a plan."""
        yield None
        yield self._passed(ours.fanned_out, calls)

    def _passed(self, program: Any, size: int) -> tuple[float, np.ndarray]:
        step = self.plan(program, size)
        value, gradients = step.value_and_grad(self.leaf, self.factors)
        (gradient,) = jax.tree.leaves(gradients)
        return float(value), np.asarray(gradient)

    def step(self, width: int) -> float:
        """Step, and wait until all workers have computed the new weights."""
        step = self.plan(ours.loss_of, optimizer=self.optimizers[width])
        return float(step(self.stages[width], *self.batches[width]))

    def graph(self, value: jax.Array, calls: int) -> Callable[[Any], Any]:
        """Return a function that runs `lined` as a plan."""
        del value
        step = self.plan(lined, calls)
        return lambda value: jax.block_until_ready(step(value))


def made(cluster: Any, program: Callable[..., Any], *size: int, **more: Any) -> Any:
    """Compile a program whose last arguments are the constants `size`."""
    return jdag.compile(lambda *given: program(*given, *size), cluster, **more)


def added(ctx: jdag.Context, one: Any, other: Any) -> Any:
    """Add two arrays on a worker."""
    return ctx.call(rows.WORKERS[0], jnp.add, one, other)


def lined(ctx: jdag.Context, value: Any, calls: int) -> Any:
    """Run a row of `rows.GRAPHS`: `calls` multiplications, or an echo if 0."""
    for number in range(calls):
        factor = jnp.asarray(rows.factor(number)[0, 0])
        value = ctx.call(rows.place(number), jnp.multiply, value, factor)
    return value if calls else ctx.call(rows.WORKERS[0], functions.same, value)


def main() -> None:
    """Launch the workers, measure, and print results after each row."""
    given, wanted = rows.asked(__doc__), rows.of(rows.PLAN)
    with ours.launched() as cluster:
        for found in rows.measure(Plans(cluster), given.repeats, wanted, given.pin):
            rows.tell(found)


if __name__ == "__main__":
    main()
