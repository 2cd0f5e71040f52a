"""Ctrl-C at any moment: engines are never left half-way, and the cluster goes on."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("seed", range(2))
def test_after_a_hundred_interrupts_the_cluster_is_as_it_was(seed: int) -> None:
    run = f"from tests.interrupt_cases import main; main({seed}, 100)"
    ran = subprocess.run(
        [sys.executable, "-c", run],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.endswith("interrupted 100\n"), (ran.stdout, ran.stderr)
