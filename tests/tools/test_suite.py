"""The runner of tests, on small suites: what it runs again, what it says and keeps."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import ROOT
from tests.tools import history, suite
from tests.tools.history import Run
from tests.tools.outcomes import Failure

PASSING = "def test_it():\n    assert 1 + 1 == 2\n"
FAILING = "def test_it():\n    assert 1 + 1 == 3\n"
FLAKY = """
from pathlib import Path

def test_it():
    is_first = not Path("tried").exists()
    Path("tried").touch()
    assert not is_first, "not yet"
"""
# The second test always kills its process, the third one in its first run.
CRASHING = """
import os, pathlib, pytest, signal

@pytest.mark.parametrize("number", range(1, 6))
def test_it(number):
    marker = pathlib.Path(f"tried-{number}")
    is_first = not marker.exists()
    marker.touch()
    if number == 2 or (number == 3 and is_first):
        os.kill(os.getpid(), signal.SIGSEGV)
"""
# As in tests/conftest.py: the tests of a file stay in one process.
GROUPS = """
from tests.tools.spreading import Groups

def pytest_xdist_make_scheduler(config, log):
    return Groups(config, log)
"""
# With FAILS, only a second try does not end.
HANGING = """
import os, pathlib, time

def test_it():
    process = pathlib.Path("process")
    is_first = not process.exists()
    process.write_text(f"{os.getpid()}")
    assert not (is_first and FAILS)
    time.sleep(60)
"""
INTERRUPTED = """
import pathlib, sys
from tests.tools import suite

