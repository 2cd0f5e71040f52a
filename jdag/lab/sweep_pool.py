"""Processes that make many runs of a scenario. Requests and replies are JSON lines."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack, suppress
from itertools import islice
from pathlib import Path
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from jdag.errors import ScenarioError, unusable

Attempt = Callable[[Path, Any], dict[str, Any]]

_COMMAND = (
    "from {0.__module__} import {0.__name__} as attempt\n"
    "from jdag.lab.sweep_pool import serve\n"
    "serve(attempt)"
)


def check_on(on: str | None) -> None:
    if on not in (None, "ray"):
        raise ScenarioError(unusable("on", on, "ray, or None for processes here"))
    if on is not None:
        from jdag.processes.launch import on_ray  # noqa: PLC0415 - imports Ray.

        on_ray.need_ray("--on ray")


def replies(
    attempt: Attempt,
    path: Path,
    runs: Mapping[int, Any],
    processes: int,
    on: str | None = None,
) -> Generator[tuple[int, dict[str, Any]]]:
    """Yield the number and the reply of each run, in the order of completion.

    If `processes` is 1, runs execute in this process. If one of several processes dies,
    the last reply is an error. With `on="ray"`, runs are tasks of Ray, `processes` at
    once; a failed task raises JoinError.
    """
    if on is not None:
        from jdag.processes.launch import on_ray  # noqa: PLC0415 - imports Ray.

        name = f"{attempt.__module__}:{attempt.__name__}"
        requests = {number: (path.resolve(), run) for number, run in runs.items()}
        yield from on_ray.ray_results(name, requests, processes)
        return
    if min(processes, len(runs)) <= 1:
        yield from ((number, attempt(path, run)) for number, run in runs.items())
        return
    command = _COMMAND.format(attempt)
    waiting = iter(runs.items())
    paths = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with ExitStack() as stack, DefaultSelector() as selector:

        def assign(process: subprocess.Popen[bytes]) -> None:
            assert process.stdin is not None and process.stdout is not None
            for number, changes in islice(waiting, 1):
                selector.register(process.stdout, EVENT_READ, (number, process))
                with suppress(BrokenPipeError):  # Its end is detected below.
                    line = f"{json.dumps([str(path), changes])}\n"
                    process.stdin.write(line.encode())
                    process.stdin.flush()

        for _ in range(min(processes, len(runs))):
            # In a separate process group, so that Ctrl-C reaches only the parent, which
            # then kills this process.
            process = subprocess.Popen(
                [sys.executable, "-c", command], env=paths, process_group=0,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            )  # fmt: skip
            stack.enter_context(process)
            stack.callback(process.kill)
            assign(process)
        while selector.get_map():
            for key, _ in selector.select():
                number, process = key.data
                selector.unregister(key.fileobj)
                line = process.stdout.readline()
                if not line.endswith(b"\n"):
                    message = f"the process of a run ended with code {process.wait()}"
                    yield number, {"error": message}
                    return
                assign(process)
                yield number, json.loads(line)


def serve(attempt: Attempt) -> None:
    requests, replies = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)  # Output of programs must not mix with replies.
    with suppress(BrokenPipeError):
        for line in requests:
            path, changes = json.loads(line)
            replies.write(f"{json.dumps(attempt(Path(path), changes))}\n")
            replies.flush()
