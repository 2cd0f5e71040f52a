"""Which cores the caller and its workers run on, alike for all systems.

It knows the standard library alone, so that any system's Python can import it. A part
begins with `begin`, and starts what its workers need inside `of_workers`: processes and
threads inherit the cores, and the numerical libraries have as many threads.
"""

import json
import os
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# The workers have all cores but the caller's, or every process is on one and the same.
APART, ONE = WAYS = ("apart", "one")
CALLER = "caller"
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
PASSES_MAX = 10
_WORKERS = "JDAG_COMPARE_CORES"  # Those of the workers, where the caller is pinned.


def cores_of(how: str, available: Collection[int]) -> tuple[list[int], list[int]]:
    """The cores of the caller and of each worker; `how` is one of `WAYS`."""
    first, *others = sorted(available)
    if how == APART and not others:
        raise SystemExit("to run caller and workers apart takes two cores")
    return [first], others if how == APART else [first]


def begin(how: str) -> None:
    """Start this process anew on the caller's cores, unless it is so already.

    So its libraries are imported, and their threads made, where they are to run.
    """
    if _WORKERS not in os.environ:
        caller, workers = cores_of(how, os.sched_getaffinity(0))
        _pin(caller)
        os.environ[_WORKERS] = json.dumps(workers)
        os.environ.pop("NPROC", None)  # XLA counts the cores that it is given.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])


@contextmanager
def of_workers() -> Iterator[None]:
    """Processes that are started in here have the workers' cores."""
    mine = sorted(os.sched_getaffinity(0))
    _pin(json.loads(os.environ[_WORKERS]))
    try:
        yield
    finally:
        _pin(mine)  # Also the threads that have begun since, by an inherited mask.


def held(pid: int | str = "self") -> list[int]:
    """The cores that any thread of a process may run on."""
    found: set[int] = set()
    for task in _tasks(pid):
        with suppress(ProcessLookupError):  # It has ended since.
            found |= os.sched_getaffinity(task)
    return sorted(found)


def _pin(cores: Sequence[int]) -> None:
    for name in THREADS:
        os.environ[name] = str(len(cores))
    for _ in range(PASSES_MAX):
        for task in _tasks("self"):
            with suppress(ProcessLookupError):
                os.sched_setaffinity(task, cores)
        if held() == sorted(cores):  # No thread has begun by an old mask meanwhile.
            return
    raise SystemExit(f"threads of this process do not stay on cores {cores}")


def _tasks(pid: int | str) -> list[int]:
    return [int(task.name) for task in Path(f"/proc/{pid}/task").iterdir()]
