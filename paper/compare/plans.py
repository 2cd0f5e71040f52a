"""Our side as plans: the programs of `paper.compare.ours`, by `jdag.compile`.

    python -m paper.compare.plans [--quick] [--pin one]

Prints a JSON object after each row, of all so far. Factors and batches are inputs of a
step, as they are arguments of the peer's calls; the factors of graphs are constants, as
in Ray's.
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
    """Plans of the rows; see `rows.Side`. A pass is one phase: both ways at once."""

    def __init__(self, cluster: jdag.Cluster) -> None:
        super().__init__(cluster, "fast")
        self.plan = cache(partial(made, cluster))

    def add(self, one: jax.Array, other: jax.Array) -> Any:
        """A step without a pass."""
        return jax.block_until_ready(self.plan(added)(one, other))

    def identity(self, value: jax.Array) -> Any:
        """A step without a pass, recorded anew for each size."""
        return jax.block_until_ready(self.plan(lined, 0)(value))

    def chain(self, trips: int) -> rows.Phases:
        """The program moves each product home; so does the plan."""
        yield None
        yield self._passed(ours.chained, trips)

    def fan_out(self, calls: int) -> rows.Phases:
        """One step."""
        yield None
        yield self._passed(ours.fanned_out, calls)

    def _passed(self, program: Any, size: int) -> tuple[float, np.ndarray]:
        step = self.plan(program, size)
        value, gradients = step.value_and_grad(self.leaf, self.factors)
        (gradient,) = jax.tree.leaves(gradients)
        return float(value), np.asarray(gradient)

    def step(self, width: int) -> float:
        """It is over when all workers have made the weights that they assign."""
        step = self.plan(ours.loss_of, optimizer=self.optimizers[width])
        return float(step(self.stages[width], *self.batches[width]))

    def graph(self, value: jax.Array, calls: int) -> Callable[[Any], Any]:
        """Values go from worker to worker."""
        del value
        step = self.plan(lined, calls)
        return lambda value: jax.block_until_ready(step(value))


def made(cluster: Any, program: Callable[..., Any], *size: int, **more: Any) -> Any:
    """The plan of a program that takes sizes after its arguments."""
    return jdag.compile(lambda *given: program(*given, *size), cluster, **more)


def added(ctx: jdag.Context, one: Any, other: Any) -> Any:
    """A sum, made on a worker."""
    return ctx.call(rows.WORKERS[0], jnp.add, one, other)


def lined(ctx: jdag.Context, value: Any, calls: int) -> Any:
    """A row of `rows.GRAPHS`."""
    for number in range(calls):
        factor = jnp.asarray(rows.factor(number)[0, 0])
        value = ctx.call(rows.place(number), jnp.multiply, value, factor)
    return value if calls else ctx.call(rows.WORKERS[0], functions.same, value)


def main() -> None:
    """Launch the workers and measure."""
    given, wanted = rows.asked(__doc__), rows.of(rows.PLAN)
    with ours.launched() as cluster:
        for found in rows.measure(Plans(cluster), given.repeats, wanted, given.pin):
            rows.tell(found)


if __name__ == "__main__":
    main()
