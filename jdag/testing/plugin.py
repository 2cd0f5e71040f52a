"""The pytest plugin: shrinks and saves a failed run, and prints how to repeat it.

pytest loads it if jdag is installed; otherwise use `-p jdag.testing.plugin`.
"""

import os
import re
import shlex
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

OPTION = "--jdag-replay"


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "repeat the run of this file instead of exploring orders (jdag.testing)"
    parser.getgroup("jdag").addoption(OPTION, metavar="FILE", help=text)


def pytest_configure(config: pytest.Config) -> None:
    path = config.getoption(OPTION)
    if path is not None:
        if not Path(path).is_file():
            raise pytest.UsageError(f"{OPTION} {path}: no such file")
        _checks().replaying[:] = [Path(path)]


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption(OPTION)
    if path is not None and not _checks().repeated:
        message = f"{path} was not repeated: no assertion that ran has its program"
        terminalreporter.write_line(f"jdag: {message} and workers", red=True)


def pytest_unconfigure(config: pytest.Config) -> None:
    if config.getoption(OPTION) is not None:
        _checks().replaying.clear()
        _checks().repeated.clear()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    error: Any = call.excinfo.value if call.excinfo is not None else None
    if call.when == "call" and hasattr(error, "failure") and hasattr(error, "drawn"):
        path = _file_of(item)
        error.failure = error.failure.shrink()
        error.save(path)
        names = item.nodeid.partition("::")[2]
        test = shlex.quote(f"{os.path.relpath(item.path)}::{names}")
        loaded = f"-p {__name__} " * (__name__ in item.config.invocation_params.args)
        command = f"pytest {loaded}{test} {OPTION} {path}"
        report.sections.append(("jdag", f"{error.failure}\nrepeat it: {command}"))
    return report


def _file_of(item: pytest.Item) -> Path:
    name = re.sub(r"\W+", "_", item.nodeid).strip("_")
    cache = getattr(item.config, "cache", None)
    folder = Path(".jdag") if cache is None else cache.mkdir("jdag")
    folder.mkdir(exist_ok=True)
    path = Path(folder, f"{name}.json")
    current = Path.cwd()
    return path.relative_to(current) if path.is_relative_to(current) else path


def _checks() -> Any:
    from jdag.testing import checks  # noqa: PLC0415 - imports JAX.

    return checks
