"""Mutation testing: each fault of a list, applied to jdag, must make a test fail.

Run as `python -m tests.mutants`. The list is `tests/mutants.toml`, one table a fault:

    [[mutant]]
    fact = "the promise that the fault breaks"
    file = "jdag/engine/credit.py"
    before = "text that occurs exactly once in the file"
    after = "its replacement"
    tests = ["tests/test_credit.py"]  # Arguments of pytest: files or test ids.
    retired = "the reason why this fault is no longer tried"  # Optional.

Faults are applied one at a time to copies of the working tree (all files that git
tracks or does not ignore). A fault that makes its tests hang counts as killed. Exit
codes: 0 all were killed; 1 some survived or are stale; 2 tests fail without a fault.
"""

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parent.parent
LIST = Path("tests", "mutants.toml")
# Compiled functions are cached, so that the next run is faster.
COMPILED = {
    "JAX_COMPILATION_CACHE_DIR": f"{tempfile.gettempdir()}/jdag-mutants-compiled",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
# These two read the sources as text and would fail for that reason alone.
IGNORED = ("--ignore=tests/test_mutants.py", "--ignore=tests/test_tidy.py")
Verdict = tuple[str, str]  # killed, SURVIVED, STALE, BROKEN or retired; details.
NAMED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
    """One entry of the list."""

    number: int
    fact: str
    file: str
    before: str
    after: str
    tests: list[str]
    retired: str = ""

    def mutated(self, tree: Path) -> str:
        """Return the file with the fault; ValueError if it cannot be applied."""
        path = tree / self.file
        source = path.read_text() if path.exists() else ""
        found = source.count(self.before)
        if found != 1:
            raise ValueError(f"STALE: its text is {found} times in {self.file}")
        text = source.replace(self.before, self.after)
        if path.suffix == ".py":
            try:
                compile(text, self.file, "exec", dont_inherit=True)
            except SyntaxError as error:
                raise ValueError(f"BROKEN: {error}") from error
        return text


def listed(tree: Path) -> list[Mutant]:
    """Return the mutants of a tree."""
    entries = tomllib.loads((tree / LIST).read_text())["mutant"]
    return [Mutant(number, **entry) for number, entry in enumerate(entries, 1)]


def copied(tree: Path, to: Path) -> Path:
    """Copy all files that git tracks or does not ignore; return the copy."""
    command = ["git", "ls-files", "-zco", "--exclude-standard"]
    said = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE)
    for name in filter(None, said.stdout.decode().split("\0")):
        if (tree / name).exists():  # Not if it was removed without `git rm`.
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, to / name)
    return to


def tested(copy: Path, args: Sequence[str], limit_s: float | None) -> tuple[int, str]:
    """Run pytest in a copy; return its exit code and output."""
    environ = {**os.environ, **COMPILED, "PYTHONPATH": str(copy)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(
            [*command, *IGNORED, *args], cwd=copy, env=environ,
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
        )  # fmt: skip
        try:
            code = process.wait(limit_s)
        finally:  # Including processes that a test left behind.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        return code, out.read()


def put(path: Path, text: str) -> None:
    """Write a source and delete its bytecode, which may look up to date."""
    path.write_text(text)
    for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        compiled.unlink()


def tried(mutant: Mutant, copy: Path, tests: Sequence[str], limit_s: float) -> Verdict:
    """Apply one fault, run tests until one fails, undo it; return the verdict."""
    if mutant.retired:
        return "retired", mutant.retired
    path = copy / mutant.file
    try:
        text = mutant.mutated(copy)
    except ValueError as error:
        what, _, why = str(error).partition(": ")
        return what, why
    original = path.read_text()
    try:
        put(path, text)
        code, said = tested(copy, ("-x", *tests), limit_s)
    except subprocess.TimeoutExpired:
        return "killed", f"its tests hang (stopped after {limit_s:g} s)"
    finally:
        put(path, original)
    named = NAMED.findall(said)
    if named and code in (1, 2):  # 2: a test module cannot be imported.
        return "killed", named[0]
    if code == 0:
        return "SURVIVED", " ".join(tests)
    return "BROKEN", f"pytest ended with {code}: {said[-300:]}"


def run(tree: Path, mutants: Sequence[Mutant], wanted: argparse.Namespace) -> int:
    """Try the mutants, print the verdicts, and return the exit code."""
    instead = shlex.split(wanted.tests)
    free: SimpleQueue[Path] = SimpleQueue()

    def one(mutant: Mutant) -> Verdict:
        copy = free.get()
        try:
            return tried(mutant, copy, instead or mutant.tests, wanted.limit)
        finally:
            free.put(copy)

    named = [test for each in mutants if not each.retired for test in each.tests]
    clean = dict.fromkeys(instead or named)
    spread = ("-n", str(wanted.jobs)) if wanted.jobs > 1 else ()
    counted: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="jdag-mutants-") as folder:
        copies = [copied(tree, Path(folder, str(n))) for n in range(wanted.jobs)]
        code, said = tested(copies[0], (*spread, *clean), None) if clean else (0, "")
        if code:
            print(f"{said}\nThe tests fail without a fault.")
            return 2
        for copy in copies:
            free.put(copy)
        with ThreadPoolExecutor(wanted.jobs) as pool:
            results = pool.map(one, mutants)
            for mutant, (what, why) in zip(mutants, results, strict=True):
                print(f"{mutant.number:4} {what:8} {mutant.fact}")
                print(f"{'':14}{why}", flush=True)
                counted[what] += 1
    print(", ".join(f"{number} {what}" for what, number in sorted(counted.items())))
    return 1 if set(counted) - {"killed", "retired"} else 0


def main(arguments: Sequence[str] | None = None, tree: Path = ROOT) -> int:
    """Parse the options, run, and return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--only", metavar="REGEX", default="", help="of file, fact")
    parser.add_argument("-n", dest="jobs", type=int, default=1, help="at a time")
    parser.add_argument("--list", action="store_true", help="print, do not run")
    parser.add_argument("--tests", default="", help="in place of those of each fault")
    parser.add_argument("--limit", type=float, default=300, help="s for a fault")
    wanted = parser.parse_args(arguments)
    is_wanted = re.compile(wanted.only).search
    mutants = [one for one in listed(tree) if is_wanted(f"{one.file} {one.fact}")]
    if not wanted.list and mutants:
        return run(tree, mutants, wanted)
    for one in mutants:
        print(f"{one.number:4} {one.file}: {one.fact}")
    return 0 if mutants else 1


if __name__ == "__main__":
    sys.exit(main())
