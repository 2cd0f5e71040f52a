"""Measures the figures of the simulated half of jdag; each goes to a file of its own.

    python paper/figures.py                 all of them
    python paper/figures.py face simulator  some

Each figure is a function of this module that returns its numbers: medians of repeats,
and ratios against plain JAX in the same run, in turn. `paper/results/NAME.json` holds
them with the target, the machine and the versions. A figure that is about a whole
process (memory) runs in a process of its own.
"""

import gc
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heapreplace
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import optax

import jdag
from jdag.compute.machine import Machine
from jdag.engine import Engine
from jdag.engine.protocol import (
    Argument,
    Arrived,
    Assigned,
    Assignment,
    Compute,
    Computed,
    ContextId,
    Differentiated,
    Effect,
    Issued,
    LeafId,
    LeafKey,
    Mode,
    Opened,
    OutputKey,
    PassResult,
    Resume,
    Root,
    Send,
)
from jdag.lab.exploration import exploration, sound
from jdag.lab.strategies import RandomWalk
from jdag.lab.subject import Subject
from jdag.scenario.case import Case

RESULTS = Path(__file__).parent / "results"
REPEATS = 7
PEAK = "peak bytes of a worker in training: the plan's at most eager's"


def median_of(measure: Callable[[], float], repeats: int = REPEATS) -> float:
    """The median of some measurements, after one that does not count."""
    measure()
    return statistics.median(measure() for _ in range(repeats))


def in_turn(jax_s: Callable[[], float], **ours: Callable[[], float]) -> dict[str, Any]:
    """Measurements in turn: their medians, and those of the ratios to JAX's."""
    rounds = [[jax_s(), *(one() for one in ours.values())] for _ in range(1 + REPEATS)]
    plain, *others = zip(*rounds[1:], strict=True)  # The first round does not count.
    found: dict[str, Any] = {"jax_s": statistics.median(plain)}
    for name, times in zip(ours, others, strict=True):
        ratios = [one / other for one, other in zip(times, plain, strict=True)]
        found[f"{name}_s"] = statistics.median(times)
        found[f"{name}_ratio"] = statistics.median(ratios)
        found[f"{name}_ratio_min"] = min(ratios)
        found[f"{name}_ratio_max"] = max(ratios)
    return found


# ----------------------------------------------------------------------- engine alone


class Named:
    """A function that nobody runs."""

    name = "nothing"
    reaches = ((True,),)
    avals = ("nothing",)


class Bench:
    """Engines whose jobs are done as soon as asked for, and a queue between."""

    def __init__(self, workers: tuple[str, ...]) -> None:
        self.engines = {name: Engine(name, workers) for name in workers}
        self.queue: deque[tuple[str, Effect]] = deque()
        self.result: Any = None

    def tell(self, worker: str, event: Any) -> None:
        """Have an engine handle an event, and all that follows from it."""
        queue, engines = self.queue, self.engines
        queue.extend((worker, effect) for effect in engines[worker].handle(event))
        while queue:
            here, effect = queue.popleft()
            if isinstance(effect, Compute):
                done = Computed(effect.job.id)
                queue.extend((here, more) for more in engines[here].handle(done))
            elif isinstance(effect, Send):
                to = effect.to
                arrived = Arrived(here, effect.message)
                queue.extend((to, more) for more in engines[to].handle(arrived))
            elif isinstance(effect, Resume):
                self.result = effect.result


def chain(nodes: int, workers: tuple[str, ...]) -> tuple[float, float]:
    """Forward and backward of a chain that changes worker at every node: us a node."""
    bench = Bench(workers)
    home = workers[0]
    context = ContextId(0, 1, 0)
    bench.tell(home, Opened(context))
    leaf = LeafKey(None, LeafId(home, 1), 0)
    made = Assignment((1, 0), None, (), (leaf,), ("aval",), "here")
    bench.tell(home, Assigned((1,), (made,)))
    argument = Argument(leaf, home, True)
    function = Named()
    start = time.perf_counter()
    for number in range(1, nodes + 1):
        worker = workers[number % len(workers)]
        path = (number,)
        bench.tell(
            home,
            Issued(context, path, worker, function, "f", (argument,), (True,), "here"),
        )
        argument = Argument(OutputKey(context, path, 0), worker, True)
    forward = time.perf_counter()
    root = Root(argument.key, "aval", False, 0)
    roots = ((argument.owner, root),)
    bench.tell(home, Differentiated(1, context, roots, Mode.FAST, False, None))
    end = time.perf_counter()
    result = bench.result
    assert isinstance(result, PassResult) and result.outcome.value == "finished", result
    return (forward - start) / nodes * 1e6, (end - forward) / nodes * 1e6


