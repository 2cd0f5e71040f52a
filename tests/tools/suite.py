"""Runs a tier of the tests, lint beside it, and each failed test once more, alone.

    python -m tests.tools.suite --lint --tier first

A test that fails and then passes alone is unstable: it does not fail the run, but the
last lines name it, and `tests/tools/history.py` keeps it for ten runs.

CPU time of one and the same work differs between machines and with what else they do.
Therefore a calibrator runs before and after, and its speed is printed beside the time.

Exit codes: 0 lint and all tests pass, some tests perhaps at the second try; 1 they do
not; 2 the arguments are wrong; 130 interrupted.
"""

import argparse
import heapq
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from tests import ROOT
from tests.tools import history, outcomes
from tests.tools.outcomes import Failure
from tests.tools.tiers import TIERS, VERSIONS

AGAIN_MAX = 20  # More failures than these have one cause, which is not chance.
AGAIN_LIMIT_S = 600
GRACE_S = 5
POLL_S = 0.2
EVENTS = 1_000_000  # Of the calibrator.


class Part:
    """A child process, with its wall-clock time and the file of its output, if any."""

    def __init__(self, child: subprocess.Popen[bytes], output: IO[str] | None) -> None:
        self.child = child
        self.output = output
        self.began_s = os.times().elapsed
        self.seconds = 0.0

    def has_ended(self, limit_s: float) -> bool:
        if self.child.returncode is None:
            with suppress(subprocess.TimeoutExpired):
                self.child.wait(limit_s)
            self.seconds = os.times().elapsed - self.began_s
        return self.child.returncode is not None

    def text(self) -> str:
        assert self.output is not None
        self.output.seek(0)
        return self.output.read()

    def end(self) -> None:
        """End it by force where Ctrl-C, which reaches children too, has not done so."""
        for force in (self.child.terminate, self.child.kill):
            if self.has_ended(GRACE_S):
                return
            force()
        self.child.wait()


@dataclass
class Suite:
    root: Path
    wanted: argparse.Namespace
    seconds: dict[str, float] = field(default_factory=dict)  # Of each part.
    unstable: list[Failure] = field(default_factory=list)
    failed: list[Failure] = field(default_factory=list)
    closing: list[str] = field(default_factory=list)
    passes: bool = True

    @contextmanager
    def started(
        self, command: Sequence[str], captured: bool, **variables: str
    ) -> Iterator[Part]:
        """Start a child process, which has ended when the block is left."""
        environ = {**os.environ, "JDAG_TIER": self.wanted.tier, **variables}
        with tempfile.TemporaryFile("w+") as file:
            output = file if captured else None
            child = subprocess.Popen(
                command, cwd=self.root, env=environ, stdout=output, stderr=output
            )
            part = Part(child, output)
            try:
                yield part
            finally:
                part.end()

    def pytest(self, *arguments: str) -> list[str]:
        marks = ("-m", self.wanted.marks)
        return [sys.executable, "-m", "pytest", "-q", *marks, *arguments]

    def make_lint(self) -> list[str]:
        venv = f"VENV={os.path.relpath(sys.prefix, self.root)}"
        return [os.environ.get("MAKE", "make"), "--no-print-directory", "lint", venv]

    def fail(self, line: str) -> None:
        self.passes = False
        self.closing.append(line)

    def run(self, file: Path) -> None:
        plugin = ("-p", outcomes.__name__, f"--max-worker-restart={AGAIN_MAX}")
        pytest = self.pytest("-n", self.wanted.jobs, *plugin, *self.wanted.paths)
        variables = {outcomes.VARIABLE: str(file)}
        with ExitStack() as stack:
            running: dict[str, Part] = {}
            if self.wanted.lint:
                lint = self.started(self.make_lint(), captured=True)
                running["lint"] = stack.enter_context(lint)
            tests = self.started(pytest, captured=False, **variables)
            running["tests"] = stack.enter_context(tests)
            codes = self.ended(running)
        failures, is_whole = outcomes.read(file)
        reason = why_not_again(codes["tests"], len(failures), is_whole)
        if reason:
            self.failed = failures
            self.fail(reason)
        elif failures:
            self.run_again(failures)

    def ended(self, parts: dict[str, Part]) -> dict[str, int]:
        codes: dict[str, int] = {}
        while len(codes) < len(parts):
            for name, part in parts.items():
                if name in codes or not part.has_ended(POLL_S):
                    continue
                codes[name] = part.child.returncode
                self.seconds[name] = part.seconds
                if name == "lint" and codes[name]:
                    print(f"\n{part.text()}", flush=True)
                    self.fail("lint failed: its output is above")
                elif name == "lint":
                    print("\nlint passed", flush=True)
        return codes

    def run_again(self, failures: list[Failure]) -> None:
        """Run each failed test alone: the run passes if all of them pass now."""
        self.seconds["again"] = 0.0
        for failure in failures:
            print(f"again, alone: {failure.test}", flush=True)
            command = self.pytest("-n", "0", failure.test)
            with self.started(command, captured=True) as part:
                how = how_failed(part)
                self.seconds["again"] += part.seconds
                if how:
                    print(part.text(), flush=True)
                    self.failed.append(failure)
                    self.fail(f"{how}: {failure.test}")
                else:
                    self.unstable.append(failure)
                    self.closing.append(f"unstable: {failure.test}: {failure.said}")


