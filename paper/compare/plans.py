"""Our side as plans: the programs of `paper.compare.ours`, by `jdag.compile`.

    python -m paper.compare.plans [--quick]

Prints a JSON object after each row, of all so far. Factors and batches are inputs of a
step, as they are arguments of the peer's calls; the factors of graphs are constants, as
in Ray's.
"""

import sys
from collections.abc import Callable, Sequence
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

    def retained(self, passes: int) -> rows.Phases:
        """So many steps, forward included, whose gradients are added up here."""
        total = np.zeros_like(rows.leaf())
        yield None
        for _ in range(passes):
            total += self._passed(ours.chained, 1)[1]
        yield total

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


def main(arguments: Sequence[str]) -> None:
    """Launch the workers and measure."""
    repeats, found = rows.repeats(arguments), {}
    with jdag.launch([ours.CALLER, *rows.WORKERS], allow=ours.ALLOWED) as cluster:
        side = Plans(cluster)
        for found in rows.measure(side, repeats):
            rows.tell(found)
        for more in rows.measure_graphs(side, repeats, found):
            rows.tell(more)


if __name__ == "__main__":
    main(sys.argv[1:])
