"""Measures how long jdag takes to start: its import, its help, and a small scenario.

    python -m paper.cold [--rounds 11]

Each round starts all rows in turn, each in a new process on one core, with bytecode in
place. `wall` is the time until the process ends, `cpu` its CPU time, both medians, and
`least` the smallest CPU time, which other load disturbs least. In rows "with jax" these
are the times of the statement alone, in a process that has imported JAX. The last
column is the ratio of `cpu` to that of `import jax`. `paper/results/cold.json` contains
the rows and, from `python -X importtime`, how the imports of the scenario are
distributed over packages; `cold.md` has both as tables.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from paper.figures import RESULTS, machine

ROOT = Path(__file__).parent.parent
SCENARIO = str(ROOT / "scenarios" / "chain.toml")
RUN = ("-m", "jdag", "run", SCENARIO, "--out")
TIMED = (
    "import time, jax, jax.numpy;"
    "wall, cpu = time.perf_counter(), time.process_time(); {};"
    "print(time.perf_counter() - wall, time.process_time() - cpu)"
)
# Each row: the arguments of Python, and the target in ms.
ROWS: dict[str, tuple[tuple[str, ...], int | None]] = {
    "python -c pass": (("-c", "pass"), None),
    "import jax": (("-c", "import jax, jax.numpy"), None),
    "import typer": (("-c", "import typer"), None),
    "import jdag, with jax": (("-c", TIMED.format("import jdag")), 120),
    "jdag.simulate, with jax": (
        ("-c", TIMED.format("import jdag; jdag.simulate")),
        None,
    ),
    "jdag --help": (("-m", "jdag", "--help"), 100),
    "jdag run scenarios/chain.toml": (RUN, 1500),
}
PACKAGES_MAX = 12
IMPORTS_RUNS = 3


def started(arguments: Sequence[str]) -> tuple[float, float]:
    """Run Python. Returns wall and CPU time in ms; for `TIMED`, the printed times."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        words = [*arguments, *([folder] if "--out" in arguments else [])]
        before, began = cpu_s(), time.perf_counter()
        done = subprocess.run(
            [sys.executable, *words], env=env, check=True, capture_output=True
        )
        took_s = time.perf_counter() - began
        used_s = cpu_s() - before
    if "perf_counter" in arguments[1]:
        took_s, used_s = map(float, done.stdout.split())
    return took_s * 1e3, used_s * 1e3


def cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def imports() -> dict[str, float]:
    """Return the ms that the modules of each package take in the scenario's process."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    least: dict[str, int] = {}
    for _ in range(IMPORTS_RUNS):
        with tempfile.TemporaryDirectory() as folder:
            words = [sys.executable, "-X", "importtime", *RUN, folder]
            done = subprocess.run(words, env=env, check=True, capture_output=True)
        for line in done.stderr.decode().splitlines():
            own, _, module = line.removeprefix("import time:").partition("|")
            if own.strip().isdigit():
                name = module.partition("|")[2].strip()
                least[name] = min(int(own), least.get(name, int(own)))
    times: Counter[str] = Counter()
    for name, us in least.items():
        times[name.partition(".")[0]] += us
    return {name: us / 1e3 for name, us in times.most_common(PACKAGES_MAX)}


def table(rows: dict[str, dict[str, float | None]], packages: dict[str, float]) -> str:
    """Return the results as tables in Markdown."""
    heads = "| | target | wall | cpu | least | of import jax |"
    lines = [heads, "| --- |" + " ---: |" * 5]
    for name, row in rows.items():
        target = "" if row["target_ms"] is None else f"{row['target_ms']} ms"
        times = " | ".join(
            [f"{row[key]:.1f} ms" for key in ("wall_ms", "cpu_ms", "cpu_least_ms")]
        )
        lines.append(f"| {name} | {target} | {times} | {row['ratio']:.3f} |")
    lines += ["", "| package | imports |", "| --- | ---: |"]
    lines += [f"| {name} | {ms:.1f} ms |" for name, ms in packages.items()]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Start all rows in turn, print the tables and write the results."""
    parser = argparse.ArgumentParser(prog="python -m paper.cold")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", type=Path, default=RESULTS)
    wanted = parser.parse_args(arguments)
    here = machine()
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ROWS}
    for number in range(1 + wanted.rounds):  # The first round fills caches.
        for name, times in found.items():
            result = started(ROWS[name][0])
            if number:
                times.append(result)
    rows: dict[str, dict[str, float | None]] = {}
    jax_ms = statistics.median([cpu for _, cpu in found["import jax"]])
    for name, times in found.items():
        wall_ms, cpu_ms = (statistics.median(each) for each in zip(*times, strict=True))
        row = {"target_ms": ROWS[name][1], "wall_ms": wall_ms, "cpu_ms": cpu_ms}
        row["cpu_least_ms"] = min(cpu for _, cpu in times)
        rows[name] = {**row, "ratio": cpu_ms / jax_ms}
    packages = imports()
    written = table(rows, packages)
    print(written)
    facts = {"what": (__doc__ or "").partition("\n")[0], "rounds": wanted.rounds}
    facts |= {"rows": rows, "imports_ms": packages, "machine": here}
    (wanted.out / "cold.json").write_text(json.dumps(facts, indent=1) + "\n")
    versions = f"Python {sys.version.split()[0]}, JAX {here['jax']}, one core"
    (wanted.out / "cold.md").write_text(f"{versions}\n\n{written}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
