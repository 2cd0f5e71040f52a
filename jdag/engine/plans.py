"""The owner's side of plans: recorded steps that several workers run.

Inputs:  Planned, Compiled, Stepping and Unplanned of programs here; Stepped.
Outputs: Prepare, Step and Settle, also to this worker's part of the plan (`steps`).

Invariant: a step is committed after it has succeeded on all workers, with the next Step
of its plan or before the next other event of a program here; a step that fails on one
worker is dropped on all.
"""

from msgspec import Struct

from jdag.engine.lifetimes import Lifetimes
from jdag.engine.protocol import (
    Compiled,
    ContextId,
    Event,
    Failure,
    Key,
    NewestKey,
    Planned,
    Prepare,
    Settle,
    Step,
    Stepped,
    Stepping,
    Unplanned,
    Worker,
)
from jdag.engine.state import State
from jdag.engine.steps import Steps, path_of
from jdag.errors import WorkerLost


class OwnedPlan(Struct, eq=False):
    workers: dict[Worker, Prepare]
    segments: int  # Number of segments on all workers.
    reporting: tuple[Worker, ...]  # The workers that report each step.
    stages: bool  # Whether a step creates new versions of leaves.
    compiled: int = 0  # Number of compiled segments.
    failure: Failure | None = None  # Why the plan cannot be used.
    compiling: int = 0  # The waiter of a Compiled event, and its `seen`.
    seen: int = 0
    waiter: int = 0  # The waiter of the running step; 0 if none runs.
    number: int = 0  # The number of the last step.
    awaited: dict[Worker, None] = {}  # Workers whose Stepped has not arrived.
    missing: int = 0  # Number of results that have not arrived.
    staged: bool = False  # The last step has succeeded and is not committed.


class Plans(Struct, eq=False):
    _state: State
    _lifetimes: Lifetimes
    _steps: Steps
    _owned: dict[ContextId, OwnedPlan] = {}
    staged: int = 0  # Number of plans with a step that is not committed.

    def planned(self, event: Planned) -> None:
        state, context = self._state, event.context
        for worker, _ in event.parts:
            state.check_reachable(worker, f"a plan cannot be prepared on {worker!r}")
        parts = dict(event.parts)
        plan = OwnedPlan(
            parts,
            sum([len(part.segments) for part in parts.values()]),
            tuple([worker for worker, part in parts.items() if part.reports]),
            any([part.stages for part in parts.values()]),
        )
        self._owned[context] = plan
        state.send_each(parts)
        empty = Prepare(context, 0, (), (), (), (), (), False)
        self._steps.begin(parts.get(state.worker, empty), event.results)

    def compiled(self, event: Compiled) -> None:
        plan = self._owned[event.context]
        plan.compiling, plan.seen = event.waiter, event.seen
        self._progress(plan)

    def _progress(self, plan: OwnedPlan) -> None:
        waiter = plan.compiling
        ready = plan.compiled > plan.seen or plan.compiled == plan.segments
        if waiter and (plan.failure is not None or ready):
            plan.compiling = 0
            self._state.resume(waiter, plan.failure or plan.compiled)

    def stepping(self, event: Stepping) -> None:
        state, context, number = self._state, event.context, event.number
        plan = self._owned[context]
        if plan.failure is not None:
            raise WorkerLost(plan.failure.message)
        if plan.waiter:  # The program was interrupted while it waited.
            self._settle(context, plan, commits=False)
        plan.waiter, plan.number = event.waiter, number
        plan.awaited = dict.fromkeys(plan.reporting)
        plan.missing = len(dict.fromkeys(self._steps.parts[context].results))
        commits, plan.staged = plan.staged, False
        self.staged -= commits
        if commits:
            self._renew(plan)
        inputs = dict(event.inputs)
        steps: dict[Worker, Step] = {}
        for worker in plan.workers:
            steps[worker] = Step(context, number, inputs.get(worker, ()), commits)
        state.send_each(steps)
        step = steps.get(state.worker) or Step(context, number, (), False)
        self._steps.step(state.worker, step)
        self._finish(context, plan)

    def stepped(self, sender: Worker, message: Stepped) -> None:
        plan = self._owned.get(message.context)
        if plan is None:
            return
        if message.number == 0:
            plan.failure = plan.failure or message.failure
            plan.compiled += 1
            self._progress(plan)
        elif message.number == plan.number and plan.waiter:
            if message.failure is not None:
                self._fail(message.context, plan, message.failure)
            else:
                plan.awaited.pop(sender, None)
                self._finish(message.context, plan)

    def results_arrived(self, context: ContextId, number: int, count: int) -> None:
        plan = self._owned.get(context)
        if plan is not None and plan.number == number:
            plan.missing -= count
            self._finish(context, plan)

    def _finish(self, context: ContextId, plan: OwnedPlan) -> None:
        if not plan.waiter or plan.awaited or plan.missing:
            return
        part, number = self._steps.parts[context], plan.number
        run = part.runs[number]
        keys = tuple(map(run.keys.__getitem__, part.results))
        self._state.resume(plan.waiter, keys)
        plan.waiter = 0
        unused: list[Key] = []
        for slot in part.results:
            self._steps.used(run, slot, unused)
        self._state.drop(unused)
        plan.staged = plan.stages
        self.staged += plan.staged
        if not part.prepare.stages:
            self._steps.drop(part, run)

    def _fail(self, context: ContextId, plan: OwnedPlan, failure: Failure) -> None:
        waiter, plan.waiter = plan.waiter, 0
        self._settle(context, plan, commits=False)
        self._state.resume(waiter, failure)

    def _settle(
        self, context: ContextId, plan: OwnedPlan, *, commits: bool, over: bool = False
    ) -> None:
        state = self._state
        message = Settle(context, plan.number, commits, over)
        for worker, part in plan.workers.items():
            if worker == state.worker or (commits and not part.stages):
                continue
            state.send(worker, message)
            if commits and worker not in state.lost:
                state.assignments[path_of(message), worker] = None
        self._steps.settled(message)

    def commit(self, event: Event) -> None:
        """Commit the staged steps of all plans, except the plan of a Stepping event."""
        stepping = event.context if isinstance(event, Stepping) else None
        for context, plan in self._owned.items():
            if plan.staged and context != stepping:
                plan.staged = False
                self.staged -= 1
                self._settle(context, plan, commits=True)
                self._renew(plan)

    def _renew(self, plan: OwnedPlan) -> None:
        parts = plan.workers.values()
        leaves = [stage.leaf for part in parts for stage in part.stages]
        self._lifetimes.renewed([NewestKey(None, leaf, 0) for leaf in leaves])

    def unplanned(self, event: Unplanned) -> None:
        plan = self._owned.pop(event.context, None)
        if plan is not None:
            self._settle(event.context, plan, commits=False, over=True)

    def lost(self, worker: Worker) -> None:
        for part in tuple(self._steps.parts.values()):
            if part.owner == worker:
                self._steps.forget(part)
        for context, plan in self._owned.items():
            if worker in plan.workers:
                failure = self._state.lost_failure(worker)
                plan.failure = plan.failure or failure
                self._progress(plan)
                if plan.waiter:
                    self._fail(context, plan, failure)
