"""Pipelines for tests: stages, their parameters, and steps with and without plans."""

from random import Random
from typing import Any

import jax.numpy as jnp
import numpy as np

import jdag
from jdag.schedules import Schedule

WIDTH, ROWS = 4, 2


def layer(w, x):
    return jnp.tanh(x @ w)


def square(x, target):
    return jnp.mean((x - target) ** 2)


def weights(stages: int) -> list[Any]:
    rng = np.random.default_rng(stages)
    return [rng.normal(size=(WIDTH, WIDTH)).astype("f4") for _ in range(stages)]


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(count)
    return [rng.normal(size=(ROWS, WIDTH)).astype("f4") for _ in range(count)]


def step(
    cluster: Any, schedule: Schedule, fetched: bool = True, stage: Any = layer
) -> list[Any]:
    """One step of a pipeline on the workers of the schedule; return its gradients."""
    stages, count = schedule.stages, schedule.micro_batches
    pipe = jdag.pipeline([stage] * stages, square)
    params = [
        cluster.put(schedule.worker(number), w)
        for number, w in enumerate(weights(stages))
    ]
    with cluster.context() as ctx:
        ctx.backward(*pipe(ctx, params, batches(count), batches(count)))
        found = ctx.gradient(params)
        return jdag.fetch(found) if fetched else found


def drawn(params: dict[str, Any], x: Any) -> Any:
    """A random stage: as many layers as it has weights, each with its own function."""
    for name, w in zip(params["names"], params["weights"], strict=True):
        x = getattr(jnp, name)(x @ w)
    return x


def drawn_step(cluster: Any, schedule: Schedule, seed: int) -> list[Any]:
    """One step of random uneven stages; its gradients.

    The last stage ends with the first weights of the first one, over a transfer.
    """
    rng, count = Random(seed), schedule.micro_batches
    tables, leaves = [], []
    for stage in range(schedule.stages):
        made = [
            cluster.put(schedule.worker(stage), w) for w in weights(rng.randint(1, 3))
        ]
        leaves += made
        names = [rng.choice(["sin", "tanh", "arctan", "cos"]) for _ in made]
        tables.append({"names": names, "weights": made})
    shared = {"names": ["sin"], "weights": leaves[:1]}
    tables[-1] = {key: tables[-1][key] + shared[key] for key in shared}
    pipe = jdag.pipeline([drawn] * schedule.stages, square)
    with cluster.context() as ctx:
        ctx.backward(*pipe(ctx, tables, batches(count), batches(count)))
        return jdag.fetch(ctx.gradient(leaves))


def simulated(schedule: Schedule | None, workers: Any, **settings: Any) -> Any:
    return jdag.simulate(workers, seed=0, schedule=schedule, **settings)
