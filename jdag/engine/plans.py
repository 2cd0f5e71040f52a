"""Plans of this worker's programs: recorded steps that all workers of a plan run.

Inputs:  Planned, Compiled, Stepping and Unplanned of programs here; Stepped.
Outputs: Prepare, Step and Settle, also to this worker's own part (`steps`).

Invariant: a step is committed after it has succeeded everywhere, with the next message
that anything here sends for a program; one that fails anywhere is dropped everywhere.
"""

from msgspec import Struct

from jdag.engine.lifetimes import Lives
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


class Owned(Struct, eq=False):
    """A plan of a program here."""

    workers: dict[Worker, Prepare]
    segments: int
    reporting: tuple[Worker, ...]  # Who reports a step.
    stages: bool  # Whether a step makes new versions of leaves.
    compiled: int = 0
    failure: Failure | None = None  # Why it cannot be used.
    compiling: int = 0  # The waiter of a Compiled,
    seen: int = 0  # and what that has seen.
    waiter: int = 0  # Of the step that runs.
    number: int = 0
    awaited: dict[Worker, None] = {}  # Whose Stepped has not come.
    missing: int = 0  # Results that have not come.
    staged: bool = False  # The last step has succeeded, and is to be committed.


class Plans(Struct, eq=False):
    """The plans of one engine."""

    _state: State
    _lives: Lives
    _steps: Steps
    _owned: dict[ContextId, Owned] = {}
    staged: int = 0  # Plans here whose last step is to be committed.

    def planned(self, event: Planned) -> None:
        """Prepare a plan on its workers."""
        state, context = self._state, event.context
        for worker, _ in event.parts:
            state.check_there(worker, f"a plan cannot be prepared on {worker!r}")
        parts = dict(event.parts)
        owned = Owned(
            parts,
            sum([len(part.segments) for part in parts.values()]),
            tuple([worker for worker, part in parts.items() if part.reports]),
            any([part.stages for part in parts.values()]),
        )
        self._owned[context] = owned
        state.send_each(parts)
        nothing = Prepare(context, 0, (), (), (), (), (), False)
        own = parts.get(state.worker, nothing)
        self._steps.begin(own, event.results)

    def compiled(self, event: Compiled) -> None:
        """A program waits until more segments are compiled."""
        owned = self._owned[event.context]
        owned.compiling, owned.seen = event.waiter, event.seen
        self._progress(owned)

    def _progress(self, owned: Owned) -> None:
        waiter = owned.compiling
        ready = owned.compiled > owned.seen or owned.compiled == owned.segments
        if waiter and (owned.failure is not None or ready):
            owned.compiling = 0
            self._state.resume(waiter, owned.failure or owned.compiled)

    def stepping(self, event: Stepping) -> None:
        """Begin a step on all workers of a plan."""
        state, context, number = self._state, event.context, event.number
        owned = self._owned[context]
        if owned.failure is not None:
            raise WorkerLost(owned.failure.message)
        if owned.waiter:  # The program was interrupted, and waits no longer.
            self._settle(context, owned, commits=False)
        owned.waiter, owned.number = event.waiter, number
        own = self._steps.parts[context]
        owned.awaited = dict.fromkeys(owned.reporting)
        owned.missing = len(dict.fromkeys(own.results))
        commits, owned.staged = owned.staged, False
        self.staged -= commits
        if commits:
            self._renew(owned)
        inputs = dict(event.inputs)
        steps: dict[Worker, Step] = {}
        for worker in owned.workers:
            given = inputs.get(worker, ())
            steps[worker] = Step(context, number, given, commits)
        state.send_each(steps)
        mine = steps.get(state.worker) or Step(context, number, (), False)
        self._steps.step(state.worker, mine)
        self._finish(context, owned)

    def stepped(self, sender: Worker, message: Stepped) -> None:
        """A worker has run a step, or failed in it, or compiled a segment."""
        owned = self._owned.get(message.context)
        if owned is None:
            return
        if message.number == 0:
            owned.failure = owned.failure or message.failure
            owned.compiled += 1
            self._progress(owned)
        elif message.number == owned.number and owned.waiter:
            if message.failure is not None:
                self._fail(message.context, owned, message.failure)
            else:
                owned.awaited.pop(sender, None)
                self._finish(message.context, owned)

    def came(self, context: ContextId, number: int, count: int) -> None:
        """So many results of a step have come."""
        owned = self._owned.get(context)
        if owned is not None and owned.number == number:
            owned.missing -= count
            self._finish(context, owned)

    def _finish(self, context: ContextId, owned: Owned) -> None:
        if not owned.waiter or owned.awaited or owned.missing:
            return
        part, number = self._steps.parts[context], owned.number
        run = part.runs[number]
        keys = tuple(map(run.here.__getitem__, part.results))
        self._state.resume(owned.waiter, keys)
        owned.waiter = 0
        gone: list[Key] = []
        for slot in part.results:
            self._steps.used(run, slot, gone)
        self._state.drop(gone)
        owned.staged = owned.stages
        self.staged += owned.staged
        if not part.prepare.stages:
            self._steps.drop(part, run)

    def _fail(self, context: ContextId, owned: Owned, failure: Failure) -> None:
        """The step that runs has failed: drop it everywhere."""
        waiter, owned.waiter = owned.waiter, 0
        self._settle(context, owned, commits=False)
        self._state.resume(waiter, failure)

    def _settle(
        self, context: ContextId, owned: Owned, *, commits: bool, over: bool = False
    ) -> None:
        state = self._state
        message = Settle(context, owned.number, commits, over)
        for worker, part in owned.workers.items():
            if worker == state.worker or (commits and not part.stages):
                continue
            state.send(worker, message)
            if commits and worker not in state.lost:
                state.assignments[path_of(message), worker] = None
        self._steps.settled(message)

    def commit(self, event: Event) -> None:
        """Commit what is staged, before anything else that a program here asks for.

        The next step of the same plan brings the commit itself.
        """
        steps = event.context if isinstance(event, Stepping) else None
        for context, owned in self._owned.items():
            if owned.staged and context != steps:
                owned.staged = False
                self.staged -= 1
                self._settle(context, owned, commits=True)
                self._renew(owned)

    def _renew(self, owned: Owned) -> None:
        """Contexts of programs here read the new versions from now on."""
        parts = owned.workers.values()
        leaves = [one.leaf for part in parts for one in part.stages]
        self._lives.renewed([NewestKey(None, leaf, 0) for leaf in leaves])

    def unplanned(self, event: Unplanned) -> None:
        """A plan is not used any more; what it staged last is committed before."""
        owned = self._owned.pop(event.context, None)
        if owned is not None:
            self._settle(event.context, owned, commits=False, over=True)

    def lost(self, worker: Worker) -> None:
        """A worker is lost: its plans go, and those that it takes part in fail."""
        for part in [one for one in self._steps.parts.values() if one.owner == worker]:
            self._steps.forget(part)
        for context, owned in self._owned.items():
            if worker in owned.workers:
                failure = self._state.lost_failure(worker)
                owned.failure = owned.failure or failure
                self._progress(owned)
                if owned.waiter:
                    self._fail(context, owned, failure)
