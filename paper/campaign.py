"""Compares random programs in many orders of events with the oracle.

    python -m paper.campaign --cpu-s 600        continues where the last call stopped

Each number is the seed of a program, which runs in `ORDERS` orders. Half of these have
a budget of faults. `paper/results/campaign.json` contains the counts of runs, and the
seeds of programs with a wrong result.
"""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import jax

from jdag.lab.exploration import Report, exploration, sound
from jdag.lab.strategies import FAULTS, PCT, RandomWalk
from jdag.lab.subject import Subject
from jdag.testing.drawn import FUNCTIONS, DrawnCall, Program
from paper.figures import RESULTS, machine

ORDERS = 50
WANTED = 1_000_000
CACHED_MAX = 200  # After so many programs, JAX's caches are cleared.


def drawn(number: int) -> Program:
    """Draw a random program, with `number` as the seed."""
    rng = Random(f"campaign {number}")
    workers = ("main", "a", "b", "c")[: rng.randint(2, 4)]
    leaves = tuple(rng.choices(workers, k=rng.randint(1, 3)))
    calls = []
    for at in range(rng.randint(1, 8)):
        given = rng.randrange(len(leaves) + at), rng.randrange(len(leaves) + at)
        calls.append(DrawnCall(rng.choice(workers), rng.choice([*FUNCTIONS]), given))
    terms, passes = rng.randint(1, len(calls)), rng.randint(1, 2)
    return Program(workers, leaves, tuple(calls), terms, passes)


def explored(number: int) -> Report:
    """Explore a program without and with faults: once at random and once by PCT."""
    program, found = drawn(number), Report()
    budgets: list[dict[str, int]] = [{}, dict.fromkeys(FAULTS, 1)]
    for at, faults in enumerate(budgets):
        subject = Subject(program.case(), program.workers, "real", faults)
        strategy = RandomWalk(number) if (number + at) % 2 else PCT(3, seed=number)
        found.add(exploration(subject, sound, range(ORDERS // 2), strategy))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run programs until the CPU time is used up; save the counts regularly."""
    parser = argparse.ArgumentParser(prog="python -m paper.campaign")
    parser.add_argument("--cpu-s", type=float, default=600.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    wanted = parser.parse_args(arguments)
    path = wanted.out / "campaign.json"
    held: dict[str, Any] = dict.fromkeys(["programs", "runs", "orders"], 0)
    held |= {"cpu_s": 0.0, "wrong": []}
    if path.exists():
        held = json.loads(path.read_text())
    spent, began = held["cpu_s"], time.process_time()
    while (cpu_s := time.process_time() - began) < wanted.cpu_s:
        if held["runs"] >= WANTED:
            break
        number = held["programs"]
        found = explored(number)
        held["programs"] += 1
        held["runs"] += found.runs
        held["orders"] += found.orders
        if found.failure is not None:
            held["wrong"].append([number, str(found.failure)])
            print(number, found.failure, flush=True)
        held |= {"wanted": WANTED, "cpu_s": round(spent + cpu_s, 1)}
        if number % 20 == 0:
            path.write_text(json.dumps({**held, "machine": machine()}, indent=1) + "\n")
        if number % CACHED_MAX == 0:
            jax.clear_caches()
    path.write_text(json.dumps({**held, "machine": machine()}, indent=1) + "\n")
    return 1 if held["wrong"] else 0


if __name__ == "__main__":
    sys.exit(main())
