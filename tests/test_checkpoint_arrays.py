"""Arrays in a folder: what fails is raised once, and nothing is printed."""

import subprocess
import sys

import numpy as np
import pytest

from jdag.api import checkpoint_arrays as stored

ARRAYS = {str(n): np.arange(20_000.0) * np.pi * (n + 1) for n in range(20)}

FAILING = """
import resource, signal, sys
from pathlib import Path
from jdag.api import checkpoint_arrays as stored
from tests.test_checkpoint_arrays import ARRAYS

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
limit = int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
try:
    stored.write(Path(sys.argv[1]), ARRAYS)
except (OSError, ValueError) as error:
    raise SystemExit("File too large" in str(error))
"""


@pytest.mark.parametrize("limit", [pytest.param(0, marks=pytest.mark.second), 10_000])
def test_a_write_that_fails_raises_and_prints_nothing(tmp_path, limit):
    script = [sys.executable, "-c", FAILING, str(tmp_path / "arrays"), str(limit)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_arrays_that_cannot_be_read_are_errors_in_their_places(tmp_path, capfd):
    stored.write(tmp_path / "arrays", ARRAYS)
    for path in (tmp_path / "arrays" / "3").glob("0*"):
        path.write_bytes(b"no")
    (tmp_path / "arrays" / "5" / ".zarray").write_bytes(b"no")
    found = stored.read(tmp_path / "arrays")
    failed = [name for name in ARRAYS if isinstance(found[name], Exception)]
    assert failed == ["3", "5"]
    for name, array in ARRAYS.items():
        if name not in failed:
            np.testing.assert_array_equal(found[name], array)
    assert capfd.readouterr() == ("", "")
