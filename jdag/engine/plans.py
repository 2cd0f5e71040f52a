"""The owner's side of plans: recorded steps that several workers run.

Inputs:  Planned, Compiled, Stepping and Unplanned of programs here; Stepped.
Outputs: Prepare, StepFrame and Settle; this worker's part of the plan runs in `steps`.

Invariant: a step is committed after it has succeeded on all workers, with the first
frame of the plan's next step or before the next other event of a program here; a step
that fails on one worker is dropped on all.
"""

from typing import Any

from msgspec import Struct

from jdag.engine.lifetimes import Lifetimes
from jdag.engine.protocol import (
    Compiled,
    ContextId,
    Event,
    Failure,
    NewestKey,
    Planned,
    Prepare,
    Settle,
    StepFrame,
    Stepped,
    Stepping,
    Unplanned,
    Worker,
)
from jdag.engine.state import State
from jdag.engine.steps import Steps
from jdag.engine.tables import Hop, StepState, begins_with_owner
from jdag.errors import WorkerLost


class OwnedPlan(Struct, eq=False):
    workers: dict[Worker, Prepare]
    segments: int  # Number of segments on all workers.
    stages: bool  # Whether a step creates new versions of leaves.
    frames: list[tuple[Hop, tuple[int, ...]]] = []  # The places are those of inputs.
    inputs: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())  # Slots here, inputs.
    compiled: int = 0  # Number of compiled segments.
    failure: Failure | None = None  # Why the plan cannot be used.
    compiling: int = 0  # The waiter of a Compiled event, and its `seen`.
    seen: int = 0
    waiter: int = 0  # The waiter of the running step; 0 if none runs.
    number: int = 0  # The number of the last step.
    base: int = 0  # The number of the last committed step.
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
        here = state.worker
        plan = OwnedPlan(
            parts,
            sum([len(part.segments) for part in parts.values()]),
            any([part.stages for part in parts.values()]),
        )
        slots = dict(event.inputs)
        index = {slot: place for place, slot in enumerate(event.slots)}
        for worker in dict.fromkeys((*parts, *slots)):
            sent = slots.get(worker, ())
            places = tuple([index[slot] for slot in sent])
            if worker == here:
                plan.inputs = sent, places
            elif sent or begins_with_owner(parts[worker]):
                frame = StepFrame(context, 0, sent, 0, True)
                plan.frames.append((Hop(worker, places, frame), places))
        self._owned[context] = plan
        state.send_each(parts)
        reporters = [to for to, part in parts.items() if part.reports and to != here]
        part = parts.get(here) or Prepare(context, 0, (), (), (), (), (), False)
        self._steps.begin(part, event.results, reporters)

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
        context, number = event.context, event.number
        plan = self._owned[context]
        if plan.failure is not None:
            raise WorkerLost(plan.failure.message)
        if plan.waiter:  # The program was interrupted while it waited.
            self._settle(context, plan, commits=False)
            plan.waiter = 0
        base = plan.number if plan.staged else plan.base
        steps, values = self._steps, event.values
        for hop, places in plan.frames:  # Raises if an input cannot be sent.
            steps.send(hop, number, base, [values[place] for place in places])
        if plan.staged:
            plan.staged = False
            self.staged -= 1
            self._renew(plan)
        plan.waiter, plan.number, plan.base = event.waiter, number, base
        step = steps.tables[context].step(number)
        slots, places = plan.inputs
        if slots:
            steps.store(step, slots, [values[place] for place in places])
        steps.open(step, base)

    def stepped(self, sender: Worker, message: Stepped) -> None:
        plan = self._owned.get(message.context)
        if plan is None:
            return
        if message.number == 0:
            plan.failure = plan.failure or message.failure
            plan.compiled += 1
            self._progress(plan)
        elif message.number == plan.number and plan.waiter:
            assert message.failure is not None, message
            self._fail(message.context, plan, message.failure)

    def finished(self, step: StepState, values: list[Any]) -> None:
        plan = self._owned[step.table.prepare.context]
        if step.number != plan.number:  # Its frames could not all be sent.
            self._steps.drop(step)
            return
        if not self._steps.driver.finish(plan.waiter, tuple(values)):
            self._state.resume(plan.waiter, tuple(values))
        plan.waiter = 0
        plan.staged = plan.stages
        self.staged += plan.staged
        self._steps.complete(step)

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
            state.expect_handling(worker, (0, context.counter, plan.number))
            state.send(worker, message)
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
        for table in tuple(self._steps.tables.values()):
            if table.owner == worker:
                self._steps.forget(table)
        for context, plan in self._owned.items():
            if worker in plan.workers:
                failure = self._state.lost_failure(worker)
                plan.failure = plan.failure or failure
                self._progress(plan)
                if plan.waiter:
                    self._fail(context, plan, failure)
