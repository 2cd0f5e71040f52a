"""One worker's part of plans: steps, run segment by segment.

Inputs:  Prepare, Step, Hop and Settle, of other workers and of `plans` here; results of
         jobs.
Outputs: CompileSegment and RunSegment jobs; Hop and Stepped; new versions of leaves.

Invariants
- A worker runs a step from its Step on, with the versions of leaves that are the newest
  at that moment. Values of other steps are never used: a hop of a step that is over is
  dropped, one of a step to come waits.
- A segment runs once all slots that it needs are there; a slot is dropped after its
  last use.
- New versions of leaves are staged until the owner commits the step. A commit starts
  from the newest versions: where these are not those that the step read, because
  another program has stepped meanwhile, the updates run again on them.
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
    """A step of a plan on one worker, until it is committed or dropped."""

    context: ContextId
    number: int
    left: list[int]  # By segment, the slots that it still needs.
    uses: dict[int, int]  # By slot, those of its uses that are still to come.
    here: dict[int, Key] = {}
    begun: bool = False
    undone: int = 0  # Segments.
    jobs: dict[int, None] = {}  # That are asked for.
    reported: bool = False
    versions: dict[LeafId, Version] = {}  # That it reads.


class WorkerPlan(Struct, eq=False):
    """One worker's part of a plan."""

    owner: Worker
    prepare: Prepare
    results: tuple[int, ...]  # On the owner, what a step gives.
    readers: dict[int, list[int]] = {}
    uses: dict[int, int] = {}
    needs: list[int] = []  # By segment, how many slots.
    free: list[int] = []  # Segments that need none.
    acts: tuple[tuple[str, Tag], ...] = ()  # Its actions of a schedule.
    runs: dict[int, StepState] = {}
    over: int = 0  # The last step that is over.

    def run(self, number: int) -> StepState:
        """Return the state of a step, which may have begun elsewhere."""
        run = self.runs.get(number)
        if run is None:
            left, uses = self.needs.copy(), self.uses.copy()
            context = self.prepare.context
            run = StepState(context, number, left, uses, undone=len(left))
            self.runs[number] = run
        return run


