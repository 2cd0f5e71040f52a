"""A pytest plugin that writes each failure of a run to a file, one JSON line each.

Loaded by `-p tests.tools.outcomes`; the variable `JDAG_OUTCOMES` has the path of the
file. Its last line says whether the run was whole, that is, whether all files were
collected and all their tests have a report.
"""

import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

VARIABLE = "JDAG_OUTCOMES"
CHARACTERS_MAX = 200


class Failure(msgspec.Struct):
    test: str
    said: str


class Writer:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.reported: set[str] = set()
        self.is_collected = True

    def write(self, **values: Any) -> None:
        with self.path.open("a") as file:
            file.write(f"{json.dumps(values)}\n")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.is_collected = False
            self.write(test=report.nodeid, said=reason_of(report))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reported.add(report.nodeid)
        if report.failed:
            self.write(test=report.nodeid, said=reason_of(report))

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        is_whole = len(self.reported) == session.testscollected
        self.write(whole=self.is_collected and is_whole)


def pytest_configure(config: pytest.Config) -> None:
    """Write where all reports arrive, and not in the processes that xdist starts."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Writer(Path(os.environ[VARIABLE])))


def reason_of(report: pytest.TestReport | pytest.CollectReport) -> str:
    crash = getattr(report.longrepr, "reprcrash", None)
    if crash is not None:
        lines = crash.message.splitlines()[:1]
    else:
        lines = [line for line in report.longreprtext.splitlines() if line.strip()]
    line = lines[-1].removeprefix("E ").strip() if lines else ""
    return line if len(line) <= CHARACTERS_MAX else f"{line[:CHARACTERS_MAX]}..."


def read(path: Path) -> tuple[list[Failure], bool]:
    """Return each failed test with its first failure, and whether the run was whole."""
    failures: dict[str, Failure] = {}
    is_whole = False
    for line in path.read_text().splitlines() if path.exists() else ():
        values = json.loads(line)
        if "test" in values:
            failures.setdefault(values["test"], Failure(**values))
        else:
            is_whole = values["whole"]
    return [*failures.values()], is_whole
