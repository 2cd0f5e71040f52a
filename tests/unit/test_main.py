"""The command line by way of the package's name."""

import subprocess
import sys


def test_python_m_jdag_is_the_command_line():
    command = [sys.executable, "-m", "jdag", "--help"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "worker" in done.stdout and "check" in done.stdout