suite.GRACE_S = 0.1
sys.exit(suite.main(["-n", "0"], *map(pathlib.Path, sys.argv[1:])))
"""
MAKEFILE = "lint:\n\t@echo a line is too long; exit {code}\n"
Ran = Callable[..., tuple[int, list[str], Run]]  # Exit code, lines, newest run.


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # Where pytest finds the plugin.
    monkeypatch.setattr(suite, "events_per_s", lambda: 3e6)
    monkeypatch.setattr(suite, "GRACE_S", 0.1)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    return tmp_path / "cache" / "unstable.json"


@pytest.fixture
def ran(tmp_path: Path, path: Path, capfd: pytest.CaptureFixture[str]) -> Ran:
    def run(*arguments: str, **sources: str) -> tuple[int, list[str], Run]:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
        code = suite.main(["-n", "1", *arguments], tmp_path, path)
        return code, capfd.readouterr().out.splitlines(), history.read(path)[-1]

    return run


@pytest.mark.second
def test_a_run_in_which_all_pass_says_what_it_took(ran: Ran):
    code, lines, run = ran("--tier", "first", test_passing=PASSING)
    assert (code, lines[-2]) == (0, "unstable in the last ten runs: none")
    assert lines[-1].startswith("tests ")
    assert lines[-1].endswith("takes 3.00 million events a second of CPU time")
    assert run.tier == "first"


def test_a_test_that_passes_alone_is_unstable_and_the_run_passes(ran: Ran, path: Path):
    code, lines, run = ran(test_flaky=FLAKY, test_passing=PASSING)
    assert code == 0
    assert lines[-3] == "unstable: test_flaky.py::test_it: AssertionError: not yet"
    in_ten_runs = f"unstable in the last ten runs: 1 test, in {path}"
    assert lines[-2] == in_ten_runs
    failure = Failure("test_flaky.py::test_it", "AssertionError: not yet")
    assert (run.unstable, run.failed) == ([failure], [])
    code, lines, run = ran()
    assert (code, lines[-2], run.unstable) == (0, in_ten_runs, [])


def test_a_test_that_fails_twice_fails_the_run_with_its_second_output(ran: Ran):
    code, lines, run = ran(test_failing=FAILING, test_passing=PASSING)
    assert code == 1
    again = lines.index("again, alone: test_failing.py::test_it")
    assert "E       assert (1 + 1) == 3" in lines[again:]
    assert lines[-3] == "failed twice: test_failing.py::test_it"
    failure = Failure("test_failing.py::test_it", "assert (1 + 1) == 3")
    assert (run.unstable, run.failed) == ([], [failure])


def test_the_rest_of_a_group_runs_after_crashes_and_a_second_crash_is_named(ran: Ran):
    files = {"conftest": GROUPS, "test_crashing": CRASHING, "test_passing": PASSING}
    code, lines, run = ran(**files)
    assert code == 1
    assert any(line.startswith("2 failed, 4 passed") for line in lines)
    crashed, unstable = (f"test_crashing.py::test_it[{number}]" for number in (2, 3))
    assert lines[-4] == f"crashed (SIGSEGV): {crashed}"
    assert lines[-3].startswith(f"unstable: {unstable}: worker ")
    assert [failure.test for failure in run.failed] == [crashed]
    assert [failure.test for failure in run.unstable] == [unstable]


@pytest.mark.second
def test_a_second_try_has_a_limit(ran: Ran, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "AGAIN_LIMIT_S", 0.5)
    code, lines, _ = ran(test_hanging=HANGING.replace("FAILS", "True"))
    assert code == 1
    assert lines[-3] == "hangs (stopped after 0.5 s): test_hanging.py::test_it"


@pytest.mark.second
def test_many_failures_are_not_run_again(ran: Ran, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(suite, "AGAIN_MAX", 1)
    code, lines, run = ran(test_failing=FAILING, test_flaky=FLAKY)
    assert code == 1
    assert lines[-3] == "2 tests failed, more than 1: none is run again"
    assert len(run.failed) == 2


def test_a_file_that_cannot_be_collected_fails_the_run_as_it_is(ran: Ran):
    code, lines, run = ran(test_broken="import not_there\n", test_flaky=FLAKY)
    assert code == 1
    assert lines[-3].endswith("no test is run again")
    said = "ModuleNotFoundError: No module named 'not_there'"
    assert run.failed[0] == Failure("test_broken.py", said)


@pytest.mark.second
@pytest.mark.parametrize(
    ("lint", "line"), [(0, "lint passed"), (1, "lint failed: its output is above")]
)
def test_a_failed_lint_fails_the_run_after_the_tests(
    lint: int, line: str, ran: Ran, tmp_path: Path
):
    (tmp_path / "Makefile").write_text(MAKEFILE.format(code=lint))
    code, lines, _ = ran("--lint", test_passing=PASSING)
    assert code == lint
    assert line in lines
    assert ("a line is too long" in lines) == bool(lint)
    assert any(line.startswith("1 passed") for line in lines)


@pytest.mark.second
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_tests_as_well(number: int, tmp_path: Path, path: Path):
    (tmp_path / "test_hanging.py").write_text(HANGING.replace("FAILS", "False"))
    runner = subprocess.Popen([sys.executable, "-c", INTERRUPTED, tmp_path, path])
    process = tmp_path / "process"
    for _ in range(600):
        if process.exists() and process.read_text():
            break
        with pytest.raises(subprocess.TimeoutExpired):
            runner.wait(0.1)
    runner.send_signal(number)  # To it alone, and not as a terminal does.
    assert runner.wait(60) == 130
    with pytest.raises(ProcessLookupError):
        os.kill(int(process.read_text()), 0)
    assert not path.exists()


def test_the_history_has_ten_runs_and_a_damaged_one_begins_anew(
    path: Path, capsys: pytest.CaptureFixture[str]
):
    path.parent.mkdir()
    path.write_text('[{"when": 3}]')
    runs: list[Run] = []
    for number in range(12):
        unstable = [Failure(f"test_{number}", "why")] if number < 4 else []
        runs = history.add(path, Run(str(number), "", "3.11.7", "all", unstable, []))
    assert capsys.readouterr().out.startswith(f"{path} is damaged and begun anew: ")
    assert [run.when for run in runs] == [str(number) for number in range(2, 12)]
    assert runs == history.read(path)
    assert " runs: 2 tests, in " in history.summary(runs, path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_run_that_cannot_be_kept_says_so(
    path: Path, capfd: pytest.CaptureFixture[str]
):
    path.parent.write_text("a file in the place of the folder")
    run = Run("now", "", "3.11.7", "first", [], [])
    assert history.add(path, run) == [run]
    said = capfd.readouterr().out
    assert said.startswith("this run is not kept for the next ones: ")
