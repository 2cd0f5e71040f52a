"""PyTorch's distributed autograd and jdag side by side, in turn in one run.

    python -m paper.compare.run --peer PYTHON [--rounds 5] [--quick]

PYTHON is that of an environment that has the peer; the variable JDAG_PEER names it too.
Each round starts each system anew, a caller and three workers, with the same settings
of the allocator and the same number of threads, every other round in the opposite
order. All must have computed the same numbers. Writes `paper/results/compare.json` and
`compare.md`; `--quick` only shows that all works, and writes nothing.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from paper.compare import rows
from paper.compare.bounds import bound
from paper.compare.costs import table as table_of_costs
from paper.figures import RESULTS, machine

ROOT = Path(__file__).parents[2]
INSTALL = (
    "it takes an environment of its own: python3.11 -m venv DIR && "
    "DIR/bin/pip install torch==2.13.0 numpy; then --peer DIR/bin/python"
)
PEER = "peer"
JUDGED = "socket, FAST"
OURS = {
    JUDGED: ("--carrier", "socket", "--mode", "fast"),
    "socket, SMART": ("--carrier", "socket", "--mode", "smart"),
    "grpc, FAST": ("--carrier", "grpc", "--mode", "fast"),
}
# What large arrays cost is mostly fresh pages; so nobody gives any back.
TUNABLES = {
    "glibc.malloc.hugetlb": 1,
    "glibc.malloc.mmap_threshold": 1 << 34,
    "glibc.malloc.trim_threshold": 1 << 34,
    "glibc.malloc.top_pad": 1 << 26,
}
ROUND_S = 900
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


def commands(peer: str, more: Sequence[str]) -> dict[str, list[str]]:
    """How each system is started."""
    ours = [sys.executable, "-m", "paper.compare.ours"]
    return {
        PEER: [peer, "-W", "ignore", "-m", "paper.compare.peer", *more],
        **{name: [*ours, *given, *more] for name, given in OURS.items()},
    }


def taken(name: str, command: Sequence[str], threads: int) -> dict[str, Any]:
    """Run one system once; return what it found."""
    done = subprocess.run(
        command,
        env=environment(threads),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=ROUND_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name} failed: {' '.join(command)}\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def rounds_of(
    started: Mapping[str, list[str]], count: int, threads: int
) -> list[dict[str, Any]]:
    """Run all systems in turn, so many times; check what they computed."""
    rounds = []
    for number in range(count):
        names = list(started) if number % 2 == 0 else list(started)[::-1]
        one: dict[str, Any] = {"load": os.getloadavg()[0]}
        for name in names:
            one[name] = taken(name, started[name], threads)
            sys.stderr.write(f"round {number + 1} of {count}: {name} is done\n")
        for name in names:
            check_same(name, one[PEER]["numbers"], one[name]["numbers"])
        rounds.append(one)
    return rounds


def check_same(name: str, peer: Found, ours: Found) -> None:
    """Refuse to go on where a system computed something else than the peer."""
    for key, value in peer.items():
        one, other = _flat(value), _flat(ours[key])
        if one.shape != other.shape or not np.allclose(
            one, other, rtol=RELATIVE, atol=ABSOLUTE
        ):
            raise SystemExit(f"{key}: {name} has {ours[key]}, the peer {value}")


def _flat(value: Any) -> np.ndarray:
    if isinstance(value, list):
        return np.concatenate([_flat(part) for part in value])
    return np.array([value], dtype=np.float64)


# ------------------------------------------------------------------------- what it says


def summary(rounds: Sequence[Found]) -> list[dict[str, Any]]:
    """For each row the medians of the rounds, and the ratios to the peer's."""
    result = []
    for row, target in rows.TARGETS.items():
        one: dict[str, Any] = {"row": row, "target": target}
        one[PEER] = statistics.median(found[PEER]["rows"][row] for found in rounds)
        for name in OURS:
            ratios = [
                found[name]["rows"][row] / found[PEER]["rows"][row] for found in rounds
            ]
            one[name] = {
                "median": statistics.median(
                    found[name]["rows"][row] for found in rounds
                ),
                "ratio": statistics.median(ratios),
                "ratio_min": min(ratios),
                "ratio_max": max(ratios),
            }
        one["met"] = one[JUDGED]["ratio"] <= target
        result.append(one)
    return result


