"""Pipelines for tests: stages, their parameters, and steps with and without plans."""

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


def simulated(schedule: Schedule | None, workers: Any, **settings: Any) -> Any:
    return jdag.simulate(workers, seed=0, schedule=schedule, **settings)
