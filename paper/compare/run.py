"""Compares PyTorch's distributed autograd and jdag, which alternate in one run.

    python -m paper.compare.run --peer PYTHON --ray PYTHON [--rounds 7] [--quick]

`--peer` and `--ray` (or the variables JDAG_PEER and JDAG_RAY) are the Pythons of
environments with PyTorch, the peer, and with Ray. Eager calls and plans are compared
with the peer, and plans also with Ray's Compiled Graph.

Each round restarts each system, with a caller, three workers and the same allocator
settings: once with the caller on one core and the workers on the others, and
once with all processes on one core. Every second round has the opposite order of
systems. Measurements count only if the computed numbers equal the peer's and all
processes ran on the requested cores. After each round, and even when interrupted, the
script writes `compare.json`, `compare.md` and the picture `compare.png` to
`paper/results/` with all measurements; the page lists the missing ones. `--quick` only
tests the script, and writes nothing.
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

from paper.compare import pinning, rows
from paper.compare.page import page
from paper.compare.picture import draw
from paper.compare.rows import EAGER, JUDGED, PEER, PLAN, RAY, SYSTEMS
from paper.figures import RESULTS, machine

ROOT = Path(__file__).parents[2]
INSTALL = (
    "it needs a separate environment: python3.11 -m venv DIR && "
    "DIR/bin/pip install {package} numpy; then --{option} DIR/bin/python"
)
# The package that must be installed for the Python of each option.
PACKAGES = {"peer": "torch==2.13.0", "ray": "ray==2.60.0"}
COSTS = [sys.executable, "-m", "paper.compare.costs"]
# For large arrays, new pages of memory cost most, so no system may free its pages.
TUNABLES = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 1 << 34,
    "glibc.malloc.trim_threshold": 1 << 34,
    "glibc.malloc.top_pad": 1 << 26,
}
ROUND_S = 900
SPREAD_MAX = 0.15  # The maximum of (largest - least ratio) / median ratio.
RELATIVE, ABSOLUTE = 1e-3, 1e-6  # Tolerances for equal numbers in float32.

Found = Mapping[str, Any]


def environment() -> dict[str, str]:
    """Return the environment of all systems; `pinning` adds numbers of threads."""
    tunables = ":".join(f"{key}={value}" for key, value in TUNABLES.items())
    return {**os.environ, "PYTHONPATH": str(ROOT), "GLIBC_TUNABLES": tunables}


def commands(peer: str, ray: str, more: Sequence[str]) -> dict[str, list[str]]:
    """Return the command of each of `SYSTEMS`, without `--pin`."""
    ours = [sys.executable, "-m", "paper.compare.ours"]
    return {
        PEER: [peer, "-W", "ignore", "-m", "paper.compare.peer", *more],
        **{name: [*ours, "--mode", mode, *more] for name, mode in EAGER.items()},
        PLAN: [sys.executable, "-m", "paper.compare.plans", *more],
        RAY: [ray, "-W", "ignore", "-m", "paper.compare.ray_graphs", *more],
    }


def taken(command: Sequence[str], found: dict[str, Any]) -> str:
    """Run the script of one system once, and add its results to `found`.

    Returns the reason if results are missing, otherwise "". Results that the system
    printed before a failure are kept.
    """
    with TemporaryFile("w+") as out, TemporaryFile("w+") as errors:
        try:
            code = subprocess.call(
                command,
                env=environment(),
                cwd=ROOT,
                stdout=out,
                stderr=errors,
                timeout=ROUND_S,
            )
        except subprocess.TimeoutExpired:
            return f"not finished within {ROUND_S} s"
        finally:
            out.seek(0)
            last = _last(out)
            for kind, part in last.items():
                found[kind] = {**found.get(kind, {}), **part}
        if not code:
            return "" if last else "it printed no results"
        errors.seek(0)
        said = errors.read().strip()
        sys.stderr.write(f"{' '.join(command)}\n{said}\n")
        return f"exit code {code}: {said.rpartition(chr(10))[2]}"


def _last(lines: Iterable[str]) -> dict[str, Any]:
    """Return the last line that is a valid JSON object, parsed."""
    found: dict[str, Any] = {}
    for line in lines:
        if line.startswith("{"):
            with suppress(ValueError):
                found = json.loads(line)
    return found


class Comparison:
    """The measurements so far, and the reasons for missing ones.

    Args:
        about: the machine and the settings.
        count: the number of requested rounds.
    """

    def __init__(self, about: Found, count: int) -> None:
        self.about = about
        self.count = count
        self.rounds: list[dict[str, Any]] = []
        self.costs: dict[str, Any] = {}
        self.failures: list[str] = []

    def round(self, started: Mapping[str, Sequence[str]]) -> None:
        """Run all systems once; in every second round, in the opposite order."""
        number = len(self.rounds) + 1
        one: dict[str, Any] = {"load": os.getloadavg()[0]}
        self.rounds.append(one)
        for how in pinning.WAYS:  # Systems with the same cores run consecutively.
            for name in list(started)[:: 1 if number % 2 else -1]:
                found = one.setdefault(name, {})
                why = taken([*started[name], "--pin", how], found)
                if why:
                    self.failures.append(f"round {number}, {name}, {how}: {why}")
                said = f"{name}, {how}, {why or 'is done'}"
                sys.stderr.write(f"round {number} of {self.count}: {said}\n")

    def cost(self, command: Sequence[str]) -> None:
        """Measure the costs of jdag's rows by `command`."""
        why = taken(command, self.costs)
        if why:
            self.failures.append(f"costs: {why}")

    def record(self) -> dict[str, Any]:
        """Return the contents of `compare.json`, including missing measurements."""
        missing = list(self.failures)
        each = []
        for number, one in enumerate(self.rounds, 1):
            kept = {"load": one["load"]}
            for name in SYSTEMS:
                found = one.get(name, {})
                truth = one.get(PLAN if name == RAY else PEER, {})
                if name not in one:
                    missing.append(f"round {number}, {name}: not measured")
                elif why := difference(truth, found) or astray(found):
                    missing.append(f"round {number}, {name}: {why}")
                elif found:
                    kept[name] = {k: v for k, v in found.items() if k != "numbers"}
            each.append(kept)
        if len(each) < self.count:
            missing.append(f"rounds: {len(each)} of {self.count} were begun")
        found = summary(each)
        without = [
            f"{one['row']}, {name}"
            for one in found
            for name in (JUDGED, PLAN)
            if (figure := one.get(name)) and figure["ratio"] is None
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
            "costs": self.costs,
            "each": each,
        }

    def write(self) -> None:
        """If anything was measured, replace each result file atomically."""
        written = self.record()
        if any(name in one for one in written["each"] for name in SYSTEMS):
            _put("compare.json", f"{json.dumps(written, indent=1)}\n".encode())
            _put("compare.md", page(written).encode())
            _put("compare.png", draw(written))


