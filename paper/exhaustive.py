"""Programs of two workers in all orders of their events, beside a brute force.

    python -m paper.exhaustive                 all programs, at most 100,000 runs each
    python -m paper.exhaustive --only ring

Programs of two calls have abstract values, and their orders are counted by a brute
force, too; those of four calls have real values, of which each order is held to the
oracle and to one bit pattern. `paper/results/exhaustive.json` has the counts and
`exhaustive.md` the table, after every few runs; another call goes on from there. The
orders of a program are in a file beside them until it is done.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jdag.lab.exploration import exploration, sound
from jdag.lab.strategies import Exhaustive
from jdag.lab.subject import Subject
from jdag.scenario import Case
from paper.figures import RESULTS, events_per_s, machine
from tests.brute_orders import TWO_CALLS, case_of, searched

RUNS = 100_000
CHUNK = 500  # Runs that are lost if the process ends.
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
HEADS = (
    *("program", "calls", "runs", "redundant", "orders", "left", "brute force"),
    *("wrong", "runs per CPU-second", "of a million events"),
)
NONE = {
    "runs": 0,
    "redundant": 0,
    "orders": 0,
    "learned": [],
    "wrong": "",
    "cpu_s": 0.0,
}


def explored(
    name: str, held: dict[str, Any], orders: Path, runs: int
) -> Iterator[None]:
    """Go on with a program; yield after every few runs, when `held` has all."""
    calls, case = PROGRAMS[name]
    subject = Subject(case, ["a", "b"], "abstract" if calls == 2 else "real", {})
    strategy = Exhaustive(runs)
    if held["learned"]:
        strategy.learn(held["learned"])
    lines = orders.read_text().split() if held["runs"] else []
    seen = dict.fromkeys(lines[: held["orders"]])
    orders.write_text("".join([f"{order}\n" for order in seen]))
    spent, began = held["cpu_s"], time.process_time()
    while not (strategy.complete or held["wrong"]):
        tried = held["runs"] + held["redundant"]
        if tried >= runs:
            break
        chunk = range(tried, min(tried + CHUNK, runs))
        found = exploration(subject, sound, chunk, strategy)
        new = [order.hex() for order in found.seen if order.hex() not in seen]
        seen |= dict.fromkeys(new)
        with orders.open("a") as file:
            file.writelines([f"{order}\n" for order in new])
        held["runs"] += found.runs
        held["redundant"] += found.redundant
        held["orders"] = len(seen)
        held["learned"] = [*strategy.learned]
        held["wrong"] = str(found.failure or "")
        held["cpu_s"] = round(spent + time.process_time() - began, 1)
        yield
    if calls == 2:
        held["brute_force"] = len(searched(subject))
    held |= {"done": True, "left": not strategy.complete}


def table(programs: Mapping[str, Any]) -> str:
    """The results as a table."""
    lines = [[*HEADS], ["---"] * len(HEADS)]
    for name in PROGRAMS:
        if name not in programs:
            continue
        of = programs[name]
        rate = of["runs"] / (of["cpu_s"] or 1)
        cells = [name, PROGRAMS[name][0], of["runs"], of["redundant"], of["orders"]]
        left = {True: "yes", False: "no"}.get(of.get("left"), "stopped")
        cells += [left, of.get("brute_force", "-"), of["wrong"] or "none"]
        cells += [round(rate), round(1e6 * rate / of["events_per_s"])]
        lines.append([f"{one:,}" if isinstance(one, int) else one for one in cells])
    said = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return (
        "# Programs of two workers in all orders\n\nOne run for each order, and those"
        " that were given up as their order had been seen (redundant); whether orders"
        " are left. Programs of two calls with abstract values, others with real ones."
        f" The last column is runs per million events of a queue.\n\n{said}\n"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, and write what has been found so far after every few runs."""
    parser = argparse.ArgumentParser(prog="python -m paper.exhaustive")
    parser.add_argument("--runs", type=int, default=RUNS)
    parser.add_argument("--only", default="", help="programs with this in their name")
    parser.add_argument("--out", type=Path, default=RESULTS)
    wanted = parser.parse_args(arguments)
    path = wanted.out / "exhaustive.json"
    held = json.loads(path.read_text()) if path.exists() else {"programs": {}}

    def write() -> None:
        path.write_text(json.dumps({**held, "machine": machine()}, indent=1) + "\n")
        (wanted.out / "exhaustive.md").write_text(table(held["programs"]))

    for name in PROGRAMS:
        of = held["programs"].get(name, {})
        if wanted.only not in name or of.get("done"):
            continue
        orders = wanted.out / f"exhaustive {name}.orders"
        of = {**NONE, **(of if orders.exists() else {})}  # Without them it begins anew.
        of["events_per_s"] = round(events_per_s())
        held["programs"][name] = of
        for _ in explored(name, of, orders, wanted.runs):
            write()
        orders.unlink()
        write()
        print(name, {key: of[key] for key in ("runs", "orders", "wrong")}, flush=True)
    return 1 if any(of["wrong"] for of in held["programs"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())
