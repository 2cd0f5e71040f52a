"""The jobs that are ready on one device, in the order in which they are to run.

A device without a schedule runs ready jobs in the order of its chooser. With a
schedule, listed jobs run in the order of the list of actions, and wait for each other.
All other jobs run as soon as the device is free.

The list waits for its next action as long as that action may still come. The list
passes over actions that the engine skips (their call is not differentiated, or failed).
Once the engine has sent the possible actions of a run, the list passes over all other
actions. The engine sends them for a context when the program waits for anything but a
pass (the forwards so far), and when a pass has begun (the forwards, and the backwards
that the pass needs); for a step of a plan when it begins. An action that arrives
nevertheless takes its place in the list.

Inputs:  `add(job, item)`; `skip(...)` for actions that will not come. Outputs: `take()`
returns the items of the next jobs, which run as one.

Invariants: each context, and each step of a plan, follows the list independently. If
the next actions of several are ready, the earliest run goes first. A job outside the
list never waits for a listed one. The list never stops at a skipped action.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush
from typing import Any

from jdag.engine.protocol import ContextId, Listed, RunSegment, Skip
from jdag.runtime.chooser import Chooser, checked_index
from jdag.schedules import Action
from jdag.schedules.actions import ScheduleStep

# Identifies a run through the list: a context and, for a plan, the step's number.
_RunId = tuple[ContextId, int]


class _Run:
    __slots__ = ("done", "expected", "ready", "step")

    def __init__(self) -> None:
        self.step = 0  # The first step that may have actions to come.
        self.done: dict[Action, None] = {}  # Actions taken or skipped.
        self.expected: dict[Action, None] | None = None  # None if unknown.
        self.ready: dict[Action, tuple[Any, Any]] = {}  # Job and item.

    def following(self, steps: Sequence[tuple[Action, ...]]) -> list[Action]:
        done, expected = self.done, self.expected
        while self.step < len(steps):
            actions = [
                action
                for action in steps[self.step]
                if action not in done and (expected is None or action in expected)
            ]
            if actions:
                return actions
            self.step += 1
        return []

    def narrow(self, actions: Iterable[Action]) -> None:
        self.expected = dict.fromkeys([*actions, *self.ready])
        self.step = 0

    def add(self, action: Action, job: Any, item: Any) -> None:
        self.ready[action] = job, item
        if self.expected is not None and action not in self.expected:
            self.expected[action] = None
            self.step = 0


class ReadyJobs:
    __slots__ = (
        "_actions",
        "_added",
        "_chooser",
        "_jobs",
        "_last_stalled",
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
        self._actions = frozenset([action for step in self._steps for action in step])
        self._last_stalled = ""  # `stalled` of the last run that failed.
        self._added = 0
        # Entries (key, order, job, item): a heap, or sorted if the chooser picks.
        self._jobs: list[tuple[tuple[Any, ...], int, Any, Any]] = []
        self._runs: dict[_RunId, _Run] = {}

    def __len__(self) -> int:
        if not self._runs:
            return len(self._jobs)
        return len(self._jobs) + sum([len(run.ready) for run in self._runs.values()])

    def add(self, job: Any, item: Any) -> None:
        action = self._action(job) if self._steps else None
        if action is not None:
            self._last_stalled = ""
            number = job.phase if isinstance(job, RunSegment) else 0
            run = self._run(job.context, number)
            if action not in run.done and action not in run.ready:
                run.add(action, job, item)
                return
        self._free(job, item)

    def lists(self, job: Any) -> bool:
        return bool(self._steps) and self._action(job) is not None

    def take(self) -> list[Any]:
        if not (self._chooser.picks_jobs and self._jobs):
            return [heappop(self._jobs)[3]] if self._jobs else self._next(True)
        ready = self.choices()
        index = self._chooser.pick_job(self._worker, tuple(ready))
        index = checked_index(index, len(ready))
        if index == len(self._jobs):
            return self._next(True)
        return [self._jobs.pop(index)[3]]

    def choices(self) -> list[Any]:
        """Return the jobs that may run next; of a step in the list, the first job."""
        return [entry[2] for entry in self._jobs] + self._next(False)[:1]

    def skip(self, skip: Skip | Listed) -> None:
        run_id = skip.context, skip.number
        if isinstance(skip, Listed):
            actions = [Action(k, tag.stage, tag.micro_batch) for k, tag in skip.actions]
            self._run(*run_id).narrow(actions)
            return
        if (tag := skip.tag) is not None:
            skipped = [Action(k, tag.stage, tag.micro_batch) for k in skip.actions]
            skipped = [action for action in skipped if action in self._actions]
            if skipped:
                self._run(*run_id).done.update(dict.fromkeys(skipped))
            return
        self._last_stalled = self.stalled
        for job, item in self._runs.pop(run_id, _Run()).ready.values():
            self._free(job, item)

    def clear(self) -> None:
        self._jobs.clear()
        self._runs.clear()

    @property
    def stalled(self) -> str:
        """Name the actions that block a list whose later actions are ready, or ""."""
        stalled = ""
        for run in self._runs.values():
            if not run.ready:
                continue
            following = run.following(self._steps)
            missing = [str(action) for action in following if action not in run.ready]
            if not missing:  # The device will take this step.
                return ""
            behind = ", ".join([str(action) for action in run.ready][:4])
            more = f" and {len(run.ready) - 4} more" if len(run.ready) > 4 else ""
            stalled = stalled or (
                f"worker {self._worker} waits for {' and '.join(missing)}, which is "
                f"next in its list; ready later in the list: {behind}{more}"
            )
        return stalled

    @property
    def waits_for(self) -> str:
        """The text `stalled` or, if it is empty, that of the last run that failed."""
        return self.stalled or self._last_stalled

    def _action(self, job: Any) -> Action | None:
        tag = getattr(job, "tag", None)
        if tag is None or not tag.listed:
            return None
        action = Action(job.action, tag.stage, tag.micro_batch)
        return action if action in self._actions else None

    def _run(self, context: ContextId, number: int) -> _Run:
        return self._runs.setdefault((context, number), _Run())

    def _next(self, take: bool) -> list[Any]:
        for run_id, run in self._runs.items():
            step = run.following(self._steps)
            if not step or not all(action in run.ready for action in step):
                continue
            if not take:
                return [run.ready[action][0] for action in step]
            items = [run.ready.pop(action)[1] for action in step]
            run.done.update(dict.fromkeys(step))
            if run_id[1] and not run.following(self._steps):
                del self._runs[run_id]  # A plan's step is over. A context may go on.
            return items
        return []

    def _free(self, job: Any, item: Any) -> None:
        self._added += 1
        entry = (self._chooser.job_key(job), self._added, job, item)
        if self._chooser.picks_jobs:
            insort(self._jobs, entry)
        else:
            heappush(self._jobs, entry)
