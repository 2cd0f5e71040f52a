"""One worker's part of plans: runs steps by its tables (`jdag.engine.tables`).

Inputs:  Prepare, StepFrame and Settle, from other workers and from `plans` here;
         results of jobs.
Outputs: CompileSegment and RunSegment jobs; StepFrame and Stepped; new versions of
         leaves.

Invariants
- A step begins when the owner's frame arrives, with the newest versions of leaves at
  that time, or with its first frame, if this worker reads and updates no leaf. Values
  of other steps are never used: frames of earlier steps are dropped, and values for a
  step that has not begun wait.
- New versions of leaves are staged until the owner commits the step. If another program
  has changed the leaves since the step read them, the commit runs the updates again, on
  the newest versions.

A driver may run a row and send a frame at once (`StepDriver`); otherwise both are
effects, like those of calls.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heappop
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from jdag.engine.graph import Value, Version
from jdag.engine.leaves import Leaves
from jdag.engine.protocol import (
    CompileSegment,
    ContextId,
    Failure,
    Job,
    Key,
    LeafId,
    Listed,
    NewestKey,
    Prepare,
    RunSegment,
    Send,
    Settle,
    Skip,
    SlotKey,
    StepFrame,
    Stepped,
    Worker,
)
from jdag.engine.state import State, first_failure
from jdag.engine.tables import (
    UNSIZED,
    Hop,
    StepState,
    Table,
    TableRow,
    table_of,
)
from jdag.errors import ProtocolError


class Steps(Struct, eq=False):
    _state: State
    _leaves: Leaves
    tables: dict[ContextId, Table] = {}
    # Set by the runtime.
    driver: Any = None
    # Set by the engine. Called for plans that this worker owns.
    stepped: Callable[[Worker, Stepped], None] = lambda *_: None
    finished: Callable[[StepState, list[Any]], None] = lambda *_: None

    def prepare(self, sender: Worker, message: Prepare) -> None:
        self.begin(message)

    def begin(
        self,
        message: Prepare,
        results: tuple[int, ...] | None = None,
        reporters: Sequence[Worker] = (),
    ) -> None:
        """Compile this worker's part of a plan. Only the owner has `results`."""
        state, context = self._state, message.context
        constants = {
            slot: self.driver.get(SlotKey(context, 0, slot))
            for slot in message.constants
        }
        owner = state.owner(context)
        table = table_of(message, owner, constants, results, reporters)
        self.tables[context] = table
        for index, segment in enumerate(message.segments):
            id = state.number_job()
            job = CompileSegment(id, context, 0, (index,), segment.function)
            state.compute(job, partial(self._compiled, context), None)

    def _compiled(self, context: ContextId, failure: Failure | None, _: Job) -> None:
        table = self.tables.get(context)
        if table is not None:
            self._report(table, Stepped(context, 0, failure))

    def _report(self, table: Table, message: Stepped) -> None:
        if table.is_owner:
            self.stepped(table.owner, message)
        else:
            self._state.send(table.owner, message)

    def arrived(self, sender: Worker, frame: StepFrame, values: Sequence[Any]) -> None:
        table, number = self.tables.get(frame.context), frame.number
        if table is None or number <= table.last_over:
            return
        if frame.begins and sender != table.owner:
            raise ProtocolError(
                f"step {number} of {frame.context} was begun by {sender!r}, but only "
                f"{table.owner!r} may begin it"
            )
        step = table.steps.get(number) or table.step(number)
        if values:
            self.store(step, frame.slots, values)
        elif sender in table.reporters and sender not in step.reported:
            step.reported[sender] = None
            step.count_down()
        if frame.begins:
            self.open(step, frame.base)
        elif step.begun:
            self._advance(step)

    def store(
        self, step: StepState, slots: tuple[int, ...], values: Sequence[Any]
    ) -> None:
        table = step.table
        arrival = table.arrivals.get(slots)
        if arrival is None:
            places = tuple(map(table.places.__getitem__, slots))
            for place, value in zip(places, values, strict=True):
                if table.sizes[place] is UNSIZED:
                    table.sizes[place] = self.driver.nbytes(value), 0
            arrival = table.arrivals[slots] = places, table.size(places)
        places, size = arrival
        step.store(places, values)
        self.driver.account(*size)

    def open(self, step: StepState, base: int) -> None:
        """Begin a step as its owner says: `base` is the last committed step."""
        table = step.table
        if base in table.steps:
            self._commit(table.steps[base])
        if table.last_over < step.number - 1:
            self._abandon(table, step.number - 1)
        if not table.prepare.reads:
            self._begin(step, ())
            return
        versions: list[Value] = []
        for read in table.prepare.reads:
            version = self._leaves.newest(read.leaf)
            if version is not None:
                step.versions[read.leaf] = version
            value = version or self._leaves.missing(NewestKey(None, read.leaf, 0))
            value.users += 1
            versions.append(value)
        self._state.when_settled(versions, self._begin, step, versions)

    def _begin(self, step: StepState, versions: Sequence[Value]) -> None:
        table = step.table
        if table.steps.get(step.number) is not step:
            return  # The step was dropped.
        if versions:
            failure = first_failure(versions)
            if failure is None and table.passed_on:
                failure = self.driver.refusal(step)
            if failure is not None:
                self._failed(step, failure)
                return
            places = [table.places[read.slot] for read in table.prepare.reads]
            values = [self.driver.get(version.stored) for version in versions]
            step.store(places, values)
        step.begun = True
        if table.actions:
            context = table.prepare.context
            self._state.out.append(Listed(context, table.actions, step.number))
        if step.ready:
            self._advance(step)

    # -------------------------------------------------------------------------- rows

    def _advance(self, step: StepState) -> None:
        ready, table, values = step.ready, step.table, step.values
        while ready:
            row = table.rows[heappop(ready)]
            if row.hops and not row.runs:
                self._send(step, row)
            inputs = [values[place] for place in row.inputs]
            freed = step.use(row) if row.shared else row.frees
            for place in freed:
                values[place] = None
            outputs = self.driver.run(step, row, inputs) if row.runs else ()
            if outputs is False:
                job = self._job(step, row, inputs, freed)
                done = partial(self._computed, step, row)
                self._state.compute(job, done, None)
            elif row.outputs and outputs.__class__ is tuple:
                self._ran(step, row, outputs, freed)
            else:
                if freed:
                    self._free(step, freed)
                if row.segment is None:
                    self.finished(step, inputs)
                elif isinstance(outputs, Failure):
                    self._failed(step, outputs)
                    if table.steps.get(step.number) is not step:
                        return  # The step was dropped.
                else:
                    self._ran(step, row, ())

    def _computed(
        self, step: StepState, row: TableRow, failure: Failure | None, job: Any
    ) -> None:
        if step.table.steps.get(step.number) is not step:
            return
        if failure is not None:
            self._failed(step, failure)
        else:
            self._ran(step, row, job.results)
            self._advance(step)

    def _ran(
        self, step: StepState, row: TableRow, outputs: Any, freed: Sequence[int] = ()
    ) -> None:
        """Store and send outputs. Count `freed` inputs as freed now."""
        table = step.table
        if outputs:
            if row.gain is None:
                self._learn_sizes(table, row)
            step.store(row.outputs, outputs)
            if row.hops:
                self._send(step, row)
                self.driver.flush()
            gain = row.gain if freed is row.frees else table.size(row.outputs, freed)
            self.driver.account(*gain)
            if row.unused:
                self._free(step, row.unused)
        step.undone -= 1
        if table.is_owner:
            step.count_down()
        elif not step.undone:
            self.complete(step)
            if table.prepare.reports:
                self.send(table.report, step.number, 0, ())

    def _learn_sizes(self, table: Table, row: TableRow) -> None:
        leaves = [table.places[read.slot] for read in table.prepare.reads]
        is_leaf = [place in leaves for place in row.inputs]
        assert row.segment is not None
        sizes = self.driver.sizes(row.segment.function, is_leaf)
        for place, size in zip(row.outputs, sizes, strict=True):
            table.sizes[place] = size
        row.gain = table.size(row.outputs, row.frees)

    def _free(self, step: StepState, places: Sequence[int]) -> None:
        self.driver.account(*step.table.size((), places))
        if self.driver.has_keys:
            self._state.drop(step.keys(places))
        for place in places:
            step.values[place] = None

    def _send(self, step: StepState, row: TableRow) -> None:
        for hop in row.hops:
            values = [step.values[place] for place in hop.places]
            self.send(hop, step.number, 0, values)

    def send(self, hop: Hop, number: int, base: int, values: Sequence[Any]) -> None:
        """Send a frame: at once, unless effects are pending, which it must follow."""
        out = self._state.out
        if hop.to not in self._state.lost and (
            out or not self.driver.send(hop, number, base, values)
        ):
            frame = replace(hop.frame, number=number, base=base)
            out.append(Send(hop.to, frame, given=tuple(values)))

    def complete(self, step: StepState) -> None:
        """End a step whose rows have run, unless it waits for its commit."""
        table = step.table
        if not table.prepare.stages:
            del table.steps[step.number]
            table.last_over = max(table.last_over, step.number)
            if step.versions:
                self._state.release(step.versions.values())

    def _failed(self, step: StepState, failure: Failure) -> None:
        table = step.table
        if not table.is_owner:
            self.drop(step)
        failed = replace(failure, route=(self._state.worker,))
        self._report(table, Stepped(table.prepare.context, step.number, failed))

    # ---------------------------------------------------------------- commit and drop

    def settle(self, sender: Worker, message: Settle) -> None:
        self.settled(message)

    def settled(self, message: Settle) -> None:
        table = self.tables.get(message.context)
        if table is None:
            return
        if not message.commits:
            self._abandon(table, message.number)
        elif message.number in table.steps:
            self._commit(table.steps[message.number])
        if message.over:
            self.forget(table)

    def _abandon(self, table: Table, number: int) -> None:
        for step in [step for step in table.steps.values() if step.number <= number]:
            self.drop(step)
        table.last_over = max(table.last_over, number)

    def drop(self, step: StepState) -> None:
        table = step.table
        del table.steps[step.number]
        table.last_over = max(table.last_over, step.number)
        if table.actions and step.undone:  # Some actions will not run.
            context = table.prepare.context
            self._state.out.append(Skip(context, None, "", step.number))
        self._free_all(step)

    def _free_all(self, step: StepState) -> None:
        kept, held = step.table.kept, enumerate(step.values)
        places = [at for at, value in held if value is not None and at not in kept]
        self._free(step, places)
        self._state.release(step.versions.values())

    def forget(self, table: Table) -> None:
        context, constants = table.prepare.context, table.prepare.constants
        self._abandon(table, max(table.steps, default=0))
        del self.tables[context]
        self._state.drop([SlotKey(context, 0, slot) for slot in constants])

    def _commit(self, step: StepState) -> None:
        table = step.table
        del table.steps[step.number]
        table.last_over = max(table.last_over, step.number)
        leaves, stages = self._leaves, table.prepare.stages
        newest: dict[LeafId, Version] = {}
        for stage in stages:
            version = leaves.newest(stage.leaf)
            if version is not None:  # The leaf was not dropped.
                newest[stage.leaf] = version
        new = {
            table.places[stage.slot]: leaves.next_version(stage.leaf, table.owner)
            for stage in stages
            if stage.leaf in newest
        }
        if any([step.versions.get(leaf) is not newest[leaf] for leaf in newest]):
            self._update_again(step, newest, new)
            return
        for place, version in new.items():
            self._replace(step, place, version, None)
        self._free_all(step)

    def _replace(
        self, step: StepState, place: int, version: Any, failure: Failure | None
    ) -> None:
        """Make a staged value a leaf's version. The step no longer holds it."""
        (version.stored,) = step.keys((place,))
        value, step.values[place] = step.values[place], None
        nbytes, activation = step.table.size((place,))
        self.driver.account(-nbytes, -activation)
        if failure is None:
            self.driver.put(version.stored, value)
        self._leaves.version_done(version, failure)

    def _update_again(
        self,
        step: StepState,
        newest: Mapping[LeafId, Version],
        new: Mapping[int, Any],
    ) -> None:
        """Run the updates of a step again, on the newest versions of leaves."""
        table = step.table
        remaining = dict.fromkeys(table.prepare.updates)
        current = {
            table.places[read.slot]: newest[read.leaf]
            for read in table.prepare.reads
            if read.leaf in newest
        }
        for index in table.prepare.updates:
            row = table.rows[index]
            before = {p: current[p] for p in row.inputs if p in current}
            for value in before.values():
                value.users += 1
            update = step, row, before, new, remaining
            self._state.when_settled(tuple(before.values()), self._update, *update)

    def _update(
        self,
        step: StepState,
        row: TableRow,
        before: Mapping[int, Version],
        new: Mapping[int, Any],
        remaining: dict[int, None],
    ) -> None:
        def updated(failure: Failure | None, job: Any) -> None:
            for index, place in enumerate(row.outputs):
                if failure is None and step.uses[place]:
                    step.values[place] = job.results[index]
                if place in new:
                    self._replace(step, place, new[place], failure)
            self._state.release(before.values())
            del remaining[row.index]
            if not remaining:
                self._free_all(step)

        failure = first_failure(before.values())
        if failure is not None:
            updated(failure, None)
            return
        inputs = [step.values[place] for place in row.inputs]
        for index, place in enumerate(row.inputs):
            if place in before:
                inputs[index] = self.driver.get(before[place].stored)
        self._state.compute(self._job(step, row, inputs, ()), updated, None)

    def _job(
        self, step: StepState, row: TableRow, inputs: list[Any], freed: Sequence[int]
    ) -> RunSegment:
        segment, table = row.segment, step.table
        assert segment is not None
        return RunSegment(
            self._state.number_job(),
            table.prepare.context,
            step.number,
            (row.index,),
            segment.function,
            inputs,
            segment.needs,
            segment.makes,
            tuple([table.slots[place] for place in freed]),
            table.size(freed),
            segment.tag,
            segment.action,
            self._kept_keys(step, row) if self.driver.has_keys else (),
            row.sent,
        )

    def _kept_keys(self, step: StepState, row: TableRow) -> tuple[Key, ...]:
        """Return the keys of the constants and leaves that a row reads."""
        table, context = step.table, step.table.prepare.context
        keys: list[Key] = [
            SlotKey(context, 0, slot)
            for slot in table.prepare.constants
            if table.places[slot] in row.inputs
        ]
        for read in table.prepare.reads:
            if read.leaf in step.versions and table.places[read.slot] in row.inputs:
                keys.append(step.versions[read.leaf].stored)
        return tuple(keys)