def engine() -> dict[str, Any]:
    """Engine alone, no arithmetic: microseconds a node of a chain, and a transfer."""
    rows = []
    for nodes in (10, 100, 1_000, 10_000, 100_000):
        repeats = max(3, min(201, 20_000 // nodes))
        local = [chain(nodes, ("a",)) for _ in range(repeats)]
        hopping = [chain(nodes, ("a", "b")) for _ in range(repeats)]
        here = [statistics.median(column) for column in zip(*local, strict=True)]
        there = [statistics.median(column) for column in zip(*hopping, strict=True)]
        rows.append(
            {
                "nodes": nodes,
                "forward_us_per_node": here[0],
                "backward_us_per_node": here[1],
                "forward_us_more_per_transfer": there[0] - here[0],
                "backward_us_more_per_transfer": there[1] - here[1],
            }
        )
    target = "backward <= 5 us a node from 10 to 100,000 nodes; + <= 15 us a transfer"
    return {"target": target, "rows": rows}


# ---------------------------------------------------------------------------- the face


def tanh_layer(w: jax.Array, x: jax.Array) -> jax.Array:
    """One layer."""
    return jnp.tanh(x @ w)


def mean_square(h: jax.Array) -> jax.Array:
    """A loss."""
    return jnp.mean(h * h)


def face() -> dict[str, Any]:
    """One `ctx.call`, compiled before: microseconds until it returns its refs."""
    calls = 200

    def once() -> float:
        with jdag.simulate(["a", "b"], seed=0, trace=False) as cluster:
            w = cluster.put("b", jnp.ones((64, 64)))
            x = cluster.put("b", jnp.ones((8, 64)))
            with cluster.context() as ctx:
                ctx.call("b", tanh_layer, w, x)
                start = time.perf_counter()
                for _ in range(calls):
                    ctx.call("b", tanh_layer, w, x)
                return (time.perf_counter() - start) / calls * 1e6

    return {"target": "<= 20 us", "us_per_call": median_of(once, 15)}


# -------------------------------------------------------------------------- whole steps


def seconds(step: Callable[[], Any]) -> float:
    """How long a step takes, until its values are there."""
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def arithmetic_s(step: Callable[[], Any]) -> float:
    """How long the jobs of a step take, each until its values are there."""
    begin, spent = Machine.begin, []

    def timed(machine: Machine, job: Any) -> Any:
        work = begin(machine, job)
        computed = work.compute

        def compute() -> Any:
            start = time.perf_counter()
            made = jax.block_until_ready(computed())
            spent.append(time.perf_counter() - start)
            return made

        work.compute = compute
        return work

    with mock.patch.object(Machine, "begin", timed):
        step()
    assert spent, "the step had no job"
    return sum(spent)


def training_peaks(program: Any, owners: list[str], ws: Any, x: Any) -> dict[str, Any]:
    """The most bytes that each worker held at a time in training by each way."""
    found = {}
    for way in ("eager", "plan"):
        with jdag.simulate(list(dict.fromkeys(owners)), seed=0) as cluster:
            refs = [cluster.put(o, w) for o, w in zip(owners, ws, strict=True)]
            optimizer = jdag.Optimizer(optax.sgd(0.1), refs)
            step = jdag.compile(program, cluster, optimizer)
            for _ in range(3):
                if way == "plan":
                    step(refs, x)
                    continue
                with cluster.context() as ctx:
                    ctx.backward(program(ctx, refs, x))
                    optimizer.step(ctx)
            workers = cluster.info().items()
            found[way] = {name: worker["bytes_peak"] for name, worker in workers}
    return found


def step_of(widths: int, layers: int, batch: int, workers: int) -> dict[str, Any]:
    """A whole step, calls one by one and as a plan, against one jit, in turn."""
    keys = jax.random.split(jax.random.key(0), layers)
    ws = [jax.random.normal(key, (widths, widths)) / widths**0.5 for key in keys]
    x = jax.random.normal(jax.random.key(1), (batch, widths))
    names = [f"w{number}" for number in range(workers)]
    owners = [names[i * workers // layers] for i in range(layers)]

    def loss(params: list[jax.Array]) -> jax.Array:
        h = x
        for w in params:
            h = tanh_layer(w, h)
        return mean_square(h)

    def program(ctx: jdag.Context, refs: list[Any], h: Any) -> Any:
        for owner, ref in zip(owners, refs, strict=True):
            h = ctx.call(owner, tanh_layer, ref, h)
        return ctx.call(owners[-1], mean_square, h)

    plain = jax.jit(jax.value_and_grad(loss))
    with jdag.simulate(names, seed=0) as cluster:
        refs = [cluster.put(o, w) for o, w in zip(owners, ws, strict=True)]

        def eager() -> Any:
            with cluster.context() as ctx:
                out = program(ctx, refs, x)
                ctx.backward(out)
                return jdag.fetch((out, [ctx.gradient(ref) for ref in refs]))

        step = partial(jdag.compile(program, cluster).value_and_grad, refs, x)
        figures = in_turn(
            partial(seconds, partial(plain, ws)),
            eager=partial(seconds, eager),
            plan=partial(seconds, step),
            plan_arithmetic=partial(arithmetic_s, step),
        )
    figures["jax_ms_per_layer"] = figures["jax_s"] / layers * 1e3
    return {**figures, "peak_bytes": training_peaks(program, owners, ws, x)}


def large_layers() -> dict[str, Any]:
    """Layers of at least 2.5 ms on 4 workers in one process, against one jit."""
    rows = [
        {"width": width, "layers": 8, "batch": batch, **step_of(width, 8, batch, 4)}
        for width, batch in ((512, 256), (768, 256), (1024, 512))
    ]
    target = "where a layer takes >= 2.5 ms: eager <= 1.15x, plan <= 1.05x"
    return {"target": f"{target}; {PEAK}", "rows": rows}


def small_layers() -> dict[str, Any]:
    """64 layers, 64 wide, batch 8, in blocks of 16 on 4 workers, against one jit."""
    target = f"eager <= 6x, plan <= 3x, its arithmetic <= 2x; {PEAK}"
    return {"target": target, "width": 64, "layers": 64, **step_of(64, 64, 8, 4)}


# --------------------------------------------------------------------------- simulator


def scalar(x: jax.Array) -> jax.Array:
    """Next to nothing."""
    return x


def simulator() -> dict[str, Any]:
    """Calls and vjps per second of CPU time with a trace, beside a queue of events."""
    hops = 2_000

    def once() -> tuple[float, float]:
        names = ["a", "b", "c", "d"]
        network = jdag.sim.Network(jdag.sim.LinkModel(latency_ns=1_000))
        with jdag.simulate(
            names, seed=0, values="abstract", network=network
        ) as cluster:
            w = cluster.put("b", jax.ShapeDtypeStruct((), jnp.float32))
            cluster.driver.settle()
            before = messages(cluster)
            start_s = time.process_time()
            with cluster.context() as ctx:
                h = w
                for hop in range(hops):
                    h = ctx.call(names[hop % 4], scalar, h)
                ctx.backward(h)
            took_s = time.process_time() - start_s
            return 2 * hops / took_s, (messages(cluster) - before) / (2 * hops)

    once()
    rows = [(events_per_s(), *once()) for _ in range(9)]
    events, jobs, sent = (
        statistics.median(column) for column in zip(*rows, strict=True)
    )
    return {
        "target": "twice the calls and vjps per event that there were on 2026-11-21",
        "events_per_s": events,
        "calls_and_vjps_per_s": jobs,
        "per_1000_events": statistics.median(1_000 * row[1] / row[0] for row in rows),
        "messages_per_call_or_vjp": sent,
        "how": f"a chain of {hops} calls around 4 workers, forward and backward, with "
        "the time of issuing the calls; in turn with a queue of 1,000 events in heapq, "
        "of which a million are replaced; CPU time",
    }


def explorer() -> dict[str, Any]:
    """Runs of `jdag.explore` per second of CPU time, beside a queue of events."""
    runs, found = 200, {}
    params = dict.fromkeys("xyz", jnp.full(3, 2.0))
    case = Case(six_calls, params, {"x": "a", "y": "b", "z": "c"})

    def once(subject: Subject) -> float:
        events, start_s = events_per_s(), time.process_time()
        explored = exploration(subject, sound, range(runs), RandomWalk())
        assert explored.failure is None, explored.failure
        return 1e6 * runs / (time.process_time() - start_s) / events

    for values in ("abstract", "real"):
        subject = Subject(case, ["a", "b", "c"], values, {})
        once(subject)
        rates = sorted(once(subject) for _ in range(REPEATS))
        of = {"median": statistics.median(rates), "min": rates[0], "max": rates[-1]}
        found[f"{values}_runs_per_million_events"] = of
    return {
        "target": "150 abstract and 106 real: twice those of 2026-11-24",
        **found,
        "how": f"{runs} random walks over 6 calls on 3 workers, forward and backward; "
        "in turn with the queue of the simulator's figure; CPU time",
    }


def six_calls(ctx: jdag.Context, refs: Any) -> jdag.Ref:
    """Calls whose arguments cross between three workers."""
    x, y, z = refs["x"], refs["y"], refs["z"]
    h, g = ctx.call("b", scaled, x, y), ctx.call("c", scaled, y, z)
    k = ctx.call("a", scaled, h, g)
    m = ctx.call("c", scaled, ctx.call("b", scaled, k, g), h)
    return ctx.call("a", jnp.sum, m)


def scaled(x: jax.Array, y: jax.Array) -> jax.Array:
    """Next to nothing."""
    return x * 2 + y


def events_per_s() -> float:
    """How many events a queue in plain Python takes per second of CPU time."""
    heap = [(number, number) for number in range(1_000)]
    start_s = time.process_time()
    for number in range(1_000_000):
        at, _ = heap[0]
        heapreplace(heap, (at + number * 7919 % 1009, number))
    return 1_000_000 / (time.process_time() - start_s)


def messages(cluster: jdag.Cluster) -> int:
    """Protocol messages sent so far; the link's own frames do not count."""
    return sum(worker["messages_sent"] for worker in cluster.info().values())


def many_workers() -> dict[str, Any]:
    """1,024 workers x 64 micro-batches, abstract: seconds and peak memory."""
    command = [sys.executable, __file__, "--inside", "many_workers_inside"]
    rows = []
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {"target": "<= 20 s and <= 2 GB", **middle}


def many_workers_inside() -> dict[str, Any]:
    """A pipeline of 1,024 stages and 64 micro-batches, shapes only."""
    names = [f"w{number}" for number in range(1_024)]
    aval = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    start = time.perf_counter()
    with jdag.simulate(names, seed=0, values="abstract") as cluster:
        ws = [cluster.put(name, aval) for name in names]
        xs = [cluster.put(names[0], aval) for _ in range(64)]
        with cluster.context() as ctx:
            losses = []
            for x in xs:
                h = x
                for name, w in zip(names, ws, strict=True):
                    h = ctx.call(name, tanh_layer, w, h)
                losses.append(ctx.call(names[-1], mean_square, h))
            ctx.backward(*losses)
        sent = messages(cluster)
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    return {"seconds": seconds, "peak_gb": peak, "messages": sent}


# --------------------------------------------------------------------------------- main

FIGURES = {
    "engine": engine,
    "face": face,
    "large_layers": large_layers,
    "small_layers": small_layers,
    "simulator": simulator,
    "explorer": explorer,
    "many_workers": many_workers,
}


def machine() -> dict[str, Any]:
    """Where and with what the figures were taken."""
    model = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.split(":", 1)[1].strip()
                break
    return {
        "cpu": model,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": version("jaxlib"),
        "jdag": version("jdag"),
    }


def main(names: list[str]) -> None:
    """Measure the figures that are named, or all, and write each to its file."""
    if names[:1] == ["--inside"]:
        sys.stdout.write(json.dumps(globals()[names[1]]()) + "\n")
        return
    # What JAX has made by importing it is not for our collector to walk.
    gc.collect()
    gc.freeze()
    RESULTS.mkdir(exist_ok=True)
    for name in names or FIGURES:
        figures = {"figure": name, "machine": machine(), **FIGURES[name]()}
        text = json.dumps(figures, indent=2)
        (RESULTS / f"{name}.json").write_text(text + "\n")
        sys.stdout.write(f"{name}: {text}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
