"""The cores that caller and workers of a comparison run on."""

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import jax
import pytest

from paper.compare import ours, pinning, rows, run
from tests.tools.error_texts import fails_with

FREE = sorted(os.sched_getaffinity(0))


def test_apart_the_caller_has_one_core_and_the_workers_have_the_others():
    assert pinning.cores_of("apart", {4, 2, 7}) == ([2], [4, 7])
    assert pinning.cores_of("one", {4, 2, 7}) == ([2], [2])
    with fails_with(SystemExit, "paper.needs_two_cores"):
        pinning.cores_of("apart", {4})


PART = """
import json, os, subprocess, sys, threading
from paper.compare import pinning, rows
import numpy
given = rows.asked("A part.")
stop = threading.Event()
early = threading.Thread(target=stop.wait)
early.start()
with pinning.of_workers():
    late = threading.Thread(target=stop.wait)  # It begins by the workers' mask.
    late.start()
    read = "import os; from paper.compare.pinning import held; "
    read += "print(held(), os.environ['OMP_NUM_THREADS'], 'NPROC' in os.environ)"
    worker = subprocess.check_output([sys.executable, "-c", read], text=True).strip()
print(pinning.held(), os.environ["OMP_NUM_THREADS"], worker, sys.argv[1:])
stop.set()
"""


@pytest.mark.skipif(len(FREE) < 2, reason="there is one core")
@pytest.mark.parametrize("how", pinning.WAYS)
def test_caller_and_workers_run_on_the_cores_that_are_asked_for(
    how: str, tmp_path: Path
):
    script = tmp_path / "part.py"
    script.write_text(PART)
    env = {**run.environment(), "NPROC": "7"}
    command = [sys.executable, "-W", "ignore", str(script), "--pin", how, "--quick"]
    said = subprocess.check_output(command, text=True, env=env).strip()
    caller, workers = pinning.cores_of(how, FREE)
    theirs = f"{workers} {len(workers)} False"
    assert said == f"{caller} 1 {theirs} ['--pin', '{how}', '--quick']"


@pytest.mark.second
@pytest.mark.skipif(len(FREE) < 2, reason="there is one core")
def test_the_workers_that_are_launched_have_their_cores_and_the_caller_has_its_own(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setenv("JDAG_COMPARE_CORES", json.dumps(FREE[1:]))
    for name in pinning.THREADS:
        monkeypatch.setenv(name, "1")  # As it is set back at the end.
    jax.devices()  # It keeps as many threads as other tests have.
    os.sched_setaffinity(0, FREE[:1])
    try:
        with ours.launched() as cluster:
            cores = ours.Ours(cluster, "fast").cores()
            assert pinning.held() == FREE[:1]
    finally:
        for task in Path("/proc/self/task").iterdir():
            with suppress(ProcessLookupError):  # It has ended since.
                os.sched_setaffinity(int(task.name), FREE)
    assert cores == dict.fromkeys(rows.WORKERS, FREE[1:])