def table(found: Sequence[Found]) -> str:
    """The summary as a table in Markdown."""
    others = [name for name in OURS if name != JUDGED]
    lines = [
        f"| row | peer | jdag: {JUDGED} | ratio (rounds) | target | met "
        f"| {' | '.join(others)} |",
        f"| --- | ---: | ---: | ---: | ---: | --- |{' ---: |' * len(others)}",
    ]
    for row in found:
        judged = row[JUDGED]
        ratios = f"{judged['ratio_min']:.2f} to {judged['ratio_max']:.2f}"
        more = " | ".join(f"{row[name]['ratio']:.2f}" for name in others)
        lines.append(
            f"| {row['row']} | {amount(row['row'], row[PEER])} "
            f"| {amount(row['row'], judged['median'])} "
            f"| **{judged['ratio']:.2f}** ({ratios}) | {row['target']} "
            f"| {'yes' if row['met'] else 'no'} | {more} |"
        )
    return "\n".join(lines) + "\n"


def amount(row: str, value: float) -> str:
    """A figure with its unit: bytes where the row is of memory, else a time."""
    if "memory" in row:
        return f"{value / 1e6:.0f} MB"
    return f"{value * 1e6:.0f} us" if value < 1e-3 else f"{value * 1e3:.3g} ms"


def misses(found: Sequence[Found], costs: Found) -> str:
    """What bounds the rows that miss their targets, each said once."""
    said: dict[str, list[str]] = {}
    for row in found:
        if not row["met"]:
            said.setdefault(bound(row["row"], costs), []).append(row["row"])
    lines = [f"- {'; '.join(names)}. {why}" for why, names in said.items()]
    return "\n".join(["## What bounds the rows that miss", "", *lines, ""])


def page(found: Sequence[Found], about: Found, costs: Found) -> str:
    """The whole of `compare.md`."""
    settings = ", ".join(f"{key} {value}" for key, value in about["settings"].items())
    where = ", ".join(f"{key} {value}" for key, value in about["machine"].items())
    return (
        "# PyTorch's distributed autograd and jdag, side by side\n\n"
        f"Judged is FAST mode on sockets: FAST is the peer's rule for passes. SMART, "
        "jdag's default, first finds what a pass needs; its ratios, and those of the "
        "gRPC carrier, are in the last columns.\n\n"
        f"{table(found)}\n"
        f"Medians of {about['rounds']} rounds in turn, of p50s in each; the ratio is "
        "jdag / peer, its range that of the rounds. `paper/compare/rows.py` has what "
        "each row does.\n\n"
        f"Machine: {where}. Load average before each round: "
        f"{', '.join(f'{load:.1f}' for load in about['loads'])}.\n\n"
        f"Settings of both: {settings}.\n\n"
        f"{misses(found, costs)}\n"
        "## What one of each costs our side\n\n"
        "After the rounds, the least of 5; calls and shares by a profile, which itself "
        "takes about as long again; `paper/compare/costs.py` has what is counted.\n\n"
        f"{table_of_costs(costs['rows'])}"
    )


def check_peer(python: str | None) -> None:
    """Refuse, in one line that says what to install, a Python without the peer."""
    found = shutil.which(python or "")
    if found is None or subprocess.call(
        [found, "-c", "import torch, numpy"], stderr=subprocess.DEVNULL
    ):
        raise SystemExit(f"{python} is no Python that has the peer: {INSTALL}")


def main(arguments: Sequence[str]) -> None:
    """Compare, and write both files."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer", default=os.environ.get("JDAG_PEER"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    check_peer(given.peer)
    threads = len(os.sched_getaffinity(0))
    more = ("--quick",) if given.quick else ()
    count = 1 if given.quick else given.rounds
    rounds = rounds_of(commands(given.peer, more), count, threads)
    found = summary(rounds)
    command = [sys.executable, "-m", "paper.compare.costs"]
    costs = taken("costs", command, threads)
    about = {
        "machine": {**machine(), "torch": rounds[0][PEER]["settings"]["torch"]},
        "settings": {"threads": threads, "batch": rows.BATCH, **TUNABLES},
        "rounds": count,
        "loads": [one["load"] for one in rounds],
    }
    if not given.quick:
        for one in rounds:
            for name in (PEER, *OURS):
                del one[name]["numbers"]
        written = {"figure": "compare", **about, "rows": found, "costs": costs}
        written["each"] = rounds
        text = json.dumps(written, indent=1)
        (RESULTS / "compare.json").write_text(text + "\n")
        (RESULTS / "compare.md").write_text(page(found, about, costs))
    sys.stdout.write(page(found, about, costs))


if __name__ == "__main__":
    main(sys.argv[1:])
