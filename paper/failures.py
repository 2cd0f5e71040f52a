"""Kills or freezes workers of scenarios at random times.

    python -m paper.failures                   12 moments of each program
    python -m paper.failures --moments 2 --programs cartpole

A moment is a run of a scenario's program on new processes. At a random time within the
duration of an undisturbed run, one worker gets `kill -9` or `SIGSTOP`. Then the
caller must get an error that names the worker. Each surviving worker must compute a
correct gradient in the same cluster and have no pass and no context, except one context
for each worker with hosted objects. After closing, no process, descriptor, shared
memory or temporary file may remain.

`paper/results/failures.json` contains each moment, `failures.md` a table. Results are
written even if a later moment fails.
"""

import argparse
import json
import os
import signal
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jdag
from jdag.errors import JdagError, text_of
from jdag.scenario import Run, Scenario, load
from paper.figures import RESULTS, machine

SCENARIOS = Path(__file__).parent.parent / "scenarios"
PROGRAMS = (
    "shared_digits",
    "remote_embedding",
    "two_shards",
    "ddp_with_rpc",
    "cartpole",
)
HOSTING = ("cartpole",)  # Their hosted objects remain after an error.
MOMENTS = 12
DEADLINE_S = 4.0
TRIES_MAX = 5  # If the program ends before the fault, a moment is repeated.
SIGNALS = (signal.SIGKILL, signal.SIGSTOP)
X = np.linspace(0.5, 2.0, 7)


def squares(w: jax.Array, x: Any) -> jax.Array:
    return jnp.sum((w * x) ** 2)


class Driver:
    """A scenario driver that runs on an existing cluster."""

    def __init__(self, cluster: jdag.Cluster) -> None:
        self._cluster = cluster

    def cluster(self, seed: int, *, clean: bool) -> jdag.Cluster:
        """Return the existing cluster, whatever the arguments."""
        del seed, clean
        return self._cluster

    def let_go(self, kept: Any) -> None: ...


def play(scenario: Scenario, cluster: jdag.Cluster) -> None:
    run = Run(
        workers=scenario.settings.names,
        seeds=(0,),
        abstract=False,
        troubled=False,
        virtual=False,
        driver=Driver(cluster),
        show=lambda *_: None,
    )
    scenario.player.play(run)


def launched(scenario: Scenario, logs: Path) -> jdag.Cluster:
    allow = [scenario.settings.program.partition(":")[0]]
    names = scenario.settings.names
    return jdag.launch(names, allow=allow, deadline_s=DEADLINE_S, logs=logs)


