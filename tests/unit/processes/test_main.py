"""The entry point of worker processes."""

import subprocess
import sys


def test_without_arguments_the_entry_point_names_the_command():
    command = [sys.executable, "-m", "jdag.processes"]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    said = "python -m jdag.processes is internal to jdag: use `jdag worker` instead\n"
    assert (done.returncode, done.stderr) == (1, said)
