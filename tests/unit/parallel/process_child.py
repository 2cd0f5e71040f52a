"""One of two processes that work together: `process_child PORT NUMBER MODE`.

It prints a line of JSON for each check: its name, what went wrong, what it returned.
"""

import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

import jax

from tests.tools.error_texts import fails_with


def said(name: str, call: Callable[[], Any]) -> None:
    wrong, value = "", None
    try:
        value = call()
    except BaseException:
        wrong = traceback.format_exc()
    print(json.dumps({"name": name, "wrong": wrong, "value": value}), flush=True)


def lost(text: str) -> None:
    import pytest  # noqa: PLC0415 - after JAX was told its processes.

    from jdag.errors import WorkerLost  # noqa: PLC0415
    from tests.unit.parallel.process_checks import gradient  # noqa: PLC0415

    with pytest.raises(WorkerLost, match=text):
        gradient()
    with fails_with(WorkerLost, "parallel.one_of_the_processes_that"):
        gradient()


def until_said(name: str, value: str) -> None:
    from jdag.parallel.waiting import _store  # noqa: PLC0415 - after JAX was told.

    for _ in range(12_000):
        listed = _store().key_value_dir_get("jdag/cpu/")
        if any(key.endswith(name) and said == value for key, said in listed):
            return
        threading.Event().wait(0.01)
    raise AssertionError(f"{name} is never {value!r}: {listed}")


def waits(number: int) -> None:
    import pytest  # noqa: PLC0415 - after JAX was told its processes.

    from jdag.errors import JdagError, WorkerLost  # noqa: PLC0415
    from tests.unit.parallel.process_checks import gradient  # noqa: PLC0415

    late = [
        "data_parallel over 2 processes: process 1 did not make this call within 3 s",
        r"process 1 is too late; .* stopped waiting after deadline_s = 3 seconds",
    ]
    differs = "deadline_s = 60 on process 0 and 61 on process 1"
    with pytest.raises(JdagError, match=differs):
        gradient(deadline_s=60.0 + number)
    assert gradient(deadline_s=60.0) == 8
    if number == 1:
        until_said("/waits/0", "")
    assert gradient(deadline_s=60.0) == 8
    if number == 1:
        until_said("/verdict", "given up")
    with pytest.raises(WorkerLost, match=late[number]):
        gradient(deadline_s=3.0)
    with fails_with(WorkerLost, "parallel.one_of_the_processes_that"):
        gradient(deadline_s=3.0)


def main(port: str, number: int, mode: str) -> None:
    jax.config.update("jax_enable_x64", True)
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, number)
    from tests.unit.parallel.process_checks import CHECKS, gradient  # noqa: PLC0415

    if mode == "ends":
        gradient()
        if number == 1:
            raise KeyError("mine")
        said("ends", lambda: lost("the program of process 1 has ended"))
        return
    if mode == "waits":
        said("waits", lambda: waits(number))
        return
    for name, check in CHECKS.items():
        said(name, check)
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    said(
        "killed",
        lambda: lost("one of the 2 processes of this data_parallel has ended: "),
    )
    os._exit(0)  # JAX would wait for the other process.


main(sys.argv[1], int(sys.argv[2]), sys.argv[3])
