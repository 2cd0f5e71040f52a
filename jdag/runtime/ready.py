"""The jobs that are ready on one device, in the order in which they are to run.

A device without a schedule runs what is ready, as its chooser orders it. With one, the
jobs that are tagged as listed run as the list of actions says, and wait for each other;
every other job runs as soon as the device is free.

When a list waits: for its next action, as long as that may come. It passes over one
that will not: one that the engine skips (its call is not differentiated, or failed),
and, once the engine has said what a run has, all others. It says so for a context when
the program waits for anything but a pass (then its forwards alone), and when a pass has
begun (its forwards, and the backwards that the pass needs); for a step of a plan when
that begins. An action that comes nevertheless takes its place in the list.

Inputs:  `add(job, item)`; `skip(...)` for what will not come.
Outputs: `take()`: the items of the jobs to run now, as one.

Invariants: each context, and each step of a plan, follows the list by itself, and waits
for no other; of several whose next action is ready, the one that came first goes first.
A job that no list has never waits for one that a list has. The list never stops at
an action that is skipped.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from jdag.engine.protocol import ContextId, Listed, RunSegment, Skip
from jdag.runtime.chooser import Chooser, checked_index
from jdag.schedules import Action
from jdag.schedules.actions import ScheduleStep

# What follows a list: a context and, of a plan, the number of the step.
_Of = tuple[ContextId, int]


class _Run:
    """One run along a list: `ready` and `gone` actions; `has` are all that may come."""

    __slots__ = ("at", "gone", "has", "ready")

    def __init__(self) -> None:
        self.at = 0  # The first step of which something may come.
        self.gone: dict[Action, None] = {}  # Taken, or skipped.
        self.has: dict[Action, None] | None = None  # None: not known.
        self.ready: dict[Action, tuple[Any, Any]] = {}  # With job and item.

    def following(self, steps: Sequence[tuple[Action, ...]]) -> list[Action]:
        """Return the actions that are next, as one; [] if none is to come."""
        gone, has = self.gone, self.has
        while self.at < len(steps):
            found = [
                part
                for part in steps[self.at]
                if part not in gone and (has is None or part in has)
            ]
            if found:
                return found
            self.at += 1
        return []

    def narrow(self, actions: Iterable[Action]) -> None:
        """Wait for these alone, and for what is ready."""
        self.has = dict.fromkeys([*actions, *self.ready])
        self.at = 0

    def add(self, action: Action, job: Any, item: Any) -> None:
        """Note an action that is ready."""
        self.ready[action] = job, item
        if self.has is not None and action not in self.has:
            self.has[action] = None
            self.at = 0


class ReadyJobs:
    """The jobs that are ready on one device; `steps` is the list of its worker."""

    __slots__ = (
        "_added",
        "_chooser",
        "_here",
        "_jobs",
        "_left",
        "_runs",
        "_steps",
        "_worker",
    )

    def __init__(
        self, chooser: Chooser, worker: str, steps: Sequence[ScheduleStep] = ()
    ) -> None:
        self._chooser = chooser
        self._worker = worker
        self._steps = tuple([step.parts for step in steps])
        self._here = frozenset([part for parts in self._steps for part in parts])
        self._left = ""  # What a run waited for that was given up.
        self._added = 0
        # (key, order of adding, job, item); a heap, or sorted if the chooser picks.
        self._jobs: list[tuple[tuple[Any, ...], int, Any, Any]] = []
        self._runs: dict[_Of, _Run] = {}

    def __len__(self) -> int:
        if not self._runs:
            return len(self._jobs)
        return len(self._jobs) + sum([len(run.ready) for run in self._runs.values()])

    def add(self, job: Any, item: Any) -> None:
        """Add a job that is ready; `item` is what `take` returns for it."""
        action = self._action(job) if self._steps else None
        if action is not None:
            self._left = ""
            number = job.phase if isinstance(job, RunSegment) else 0
            run = self._run(job.context, number)
            if action not in run.gone and action not in run.ready:
                run.add(action, job, item)
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
        index = checked_index(index, len(ready))
        if index == len(self._jobs):
            return self._next(True)
        return [self._jobs.pop(index)[3]]

    def choices(self) -> list[Any]:
        """The jobs of which one may run next; of a step of the list the first."""
        return [entry[2] for entry in self._jobs] + self._next(False)[:1]

    def skip(self, skip: Skip | Listed) -> None:
        """Wait for these actions no more; without a tag for none of the context."""
        of = skip.context, skip.number
        if isinstance(skip, Listed):
            acts = [Action(k, one.stage, one.micro_batch) for k, one in skip.actions]
            self._run(*of).narrow(acts)
            return
        if (tag := skip.tag) is not None:
            gone = [Action(kind, tag.stage, tag.micro_batch) for kind in skip.actions]
            gone = [action for action in gone if action in self._here]
            if gone:
                self._run(*of).gone.update(dict.fromkeys(gone))
            return
        self._left = self.stalled
        for job, item in self._runs.pop(of, _Run()).ready.values():
            self._free(job, item)

    def clear(self) -> None:
        """Remove all jobs, as when the worker is gone."""
        self._jobs.clear()
        self._runs.clear()

    @property
    def stalled(self) -> str:
        """What a list waits for while other jobs of it are ready; "" if none are."""
        stalled = ""
        for run in self._runs.values():
            if not run.ready:
                continue
            following = run.following(self._steps)
            wanted = [str(action) for action in following if action not in run.ready]
            if not wanted:  # The device has not come to it yet.
                return ""
            behind = ", ".join([str(action) for action in run.ready][:4])
            more = f" and {len(run.ready) - 4} more" if len(run.ready) > 4 else ""
            stalled = stalled or (
                f"worker {self._worker} waits for {' and '.join(wanted)}, which is "
                f"next in its list; ready behind it: {behind}{more}"
            )
        return stalled

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

    def _run(self, context: ContextId, number: int) -> _Run:
        return self._runs.setdefault((context, number), _Run())

    def _next(self, take: bool) -> list[Any]:
        """The items of the next step, which is taken; or else its jobs."""
        for of, run in self._runs.items():
            step = run.following(self._steps)
            if not step or not all(action in run.ready for action in step):
                continue
            if not take:
                return [run.ready[action][0] for action in step]
            items = [run.ready.pop(action)[1] for action in step]
            run.gone.update(dict.fromkeys(step))
            if of[1] and not run.following(self._steps):
                del self._runs[of]  # A step is over; a context may go on.
            return items
        return []

    def _free(self, job: Any, item: Any) -> None:
        """Add a job that no list has."""
        self._added += 1
        entry = (self._chooser.job_key(job), self._added, job, item)
        if self._chooser.picks_jobs:
            insort(self._jobs, entry)
        else:
            heappush(self._jobs, entry)
