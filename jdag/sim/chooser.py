"""One chooser for every choice: which ready job runs, which tied event is next.

A job is ready work on a worker, one forward or one vjp. Of it a policy reads
`phase` (0 for forward, else the number of its pass), `path` (its call's place in the
program, a tuple of ints) and `sequence` (the order in which jobs became ready).

Most policies are an order, `job_key`: ready jobs then wait in a heap, and a choice
costs the logarithm of their number. A policy that wants to see all that is ready, and
to know where, says so by `picks_jobs`; one that wants to order tied events, by
`picks_events`. Where they do not, nothing is asked of them and nothing is paid.

A choice changes when things happen and never what comes out: sums go by path.

Invariants of `ReadyJobs`: what was added is handed out once; with equal keys, and for a
picking policy's list, jobs are in the order of `job_key` and then of being added.
"""

from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any

from jdag.errors import JdagError, ScenarioError, unusable

JobKey = Callable[[Any], tuple[Any, ...]]


def _first_job(worker: str, ready: Sequence[Any]) -> int:
    return 0


def _first_event(tied: Sequence[Any]) -> int:
    return 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Chooser:
    """A policy: an order of jobs, and where it wants to pick for itself.

    `job_key(job)` orders ready jobs, lowest first. `pick_job(worker, ready)` is the
    index of the job to run, asked only if `picks_jobs`; `pick_event(tied)` that of the
    event to happen, of those tied in time and priority, asked only if `picks_events`.
    """

    name: str
    job_key: JobKey
    picks_jobs: bool = False
    picks_events: bool = False
    pick_job: Callable[[str, Sequence[Any]], int] = _first_job
    pick_event: Callable[[Sequence[Any]], int] = _first_event


def _path_key(job: Any) -> tuple[Any, ...]:
    return (job.phase, job.path, job.sequence)


def _backward_first_key(job: Any) -> tuple[Any, ...]:
    return (job.phase == 0, job.phase, job.path, job.sequence)


POLICIES: dict[str, Chooser] = {
    "path": Chooser(name="path", job_key=_path_key),
    "backward_first": Chooser(name="backward_first", job_key=_backward_first_key),
}


def policy(name: str) -> Chooser:
    """The policy of that name.

    "path": the order of the program: forward before backward, then by pass, then by
    path. "backward_first": backward before forward, then the same. With micro-batches
    called one after another, these are the orders of GPipe and 1F1B.

    Raises:
        ScenarioError: no such policy; names those there are.
    """
    if not isinstance(name, str) or name not in POLICIES:
        allowed = "one of " + ", ".join(POLICIES)
        raise ScenarioError(unusable("policy", name, allowed))
    return POLICIES[name]


class ReadyJobs:
    """The jobs that are ready on one worker, handed out as the chooser wants them."""

    __slots__ = ("_added", "_chooser", "_jobs", "_worker")

    def __init__(self, chooser: Chooser, worker: str) -> None:
        self._chooser = chooser
        self._worker = worker
        self._added = 0
        # (key, order of adding, job); a heap, or sorted if the policy picks.
        self._jobs: list[tuple[tuple[Any, ...], int, Any]] = []

    def __len__(self) -> int:
        """How many jobs are ready."""
        return len(self._jobs)

    def add(self, job: Any) -> None:
        """One more job is ready."""
        self._added += 1
        entry = (self._chooser.job_key(job), self._added, job)
        if self._chooser.picks_jobs:
            insort(self._jobs, entry)
        else:
            heappush(self._jobs, entry)

    def take(self) -> Any:
        """The job to run now, None when none is ready.

        Raises:
            JdagError: the policy picked one that is not there.
        """
        if not self._jobs:
            return None
        if not self._chooser.picks_jobs:
            return heappop(self._jobs)[2]
        ready = tuple(job for _, _, job in self._jobs)
        index = self._chooser.pick_job(self._worker, ready)
        return self._jobs.pop(checked(self._chooser, index, len(ready)))[2]

    def clear(self) -> tuple[Any, ...]:
        """Take out all that is ready, as when the worker is gone; in order of keys."""
        jobs = tuple(job for _, _, job in sorted(self._jobs))
        self._jobs.clear()
        return jobs


def checked(chooser: Chooser, index: int, count: int) -> int:
    """The index that a policy picked, if there is such a one.

    Raises:
        JdagError: there is not; names the policy, the index and the count.
    """
    if not 0 <= index < count:
        raise JdagError(
            f"policy {chooser.name!r} picked {index!r};"
            f" it takes an index from 0 to {count - 1}"
        )
    return index
