"""Pipelines for tests: stages, their parameters, and steps with and without plans."""

from collections.abc import Sequence
from itertools import zip_longest
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdag
from jdag.schedules import Schedule

WIDTH, ROWS = 4, 2


def layer(w, x):
    return jnp.tanh(x @ w)


def square(x, target):
    return jnp.mean((x - target) ** 2)


def through(x, w):
    return layer(w, x)


def wave(w, x):
    return jnp.sin(x) @ w


def refuse(x):
    raise ValueError("it is too large")


@jax.custom_vjp
def breaks(w, x):
    return jax.pure_callback(refuse, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


breaks.defvjp(lambda w, x: (breaks(w, x), w), lambda w, ct: (w, ct))


def weights(stages: int) -> list[Any]:
    rng = np.random.default_rng(stages)
    return [rng.normal(size=(WIDTH, WIDTH)).astype("f4") for _ in range(stages)]


def batches(count: int) -> list[Any]:
    rng = np.random.default_rng(count)
    return [rng.normal(size=(ROWS, WIDTH)).astype("f4") for _ in range(count)]


def put(cluster: Any, schedule: Schedule, frozen: Sequence[bool] = ()) -> list[Any]:
    stages = zip_longest(weights(schedule.stages), frozen)
    return [
        cluster.put(schedule.worker(stage), w, tracked=not is_frozen)
        for stage, (w, is_frozen) in enumerate(stages)
    ]


def step(
    cluster: Any, schedule: Schedule, fetched: bool = True, stage: Any = layer
) -> list[Any]:
    stages, count = schedule.stages, schedule.micro_batches
    pipe = jdag.pipeline([stage] * stages, square)
    params = put(cluster, schedule)
    with cluster.context() as ctx:
        ctx.backward(*pipe(ctx, params, batches(count), batches(count)))
        found = ctx.gradient(params)
        return jdag.fetch(found) if fetched else found


def drawn(params: dict[str, Any], x: Any) -> Any:
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
