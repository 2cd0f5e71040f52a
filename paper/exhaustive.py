"""Explores all orders of events of two-worker programs; compares with brute force.

    python -m paper.exhaustive                 all programs, at most 100,000 runs each
    python -m paper.exhaustive --only ring

Programs of two calls have abstract values. Programs of four calls have real values:
each order must give the oracle's gradients, and all orders the same bits. After each
program, `paper/results/exhaustive.json` (counts) and `exhaustive.md` (table) are
written.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdag.lab.exploration import exploration, sound
from jdag.lab.strategies import Exhaustive
from jdag.lab.subject import Subject
from jdag.scenario import Case
from paper.figures import RESULTS, machine
from tests.tools.brute_orders import TWO_CALLS, case_of, searched

RUNS = 100_000
FOUR_CALLS = {
    "four here": case_of("b", ("a", (0, 0)), ("a", (1,)), ("a", (2,)), ("a", (3,))),
    "own leaf, two here, two there": case_of(
        "a", ("a", (0, 0)), ("a", (1,)), ("b", (2,)), ("b", (3,))
    ),
    "own leaf, diamond": case_of(
        "a", ("a", (0,)), ("a", (1,)), ("a", (1,)), ("b", (2, 3))
    ),
    "own leaf, ring": case_of(
        "a", ("a", (0, 0)), ("b", (1,)), ("a", (2,)), ("b", (3,))
    ),
    "ring": case_of("b", ("b", (0, 0)), ("a", (1,)), ("b", (2,)), ("a", (3,))),
}
PROGRAMS: Mapping[str, tuple[int, Case]] = {
    **{name: (2, case) for name, case in TWO_CALLS.items()},
    **{name: (4, case) for name, case in FOUR_CALLS.items()},
}
COLUMNS = "runs", "redundant", "orders", "left", "brute_force", "wrong"


def explored(name: str, runs: int = RUNS) -> dict[str, Any]:
    """Explore the orders of a program's events in at most `runs` runs."""
    calls, case = PROGRAMS[name]
    subject = Subject(case, ["a", "b"], "abstract" if calls == 2 else "real", {})
    strategy = Exhaustive(runs)
    found = exploration(subject, sound, range(runs), strategy)
    return {
        "runs": found.runs,
        "redundant": found.redundant,
        "orders": found.orders,
        "left": "no" if strategy.complete else "yes",
        "brute_force": len(searched(subject)),
        "wrong": str(found.failure or "none"),
    }


def table(programs: Mapping[str, Any]) -> str:
    """Return the results as a page in Markdown with a table."""
    heads = ["program", "calls", *[one.replace("_", " ") for one in COLUMNS]]
    lines = [heads, ["---"] * len(heads)]
    for name, of in sorted(programs.items(), key=lambda one: [*PROGRAMS].index(one[0])):
        cells = [PROGRAMS[name][0], *[of[one] for one in COLUMNS]]
        shown = [f"{one:,}" if isinstance(one, int) else one for one in cells]
        lines.append([name, *shown])
    said = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        "# Programs of two workers in all orders\n\nThere is one run for each order in "
        "which events arrive at engines. Redundant runs were stopped because their "
        "order had been seen. The column `left` tells whether orders remain. "
        "Programs of two calls have abstract values, other "
        f"programs real values.\n\n{said}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Explore the programs, and write the results after each program."""
    parser = argparse.ArgumentParser(prog="python -m paper.exhaustive")
    parser.add_argument("--runs", type=int, default=RUNS)
    text = "run only programs whose name contains this text"
    parser.add_argument("--only", default="", help=text)
    parser.add_argument("--out", type=Path, default=RESULTS)
    wanted = parser.parse_args(arguments)
    path = wanted.out / "exhaustive.json"
    programs = json.loads(path.read_text())["programs"] if path.exists() else {}
    for name in PROGRAMS:
        if wanted.only in name:
            programs[name] = explored(name, wanted.runs)
            print(name, programs[name], flush=True)
            said = json.dumps({"programs": programs, "machine": machine()}, indent=1)
            path.write_text(said + "\n")
            (wanted.out / "exhaustive.md").write_text(table(programs))
    return 1 if any(of["wrong"] != "none" for of in programs.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
