"""Mutation testing: each fault of a list, applied to jdag, must make a test fail.

Run as `python -m tests.tools.mutants`. The list is `tests/tools/mutants.toml`, one
table a fault:

    [[mutant]]
    fact = "the promise that the fault breaks"
    file = "jdag/engine/credit.py"
    before = "text that occurs exactly once in the file"
    after = "its replacement"
    tests = ["tests/unit/engine/test_credit.py"]  # Arguments of pytest: files or ids.
    retired = "the reason why this fault is no longer tried"  # Optional.

Faults are applied one at a time to copies of the working tree (all files that git
tracks or does not ignore). The tests of a fault run in the first tier and, where none
of these fails, in the whole (see `tests/tools/tiers.py`). A fault that makes its tests
hang counts as killed. The verdicts:

    killed    by the first tier
    second    by the whole alone
    SURVIVED  both
    STALE     the text `before` is not in the file, or there several times
    BROKEN    the fault is not valid Python, or pytest cannot run the tests
    retired   not tried

Exit codes: 0 all were killed; 1 some survived, are stale or broken, or the first tier
killed fewer than nine in ten of the whole list; 2 tests fail without a fault.
"""

import argparse
import json
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
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from tests import ROOT

LIST = Path("tests", "tools", "mutants.toml")
# Compiled functions are cached, so that the next run is faster.
COMPILED = {
    "JAX_COMPILATION_CACHE_DIR": f"{tempfile.gettempdir()}/jdag-mutants-compiled",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
}
# These two read the sources as text and would fail for that reason alone.
IGNORED = ("--ignore=tests/tools/test_mutants.py", "--ignore=tests/tools/test_tidy.py")
TIERS = {"first": "killed", "all": "second"}  # In this order; verdict of its kills.
Verdict = tuple[str, str]  # One of those above; details.
NAMED = re.compile(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Mutant:
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


def tested(
    copy: Path, args: Sequence[str], limit_s: float | None, tier: str
) -> tuple[int, str]:
    environ = {**os.environ, **COMPILED, "PYTHONPATH": str(copy), "JDAG_TIER": tier}
    environ.pop("PYTHONDONTWRITEBYTECODE", None)  # A copy is imported many times.
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
    if mutant.retired:
        return "retired", mutant.retired
    path = copy / mutant.file
    try:
        text = mutant.mutated(copy)
    except ValueError as error:
        verdict, _, why = str(error).partition(": ")
        return verdict, why
    original = path.read_text()
    try:
        put(path, text)
        return judged(copy, tests, limit_s)
    finally:
        put(path, original)


def judged(copy: Path, tests: Sequence[str], limit_s: float) -> Verdict:
    """Run the tests tier by tier until one fails; return the verdict on the fault."""
    for tier, verdict in TIERS.items():
        try:
            code, output = tested(copy, ("-x", *tests), limit_s, tier)
        except subprocess.TimeoutExpired:
            return verdict, f"its tests hang (stopped after {limit_s:g} s)"
        failed = NAMED.findall(output)
        if failed and code in (1, 2):  # 2: a test module cannot be imported.
            return verdict, failed[0]
        if code not in (0, 5):  # 5: the tier has none of the tests.
            return "BROKEN", f"pytest ended with {code}: {output[-300:]}"
    return "SURVIVED", " ".join(tests)


@dataclass(frozen=True)
class Options:
    jobs: int = 1  # At a time.
    tests: tuple[str, ...] = ()  # In place of those of each fault.
    limit_s: float = 300  # For the tests of one fault in one tier.
    clean: bool = True  # Whether the tests must pass without a fault first.
    results: Path | None = None  # A file to which each verdict is appended as JSON.
    whole: bool = False  # Whether these are all faults of the list.


def passes(copy: Path, mutants: Sequence[Mutant], options: Options) -> bool:
    """Return whether the tests pass without a fault; print their output if not."""
    named = [test for each in mutants if not each.retired for test in each.tests]
    tests = dict.fromkeys(options.tests or named)
    if not tests:
        return True
    spread = ("-n", str(options.jobs)) if options.jobs > 1 else ()
    code, output = tested(copy, (*spread, *tests), None, "all")
    if code:
        print(f"{output}\nThe tests fail without a fault.")
    return code == 0


def verdicts(
    copies: Sequence[Path], mutants: Sequence[Mutant], options: Options
) -> Iterator[tuple[Mutant, Verdict, float]]:
    free: SimpleQueue[Path] = SimpleQueue()
    for copy in copies:
        free.put(copy)

    def timed(mutant: Mutant) -> tuple[Mutant, Verdict, float]:
        copy = free.get()
        began_s = os.times().elapsed
        try:
            tests = options.tests or mutant.tests
            verdict = tried(mutant, copy, tests, options.limit_s)
        finally:
            free.put(copy)
        return mutant, verdict, os.times().elapsed - began_s

    with ThreadPoolExecutor(len(copies)) as pool:
        yield from pool.map(timed, mutants)


def summed_up(
    counts: Counter[str], seconds: float, whole: bool
) -> tuple[list[str], int]:
    """Return the closing lines and the exit code; `whole`: all faults were tried."""
    lines = [", ".join(f"{number} {what}" for what, number in sorted(counts.items()))]
    total, first = counts.total() - counts["retired"], counts["killed"]
    code = 1 if first + counts["second"] < total else 0
    if total:
        minutes, rest = divmod(round(seconds), 60)
        lines += [
            f"first tier killed {first} of {total} ({first / total:.1%}), the whole "
            f"{first + counts['second']} of {total}; {minutes} minutes {rest} seconds"
        ]
    if whole and first * 10 < total * 9:
        lines += ["The first tier must kill nine in ten: mark fewer tests `second`."]
        code = 1
    return lines, code


def run(tree: Path, mutants: Sequence[Mutant], options: Options) -> int:
    if options.results:
        options.results.touch()  # Rather fail now than after the first fault.
    began_s = os.times().elapsed
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="jdag-mutants-") as folder:
        copies = [copied(tree, Path(folder, str(n))) for n in range(options.jobs)]
        if options.clean and not passes(copies[0], mutants, options):
            return 2
        for mutant, (verdict, why), seconds in verdicts(copies, mutants, options):
            counts[verdict] += 1
            print(f"{mutant.number:4} {verdict:8} {seconds:4.0f} s  {mutant.fact}")
            print(f"{'':22}{why}", flush=True)
            if options.results:
                result = {
                    "number": mutant.number, "fact": mutant.fact, "file": mutant.file,
                    "verdict": verdict, "seconds": round(seconds, 1), "why": why,
                }  # fmt: skip
                with options.results.open("a") as file:
                    file.write(f"{json.dumps(result)}\n")
    lines, code = summed_up(counts, os.times().elapsed - began_s, options.whole)
    print("\n".join(lines), flush=True)
    return code


