"""Worker processes whose parent ends, or asks them to stop, while they still start."""

import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jdag.processes.launch.launch import Launch
from tests import ROOT
from tests.tools.rpc_cases import lives, options_of
from tests.tools.stream_cases import soon

LONG_S = 60.0
# In place of JAX: an import that does not end in the time of a test.
SLOW = """
import os, time
with open({here!r} + "/new", "w") as file:
    file.write(str(os.getpid()))
os.rename({here!r} + "/new", {here!r} + "/importing")
time.sleep(3600)
"""
CALLER = """
import os, sys
from jdag.processes.launch.launch import Launch
from tests.tools.rpc_cases import lives, options_of
Launch(options_of("a"), env={"PYTHONPATH": os.pathsep.join([sys.argv[1], *sys.path])})
"""


@pytest.fixture
def slow(tmp_path: Path) -> Path:
    made = tmp_path / "slow"
    made.mkdir()
    (made / "jax.py").write_text(SLOW.format(here=str(tmp_path)))
    return made


def start(
    parent: int, litter: Path, *path: Path
) -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        arguments = (str(theirs.fileno()), "a", str(parent), str(litter))
        process = subprocess.Popen(
            [sys.executable, "-m", "jdag.processes", *arguments],
            pass_fds=(theirs.fileno(),),
            env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*path, ROOT]))},
        )
    return process, ours


def test_a_worker_whose_caller_is_killed_while_it_imports_ends(
    tmp_path: Path, slow: Path
) -> None:
    logs = tmp_path / "temporary"
    logs.mkdir()
    caller = subprocess.Popen(
        [sys.executable, "-c", CALLER, str(slow)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(logs)},
    )
    try:
        soon((tmp_path / "importing").exists)
        worker = int((tmp_path / "importing").read_text())
        assert lives(worker) and list(logs.iterdir())
    finally:
        caller.kill()
        caller.wait()
    soon(lambda: not lives(worker))
    assert not list(logs.iterdir())


def test_a_worker_ends_whose_parent_was_gone_before_it_could_watch(
    tmp_path: Path,
) -> None:
    litter = tmp_path / "litter"
    litter.mkdir()
    process, ours = start(os.getppid(), litter)  # The socket stays open.
    with ours:
        assert process.wait(LONG_S) == 1
    assert not litter.exists()


def test_a_worker_is_stopped_while_it_imports(tmp_path: Path, slow: Path) -> None:
    (options,) = options_of("a")
    process, ours = start(os.getpid(), tmp_path / "none", slow)
    with ours:
        # What asks it to stop may come with its options; asked again it ends at once.
        ours.sendall(options.written() + b"\nstop\n")
        soon((tmp_path / "importing").exists)
        ours.sendall(b"stop\n")
        assert process.wait(LONG_S) == 128 + signal.SIGTERM


def test_workers_outlive_the_thread_that_launched_them() -> None:
    launches: list[Launch] = []
    thread = threading.Thread(target=lambda: launches.append(Launch(options_of("a"))))
    thread.start()
    thread.join(4 * LONG_S)
    (launch,) = launches
    with launch:
        # Had its start asked for the end of that thread, SIGHUP would be there by now.
        assert not thread.is_alive()
        assert launch.alive == ("a",)
    assert launch._children["a"].process.returncode == 0
