"""Runs the benchmarks of the simulator; each has its own result file.

    python paper/figures.py                 all benchmarks
    python paper/figures.py face simulator  only these two

Each benchmark is a function of this module that returns its numbers: medians of
repeats, and ratios to plain JAX, which alternates with jdag in the same run.
`paper/results/NAME.json` contains the numbers with the target, the machine and the
versions. Benchmarks of a whole process (memory) run in a separate process.
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
    """Measure `repeats` times, after one discarded measurement; return the median."""
    measure()
    return statistics.median(measure() for _ in range(repeats))


def in_turn(jax_s: Callable[[], float], **ours: Callable[[], float]) -> dict[str, Any]:
    """Measure JAX and jdag alternately. Returns median times and ratios to JAX."""
    rounds = [[jax_s(), *(one() for one in ours.values())] for _ in range(1 + REPEATS)]
    plain, *others = zip(*rounds[1:], strict=True)  # The first round is discarded.
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
    """A function that is never executed."""

    name = "nothing"
    reaches = ((True,),)
    avals = ("nothing",)


class Bench:
    """Engines whose jobs complete immediately, and a message queue between them."""

    def __init__(self, workers: tuple[str, ...]) -> None:
        self.engines = {name: Engine(name, workers) for name in workers}
        self.queue: deque[tuple[str, Effect]] = deque()
        self.result: Any = None

    def tell(self, worker: str, event: Any) -> None:
        """Let an engine handle an event, and carry out all effects that follow."""
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
    """Measure a chain of calls. Returns microseconds per node, forward and backward."""
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
    """Measure the engine without jobs: microseconds per node and per transfer."""
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


# ---------------------------------------------------------------------- one ctx.call


def tanh_layer(w: jax.Array, x: jax.Array) -> jax.Array:
    return jnp.tanh(x @ w)


def mean_square(h: jax.Array) -> jax.Array:
    return jnp.mean(h * h)


def face() -> dict[str, Any]:
    """Measure `ctx.call` of a compiled function: microseconds until it returns."""
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
    """Return the seconds of a step, including the wait for its values."""
    start = time.perf_counter()
    jax.block_until_ready(step())
    return time.perf_counter() - start


def arithmetic_s(step: Callable[[], Any]) -> float:
    """Return the seconds that a step spends in its jobs, without jdag's overhead."""
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
    """Return each worker's peak memory in training: without and with a plan."""
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
    """Compare the time of a step by calls, and as a plan, with one jit."""
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
    """Compare large layers on 4 workers with one jit."""
    rows = [
        {"width": width, "layers": 8, "batch": batch, **step_of(width, 8, batch, 4)}
        for width, batch in ((512, 256), (768, 256), (1024, 512))
    ]
    target = "where a layer takes >= 2.5 ms: eager <= 1.15x, plan <= 1.05x"
    return {"target": f"{target}; {PEAK}", "rows": rows}


def small_layers() -> dict[str, Any]:
    """Compare 64 layers of width 64 with one jit; each of 4 workers has 16."""
    target = f"eager <= 6x, plan <= 3x, its arithmetic <= 2x; {PEAK}"
    return {"target": target, "width": 64, "layers": 64, **step_of(64, 64, 8, 4)}


# --------------------------------------------------------------------------- simulator


def scalar(x: jax.Array) -> jax.Array:
    return x


def simulator() -> dict[str, Any]:
    """Measure calls and vjps per second of CPU time; compare with `events_per_s`."""
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
    """Measure runs of `jdag.explore` per million events of `events_per_s`."""
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
    """Make six calls on three workers, which send each other their results."""
    x, y, z = refs["x"], refs["y"], refs["z"]
    h, g = ctx.call("b", scaled, x, y), ctx.call("c", scaled, y, z)
    k = ctx.call("a", scaled, h, g)
    m = ctx.call("c", scaled, ctx.call("b", scaled, k, g), h)
    return ctx.call("a", jnp.sum, m)


def scaled(x: jax.Array, y: jax.Array) -> jax.Array:
    """Compute a product and a sum, which take little time."""
    return x * 2 + y


def events_per_s() -> float:
    """Measure this machine: events that a `heapq` handles per second of CPU time."""
    heap = [(number, number) for number in range(1_000)]
    start_s = time.process_time()
    for number in range(1_000_000):
        at, _ = heap[0]
        heapreplace(heap, (at + number * 7919 % 1009, number))
    return 1_000_000 / (time.process_time() - start_s)


def messages(cluster: jdag.Cluster) -> int:
    """Return the number of protocol messages that all workers have sent."""
    return sum(worker["messages_sent"] for worker in cluster.info().values())


def many_workers() -> dict[str, Any]:
    """Run `many_workers_inside` in new processes. Returns median time and memory."""
    command = [sys.executable, __file__, "--inside", "many_workers_inside"]
    rows = []
    for _ in range(3):
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
    middle = {name: statistics.median(row[name] for row in rows) for name in rows[0]}
    return {"target": "<= 20 s and <= 2 GB", **middle}


def many_workers_inside() -> dict[str, Any]:
    """Run a pipeline of 1,024 workers and 64 micro-batches, with abstract values."""
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
    """Return the CPU, the number of cores and the versions, for a result file."""
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
    """Run the named benchmarks (default: all); write each result to its file."""
    if names[:1] == ["--inside"]:
        sys.stdout.write(json.dumps(globals()[names[1]]()) + "\n")
        return
    # After `freeze`, the garbage collector skips the objects of imported modules.
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