def descriptors() -> int:
    """Return the number of open descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def children() -> set[str]:
    """Return the ids of the living child processes."""
    found = set[str]()
    for task in Path("/proc/self/task").iterdir():
        try:
            found.update((task / "children").read_text().split())
        except OSError:  # The thread has just ended.
            continue
    return found


def files() -> set[str]:
    """Return the temporary files and the shared memory segments of jdag."""
    own = Path(tempfile.gettempdir()).iterdir()
    return {str(file) for file in (*Path("/dev/shm").glob("*jdag*"), *own)}


def survives(cluster: jdag.Cluster, lost: str, *, hosts: bool) -> list[str]:
    """Check that each surviving worker computes a gradient. Returns the errors."""
    wrong = []
    expected = jax.grad(squares)(jnp.asarray(X), X)
    for worker in cluster.workers:
        if worker == lost:
            continue
        try:
            w = cluster.put(worker, X)
            with cluster.context() as ctx:
                ctx.backward(ctx.call(worker, squares, w, X))
                found = ctx.gradient(w).fetch()
            if not np.allclose(found, expected, rtol=1e-6):
                wrong.append(f"{worker}: a wrong gradient")
        except JdagError as error:
            wrong.append(f"{worker}: {error}")
    if not wrong:
        cluster.driver.settle()
        for worker, held in cluster.info().items():
            of_objects = len(cluster.workers) - 1 if worker == cluster.here else 1
            most = {"live_contexts": of_objects * hosts, "live_passes": 0}
            for what, count in most.items() if worker != lost else ():
                if held[what] > count:
                    wrong.append(f"{worker}: {what} {held[what]}")
    return wrong


def moment(
    scenario: Scenario, number: signal.Signals, victim: str, at_s: float
) -> dict[str, Any]:
    """Run the program, and send a worker the signal after `at_s`. Returns a record."""
    before = descriptors(), files(), children()
    struck: list[float] = []
    found: dict[str, Any] = {"signal": number.name, "victim": victim, "at_s": at_s}
    with tempfile.TemporaryDirectory() as logs:
        cluster = launched(scenario, Path(logs))
        pid = cluster.driver.launch.pids[victim]

        def strike() -> None:
            struck.append(time.monotonic())
            os.kill(pid, number)

        blow = threading.Timer(at_s, strike)
        blow.daemon = True
        with cluster:
            begun = time.monotonic()
            blow.start()
            try:
                play(scenario, cluster)
                found["outcome"] = "finished"
            except JdagError as error:
                found |= {"outcome": type(error).__name__, "said": text_of(error)}
            ended = time.monotonic()
            blow.cancel()
            blow.join()
            if struck:
                found["seconds"] = ended - struck[0]
                found["names"] = f"'{victim}'" in found.get("said", "")
            hosts = scenario.settings.name in HOSTING
            wrong = survives(cluster, victim, hosts=hosts) if struck else []
            found |= {"survivors": wrong, "ended_s": ended - begun}
    found["left"] = leftovers(before)
    return found


def leftovers(before: tuple[int, set[str], set[str]]) -> list[str]:
    """Wait up to 5 s. Returns new processes, descriptors and files that remain."""
    due = time.monotonic() + 5
    while True:
        left = [f"process {pid}" for pid in sorted(children() - before[2])]
        if (now := descriptors()) > before[0]:
            left.append(f"{now - before[0]} descriptors")
        left += sorted(files() - before[1])
        if not left or time.monotonic() > due:
            return left
        time.sleep(0.05)


def is_right(found: dict[str, Any]) -> bool:
    """Return whether the error was right and in time, and nothing remained."""
    in_time = found["seconds"] <= DEADLINE_S + 2.0
    named = found["outcome"] == "WorkerLost" and found["names"] and in_time
    return bool(named and not found["survivors"] and not found["left"])


def campaign(name: str, moments: int) -> dict[str, Any]:
    """Measure a program undisturbed, then run its moments."""
    scenario = load(SCENARIOS / f"{name}.toml")
    rng = Random(name)
    folder = tempfile.TemporaryDirectory()
    with folder as logs, launched(scenario, Path(logs)) as cluster:
        begun = time.monotonic()
        play(scenario, cluster)
        whole_s = time.monotonic() - begun
    found: list[dict[str, Any]] = []
    while len(found) < moments:
        number = SIGNALS[len(found) % 2]
        victim = rng.choice(scenario.settings.names[1:])
        for _ in range(TRIES_MAX):
            one = moment(scenario, number, victim, rng.uniform(0, whole_s))
            if one["outcome"] != "finished":
                break
            whole_s = min(whole_s, one["ended_s"])
        print(
            name, len(found), {k: v for k, v in one.items() if k != "said"}, flush=True
        )
        found.append({**one, "right": one["outcome"] != "finished" and is_right(one)})
    return {"whole_s": whole_s, "moments": found}


def table(results: dict[str, Any], machine: dict[str, Any]) -> str:
    """Return the results as a page in Markdown."""
    lines = [
        "# Workers that are killed or frozen",
        "",
        f"Programs of `scenarios/` on processes, deadline {DEADLINE_S:g} s; "
        f"{machine['cores']} cores, Python {machine['python']}, JAX {machine['jax']}.",
        "A run is right if the caller gets an error that names the worker, in time; if "
        "survivors compute a right gradient, and have no pass and only contexts of "
        "hosted objects; and if no process, file or memory is left.",
        "",
        "| program | killed | frozen | right | slowest error, killed, s | frozen, s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for name, of in results.items():
        by = {
            number.name: [one for one in of["moments"] if one["signal"] == number.name]
            for number in SIGNALS
        }
        slowest = [
            f"{max((one.get('seconds', 0.0) for one in ones), default=0.0):.2f}"
            for ones in by.values()
        ]
        right = sum(one["right"] for one in of["moments"])
        counts = [str(len(ones)) for ones in by.values()]
        whole = f"{right} of {len(of['moments'])}"
        lines.append(f"| {' | '.join([name, *counts, whole, *slowest])} |")
    return "\n".join([*lines, ""])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the campaign and write its results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=int, default=MOMENTS)
    parser.add_argument("--programs", nargs="+", default=PROGRAMS, choices=PROGRAMS)
    asked = parser.parse_args(arguments)
    results: dict[str, Any] = {}
    former = tempfile.gettempdir()
    try:
        with tempfile.TemporaryDirectory() as own:  # A folder for this process alone.
            tempfile.tempdir = os.environ["TMPDIR"] = own
            for name in asked.programs:
                results[name] = campaign(name, asked.moments)
    finally:
        tempfile.tempdir = os.environ["TMPDIR"] = former
        here = machine()
        whole = {"machine": here, "deadline_s": DEADLINE_S, "programs": results}
        (RESULTS / "failures.json").write_text(json.dumps(whole, indent=1) + "\n")
        (RESULTS / "failures.md").write_text(table(results, here))


if __name__ == "__main__":
    main()
