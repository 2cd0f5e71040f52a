"""Trainers and a parameter server: gradients do not mix, and no update is lost.

A server has the parameters of a linear model, y = x w. Each trainer has its own rows
and fits them by least squares. The training has three parts:

1. All trainers differentiate the scalar product x . w at the same time, each with a
   different x in a separate context. Each gradient must be the trainer's x.
2. Each trainer repeatedly reads the parameters, computes a gradient and updates the
   parameters. The seed determines the order of updates. No update is lost, and the
   parameters approach the true parameters.
3. In synchronous rounds, all trainers compute gradients at the same parameters, and
   the main program applies them in the order of the trainers. Each round equals a step
   of gradient descent on all rows by plain JAX, and its bits do not depend on the seed.

With `compile = true`, parts 2 and 3 use plans; part 1 always uses contexts.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from jdag.api.cluster import Cluster
from jdag.api.value_and_grad import value_and_grad
from jdag.errors import ScenarioError
from jdag.plans.compiling import compile
from jdag.scenario.player import (
    LEFT_OVER,
    SENT,
    Figures,
    Run,
    Traces,
    bits,
    difference,
    left_over,
    sent,
    time_of,
    worst,
)
from jdag.training.optimizer import Optimizer

FIGURES: Mapping[str, str] = {
    "outcome": "how the training ended",
    "gradients": "distinct elements of the gradient of x . w, by trainer",
    "contexts_at_once": "largest number of contexts on the server at one time",
    "updates": "number of updates of all trainers, first seed",
    "update_orders": "number of bitwise different parameters after the races",
    "distance": "relative distance from the true parameters, worst seed",
    "rounds": "number of synchronous rounds",
    "round_patterns": "number of bitwise different parameters after the rounds",
    "gradient_difference": "max|w - w*| / max|w*| after the rounds; w* by plain JAX",
    "gradient_bits": "hash of the bits of the results of parts 1 and 3",
    "seeds": "number of seeds",
    **SENT,
    "virtual_time_ns": "virtual time of all three parts",
    "wall_time_ns": "the same by the clock of this host",
    **LEFT_OVER,
    "digest": "digest of the trace; for several seeds, of their digests",
}


def weighed(w: Array, x: Array) -> Array:
    """Return the scalar product x . w."""
    return jnp.sum(w * x)


def loss(w: Array, x: Array, y: Array) -> Array:
    """Return half the mean squared error; x is (rows, width), y is (rows,)."""
    return jnp.mean(jnp.square(x @ w - y)) / 2


def descended(w: Array, gradient: Array, rate: Array) -> Array:
    """Return the parameters after a step of gradient descent."""
    return w - rate * gradient


def one_more(count: Array) -> Array:
    return count + 1


def truth(width: int) -> Any:
    """Return the true parameters, from which `Lessons.data` computes y."""
    return jnp.linspace(-1.0, 1.0, width)


class Lessons(NamedTuple):
    """The settings of one trainer, which can be sent to its process."""

    server: str
    number: int
    width: int
    rows: int
    steps: int
    rate: float

    @property
    def data(self) -> tuple[Any, Any]:
        """The trainer's rows (x, y), without noise in y."""
        x = jax.random.normal(jax.random.key(self.number), (self.rows, self.width))
        return x, x @ truth(self.width)


def _differentiate(server: str, w: Any, x: float, cluster: Cluster) -> Any:
    """Differentiate x . w. Returns (gradient, number of contexts on the server)."""
    with cluster.context() as ctx:
        product = ctx.call(server, weighed, w, jnp.full(w.shape, x))
        product.fetch()
        at_once = cluster.info()[server]["live_contexts"]
        ctx.backward(product)
        return ctx.gradient(w).fetch(), at_once


def _train(lessons: Any, w: Any, count: Any, cluster: Cluster) -> None:
    """Run a trainer of part 2: update the parameters without waiting for others."""
    lessons = Lessons(*lessons)
    x, y = lessons.data
    for _ in range(lessons.steps):
        with cluster.context() as ctx:
            ctx.backward(ctx.call(lessons.server, loss, w, x, y))
            cluster.update(descended, w, ctx.gradient(w), lessons.rate)
        cluster.update(one_more, count)


def _loss(ctx: Any, w: Any, server: str, x: Any, y: Any) -> Any:
    return ctx.call(server, loss, w, x, y)


def _train_by_plan(
    lessons: Any, w: Any, count: Any, optimizer: Any, cluster: Cluster
) -> None:
    """Run a trainer of part 2 like `_train`, by a plan that includes the update."""
    lessons = Lessons(*lessons)
    step = compile(_loss, cluster, optimizer)
    for _ in range(lessons.steps):
        step(w, lessons.server, *lessons.data)
        cluster.update(one_more, count)


def _rounds_by_plan(lessons: Any, w: Any, cluster: Cluster) -> None:
    """Run a trainer of part 3 by a plan. Trainer 0 applies the summed gradients."""
    lessons = Lessons(*lessons)
    step = compile(_loss, cluster)
    for _ in range(lessons.steps):
        _, gradient = step.value_and_grad(w, lessons.server, *lessons.data)
        total = cluster.all_reduce(gradient)
        if not lessons.number:
            cluster.update(descended, w, total, lessons.rate)
            w.fetch()
        cluster.barrier()


