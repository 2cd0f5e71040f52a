"""Measures re-timing: (nodes of a run's graph) x settings, per second of CPU time.

    python -m paper.retiming

A run of 1F1B in virtual time is recorded once. Its makespan is then computed with many
settings at once (`jax.vmap` of `makespan_fn`), also with gradients, and with one
setting in whole ns (`makespan`). For comparison, the same rounds measure a queue of
events in plain Python (`paper.figures.events_per_s`) and a new run of the simulator.
"""

import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdag
from paper.figures import RESULTS, events_per_s, machine

STAGES, MICRO_BATCHES, SETTINGS, ROUNDS = 8, 64, 1_000, 5


def layer(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def mse(x: Any, y: Any) -> Any:
    return jnp.mean((x - y) ** 2)


def recorded() -> Any:
    """Simulate a step of a pipeline. Returns its trace."""
    schedule = jdag.schedules.one_f_one_b(stages=STAGES, micro_batches=MICRO_BATCHES)
    link = jdag.sim.LinkModel(latency_ns=500, bandwidth_bytes_per_s=10**9)
    with jdag.simulate(
        schedule.workers,
        seed=0,
        values="abstract",
        schedule=schedule,
        network=jdag.sim.Network(link, control_lane=True),
        devices=jdag.sim.DeviceModel(forward_ns=1_000, backward_ns=2_000),
    ) as cluster:
        last = schedule.worker(STAGES - 1)
        params = [cluster.put(schedule.worker(n), jnp.eye(3)) for n in range(STAGES)]
        batch = jnp.ones((2, 3))
        xs, ys = (
            [cluster.put(where, batch, tracked=False) for _ in range(MICRO_BATCHES)]
            for where in (schedule.worker(0), last)
        )
        jdag.fetch([params, xs, ys])
        with cluster.context() as ctx:
            pipe = jdag.pipeline([layer] * STAGES, mse)
            ctx.backward(*pipe(ctx, params, xs, ys))
        return cluster.trace


def cpu_s(work: Callable[[], Any]) -> float:
    """Return the CPU seconds of a call of `work`, until its result is ready."""
    begin = time.process_time()
    jax.block_until_ready(work())
    return time.process_time() - begin


def main() -> None:
    """Measure, and write `paper/results/retiming.json`."""
    run = jdag.retime(recorded())
    nodes = run.nodes
    scales = np.linspace(0.5, 2.0, SETTINGS)
    link = jdag.sim.LinkModel(latency_ns=300, bandwidth_bytes_per_s=10**9)
    with jax.enable_x64(True):
        many = jax.tree.map(lambda value: value * jnp.asarray(scales), run.settings)
        works = {
            "vmap": jax.vmap(run.makespan_fn),
            "vmap_of_grad": jax.vmap(jax.grad(run.makespan_fn)),
        }
        rows: list[dict[str, float]] = []
        for number in range(ROUNDS + 1):
            row = {"events_per_s": events_per_s()}
            for name, work in works.items():
                took_s = cpu_s(partial(work, many))
                row[f"{name}_node_settings_per_s"] = nodes * SETTINGS / took_s
            row["makespan_nodes_per_s"] = nodes / cpu_s(lambda: run.makespan(link))
            row["simulated_nodes_per_s"] = nodes / cpu_s(recorded)
            rows += [row] * (number > 0)  # The first round compiles.
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    events = middle["events_per_s"]
    found = {
        "figure": "retiming",
        "machine": machine(),
        "target": "10 million node-settings per CPU-second where the queue takes 3 "
        "million events",
        "nodes": nodes,
        "settings": SETTINGS,
        **middle,
        "vmap_per_3_million_events": 3e6 * middle["vmap_node_settings_per_s"] / events,
    }
    text = json.dumps(found, indent=2)
    (RESULTS / "retiming.json").write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