def why_not_again(code: int, failed_n: int, is_whole: bool) -> str:
    """Return why a run fails as it is; "" where its failed tests are run again."""
    if code not in (0, 1):
        return f"pytest ended with {code}, so that no test is run again"
    if not is_whole:
        return "files were not collected, or tests not run, and no test is run again"
    if (code == 1) != (failed_n > 0):
        return f"pytest ended with {code}, and {failed_n} tests failed"
    if failed_n > AGAIN_MAX:
        return f"{failed_n} tests failed, more than {AGAIN_MAX}: none is run again"
    return ""


def how_failed(part: Part) -> str:
    """Return how a second try failed; "" if it passed."""
    if not part.has_ended(AGAIN_LIMIT_S):
        return f"hangs (stopped after {AGAIN_LIMIT_S} s)"
    code = part.child.returncode
    if code < 0:
        return f"crashed ({signal.Signals(-code).name})"
    return "failed twice" if code else ""


def events_per_s() -> float:
    heap = [(number * 7919 % 1009, number) for number in range(1000)]
    heapq.heapify(heap)
    begin = os.times()
    for number in range(EVENTS):
        at, _ = heap[0]
        heapq.heapreplace(heap, (at + number * 7919 % 1009, number))
    end = os.times()
    return EVENTS / (end.user + end.system - begin.user - begin.system)


def run(wanted: argparse.Namespace, root: Path, path: Path) -> int:
    speeds = [events_per_s()]
    begin = os.times()
    suite = Suite(root, wanted)
    with tempfile.TemporaryDirectory(prefix="jdag-suite-") as folder:
        suite.run(Path(folder, "outcomes"))
    minutes = (sum(os.times()[:4]) - sum(begin[:4])) / 60
    speeds.append(events_per_s())
    speed = sum(speeds) / len(speeds) / 1e6
    this_run = history.Run(
        when=datetime.now(UTC).isoformat(timespec="seconds"),  # noqa: TID251
        commit=history.commit_of(root),
        python=platform.python_version(),
        tier=wanted.tier,
        unstable=suite.unstable,
        failed=suite.failed,
    )
    runs = history.add(path, this_run)
    print(*suite.closing, history.summary(runs, path), sep="\n")
    parts = ", ".join(f"{part} {s:.0f} s" for part, s in suite.seconds.items())
    same = f"{minutes * speed / 3:.1f} at 3 million events/s"
    used = f"{minutes:.1f} CPU-minutes ({same})"
    where = f"a queue takes {speed:.2f} million events a second of CPU time"
    print(f"{parts}; {used}, where {where}", flush=True)
    return 0 if suite.passes else 1


def main(
    argv: Sequence[str] | None = None, root: Path = ROOT, path: Path | None = None
) -> int:
    """Run; `path`: the file of the history, in place of that in the user's cache."""
    parser = argparse.ArgumentParser(prog="python -m tests.tools.suite")
    parser.add_argument("--tier", choices=TIERS, default="all")
    parser.add_argument("--lint", action="store_true", help="`make lint` beside it")
    parser.add_argument("-n", dest="jobs", default="3", help="processes of tests")
    parser.add_argument("-m", dest="marks", default="not long", help="as of pytest")
    parser.add_argument("paths", nargs="*", help="as of pytest")
    wanted = parser.parse_args(argv)
    if wanted.tier == "versions" and not wanted.paths:
        wanted.paths = [*VERSIONS]
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # Ends children too.
    try:
        return run(wanted, root, path or history.default_path())
    except KeyboardInterrupt:
        return 128 + signal.SIGINT


if __name__ == "__main__":
    sys.exit(main())