def _gradient(lessons: Any, w: Any, cluster: Cluster) -> Any:
    """Run a trainer in a round of part 3. Returns its gradient."""
    lessons = Lessons(*lessons)
    x, y = lessons.data

    def program(ctx: Any, w: Any) -> Any:
        return ctx.call(lessons.server, loss, w, x, y)

    _, gradient = value_and_grad(program, cluster)(w)
    return gradient


@dataclass(slots=True)
class Trainers:
    workers: Sequence[str]
    steps: int
    width: int
    rows: int
    rate: float
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)
    compiles: ClassVar[bool] = True

    @property
    def trainers(self) -> Sequence[str]:
        """All workers except the first, the server."""
        return self.workers[1:]

    def play(self, run: Run) -> Figures:
        """Run all parts with each seed. Most metrics are those of the first seed."""
        raced: list[Any] = []
        stepped: list[Any] = []
        traces = Traces()
        first: Figures = {}
        for number, seed in enumerate(run.seeds):
            cluster = run.cluster(seed)
            begun_ns = cluster.now_ns
            part_1 = self._at_once(cluster)
            part_ns = (
                cluster.now_ns
            )  # The timeline shows only part 1, since the others are too long.
            updates, w = self._race(run, cluster)
            raced.append(w)
            stepped.append(self._in_step(run, cluster))
            traces.add(cluster)
            if not number:
                run.keep(cluster, (begun_ns, part_ns))
                first = {**part_1, "updates": updates, **sent(cluster)}
                first |= left_over(run, cluster)
                first |= time_of(run, cluster.now_ns - begun_ns)
                gradients = [np.asarray(g) for g in part_1["gradients"]]
                first["gradient_bits"] = bits([*gradients, stepped[0]])
            run.progress(number + 1, len(run.seeds))
        return {
            "outcome": "finished",
            **first,
            "update_orders": len(dict.fromkeys(bits([w]) for w in raced)),
            "distance": worst([difference(w, truth(self.width)) for w in raced]),
            "rounds": self.steps,
            "round_patterns": len(dict.fromkeys(bits([w]) for w in stepped)),
            "gradient_difference": worst([difference(stepped[0], self._descent())]),
            "seeds": len(run.seeds),
            **{name: v for name, v in traces.figures.items() if name == "digest"},
        }

    # ----------------------------------------------------------------- the three parts

    def _at_once(self, cluster: Cluster) -> Figures:
        w = cluster.put(self.workers[0], jnp.ones(self.width))
        programs = {
            name: partial(_differentiate, self.workers[0], w, float(number + 1))
            for number, name in enumerate(self.trainers)
        }
        results = cluster.run(programs).values()
        cluster.drop(w)
        return {
            "gradients": [np.unique(gradient).tolist() for gradient, _ in results],
            "contexts_at_once": max(at_once for _, at_once in results),
        }

    def _race(self, run: Run, cluster: Cluster) -> tuple[int, Any]:
        server = self.workers[0]
        w, count = cluster.put(server, (jnp.zeros(self.width), jnp.asarray(0)))
        train: Any = _train
        more: list[Any] = []
        if run.compile:
            train, more = _train_by_plan, [Optimizer(optax.sgd(self.rate), w)]
        programs = {
            name: partial(train, self._lessons(number), w, count, *more)
            for number, name in enumerate(self.trainers)
        }
        cluster.run(programs)
        updates, params = int(count.fetch()), w.fetch()
        for optimizer in more:
            optimizer.drop()
        cluster.drop([w, count])
        return updates, params

    def _in_step(self, run: Run, cluster: Cluster) -> Any:
        w = cluster.put(self.workers[0], jnp.zeros(self.width))
        function = _rounds_by_plan if run.compile else _gradient
        programs = {
            name: partial(function, self._lessons(number), w)
            for number, name in enumerate(self.trainers)
        }
        if run.compile:
            cluster.run(programs)
        for _ in range(0 if run.compile else self.steps):
            for gradient in cluster.run(programs).values():
                cluster.update(descended, w, gradient, self.rate)
        params = w.fetch()
        cluster.drop(w)
        return params

    def _lessons(self, number: int) -> Lessons:
        return Lessons(
            self.workers[0], number, self.width, self.rows, self.steps, self.rate
        )

    # -------------------------------------------------------------------- the truth

    def _descent(self) -> Any:
        """Compute the parameters after all rounds of part 3 by plain JAX."""
        data = [self._lessons(number).data for number, _ in enumerate(self.trainers)]

        def total_loss(w: Any) -> Any:
            losses = [loss(w, x, y) for x, y in data]
            return sum(losses[1:], losses[0])

        w = jnp.zeros(self.width)
        for _ in range(self.steps):
            w = w - self.rate * jax.grad(total_loss)(w)
        return w


def trainers(
    workers: Sequence[str],
    *,
    steps: int = 20,
    width: int = 4,
    rows: int = 16,
    rate: float = 0.1,
) -> Trainers:
    """Make the scenario's player, with a parameter server and trainers.

    Args:
        workers: the server, then the trainers.
        steps: number of steps of each trainer in part 2, and of rounds in part 3.
        width: number of parameters.
        rows: number of rows of each trainer.
        rate: learning rate of gradient descent.
    """
    if len(workers) < 2:
        raise ScenarioError(
            f"workers = {list(workers)!r}: trainers needs a server and at least one "
            "trainer"
        )
    return Trainers(workers, steps, width, rows, rate)
