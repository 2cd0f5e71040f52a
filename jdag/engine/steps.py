"""One worker's part of plans: runs steps segment by segment.

Inputs:  Prepare, Step, Hop and Settle, from other workers and from `plans` here;
         results of jobs.
Outputs: CompileSegment and RunSegment jobs; Hop and Stepped; new versions of leaves.

Invariants
- A step begins when its Step arrives, with the newest versions of leaves at that time.
  Values of other steps are never used: the hop of a finished step is dropped, the hop
  of a step that has not begun waits.
- A segment runs once all its input slots are stored; a slot is dropped after its last
  use.
- New versions of leaves are staged until the owner commits the step. If another program
  has changed the leaves since the step read them, the commit runs the updates again, on
  the newest versions.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jdag.engine.graph import Value, Version
from jdag.engine.leaves import Leaves
from jdag.engine.protocol import (
    Acknowledge,
    CompileSegment,
    ContextId,
    Failure,
    Hop,
    Job,
    Key,
    LeafId,
    Listed,
    NewestKey,
    Path,
    Prepare,
    RunSegment,
    Settle,
    Skip,
    SlotKey,
    Step,
    Stepped,
    Tag,
    Worker,
    landing,
)
from jdag.engine.state import State, first_failure


class StepState(Struct, eq=False):
    context: ContextId
    number: int
    missing: list[int]  # By segment, the number of missing input slots.
    uses: dict[int, int]  # By slot, the number of remaining uses.
    keys: dict[int, Key] = {}  # By slot, the stored values.
    begun: bool = False
    undone: int = 0  # Number of segments that have not run.
    jobs: dict[int, None] = {}  # Jobs in progress.
    reported: bool = False
    versions: dict[LeafId, Version] = {}  # The versions that the step reads.


class WorkerPlan(Struct, eq=False):
    owner: Worker
    prepare: Prepare
    results: tuple[int, ...]  # On the owner: the slots that a step returns.
    readers: dict[int, list[int]] = {}  # By slot, the segments that read it.
    uses: dict[int, int] = {}  # By slot, the number of uses in a step.
    needs: list[int] = []  # By segment, the number of its input slots.
    free: list[int] = []  # Segments without input slots.
    actions: tuple[tuple[str, Tag], ...] = ()  # The worker's actions in a schedule.
    runs: dict[int, StepState] = {}  # Steps in progress, by number.
    last_over: int = 0  # The number of the last finished or dropped step.

    def run(self, number: int) -> StepState:
        run = self.runs.get(number)
        if run is None:
            missing, uses = self.needs.copy(), self.uses.copy()
            context = self.prepare.context
            run = StepState(context, number, missing, uses, undone=len(missing))
            self.runs[number] = run
        return run


class Steps(Struct, eq=False):
    _state: State
    _leaves: Leaves
    parts: dict[ContextId, WorkerPlan] = {}
    # Set by the engine. Called for plans that this worker owns.
    stepped: Callable[[Worker, Stepped], None] = lambda *_: None
    results_arrived: Callable[[ContextId, int, int], None] = lambda *_: None

    def prepare(self, sender: Worker, message: Prepare) -> None:
        self.begin(message, ())

    def begin(self, message: Prepare, results: tuple[int, ...]) -> None:
        """Compile this worker's part of a plan. Only the owner has `results`."""
        state, context = self._state, message.context
        owner = state.owner(context)
        part = self.parts[context] = WorkerPlan(owner, message, results)
        uses, updates = part.uses, message.updates
        for index, segment in enumerate(message.segments):
            part.needs.append(len(segment.needs))
            if not segment.needs:
                part.free.append(index)
            for slot in segment.needs:
                part.readers.setdefault(slot, []).append(index)
                uses[slot] = uses.get(slot, 0) + 1 + (index in updates)
            id = state.number_job()
            job = CompileSegment(id, context, 0, (index,), segment.function)
            state.compute(job, partial(self._compiled, context), None)
        actions = [(each.action, each.tag) for each in message.segments if each.tag]
        part.actions = tuple(actions)
        staged = [stage.slot for stage in message.stages]
        for slot in (*results, *message.constants, *staged):
            uses[slot] = uses.get(slot, 0) + 1

    def _compiled(self, context: ContextId, failure: Failure | None, _: Job) -> None:
        self._report(context, Stepped(context, 0, failure))

    def _report(self, context: ContextId, message: Stepped) -> None:
        part = self.parts.get(context)
        if part is None:
            return
        if part.owner == self._state.worker:
            self.stepped(part.owner, message)
        else:
            self._state.send(part.owner, message)

    def step(self, sender: Worker, message: Step) -> None:
        context, number = message.context, message.number
        part = self.parts.get(context)
        if part is None or number <= part.last_over:
            self._state.drop(landing(message))
            return
        if message.commits:
            self._commit(part, number - 1)
        run = part.run(number)
        values: list[Value] = []
        for read in part.prepare.reads:
            newest = NewestKey(None, read.leaf, 0)
            version = self._leaves.version(newest)
            if version is not None:
                run.versions[read.leaf] = version
            value = version or self._leaves.missing(newest)
            value.users += 1
            values.append(value)
        for slot in message.slots:
            run.keys[slot] = SlotKey(context, number, slot)
        if values:
            self._state.when_settled(values, partial(self._begin, part, run, values))
        else:
            self._begin(part, run, ())

    def _begin(self, part: WorkerPlan, run: StepState, values: Sequence[Value]) -> None:
        if part.runs.get(run.number) is not run:
            return  # The step was dropped.
        if values and (failure := first_failure(values)) is not None:
            self._failed(part, run, failure)
            return
        run.begun = True
        if part.actions:
            self._state.out.append(Listed(run.context, part.actions, run.number))
        for slot in part.prepare.constants:
            run.keys[slot] = SlotKey(run.context, 0, slot)
        for read, value in zip(part.prepare.reads, values, strict=True):
            run.keys[read.slot] = value.stored
        self._arrived(part, run, tuple(run.keys), part.free)
        self._done(part, run)  # A part may have no segments.

    def hop(self, sender: Worker, message: Hop) -> None:
        part, state = self.parts.get(message.context), self._state
        if part is None or message.number <= part.last_over:
            state.drop(landing(message))
            return
        run = part.run(message.number)
        new = [slot for slot in message.slots if slot not in run.keys]
        for slot in new:
            run.keys[slot] = SlotKey(message.context, message.number, slot)
        if run.begun:
            self._arrived(part, run, new)

    def _arrived(
        self,
        part: WorkerPlan,
        run: StepState,
        slots: Sequence[int],
        ready: Sequence[int] = (),
    ) -> None:
        missing, complete = run.missing, [*ready]
        for slot in slots:
            for index in part.readers.get(slot, ()):
                missing[index] -= 1
                if not missing[index]:
                    complete.append(index)
        if results := part.results:
            count = sum([slot in results for slot in slots])
            if count:
                self.results_arrived(run.context, run.number, count)
        complete.sort()
        for index in complete:
            self._run(part, run, index)

    # ---------------------------------------------------------------------- segments

    def _run(self, part: WorkerPlan, run: StepState, index: int) -> None:
        context, segment = part.prepare.context, part.prepare.segments[index]
        if segment.hops and not segment.makes:  # The segment only forwards values.
            self._ran(part, run, index)
            return
        number, keys, uses = run.number, run.keys, run.uses
        inputs, last = [], []
        for slot in segment.needs:
            key = keys[slot]
            inputs.append(key)
            if uses[slot] == 1 and _is_of_step(key, run):
                last.append(key)
                del keys[slot]
        outputs = [SlotKey(context, number, slot) for slot in segment.makes]
        id, action = self._state.number_job(), (segment.tag, segment.action)
        head = id, context, number, (index,), segment.function
        ends = tuple(inputs), tuple(outputs), tuple(last)
        job = RunSegment(*head, *ends, *action)
        run.jobs[id] = None
        self._state.compute(job, partial(self._computed, part, run, index), None)

    def _computed(
        self,
        part: WorkerPlan,
        run: StepState,
        index: int,
        failure: Failure | None,
        job: Any,
    ) -> None:
        del run.jobs[job.id]
        if part.runs.get(run.number) is not run:
            self._state.drop(job.outputs)
        elif failure is not None:
            self._failed(part, run, failure)
        else:
            segment = part.prepare.segments[index]
            run.keys.update(zip(segment.makes, job.outputs, strict=True))
            self._ran(part, run, index)

    def _ran(self, part: WorkerPlan, run: StepState, index: int) -> None:
        state, segment = self._state, part.prepare.segments[index]
        context, number = part.prepare.context, run.number
        keys = run.keys
        for out in segment.hops:
            sent = tuple(map(keys.__getitem__, out.slots))
            state.send(out.to, Hop(context, number, out.slots), sent)
        unused: list[Key] = []
        for slot in segment.needs:
            if slot in keys:
                self.used(run, slot, unused)
        for slot in segment.makes:
            if not run.uses.get(slot):
                unused.append(keys.pop(slot))
        state.drop(unused)
        run.undone -= 1
        self._arrived(part, run, segment.makes)
        self._done(part, run)

    def used(self, run: StepState, slot: int, unused: list[Key]) -> None:
        run.uses[slot] -= 1
        if not run.uses[slot] and _is_of_step(run.keys[slot], run):
            unused.append(run.keys.pop(slot))

    def _done(self, part: WorkerPlan, run: StepState) -> None:
        if run.undone or part.runs.get(run.number) is not run or run.reported:
            return
        run.reported = True
        prepare = part.prepare
        if part.owner != self._state.worker and not prepare.stages:
            self.drop(part, run)
        if prepare.reports:
            self._report(prepare.context, Stepped(prepare.context, run.number, None))

    def _failed(self, part: WorkerPlan, run: StepState, failure: Failure) -> None:
        if part.owner != self._state.worker:
            self.drop(part, run)
        route = (self._state.worker,)
        failed = replace(failure, route=route)
        context = part.prepare.context
        self._report(context, Stepped(context, run.number, failed))

    # ---------------------------------------------------------------- commit and drop

    def settle(self, sender: Worker, message: Settle) -> None:
        self.settled(message)
        if message.commits:
            self._state.send(sender, Acknowledge(None, (path_of(message),)))

    def settled(self, message: Settle) -> None:
        part = self.parts.get(message.context)
        if part is None:
            return
        if message.commits:
            self._commit(part, message.number)
        else:
            self._abandon(part, message.number)
        if message.over:
            self.forget(part)

    def _abandon(self, part: WorkerPlan, number: int) -> None:
        for run in [run for run in part.runs.values() if run.number <= number]:
            self.drop(part, run)
        part.last_over = max(part.last_over, number)

    def drop(self, part: WorkerPlan, run: StepState) -> None:
        """Drop a step. Its values are dropped when its jobs have ended."""
        del part.runs[run.number]
        part.last_over = max(part.last_over, run.number)
        if part.actions and run.undone:  # Some actions will not run.
            self._state.out.append(Skip(run.context, None, "", run.number))
        self._drop_values(run, ())

    def _drop_values(self, run: StepState, committed: Sequence[Key]) -> None:
        if not run.keys and not run.versions:
            return
        keys = [key for key in run.keys.values() if _is_of_step(key, run)]
        dropped = [key for key in keys if key not in committed]
        versions = tuple(run.versions.values())

        def drop() -> None:
            self._state.drop(dropped)
            self._state.release(versions)

        self._state.when_computed(tuple(run.jobs), drop)

    def forget(self, part: WorkerPlan) -> None:
        context = part.prepare.context
        self._abandon(part, max(part.runs, default=0))
        del self.parts[context]
        constants = part.prepare.constants
        self._state.drop([SlotKey(context, 0, slot) for slot in constants])

    def _commit(self, part: WorkerPlan, number: int) -> None:
        run = part.runs.get(number)
        if run is None:
            return
        del part.runs[number]
        part.last_over = max(part.last_over, number)
        leaves, stages = self._leaves, part.prepare.stages
        newest: dict[LeafId, Version] = {}
        for stage in stages:
            version = leaves.version(NewestKey(None, stage.leaf, 0))
            if version is not None:  # The leaf was not dropped.
                newest[stage.leaf] = version
        new = {
            stage.slot: leaves.next_version(stage.leaf, part.owner)
            for stage in stages
            if stage.leaf in newest
        }
        if any([run.versions.get(leaf) is not newest[leaf] for leaf in newest]):
            self._update_again(part, run, newest, new)
            return
        for slot, value in new.items():
            value.stored = run.keys[slot]
            leaves.version_done(value, None)
        self._drop_values(run, [value.stored for value in new.values()])

    def _update_again(
        self,
        part: WorkerPlan,
        run: StepState,
        newest: Mapping[LeafId, Version],
        new: Mapping[int, Version],
    ) -> None:
        updates, reads = part.prepare.updates, part.prepare.reads
        remaining = dict.fromkeys(updates)
        current = {r.slot: newest[r.leaf] for r in reads if r.leaf in newest}
        for index in updates:
            segment = part.prepare.segments[index]
            before = {slot: current[slot] for slot in segment.needs if slot in current}
            for value in before.values():
                value.users += 1
            update = partial(self._update, part, run, index, before, new, remaining)
            self._state.when_settled(tuple(before.values()), update)

    def _update(
        self,
        part: WorkerPlan,
        run: StepState,
        index: int,
        before: Mapping[int, Version],
        new: Mapping[int, Version],
        remaining: dict[int, None],
    ) -> None:
        segment, context = part.prepare.segments[index], part.prepare.context
        keys = run.keys | {slot: version.stored for slot, version in before.items()}

        def updated(failure: Failure | None, _: Any) -> None:
            for slot in segment.makes:
                if (value := new.get(slot)) is not None:
                    value.stored = run.keys[slot]
                    self._leaves.version_done(value, failure)
            self._state.release(before.values())
            del remaining[index]
            if not remaining:
                self._drop_values(run, [value.stored for value in new.values()])

        failure = first_failure(before.values())
        if failure is not None:
            updated(failure, None)
            return
        inputs = tuple([keys[slot] for slot in segment.needs])
        outputs = tuple([run.keys[slot] for slot in segment.makes])
        id, function = self._state.number_job(), segment.function
        head = id, context, run.number, (index,), function
        self._state.compute(RunSegment(*head, inputs, outputs, ()), updated, None)


def path_of(message: Settle) -> Path:
    """The path in the Acknowledge of a commit. No assignment has such a path."""
    return (0, message.context.counter & (1 << 32) - 1, message.number)


def _is_of_step(key: Key, run: StepState) -> bool:
    return key.kind == "slot" and key.context == run.context and key.name == run.number
