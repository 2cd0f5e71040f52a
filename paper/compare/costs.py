"""What a row costs our side: processor time, calls of Python, messages.

    python -m paper.compare.costs [--pin one]

Beside the time that passes it counts, for the caller and for the worker w0: how long
their threads ran (spinning included), how many calls of Python functions the caller
made, and what all workers sent. Counts do not depend on who else uses the machine;
times do. A profile of the caller says which parts of jdag
its own time went to. `paper.compare.run` has this measured too, after its rounds, and
writes it to `paper/results/`.
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
# Where the caller's time goes, by the files of functions, the first that fits; what is
# built in counts to who called it, but for those that wait.
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
    """How long all threads of a process have run, also those that have ended.

    Read from Linux's CPU-time clock of the process: the number is that of
    clock_getcpuclockid(3).
    """
    return time.clock_gettime_ns(~pid << 3 | 2)


def cost(cluster: jdag.Cluster, work: Callable[[], int]) -> dict[str, Any]:
    """What `work` costs, for each of the units that it says it has done."""
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
    """How many calls of functions a unit takes the caller, and which part of its time.

    Waiting is not part of that time.
    """
    profile = cProfile.Profile()
    units = profile.runcall(work)
    found: Any = pstats.Stats(profile)
    spent = dict.fromkeys([*PARTS, "the rest"], 0.0)
    for (file, _, name), (_, _, own_s, _, callers) in found.stats.items():
        if any(word in name for word in WAITING):
            continue
        if file != "~":  # What is built in has no file.
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
    """Do it so often."""
    for _ in range(times):
        work()
    return times


def through(make: Callable[[], rows.Phases], units: int) -> int:
    """Run the phases of a row that has so many units."""
    for _ in make():
        pass
    return units


def works(side: ours.Ours) -> dict[str, Callable[[], int]]:
    """The rows, as what does some units of each."""
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
    """The costs of all rows, in Markdown."""
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
    """Measure; print a JSON object after each row, a table, and all as the last one."""
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
    sys.stdout.write(f"What one costs; the least of {ROUNDS}.\n\n{table(found)}\n")
    rows.tell({"rows": found})


if __name__ == "__main__":
    main()
