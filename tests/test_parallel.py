"""What needs several devices passes in a process that has eight."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(Path(__file__).with_name("parallel").glob("test_*.py"))


@pytest.mark.parametrize("file", FILES, ids=[file.stem for file in FILES])
def test_with_eight_devices(file: Path) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-x", str(file)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider"],
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


def test_there_are_files_for_it() -> None:
    assert len(FILES) >= 5
