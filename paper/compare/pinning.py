"""Pins the caller and its workers to cores, in the same way for all systems.

This module imports only the standard library, so that each system's Python can import
it. Each system's script calls `begin`, and starts its workers inside `of_workers`. New
processes and threads inherit the cores, and numerical libraries use one thread a core.
"""

import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# "apart": the workers have all cores but the caller's. "one": all share one core.
APART, ONE = WAYS = ("apart", "one")
CALLER = "caller"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PASSES_MAX = 10
_WORKERS = "JDAG_COMPARE_CORES"  # The environment variable with the workers' cores.


def cores_of(how: str, available: Collection[int]) -> tuple[list[int], list[int]]:
    """Return the cores of the caller and those of all workers; `how` is in `WAYS`."""
    first, *others = sorted(available)
    if how == APART and not others:
        raise SystemExit("separate cores for caller and workers need two cores or more")
    return [first], others if how == APART else [first]


def begin(how: str) -> None:
    """Pin this process to the caller's cores and restart it, if not done before.

    The libraries that it imports then start their threads on these cores.
    """
    if _WORKERS not in os.environ:
        caller, workers = cores_of(how, os.sched_getaffinity(0))
        _pin(caller)
        os.environ[_WORKERS] = json.dumps(workers)
        os.environ.pop("NPROC", None)  # XLA then counts the available cores.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextmanager
def of_workers() -> Iterator[None]:
    """Pin processes that are started inside this context to the workers' cores."""
    mine = sorted(os.sched_getaffinity(0))
    _pin(json.loads(os.environ[_WORKERS]))
    try:
        yield
    finally:
        _pin(mine)  # Also pins threads that started inside the context.


def held(pid: int | str = "self") -> list[int]:
    """Return the cores that any thread of a process may run on."""
    found: set[int] = set()
    for task in _tasks(pid):
        with suppress(ProcessLookupError):  # The thread has ended.
            found |= os.sched_getaffinity(task)
    return sorted(found)


def _pin(cores: Sequence[int]) -> None:
    for name in THREADS:
        os.environ[name] = str(len(cores))
    for _ in range(PASSES_MAX):
        for task in _tasks("self"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(task, cores)
        if held() == sorted(cores):  # No new thread has inherited the old cores.
            return
    raise SystemExit(f"threads of this process do not stay on cores {cores}")


def _tasks(pid: int | str) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
