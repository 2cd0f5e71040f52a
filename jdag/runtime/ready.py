"""The jobs that are ready on one device, in the order in which they are to run.

A device without a schedule runs what is ready, as its chooser orders it. With one, the
jobs that are tagged as listed run as the list of actions says, and wait for each other;
every other job runs as soon as the device is free.

Inputs:  `add(job, item)`; `skip(...)` for actions that will not come.
Outputs: `take()`: the items of the jobs to run now, as one.

Invariants: the list is followed by one context at a time, or by one step of a plan, in
the order in which they came, and from its start by each. A job that no list has never
waits for one that a list has. An action that is skipped is nobody's turn.
"""

from bisect import insort
from collections.abc import Sequence
from heapq import heappop, heappush
from typing import Any

from jdag.engine.protocol import ContextId, RunSegment, Skip
from jdag.runtime.chooser import Chooser, checked
from jdag.schedules import Action
from jdag.schedules.actions import Step

# What follows a list: a context and, of a plan, the number of the step.
_Run = tuple[ContextId, int]


class ReadyJobs:
    """The jobs that are ready on one device; `steps` is the list of its worker."""

    __slots__ = (
        "_added",
        "_at",
        "_chooser",
        "_here",
        "_jobs",
        "_left",
        "_runs",
        "_steps",
        "_worker",
    )

    def __init__(
        self, chooser: Chooser, worker: str, steps: Sequence[Step] = ()
    ) -> None:
        self._chooser = chooser
        self._worker = worker
        self._steps = tuple([step.parts for step in steps])
        self._here = frozenset([part for parts in self._steps for part in parts])
        self._at = 0  # The step of the first run that is next.
        self._left = ""  # What a run waited for that was given up.
        self._added = 0
        # (key, order of adding, job, item); a heap, or sorted if the chooser picks.
        self._jobs: list[tuple[tuple[Any, ...], int, Any, Any]] = []
        # By run: the listed actions that are ready, with job and item; None: skipped.
        self._runs: dict[_Run, dict[Action, tuple[Any, Any] | None]] = {}

    def __len__(self) -> int:
        held = [len(self._held(run)) for run in self._runs] if self._runs else ()
        return len(self._jobs) + sum(held)

    def add(self, job: Any, item: Any) -> None:
        """Add a job that is ready; `item` is what `take` returns for it."""
        action = self._action(job) if self._steps else None
        if action is not None:
            self._left = ""
            number = job.phase if isinstance(job, RunSegment) else 0
            came = self._runs.setdefault((job.context, number), {})
            if action not in came:
                came[action] = job, item
                return
        self._free(job, item)

    def lists(self, job: Any) -> bool:
        """Whether the list has this job."""
        return bool(self._steps) and self._action(job) is not None

    def take(self) -> list[Any]:
        """Remove the jobs to run now, as one; return their items, [] if none may."""
        if not (self._chooser.picks_jobs and self._jobs):
            return [heappop(self._jobs)[3]] if self._jobs else self._next(True)
        ready = self.choices()
        index = self._chooser.pick_job(self._worker, tuple(ready))
        index = checked(index, len(ready))
        if index == len(self._jobs):
            return self._next(True)
        return [self._jobs.pop(index)[3]]

    def choices(self) -> list[Any]:
        """The jobs of which one may run next; of a step of the list the first."""
        return [entry[2] for entry in self._jobs] + self._next(False)[:1]

    def skip(self, skip: Skip) -> None:
        """Wait for these actions no more; without a tag for none of the context."""
        tag, run = skip.tag, (skip.context, skip.number)
        if tag is not None:
            gone = [Action(kind, tag.stage, tag.micro_batch) for kind in skip.actions]
            gone = [action for action in gone if action in self._here]
            if gone:
                self._runs.setdefault(run, {}).update(dict.fromkeys(gone))
            return
        self._left = self.stalled
        if run in self._runs:
            self._over(run)

    def clear(self) -> None:
        """Remove all jobs, as when the worker is gone."""
        self._jobs.clear()
        self._runs.clear()
        self._at = 0

    @property
    def stalled(self) -> str:
        """What a list waits for while other jobs of it are ready; "" if none are."""
        for run in self._runs:
            held = self._held(run)
            if held and self._at < len(self._steps):
                came = self._runs[run]
                wanted = [str(a) for a in self._steps[self._at] if a not in came]
                if not wanted:  # The device has not come to it yet.
                    return ""
                behind = ", ".join([str(action) for action, _, _ in held[:4]])
                more = f" and {len(held) - 4} more" if len(held) > 4 else ""
                return (
                    f"worker {self._worker} waits for {' and '.join(wanted)}, which is "
                    f"next in its list; ready behind it: {behind}{more}"
                )
        return ""

    @property
    def waits_for(self) -> str:
        """The same; if nothing is held up, what the run waited for that failed last."""
        return self.stalled or self._left

    def _action(self, job: Any) -> Action | None:
        tag = getattr(job, "tag", None)
        if tag is None or not tag.listed:
            return None
        action = Action(job.action, tag.stage, tag.micro_batch)
        return action if action in self._here else None

    def _held(self, run: _Run) -> list[tuple[Action, Any, Any]]:
        ready = self._runs[run].items()
        return [(action, *of) for action, of in ready if of is not None]

    def _next(self, take: bool) -> list[Any]:
        """The items of the next step, which is taken; or else its jobs."""
        while self._runs:
            run, came = next(iter(self._runs.items()))
            while self._at < len(self._steps):
                step = self._steps[self._at]
                if not all(part in came for part in step):
                    return []
                found = [of for part in step if (of := came[part]) is not None]
                if found and not take:
                    return [job for job, _ in found]
                self._at += 1
                for part in step:
                    came[part] = None
                if found:
                    if self._at == len(self._steps):
                        self._over(run)
                    return [item for _, item in found]
            self._over(run)
        return []

    def _over(self, run: _Run) -> None:
        """The list ends for a run; what is left of it waits for nothing more."""
        if run == next(iter(self._runs)):
            self._at = 0
        held = self._held(run)
        del self._runs[run]
        for _, job, item in held:
            self._free(job, item)

    def _free(self, job: Any, item: Any) -> None:
        """Add a job that no list has."""
        self._added += 1
        entry = (self._chooser.job_key(job), self._added, job, item)
        if self._chooser.picks_jobs:
            insort(self._jobs, entry)
        else:
            heappush(self._jobs, entry)
