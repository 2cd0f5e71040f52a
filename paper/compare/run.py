"""PyTorch's distributed autograd and jdag side by side, in turn in one run.

    python -m paper.compare.run --peer PYTHON --ray PYTHON [--rounds 7] [--quick]

PYTHON is that of an environment that has the peer, and of one that has Ray; the
variables JDAG_PEER and JDAG_RAY name them too. The verdict is that of eager calls;
plans have columns of their own, and a table beside Ray's Compiled Graph.

Each round starts each system anew, a caller and three workers, with the same settings
of the allocator and the same number of threads, every other round in the opposite
order. Figures count only with numbers that are the peer's. After each round, and at the
end however it comes, `paper/results/compare.json` and `compare.md` are written with all
that was measured; the page names what is missing. `--quick` only shows that all works,
and writes nothing.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from textwrap import shorten
from typing import Any

import numpy as np

from paper.compare import rows
from paper.compare.bounds import bound
from paper.compare.costs import table as table_of_costs
from paper.figures import RESULTS, machine

ROOT = Path(__file__).parents[2]
INSTALL = (
    "it takes an environment of its own: python3.11 -m venv DIR && "
    "DIR/bin/pip install {package} numpy; then --{option} DIR/bin/python"
)
# What an option's Python has to have.
PACKAGES = {"peer": "torch==2.13.0", "ray": "ray==2.60.0"}
PEER, PLAN, RAY = "peer", "plan", "Ray"
JUDGED = "socket, FAST"
OURS = {
    JUDGED: ("--carrier", "socket", "--mode", "fast"),
    "socket, SMART": ("--carrier", "socket", "--mode", "smart"),
    "grpc, FAST": ("--carrier", "grpc", "--mode", "fast"),
}
SYSTEMS = (PEER, *OURS, PLAN, RAY)
COSTS = [sys.executable, "-m", "paper.compare.costs"]
# What large arrays cost is mostly fresh pages; so nobody gives any back.
TUNABLES = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 1 << 34,
    "glibc.malloc.trim_threshold": 1 << 34,
    "glibc.malloc.top_pad": 1 << 26,
}
ROUND_S = 900
MET = {True: "yes", False: "no", None: "-"}
RELATIVE, ABSOLUTE = 1e-3, 1e-6  # How near the same numbers are, in float32.

Found = Mapping[str, Any]


def environment(threads: int) -> dict[str, str]:
    """What both sides run in."""
    return {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLIBC_TUNABLES": ":".join(f"{key}={value}" for key, value in TUNABLES.items()),
        "OMP_NUM_THREADS": str(threads),
        "NPROC": str(threads),
    }


def commands(peer: str, ray: str, more: Sequence[str]) -> dict[str, list[str]]:
    """How each of `SYSTEMS` is started."""
    ours = [sys.executable, "-m", "paper.compare.ours"]
    return {
        PEER: [peer, "-W", "ignore", "-m", "paper.compare.peer", *more],
        **{name: [*ours, *given, *more] for name, given in OURS.items()},
        PLAN: [sys.executable, "-m", "paper.compare.plans", *more],
        RAY: [ray, "-W", "ignore", "-m", "paper.compare.ray_graphs", *more],
    }


def taken(command: Sequence[str], threads: int, found: dict[str, Any]) -> str:
    """Run one system once; put what it found into `found`.

    Returns why that is not all, or nothing. However the run ends, what the system has
    printed until then is found.
    """
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        try:
            code = subprocess.call(
                command,
                env=environment(threads),
                cwd=ROOT,
                stdout=out,
                stderr=errors,
                timeout=ROUND_S,
            )
        except subprocess.TimeoutExpired:
            return f"not done within {ROUND_S} s"
        finally:
            out.seek(0)
            found.update(_last(out))
        if not code:
            return "" if found else "it printed no figures"
        errors.seek(0)
        said = errors.read().strip()
        sys.stderr.write(f"{' '.join(command)}\n{said}\n")
        return f"exit code {code}: {said.rpartition(chr(10))[2]}"


def _last(lines: Iterable[str]) -> dict[str, Any]:
    """The last JSON object among lines; the very last one may be cut off."""
    found: dict[str, Any] = {}
    for line in lines:
        if line.startswith("{"):
            with suppress(ValueError):
                found = json.loads(line)
    return found


class Comparison:
    """What has been measured so far, and why there is no more.

    Args:
        about: the machine and the settings.
        count: of rounds that are asked for.
        threads: of each system.
    """

    def __init__(self, about: Found, count: int, threads: int) -> None:
        self.about = about
        self.count = count
        self.threads = threads
        self.rounds: list[dict[str, Any]] = []
        self.costs: dict[str, Any] = {}
        self.failures: list[str] = []

    def round(self, started: Mapping[str, Sequence[str]]) -> None:
        """Run all systems once, every other time in the opposite order."""
        number = len(self.rounds) + 1
        one: dict[str, Any] = {"load": os.getloadavg()[0]}
        self.rounds.append(one)
        for name in list(started)[:: 1 if number % 2 else -1]:
            found = one[name] = {}
            why = taken(started[name], self.threads, found)
            if why:
                self.failures.append(f"round {number}, {name}: {why}")
            done = why or "is done"
            sys.stderr.write(f"round {number} of {self.count}: {name} {done}\n")

    def cost(self, command: Sequence[str]) -> None:
        """Measure what rows cost our side."""
        why = taken(command, self.threads, self.costs)
        if why:
            self.failures.append(f"costs: {why}")

    def record(self) -> dict[str, Any]:
        """What is written: all that counts, and a list of what is missing."""
        missing = list(self.failures)
        each = []
        for number, one in enumerate(self.rounds, 1):
            kept = {"load": one["load"]}
            for name in SYSTEMS:
                found = one.get(name, {})
                truth = one.get(PLAN if name == RAY else PEER, {})
                if name not in one:
                    missing.append(f"round {number}, {name}: not measured")
                elif why := difference(truth, found):
                    missing.append(f"round {number}, {name}: {why}")
                elif found:
                    kept[name] = {k: v for k, v in found.items() if k != "numbers"}
            each.append(kept)
        if len(each) < self.count:
            missing.append(f"rounds: {len(each)} of {self.count} were begun")
        found, graphs = summary(each), beside_ray(each)
        without = [one["row"] for one in found if one["met"] is None]
        planned = [one for one in (*found, *graphs) if one[PLAN]]
        without += [
            f"{one['row']}, {PLAN}" for one in planned if not one[PLAN]["ratio"]
        ]
        if without:
            missing.append(f"rows without a ratio: {'; '.join(without)}")
        if not self.costs:
            missing.append("costs: not measured")
        versions = {"torch": "not measured", "ray": "not measured"}
        for one in each:
            for name in (PEER, RAY):
                versions |= one.get(name, {}).get("settings", {})
        return {
            "figure": "compare",
            "machine": {**self.about["machine"], **versions},
            "settings": self.about["settings"],
            "rounds": len(each),
            "loads": [one["load"] for one in each],
            "missing": missing,
            "rows": found,
            "graphs": graphs,
            "costs": self.costs,
            "each": each,
        }

    def write(self) -> None:
        """Write both files, each at once, if anything was measured; figures first."""
        written = self.record()
        if any(name in one for one in written["each"] for name in SYSTEMS):
            _put("compare.json", json.dumps(written, indent=1) + "\n")
            _put("compare.md", page(written))


def _put(name: str, text: str) -> None:
    part = RESULTS / f"{name}.part"
    part.write_text(text)
    part.replace(RESULTS / name)


def difference(peer: Found, ours: Found) -> str:
    """Where a system computed something else than the peer, as far as both have."""
    theirs, numbers = peer.get("numbers", {}), ours.get("numbers", {})
    for key in theirs:
        if key not in numbers:
            continue
        one, other = _flat(theirs[key]), _flat(numbers[key])
        if one.shape != other.shape or not np.allclose(
            one, other, rtol=RELATIVE, atol=ABSOLUTE
        ):
            has = shorten(str(numbers[key]), 60), shorten(str(theirs[key]), 60)
            return f"not counted: {key} is {has[0]}, the peer's {has[1]}"
    return ""


def _flat(value: Any) -> np.ndarray:
    if isinstance(value, list):
        return np.concatenate([_flat(part) for part in value])
    return np.array([value], dtype=np.float64)


# ------------------------------------------------------------------------- what it says


def summary(rounds: Sequence[Found]) -> list[dict[str, Any]]:
    """For each row the medians of the rounds, and the ratios to the peer's.

    None where no round has a figure, or none has both.
    """
    result = []
    for row, target in rows.TARGETS.items():
        one: dict[str, Any] = {"row": row, "target": target}
        one[PEER] = _median(_figure(found, PEER, row) for found in rounds)
        for name in OURS:
            aim = target if name == JUDGED else None
            one[name] = compared(rounds, (name, row), (PEER, row), aim)
        one["met"] = one[JUDGED]["met"]
        one[PLAN] = None
        plan = row.removesuffix(", backward")
        if plan in rows.PLANS:
            both = [of for of in rows.TARGETS if f"{of}, ".startswith(f"{plan}, ")]
            aim = rows.PLANS[plan]
            one[PLAN] = compared(rounds, (PLAN, plan), (PEER, *both), aim)
        result.append(one)
    return result


def beside_ray(rounds: Sequence[Found]) -> list[dict[str, Any]]:
    """The same of the rows of graphs: a plan's ratio to Ray's time."""
    aim = rows.GRAPH_TARGET
    return [
        {
            "row": row,
            RAY: _median(_figure(found, RAY, row) for found in rounds),
            PLAN: compared(rounds, (PLAN, row), (RAY, row), aim),
        }
        for row in rows.GRAPHS
    ]


def compared(
    rounds: Sequence[Found],
    ours: Sequence[str],
    theirs: Sequence[str],
    target: float | None,
) -> dict[str, Any]:
    """The median of a system's rows, together, and of their ratio to another's."""
    pairs = [(_figure(found, *ours), _figure(found, *theirs)) for found in rounds]
    ratios = [one / other for one, other in pairs if one and other]
    ratio = _median(ratios)
    return {
        "median": _median(one for one, _ in pairs),
        "ratio": ratio,
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        "target": target,
        "met": None if ratio is None or target is None else ratio <= target,
    }


def _figure(found: Found, name: str, *wanted: str) -> float | None:
    measured = found.get(name, {}).get("rows", {})
    figures = [measured[row] for row in wanted if row in measured]
    return sum(figures) if len(figures) == len(wanted) else None


def _median(figures: Iterable[float | None]) -> float | None:
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def table(found: Sequence[Found]) -> str:
    """The summary as a table in Markdown."""
    others = [name for name in OURS if name != JUDGED]
    lines = [
        f"| row | peer | jdag: {JUDGED} | ratio (rounds) | target | met | plan "
        f"| ratio (rounds) | target | met | {' | '.join(others)} |",
        f"| --- | ---: {'| ---: | ---: | ---: | --- ' * 2}|{' ---: |' * len(others)}",
    ]
    for row in found:
        name, plan = row["row"], row[PLAN]
        more = " | ".join(_ratio(row[other]["ratio"]) for other in others)
        planned = _cells(name, plan) if plan else "- | - | - | -"
        lines.append(
            f"| {name} | {amount(name, row[PEER])} "
            f"| {_cells(name, row[JUDGED])} | {planned} | {more} |"
        )
    return "\n".join(lines) + "\n"


def table_of_graphs(found: Sequence[Found]) -> str:
    """Plans beside Ray's Compiled Graph, in Markdown."""
    lines = [
        "| row | Ray | plan | plan / Ray (rounds) | target | met |",
        "| --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in found:
        name, cells = row["row"], _cells(row["row"], row[PLAN])
        lines.append(f"| {name} | {amount(name, row[RAY])} | {cells} |")
    return "\n".join(lines) + "\n"


def _cells(row: str, found: Found) -> str:
    least, most = _ratio(found["ratio_min"]), _ratio(found["ratio_max"])
    return (
        f"{amount(row, found['median'])} | **{_ratio(found['ratio'])}** "
        f"({least} to {most}) | {found['target'] or '-'} | {MET[found['met']]}"
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def amount(row: str, value: float | None) -> str:
    """A figure with its unit: bytes where the row is of memory, else a time."""
    if value is None:
        return "-"
    if "memory" in row:
        return f"{value / 1e6:.0f} MB"
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.3g} ms"


def misses(found: Sequence[Found], costs: Found) -> str:
    """What bounds the rows that miss their targets, each said once."""
    said: dict[str, list[str]] = {}
    for row in found:
        if row["met"] is False:
            said.setdefault(bound(row["row"], costs), []).append(row["row"])
    lines = [f"- {'; '.join(names)}. {why}" for why, names in said.items()]
    return "\n".join(["## What bounds the rows that miss", "", *lines, ""])


def page(written: Found) -> str:
    """The whole of `compare.md`."""
    settings = ", ".join(f"{key} {value}" for key, value in written["settings"].items())
    where = ", ".join(f"{key} {value}" for key, value in written["machine"].items())
    gaps = "".join(f"- {one}\n" for one in written["missing"])
    missing = f"## What is missing\n\n{gaps}\n" if gaps else ""
    costs, no_costs = written["costs"].get("rows"), "It was not measured.\n"
    return (
        "# PyTorch's distributed autograd and jdag, side by side\n\n"
        f"Judged is FAST mode on sockets: FAST is the peer's rule for passes. SMART, "
        "jdag's default, first finds what a pass needs; its ratios, and those of the "
        "gRPC carrier, are in the last columns. A plan (`jdag.compile`) is no part of "
        "that verdict. One of a chain or a fan-out runs forward and backward at once: "
        "its time is in the row of backward, its ratio that to the sum of the peer's "
        "two; one of retained passes runs forward as often too.\n\n"
        f"{table(written['rows'])}\n"
        "Plans beside Ray's Compiled Graph, forward alone: an array goes to a worker "
        "and back, or through so many calls by three workers in turn.\n\n"
        f"{table_of_graphs(written['graphs'])}\n"
        f"Medians of {written['rounds']} rounds in turn, of p50s in each; the ratio is "
        "jdag / peer, its range that of the rounds. `paper/compare/rows.py` has what "
        "each row does.\n\n"
        f"Machine: {where}. Load average before each round: "
        f"{', '.join(f'{load:.1f}' for load in written['loads'])}.\n\n"
        f"Settings of both: {settings}.\n\n"
        f"{missing}"
        f"{misses(written['rows'], written['costs'])}\n"
        "## What one of each costs our side\n\n"
        "After the rounds, the least of 5; calls and shares by a profile, which itself "
        "takes about as long again; `paper/compare/costs.py` has what is counted.\n\n"
        f"{table_of_costs(costs) if costs else no_costs}"
    )


def check(option: str, python: str | None) -> None:
    """Refuse, in one line that says what to install, a Python without a package."""
    found, package = shutil.which(python or ""), PACKAGES[option]
    module = package.partition("==")[0]
    if found is None or subprocess.call(
        [found, "-c", f"import {module}, numpy"], stderr=subprocess.DEVNULL
    ):
        install = INSTALL.format(package=package, option=option)
        raise SystemExit(f"{python} is no Python that has {module}: {install}")


def main(arguments: Sequence[str]) -> None:
    """Compare, and write both files.

    Exits with 1 where something is missing, and with 130 where it was interrupted.
    """
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for option in PACKAGES:
        named = os.environ.get(f"JDAG_{option.upper()}")
        parser.add_argument(f"--{option}", default=named)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    for option in PACKAGES:
        check(option, getattr(given, option))
    threads = len(os.sched_getaffinity(0))
    settings = {"threads": threads, "batch": rows.BATCH, **TUNABLES}
    about = {"machine": machine(), "settings": settings}
    count = 1 if given.quick else given.rounds
    made = Comparison(about, count, threads)
    code = 0
    try:
        more = ("--quick",) if given.quick else ()
        _measure(made, commands(given.peer, given.ray, more), given.quick)
    except KeyboardInterrupt:
        made.failures.append("the rest: it was interrupted")
        code = 130
    except Exception as error:
        made.failures.append(f"the rest: {type(error).__name__}: {error}")
        raise
    finally:
        if not given.quick:
            made.write()
    written = made.record()
    sys.stdout.write(page(written))
    sys.exit(code or int(bool(written["missing"])))


def _measure(made: Comparison, started: Found, quick: bool) -> None:
    for _ in range(made.count):
        made.round(started)
        if not quick:
            made.write()
    made.cost(COSTS)


if __name__ == "__main__":
    main(sys.argv[1:])
