"""Measures the costs of each row for jdag: CPU time, Python calls, messages.

    python -m paper.compare.costs [--pin one]

It measures the CPU time of the caller and of worker w0 (including busy waiting), the
number of Python calls of the caller, and the messages of all workers. Counts do not
depend on the load of the machine; times do. A profile of the caller divides its time
among the parts of jdag. `paper.compare.run` also measures this after
its rounds, and writes it to `paper/results/`.
"""

import cProfile
import os
import pstats
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

import jdag
from paper.compare import ours, plans, rows

ROUNDS = 5
# A function's time counts for the first part whose text occurs in its file's path. A
# built-in function counts for its caller's part, and not at all if it waits.
PARTS = {
    "engine": "/jdag/engine/",
    "codec and link": "/jdag/wire/",
    "sockets and loop": "/jdag/processes/",
    "values": "/jdag/compute/",
    "face": "/jdag/",
    "JAX": "/jax",
}
WAITING = ("epoll", "sched_yield", "acquire")
COLUMNS = {
    "wall_us": "time",
    "caller_us": "caller ran",
    "worker_us": "w0 ran",
    "jobs_us": "jobs of all",
    "calls": "Python calls of the caller",
    "messages": "messages",
    "bytes": "bytes",
}


def ran_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process, including ended threads.

    It computes the id of the process's clock as clock_getcpuclockid(3) does.
    """
    return time.clock_gettime_ns(~pid << 3 | 2)


def cost(cluster: jdag.Cluster, work: Callable[[], int]) -> dict[str, Any]:
    """Measure `work` several times. Returns the least costs per unit of work."""
    pids = (os.getpid(), cluster.driver.launch.pids[rows.WORKERS[0]])
    work()
    best: dict[str, float] = {}
    for _ in range(ROUNDS):
        before = cluster.info()
        ran = list(map(ran_ns, pids))
        start_ns = time.perf_counter_ns()
        units = work()
        wall_ns = time.perf_counter_ns() - start_ns
        caller, worker = (ran_ns(pid) - was for pid, was in zip(pids, ran, strict=True))
        counted = _counted(before, cluster.info())
        found = {
            "wall_us": wall_ns / 1e3,
            "caller_us": caller / 1e3,
            "worker_us": worker / 1e3,
            "jobs_us": counted["busy_ns"] / 1e3,
            "messages": counted["messages_sent"],
            "bytes": counted["bytes_sent"],
        }
        each = {key: value / units for key, value in found.items()}
        best = {key: min(value, best.get(key, value)) for key, value in each.items()}
    return {**best, **profiled(work)}


def profiled(work: Callable[[], int]) -> dict[str, Any]:
    """Return the caller's function calls per unit, and each part's share of its time.

    The time does not include waiting.
    """
    profile = cProfile.Profile()
    units = profile.runcall(work)
    found: Any = pstats.Stats(profile)
    spent = dict.fromkeys([*PARTS, "the rest"], 0.0)
    for (file, _, name), (_, _, own_s, _, callers) in found.stats.items():
        if any(word in name for word in WAITING):
            continue
        if file != "~":  # Built-in functions have no file.
            spent[_part(file)] += own_s
            continue
        for (caller, _, _), (_, _, from_it_s, _) in callers.items():
            spent[_part(caller)] += from_it_s
    whole = sum(spent.values())
    shares = {part: own_s / whole for part, own_s in spent.items()}
    return {"calls": found.total_calls / units, "shares": shares}


def _part(file: str) -> str:
    return next((part for part, path in PARTS.items() if path in file), "the rest")


def _counted(before: Any, after: Any) -> dict[str, float]:
    keys = ("busy_ns", "messages_sent", "bytes_sent")
    return {
        key: sum(after[name][key] - held[key] for name, held in before.items())
        for key in keys
    }


def repeated(work: Callable[[], Any], times: int) -> int:
    """Call `work` `times` times. Returns `times`, the number of units of work."""
    for _ in range(times):
        work()
    return times


def through(make: Callable[[], rows.Phases], units: int) -> int:
    """Run all phases of a row. Returns its number of units."""
    for _ in make():
        pass
    return units


def works(side: ours.Ours) -> dict[str, Callable[[], int]]:
    """Return a function for each row, which runs it and returns the units of work."""
    one, other = side.array(rows.leaf()), side.array(rows.factor(1))
    found: dict[str, Callable[[], int]] = {}
    found["add"] = partial(repeated, partial(side.add, one, other), 100)
    for name, size in rows.BYTES.items():
        value = side.array(np.zeros(size // 4, np.float32))
        identity = partial(side.identity, value)
        found[f"identity {name}"] = partial(repeated, identity, 10)
    found["round trip of a chain of 100, both ways"] = partial(
        through, partial(side.chain, 100), 100
    )
    found["call of a fan-out of 64, both ways"] = partial(
        through, partial(side.fan_out, rows.CALLS), rows.CALLS
    )
    if not isinstance(side, plans.Plans):
        found["retained pass"] = partial(through, partial(side.retained, 300), 300)
    found["pass, both ways"] = partial(through, partial(rows.repeated, side, 100), 100)
    for width in rows.WIDTHS:
        side.prepare(width)
        step = partial(side.step, width)
        found[f"step of MLP {width} wide"] = partial(repeated, step, 3)
    return found


def table(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the costs of all rows as a table in Markdown."""
    columns = [*COLUMNS.values(), *PARTS, "the rest"]
    lines = [
        f"| one | {' | '.join(columns)} |",
        f"| --- |{' ---: |' * len(columns)}",
    ]
    for name, costs in found.items():
        cells = [
            f"{costs[key]:,.0f}{' us' if key.endswith('_us') else ''}"
            for key in COLUMNS
        ]
        cells += [f"{share:.0%}" for share in costs["shares"].values()]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure all rows; print JSON after each row, then a table, then JSON again."""
    rows.asked(__doc__)
    with ours.launched() as cluster:
        side = ours.Ours(cluster, "fast")
        found: dict[str, Any] = {}
        for name, work in works(side).items():
            found[name] = cost(cluster, work)
            rows.tell({"rows": found})
        for name, work in works(plans.Plans(cluster)).items():
            found[f"{name}, plan"] = cost(cluster, work)
            rows.tell({"rows": found})
    sys.stdout.write(f"Costs of each row; the least of {ROUNDS}.\n\n{table(found)}\n")
    rows.tell({"rows": found})


if __name__ == "__main__":
    main()
