"""What needs several devices passes in a process that has eight."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(Path(__file__).with_name("parallel").glob("test_*.py"))


@pytest.fixture(scope="module")
def ran(request: pytest.FixtureRequest) -> subprocess.CompletedProcess[str]:
    """One process for the files of all tests below that were asked for."""
    asked = [item for item in request.session.items if item.path == request.path]
    files = [file for file in FILES if any(file.stem in item.name for item in asked)]
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-rfE"]
    return subprocess.run(
        [*command, "-p", "no:cacheprovider", *map(str, files)],
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_with_eight_devices(file: Path, ran: subprocess.CompletedProcess[str]) -> None:
    lines = ran.stdout.splitlines()
    wrong = [line for line in lines if line.startswith(("FAILED ", "ERROR "))]
    ended = ran.returncode == 0 or (ran.returncode == 1 and wrong)
    assert ended, ran.stdout[-6000:] + ran.stderr[-2000:]
    named = f"{file.relative_to(ROOT)}"
    assert not any(named in line for line in wrong), ran.stdout[-20_000:]


def test_there_are_files_for_it() -> None:
    assert len(FILES) >= 5
