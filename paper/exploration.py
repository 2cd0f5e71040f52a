"""Measures how soon exploration finds bugs that appear only in some event orders.

    python -m paper.exploration                 all bugs, 100 runs for each strategy
    python -m paper.exploration --runs 20 --only addends

Each bug of `paper.planted` is applied to a copy of the source tree, and a process
explores the bug's program with each strategy. A rate of wrong runs counts as below
PCT's bound 1 / (n k^(d-1)) if, at that bound, so few wrong runs would have a
probability of less than 0.1 %. The depth of a bug is the least d at which PCT found it.

`paper/results/exploration.json` contains all results, `exploration.md` a table. A
second call continues with the bugs that have no result yet.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from math import comb
from pathlib import Path
from typing import Any

from jdag.lab.exploration import sound
from jdag.lab.failures import run_failure
from jdag.lab.strategies import PCT, parsed_strategy
from jdag.lab.subject import Subject
from paper.figures import RESULTS, machine
from paper.planted import BUGS, Bug
from paper.planted_programs import PROGRAMS
from tests import ROOT
from tests.tools.mutants import Mutant, copied, put

STRATEGIES = ("random", "pct:1", "pct:2", "pct:3")
CONFIDENCE = 0.001
LIMIT_S = 900


def rates(program: str, runs: int) -> dict[str, Any]:
    """Explore a program with each strategy. Returns the wrong runs of each."""
    planted = PROGRAMS[program]
    subject = Subject(planted.program, [*planted.workers], "real", planted.faults)
    first = subject.first()
    if run_failure(subject, first, sound, 0) is not None:
        return {"error": "the default run violates the property too"}
    found: dict[str, Any] = {"picks": len(first.steps)}
    for name in STRATEGIES:
        strategy: Any = parsed_strategy(name)
        strategy.planned(len(first.choices))
        wrong = []
        for run in range(runs):
            played = subject.play(strategy.begin(run))
            strategy.ended(len(played.choices))
            if run_failure(subject, played, sound, run) is not None:
                wrong.append(run)
        least = strategy.runs_per_bug if isinstance(strategy, PCT) else None
        found[name] = {"runs": runs, "wrong": wrong, "bound": least}
    return found


def below(wrong: int, runs: int, bound: int) -> bool:
    """Return whether `wrong` of `runs` runs is significantly below a rate 1/bound."""
    p = 1 / bound
    few = [comb(runs, n) * p**n * (1 - p) ** (runs - n) for n in range(wrong + 1)]
    return sum(few) < CONFIDENCE


def depth_of(found: Mapping[str, Any]) -> int | None:
    """Return the least depth at which PCT found a bug, or None."""
    return next((d for d in (1, 2, 3) if found[f"pct:{d}"]["wrong"]), None)


def tried(bug: Bug, tree: Path, runs: int) -> dict[str, Any]:
    """Apply a bug to a copy of the tree, and explore its program with that code."""
    file = f"jdag/engine/{bug.file}"
    mutant = Mutant(0, bug.fact, file, bug.before, bug.after, [])
    path, text = tree / file, mutant.mutated(tree)
    original = path.read_text()
    command = [sys.executable, "-W", "ignore", "-m", "paper.exploration"]
    try:
        put(path, text)
        done = subprocess.run(
            [*command, "--child", bug.program, "--runs", str(runs)],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True, text=True, timeout=LIMIT_S, check=False,
        )  # fmt: skip
    finally:
        put(path, original)
    lines = done.stdout.splitlines()
    return json.loads(lines[-1]) if done.returncode == 0 else {"error": done.stderr}


def table(bugs: Mapping[str, Any]) -> str:
    """Return the results as a page in Markdown with a table."""
    heads = ["bug", "depth", "bound (n, k)"]
    lines = [[*heads, *STRATEGIES], ["---"] * (len(heads) + len(STRATEGIES))]
    for fact, found in bugs.items():
        depth = depth_of(found)
        bound = found[f"pct:{depth}"]["bound"] if depth else None
        cells = [fact, str(depth or "-"), f"1/{bound:,}" if bound else "-"]
        for name in STRATEGIES:
            of = found[name]
            first = f"{of['wrong'][0] + 1}" if of["wrong"] else "-"
            cells.append(f"{first} ({len(of['wrong'])}/{of['runs']})")
        lines.append(cells)
    said = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        "# Planted bugs and exploration\n\nThe number of runs until a bug is found, and"
        " in brackets the wrong runs of all runs. The bound is that of PCT at the bug's"
        f" depth.\n\n{said}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore the programs of all bugs, and write the results after each bug."""
    parser = argparse.ArgumentParser(prog="python -m paper.exploration")
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--only", default="", help="a part of the bugs' descriptions")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--child", help="run this program here and print its rates")
    wanted = parser.parse_args(arguments)
    if wanted.child:
        print(json.dumps(rates(wanted.child, wanted.runs)))
        return 0
    path = wanted.out / "exploration.json"
    held = json.loads(path.read_text()) if path.exists() else {"bugs": {}}
    with tempfile.TemporaryDirectory(prefix="jdag-planted-") as folder:
        tree = copied(ROOT, Path(folder))
        for bug in BUGS:
            if wanted.only not in bug.fact or bug.fact in held["bugs"]:
                continue
            found = tried(bug, tree, wanted.runs)
            print(bug.fact, {k: len(v["wrong"]) for k, v in found.items() if ":" in k}
                  or found, flush=True)  # fmt: skip
            if "error" in found:
                continue
            held["bugs"][bug.fact] = {"program": bug.program, **found}
            held |= {"machine": machine()}
            path.write_text(json.dumps(held) + "\n")
            (wanted.out / "exploration.md").write_text(table(held["bugs"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