class Steps(Struct, eq=False):
    """The parts of plans on one worker, and the steps that are under way."""

    _state: State
    _leaves: Leaves
    parts: dict[ContextId, WorkerPlan] = {}
    # What comes of plans of this worker; set by the engine.
    stepped: Callable[[Worker, Stepped], None] = lambda *_: None
    came: Callable[[ContextId, int, int], None] = lambda *_: None

    def prepare(self, sender: Worker, message: Prepare) -> None:
        """Take this worker's part of a plan, and compile it."""
        self.begin(message, ())

    def begin(self, message: Prepare, results: tuple[int, ...]) -> None:
        """Take a part; `results` are slots that its owner, which is here, waits for."""
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
        acts = [(one.action, one.tag) for one in message.segments if one.tag]
        part.acts = tuple(acts)
        kept = [one.slot for one in message.stages]
        for slot in (*results, *message.constants, *kept):
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
        """Begin a step here: read the leaves, run what needs no hop."""
        context, number = message.context, message.number
        part = self.parts.get(context)
        if part is None or number <= part.over:
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
            run.here[slot] = SlotKey(context, number, slot)
        if values:
            self._state.when_settled(values, partial(self._begin, part, run, values))
        else:
            self._begin(part, run, ())

    def _begin(self, part: WorkerPlan, run: StepState, values: Sequence[Value]) -> None:
        if part.runs.get(run.number) is not run:
            return  # Dropped meanwhile.
        if values and (failure := first_failure(values)) is not None:
            self._failed(part, run, failure)
            return
        run.begun = True
        if part.acts:
            self._state.out.append(Listed(run.context, part.acts, run.number))
        for slot in part.prepare.constants:
            run.here[slot] = SlotKey(run.context, 0, slot)
        for read, value in zip(part.prepare.reads, values, strict=True):
            run.here[read.slot] = value.stored
        self._come(part, run, tuple(run.here), part.free)
        self._done(part, run)  # If there is nothing to do.

    def hop(self, sender: Worker, message: Hop) -> None:
        """Values of a step came from another worker."""
        part, state = self.parts.get(message.context), self._state
        if part is None or message.number <= part.over:
            state.drop(landing(message))
            return
        run = part.run(message.number)
        came = [slot for slot in message.slots if slot not in run.here]
        for slot in came:
            run.here[slot] = SlotKey(message.context, message.number, slot)
        if run.begun:
            self._come(part, run, came)

    def _come(
        self,
        part: WorkerPlan,
        run: StepState,
        slots: Sequence[int],
        ready: Sequence[int] = (),
    ) -> None:
        """Values are here: run the segments that waited for the last of these."""
        left, found = run.left, [*ready]
        for slot in slots:
            for index in part.readers.get(slot, ()):
                left[index] -= 1
                if not left[index]:
                    found.append(index)
        if results := part.results:
            came = 0
            for slot in slots:
                came += slot in results
            if came:
                self.came(run.context, run.number, came)
        found.sort()
        for index in found:
            self._run(part, run, index)

    # ---------------------------------------------------------------------- segments

    def _run(self, part: WorkerPlan, run: StepState, index: int) -> None:
        context, segment = part.prepare.context, part.prepare.segments[index]
        if segment.hops and not segment.makes:  # It only passes values on.
            self._ran(part, run, index)
            return
        number, here, uses = run.number, run.here, run.uses
        inputs, outputs, last = [], [], []
        for slot in segment.needs:
            key = here[slot]
            inputs.append(key)
            if uses[slot] == 1 and _is_own(key, run):
                last.append(key)
                del here[slot]
        for slot in segment.makes:
            outputs.append(SlotKey(context, number, slot))
        id = self._state.number_job()
        job = RunSegment(
            id,
            context,
            run.number,
            (index,),
            segment.function,
            tuple(inputs),
            tuple(outputs),
            tuple(last),
            segment.tag,
            segment.action,
        )
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
            run.here.update(zip(segment.makes, job.outputs, strict=True))
            self._ran(part, run, index)

    def _ran(self, part: WorkerPlan, run: StepState, index: int) -> None:
        state, segment = self._state, part.prepare.segments[index]
        context, number = part.prepare.context, run.number
        here = run.here
        for out in segment.hops:
            keys = tuple(map(here.__getitem__, out.slots))
            state.send(out.to, Hop(context, number, out.slots), keys)
        gone: list[Key] = []
        for slot in segment.needs:
            if slot in here:
                self.used(run, slot, gone)
        for slot in segment.makes:
            if not run.uses.get(slot):
                gone.append(here.pop(slot))
        state.drop(gone)
        run.undone -= 1
        self._come(part, run, segment.makes)
        self._done(part, run)

    def used(self, run: StepState, slot: int, gone: list[Key]) -> None:
        """Count a use of a slot; add the key to be dropped, if it was the last."""
        run.uses[slot] -= 1
        if not run.uses[slot] and _is_own(run.here[slot], run):
            gone.append(run.here.pop(slot))

    def _done(self, part: WorkerPlan, run: StepState) -> None:
        """Report the step if all segments have run here."""
        if run.undone or part.runs.get(run.number) is not run or run.reported:
            return
        run.reported = True
        prepare = part.prepare
        if part.owner != self._state.worker and not prepare.stages:
            self.drop(part, run)
        if prepare.reports:
            self._report(prepare.context, Stepped(prepare.context, run.number, None))

    def _failed(self, part: WorkerPlan, run: StepState, failure: Failure) -> None:
        """The step cannot go on here: drop it, and report that to the owner."""
        if part.owner != self._state.worker:
            self.drop(part, run)
        route = (self._state.worker,)
        failed = replace(failure, route=route)
        context = part.prepare.context
        self._report(context, Stepped(context, run.number, failed))

    # ------------------------------------------------------------------ ends of steps

    def settle(self, sender: Worker, message: Settle) -> None:
        """The owner commits a step or drops it, or the whole plan."""
        self.settled(message)
        if message.commits:
            self._state.send(sender, Acknowledge(None, (path_of(message),)))

    def settled(self, message: Settle) -> None:
        """Commit a step or drop it."""
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
        """Drop this step and all before it."""
        for run in [run for of, run in part.runs.items() if of <= number]:
            self.drop(part, run)
        part.over = max(part.over, number)

    def drop(self, part: WorkerPlan, run: StepState) -> None:
        """Drop a step, and its values when its jobs have ended."""
        del part.runs[run.number]
        part.over = max(part.over, run.number)
        if part.acts and run.undone:  # Some of its actions will not come.
            self._state.out.append(Skip(run.context, None, "", run.number))
        self._let_go(run, ())

    def _let_go(self, run: StepState, kept: Sequence[Key]) -> None:
        if not run.here and not run.versions:
            return
        own = [k for k in run.here.values() if _is_own(k, run) and k not in kept]
        versions = tuple(run.versions.values())

        def drop() -> None:
            self._state.drop(own)
            self._state.release(versions)

        self._state.when_computed(tuple(run.jobs), drop)

    def forget(self, part: WorkerPlan) -> None:
        """Drop a part with all its steps."""
        context = part.prepare.context
        self._abandon(part, max(part.runs, default=0))
        del self.parts[context]
        constants = part.prepare.constants
        self._state.drop([SlotKey(context, 0, slot) for slot in constants])

    def _commit(self, part: WorkerPlan, number: int) -> None:
        """Make what a step staged the newest versions of its leaves."""
        run = part.runs.get(number)
        if run is None:
            return
        del part.runs[number]
        part.over = max(part.over, number)
        leaves, stages = self._leaves, part.prepare.stages
        newest: dict[LeafId, Version] = {}
        for one in stages:
            version = leaves.version(NewestKey(None, one.leaf, 0))
            if version is not None:  # It was not dropped.
                newest[one.leaf] = version
        stages = tuple([one for one in stages if one.leaf in newest])
        made = {one.slot: leaves.next_version(one.leaf, part.owner) for one in stages}
        if any([run.versions.get(leaf) is not newest[leaf] for leaf in newest]):
            self._update_again(part, run, newest, made)
            return
        for slot, value in made.items():
            value.stored = run.here[slot]
            leaves.made(value, None)
        self._let_go(run, [value.stored for value in made.values()])

    def _update_again(
        self,
        part: WorkerPlan,
        run: StepState,
        newest: Mapping[LeafId, Version],
        made: Mapping[int, Version],
    ) -> None:
        """Run the updates on the newest versions, which another program has made."""
        updates, reads = part.prepare.updates, part.prepare.reads
        left = dict.fromkeys(updates)
        of = {read.slot: newest[read.leaf] for read in reads if read.leaf in newest}
        for index in updates:
            segment = part.prepare.segments[index]
            before = {slot: of[slot] for slot in segment.needs if slot in of}
            for value in before.values():
                value.users += 1
            then = partial(self._update, part, run, index, before, made, left)
            self._state.when_settled(tuple(before.values()), then)

    def _update(
        self,
        part: WorkerPlan,
        run: StepState,
        index: int,
        before: Mapping[int, Version],
        made: Mapping[int, Version],
        left: dict[int, None],
    ) -> None:
        segment, context = part.prepare.segments[index], part.prepare.context
        here = {**run.here, **{slot: of.stored for slot, of in before.items()}}

        def updated(failure: Failure | None, _: Any) -> None:
            for slot in segment.makes:
                if (value := made.get(slot)) is not None:
                    value.stored = run.here[slot]
                    self._leaves.made(value, failure)
            self._state.release(before.values())
            del left[index]
            if not left:
                self._let_go(run, [value.stored for value in made.values()])

        failure = first_failure(before.values())
        if failure is not None:
            updated(failure, None)
            return
        inputs = tuple([here[slot] for slot in segment.needs])
        outputs = tuple([run.here[slot] for slot in segment.makes])
        id, function = self._state.number_job(), segment.function
        job = RunSegment(
            id, context, run.number, (index,), function, inputs, outputs, ()
        )
        self._state.compute(job, updated, None)


def path_of(message: Settle) -> Path:
    """The path under which a commit is acknowledged; no assignment has such a one."""
    return (0, message.context.counter & (1 << 32) - 1, message.number)


def _is_own(key: Key, run: StepState) -> bool:
    """Whether a value was made in this step; versions, constants are not."""
    return key.kind == "slot" and key.context == run.context and key.name == run.number