def main(arguments: Sequence[str] | None = None, tree: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tools.mutants")
    parser.add_argument("--only", metavar="REGEX", default="", help="of file, fact")
    parser.add_argument("-n", dest="jobs", type=int, default=1, help="at a time")
    parser.add_argument("--list", action="store_true", help="print, do not run")
    parser.add_argument("--tests", default="", help="in place of those of each fault")
    parser.add_argument("--limit", type=float, default=300, help="s for a tier's tests")
    parser.add_argument(
        "--no-clean", action="store_true", help="do not run the tests without a fault"
    )
    parser.add_argument(
        "--results", type=Path, metavar="FILE", help="append a line of JSON a fault"
    )
    wanted = parser.parse_args(arguments)
    is_wanted = re.compile(wanted.only).search
    mutants = [one for one in listed(tree) if is_wanted(f"{one.file} {one.fact}")]
    if not wanted.list and mutants:
        options = Options(
            jobs=wanted.jobs,
            tests=tuple(shlex.split(wanted.tests)),
            limit_s=wanted.limit,
            clean=not wanted.no_clean,
            results=wanted.results,
            whole=not wanted.only,
        )
        return run(tree, mutants, options)
    for one in mutants:
        print(f"{one.number:4} {one.file}: {one.fact}")
    return 0 if mutants else 1


if __name__ == "__main__":
    sys.exit(main())