def _put(name: str, content: bytes) -> None:
    part = RESULTS / f"{name}.part"
    part.write_bytes(content)
    part.replace(RESULTS / name)


def astray(found: Found) -> str:
    """Return which process ran on other cores than requested, or ""."""
    for how, held in found.get("cores", {}).items():
        caller, workers = pinning.cores_of(how, os.sched_getaffinity(0))
        for name, cores in held.items():
            asked = caller if name == pinning.CALLER else workers
            if cores != asked:
                return f"not counted: {how}, {name} ran on cores {cores}, not {asked}"
    return ""


def difference(peer: Found, ours: Found) -> str:
    """Return the first number that differs from the peer's, or "" if all agree."""
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


# --------------------------------------------------------------------------- results


def summary(rounds: Sequence[Found]) -> list[dict[str, Any]]:
    """Return the medians of each row over the rounds, and the ratios to the peer.

    A value is None if no round has the needed measurements.
    """
    result = []
    for row in rows.of_both():
        targets = rows.TARGETS[row.removesuffix(rows.ON_ONE)]
        peer = RAY if row.startswith("graph") else PEER
        one: dict[str, Any] = {"row": row, PEER: _median(rounds, peer, row)}
        for name in (*EAGER, PLAN):
            if (PLAN if name == PLAN else JUDGED) in targets:
                one[name] = compared(rounds, name, peer, row, targets.get(name))
        result.append(one)
    return result


def compared(
    rounds: Sequence[Found], ours: str, theirs: str, row: str, target: float | None
) -> dict[str, Any]:
    """Return the median of a row of `ours`, and the median of its ratio to `theirs`.

    The ratio is `unsteady` if its spread over the rounds exceeds SPREAD_MAX.
    """
    pairs = [
        (_figure(found, ours, row), _figure(found, theirs, row)) for found in rounds
    ]
    ratios = [one / other for one, other in pairs if one and other]
    ratio = spread = None
    if ratios:
        ratio = statistics.median(ratios)
        spread = (max(ratios) - min(ratios)) / ratio
    return {
        "median": _median(rounds, ours, row),
        "ratio": ratio,
        "ratio_min": min(ratios, default=None),
        "ratio_max": max(ratios, default=None),
        "spread": spread,
        "unsteady": None if spread is None else spread > SPREAD_MAX,
        "target": target,
        "met": None if ratio is None or target is None else ratio <= target,
    }


def _figure(found: Found, name: str, row: str) -> float | None:
    figure: float | None = found.get(name, {}).get("rows", {}).get(row)
    return figure


def _median(rounds: Sequence[Found], name: str, row: str) -> float | None:
    figures = [_figure(found, name, row) for found in rounds]
    known = [figure for figure in figures if figure is not None]
    return statistics.median(known) if known else None


def check(option: str, python: str | None) -> None:
    """If a Python lacks its package, exit with instructions to install it."""
    found, package = shutil.which(python or ""), PACKAGES[option]
    module = package.partition("==")[0]
    if found is None or subprocess.call(
        [found, "-c", f"import {module}, numpy"], stderr=subprocess.DEVNULL
    ):
        install = INSTALL.format(package=package, option=option)
        raise SystemExit(f"{python} is not a Python with {module}: {install}")


def main(arguments: Sequence[str]) -> None:
    """Run the comparison, and write the result files.

    Exits with 1 if measurements are missing, and with 130 after an interrupt.
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
    pins = {how: pinning.cores_of(how, os.sched_getaffinity(0)) for how in pinning.WAYS}
    settings = {
        **{f"cores of caller and workers {how}": pin for how, pin in pins.items()},
        "batch": rows.BATCH,
        **TUNABLES,
    }
    about = {"machine": machine(), "settings": settings}
    count = 1 if given.quick else given.rounds
    made = Comparison(about, count)
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
