"""Trainers and a parameter server: gradients do not mix, updates are not lost.

Three questions of one server that keeps the parameters and several trainers, each with
rows of its own to fit a line through, y = x w, by least squares:

1. Each trainer differentiates x . w, for an x of its own, in a context of its own while
   all others have theirs open: its gradient is its x.
2. Each trainer, whenever it is ready, reads the parameters, differentiates and updates
   them: in which order is a race that the seed decides. Each update counts, and the
   parameters get near those that the rows were made from.
3. In rounds, all differentiate at the same parameters, and the main program applies the
   gradients in the order of the trainers: then no seed changes a bit, and each round is
   one of gradient descent on all rows, which plain JAX is asked for as well.

With `compile = true` the trainers of the second and the third part run plans; the first
part is about contexts.
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
from jdag.scenario.case import (
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
    "gradients": "of x . w by each trainer at once: each different element once",
    "contexts_at_once": "the most contexts that the server held at one time",
    "updates": "updates of the parameters that count, of all trainers; of one seed",
    "update_orders": "different parameters that the races of the seeds ended with",
    "distance": "from the parameters that the rows were made from, the worst seed",
    "rounds": "rounds in step",
    "round_patterns": "different parameters, bit by bit, that the rounds ended with",
    "gradient_difference": "max|w - w*| / max|w*| after the rounds; w* by plain JAX",
    "gradient_bits": "a hash of the gradients at once, and of what rounds ended with",
    "seeds": "seeds played",
    **SENT,
    "virtual_time_ns": "of all three parts",
    "wall_time_ns": "from beginning to end, on this host's clock",
    **LEFT_OVER,
    "digest": "the digest of the trace; of several seeds, that of their digests",
}


def weighed(w: Array, x: Array) -> Array:
    """The product x . w: a number."""
    return jnp.sum(w * x)


def loss(w: Array, x: Array, y: Array) -> Array:
    """Half the mean square of what is missing: x (rows, width), y (rows,)."""
    return jnp.mean(jnp.square(x @ w - y)) / 2


def descended(w: Array, gradient: Array, rate: Array) -> Array:
    """A step of gradient descent."""
    return w - rate * gradient


def one_more(count: Array) -> Array:
    """The next number."""
    return count + 1


def truth(width: int) -> Any:
    """The parameters that the rows are made from."""
    return jnp.linspace(-1.0, 1.0, width)


class Lessons(NamedTuple):
    """What one trainer has to do: plain data, as it may be in another process."""

    server: str
    number: int
    width: int
    rows: int
    steps: int
    rate: float

    @property
    def data(self) -> tuple[Any, Any]:
        """The rows of this trainer, without noise."""
        x = jax.random.normal(jax.random.key(self.number), (self.rows, self.width))
        return x, x @ truth(self.width)


def _differentiate(server: str, w: Any, x: float, cluster: Cluster) -> Any:
    """Differentiate x . w; how many contexts the server had then."""
    with cluster.context() as ctx:
        product = ctx.call(server, weighed, w, jnp.full(w.shape, x))
        product.fetch()
        at_once = cluster.info()[server]["live_contexts"]
        ctx.backward(product)
        return ctx.gradient(w).fetch(), at_once


def _train(lessons: Any, w: Any, count: Any, cluster: Cluster) -> None:
    """Read, differentiate and update, whatever the others do."""
    lessons = Lessons(*lessons)
    x, y = lessons.data
    for _ in range(lessons.steps):
        with cluster.context() as ctx:
            ctx.backward(ctx.call(lessons.server, loss, w, x, y))
            cluster.update(descended, w, ctx.gradient(w), lessons.rate)
        cluster.update(one_more, count)


def _loss(ctx: Any, w: Any, server: str, x: Any, y: Any) -> Any:
    """The loss of some rows, on the server."""
    return ctx.call(server, loss, w, x, y)


def _train_by_plan(
    lessons: Any, w: Any, count: Any, optimizer: Any, cluster: Cluster
) -> None:
    """The same as `_train` by one plan, which an optimizer steps."""
    lessons = Lessons(*lessons)
    step = compile(_loss, cluster, optimizer)
    for _ in range(lessons.steps):
        step(w, lessons.server, *lessons.data)
        cluster.update(one_more, count)


def _rounds_by_plan(lessons: Any, w: Any, cluster: Cluster) -> None:
    """All rounds of one trainer by one plan; the first one applies the sums."""
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
    """The gradient at the parameters as they are."""
    lessons = Lessons(*lessons)
    x, y = lessons.data

    def program(ctx: Any, w: Any) -> Any:
        return ctx.call(lessons.server, loss, w, x, y)

    _, gradient = value_and_grad(program, cluster)(w)
    return gradient


@dataclass(slots=True)
class Trainers:
    """The server and its trainers, as a scenario plays them."""

    workers: Sequence[str]
    steps: int
    width: int
    rows: int
    rate: float
    figures: Mapping[str, str] = field(default_factory=lambda: FIGURES)
    compiles: ClassVar[bool] = True

    @property
    def trainers(self) -> Sequence[str]:
        """Every worker but the first, the server."""
        return self.workers[1:]

    def play(self, run: Run) -> Figures:
        """Play all three parts with each seed; the first one is reported."""
        raced: list[Any] = []
        stepped: list[Any] = []
        traces = Traces()
        first: Figures = {}
        for number, seed in enumerate(run.seeds):
            cluster = run.cluster(seed)
            begun_ns = cluster.now_ns
            found = self._at_once(cluster)
            part_ns = cluster.now_ns  # All three parts would leave bars of no width.
            updates, w = self._race(run, cluster)
            raced.append(w)
            stepped.append(self._in_step(run, cluster))
            traces.add(cluster)
            if not number:
                run.keep(cluster, (begun_ns, part_ns))
                first = {**found, "updates": updates, **sent(cluster)}
                first |= left_over(run, cluster)
                first |= time_of(run, cluster.now_ns - begun_ns)
                given = [np.asarray(one) for one in found["gradients"]]
                first["gradient_bits"] = bits([*given, stepped[0]])
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
            **{name: one for name, one in traces.figures.items() if name == "digest"},
        }

    # ----------------------------------------------------------------- the three parts

    def _at_once(self, cluster: Cluster) -> Figures:
        w = cluster.put(self.workers[0], jnp.ones(self.width))
        programs = {
            name: partial(_differentiate, self.workers[0], w, float(number + 1))
            for number, name in enumerate(self.trainers)
        }
        found = cluster.run(programs).values()
        cluster.drop(w)
        return {
            "gradients": [np.unique(gradient).tolist() for gradient, _ in found],
            "contexts_at_once": max(at_once for _, at_once in found),
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
        updates, found = int(count.fetch()), w.fetch()
        for optimizer in more:
            optimizer.drop()
        cluster.drop([w, count])
        return updates, found

    def _in_step(self, run: Run, cluster: Cluster) -> Any:
        w = cluster.put(self.workers[0], jnp.zeros(self.width))
        one = _rounds_by_plan if run.compile else _gradient
        programs = {
            name: partial(one, self._lessons(number), w)
            for number, name in enumerate(self.trainers)
        }
        if run.compile:
            cluster.run(programs)
        for _ in range(0 if run.compile else self.steps):
            for gradient in cluster.run(programs).values():
                cluster.update(descended, w, gradient, self.rate)
        found = w.fetch()
        cluster.drop(w)
        return found

    def _lessons(self, number: int) -> Lessons:
        """What one trainer has to do."""
        return Lessons(
            self.workers[0], number, self.width, self.rows, self.steps, self.rate
        )

    # ------------------------------------------------------------------- what is right

    def _descent(self) -> Any:
        """The parameters after all rounds, by plain JAX."""
        data = [self._lessons(number).data for number, _ in enumerate(self.trainers)]

        def whole(w: Any) -> Any:
            losses = [loss(w, x, y) for x, y in data]
            return sum(losses[1:], losses[0])

        w = jnp.zeros(self.width)
        for _ in range(self.steps):
            w = w - self.rate * jax.grad(whole)(w)
        return w


def trainers(
    workers: Sequence[str],
    *,
    steps: int = 20,
    width: int = 4,
    rows: int = 16,
    rate: float = 0.1,
) -> Trainers:
    """A parameter server, and a trainer on each other worker.

    Args:
        workers: the server first, then the trainers.
        steps: of each trainer, and rounds in step.
        width: how many parameters.
        rows: how many each trainer has.
        rate: of gradient descent.
    """
    if len(workers) < 2:
        raise ScenarioError(
            f"workers = {list(workers)!r}: trainers needs a server and at least one "
            "trainer"
        )
    return Trainers(workers, steps, width, rows, rate)
