"""What needs several devices passes in a process that has eight."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

FILES = sorted(Path(__file__).with_name("parallel").glob("test_*.py"))
# One process for each; those that compile the same functions are together.
PARTS = {
    "data": (
        *("apply", "data"),
        *("processes", "waiting", "parallel_digits", "paper_data_parallel"),
    ),
    "moves": ("devices", "movement", "moves", "program"),
}


@pytest.mark.parametrize("part", PARTS)
def test_with_eight_devices(part: str) -> None:
    options = ["-v", "-n", "0", "-p", "no:cacheprovider"]
    files = [f"tests/unit/parallel/test_{name}.py" for name in PARTS[part]]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, *files],
        cwd=ROOT,
        env={**os.environ, "JAX_NUM_CPU_DEVICES": "8"},
        capture_output=True,
        text=True,
        check=False,
    )  # Its last line is the test that ran, if it crashed.
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2000:]


def test_each_file_for_them_is_in_one_part() -> None:
    named = [name for names in PARTS.values() for name in names]
    assert sorted(named) == sorted(file.stem.removeprefix("test_") for file in FILES)
