"""Compare the bits of gradients and losses between this checkout and another one.

    python -m tests.tools.same_bits OTHER_CHECKOUT [--quick]

All scenarios, the documents' examples and 100 random programs (in both modes) run with
the jdag of each checkout, on both drivers, on this machine under the same settings.
Every value that the main program fetches is compared bit by bit; sizes, times and trace
digests are not. Both sides use the random programs and the runner of this checkout
(`tests.tools.same_bits_child`) and the documents of the other one. Exit codes: 0 no
difference; 1 a value differs, or a program fails on one side only.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from tests import ROOT
from tests.tools.documents import documents

DRIVERS = ("sim", "rpc")
PROGRAMS = 100
CHUNK = 25  # Random programs in one process.
LIMIT_S = 3000.0
QUICK = ("chain", "diamond", "digits", "replicas_on_workers")
QUICK_PROGRAMS = 6
NOT_ALIKE = ("DIFFERS", "FAILED")


class Job(NamedTuple):
    kind: str
    driver: str
    arguments: tuple[str, ...]


Found = dict[str, Any]  # By program: its records, and its error or None.


def jobs(other: Path, quick: bool) -> Iterator[Job]:
    files = {file.name for at in (ROOT, other) for file in at.glob("scenarios/*.toml")}
    programs = QUICK_PROGRAMS if quick else PROGRAMS
    for driver in DRIVERS:
        for name in sorted(files):
            if not quick or Path(name).stem in QUICK:
                yield Job("scenario", driver, (f"scenarios/{name}",))
        for page in documents(other):
            if "```python\n" in page.read_text(encoding="utf-8"):
                yield Job("document", driver, (str(page),))
        for first in range(0, programs, CHUNK):
            end = min(first + CHUNK, programs)
            yield Job("random", driver, (str(first), str(end)))


def side_of(checkout: Path, folder: Path) -> Path:
    """Make a folder to run in: jdag and scenarios of a checkout, tests of this one."""
    folder.mkdir()
    for name, at in (("jdag", checkout), ("scenarios", checkout), ("tests", ROOT)):
        (folder / name).symlink_to(at / name)
    return folder


def ran(job: Job, side: Path) -> Found:
    environ = {
        **os.environ,
        "PYTHONPATH": str(side),
        "PYTHONHASHSEED": "0",
        "JAX_COMPILATION_CACHE_DIR": f"{tempfile.gettempdir()}/jdag-same-bits-compiled",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    with tempfile.TemporaryDirectory(dir=side.parent) as folder:
        out = Path(folder, "out.json")
        command = [
            sys.executable,
            "-m",
            "tests.tools.same_bits_child",
            job.kind,
            job.driver,
        ]
        try:
            done = subprocess.run(
                [*command, str(out), *job.arguments],
                cwd=side,
                env=environ,
                capture_output=True,
                text=True,
                check=False,
                timeout=LIMIT_S,
            )
            if out.exists():
                found: Found = json.loads(out.read_text())
                return found
            said = f"exit code {done.returncode}: {done.stderr.strip()[-300:]}"
        except subprocess.TimeoutExpired:
            said = f"no end within {LIMIT_S:g} s"
    return {f"{job.kind} {' '.join(job.arguments)}": {"records": [], "error": said}}


NOTHING = {"records": [], "error": "it is not there"}


def compared(here: dict[str, Any], there: dict[str, Any]) -> tuple[str, str]:
    errors = here["error"], there["error"]
    both = list(zip(here["records"], there["records"], strict=False))
    for number, (one, other) in enumerate(both):
        if one != other:
            what = one[0] if one[0] == other[0] else f"{one[0]} and {other[0]}"
            return "DIFFERS", f"value {number}, {what}: {one[1]} here, {other[1]} there"
    if (errors[0] is None) != (errors[1] is None):
        where = "there" if errors[0] is None else "here"
        return "FAILED", f"{where} only: {errors[0] or errors[1]}"
    counts = len(here["records"]), len(there["records"])
    if counts[0] != counts[1]:
        return "DIFFERS", f"{counts[0]} values here, {counts[1]} there"
    if errors[0] is not None:
        return "skipped", f"fails on both sides: {errors[0]}"
    return "same", f"{counts[0]} values"


def judged(job: Job, here: Path, there: Path) -> Iterator[tuple[str, str, str]]:
    """Run a job on both sides; yield name, verdict and reason for each of its programs.

    A job with a difference runs once more on this side: its bits may vary by nature.
    """
    with ThreadPoolExecutor(2) as pool:
        mine, other = pool.map(lambda side: ran(job, side), (here, there))
    again: Found | None = None
    for name in dict.fromkeys((*mine, *other)):
        found = mine.get(name, NOTHING)
        verdict, why = compared(found, other.get(name, NOTHING))
        if verdict in NOT_ALIKE and name in mine:
            again = ran(job, here) if again is None else again
            if compared(found, again.get(name, NOTHING))[0] in NOT_ALIKE:
                verdict, why = "varies", f"from run to run on this side; {why}"
        yield f"{name} on {job.driver}", verdict, why


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.same_bits")
    parser.add_argument("other", type=Path, help="another checkout of jdag")
    parser.add_argument("--quick", action="store_true", help="a few of each kind")
    parser.add_argument("--only", default="", help="jobs with this text in them")
    wanted = parser.parse_args(arguments)
    other = wanted.other.resolve()
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="jdag-same-bits-") as folder:
        here = side_of(ROOT, Path(folder, "here"))
        there = side_of(other, Path(folder, "there"))
        for job in jobs(other, wanted.quick):
            if wanted.only in f"{job.kind} {job.driver} {' '.join(job.arguments)}":
                for name, verdict, why in judged(job, here, there):
                    print(f"{verdict:8} {name}: {why}", flush=True)
                    counted[verdict] += 1
    print(", ".join(f"{number} {what}" for what, number in sorted(counted.items())))
    return 1 if any(counted[what] for what in NOT_ALIKE) or not counted else 0


if __name__ == "__main__":
    sys.exit(main())
