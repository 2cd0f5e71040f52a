"""Release of contexts, and the effects of a lost worker on contexts.

Inputs:  Opened and Left from programs, Release and Released from other workers, Lost
         and Joined from the driver.
Outputs: Release and its answers, Resume and Drop.

Invariants
- Every context ends with one Release to each participating worker. A worker answers
  when it is quiet (all calls have run, all values are sent), so that no error is
  missed. An abort (a worker was lost, or a pass was interrupted) goes to all workers;
  each answers once no job of the context is running.
- If a worker is lost while the program leaves a context, the release becomes an abort,
  since other workers may wait for values that the lost worker never sent.
- A worker whose transfer peer is lost during a pass fails the pass: no other worker
  knows that the cotangent will not arrive.
- After a release a worker stores only the horizon of the context's owner: the released
  contexts (`state.Horizon`). A horizon only rises, whatever the order in which releases
  of several contexts arrive.
- A worker that joins again is a new worker, and the others notice it at different
  times. Another worker may call the new worker in a context whose owner has not noticed
  the new worker yet. If that owner then aborts the context, it does not inform the new
  worker. Therefore each worker sends its horizon to a new worker. A context below the
  horizon that was not released is dropped.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec import Struct

from jdag.engine.forward import Forwarding
from jdag.engine.graph import Fragment, FrameRecord
from jdag.engine.leaves import Leaves, Update
from jdag.engine.passes import Passes
from jdag.engine.phases import NEXT, OwnedFragment, Phase
from jdag.engine.plans import Plans
from jdag.engine.program_frames import ProgramFrames
from jdag.engine.protocol import (
    ContextId,
    End,
    Failure,
    Joined,
    Left,
    Opened,
    Outcome,
    Release,
    Released,
    Worker,
    incarnated,
    incarnation_of,
)
from jdag.engine.protocol import Lost as LostEvent
from jdag.engine.reads import Reads
from jdag.engine.state import Horizon, State


class ContextTeardown(Struct, eq=False):
    _state: State
    _leaves: Leaves
    _forwarding: Forwarding
    _frames: ProgramFrames
    _passes: Passes
    _reads: Reads
    _plans: Plans

    def opened(self, event: Opened) -> None:
        state, context = self._state, event.context
        assert context not in state.contexts and not state.is_released(context), context
        assert context.incarnation == state.incarnation, context
        state.opened = context.counter
        fragment = state.contexts[context] = OwnedFragment(context, state.worker)
        fragment.frames[()] = FrameRecord((), None, workers={state.worker: None})

    # --------------------------------------------------------------- release

    def left(self, event: Left) -> None:
        fragment = self._passes.owned(event.context)
        top = fragment.frames[()]
        abort = fragment.phase is not Phase.OPEN or bool(top.launched)
        self._passes.never_began(fragment)
        fragment.advance(Left)
        fragment.waiter = event.waiter
        go = partial(self._leave, fragment, abort)
        if abort:
            self._frames.discard_waits(top)
            self._passes.abandon(fragment)
            go()
        else:
            self._frames.when_acknowledged(top, go)

    def _leave(self, fragment: OwnedFragment, abort: bool) -> None:
        state = self._state
        abort = abort or fragment.lost is not None
        receivers = dict.fromkeys(fragment.frames[()].workers)
        if abort:
            receivers |= dict.fromkeys(state.workers)
        live = tuple(open for open in self._live() if open != fragment.context.counter)
        state.ask_all(fragment, receivers, Release(fragment.context, live, abort))

    def _live(self) -> list[int]:
        parts = self._state.contexts.values()
        owned = [part for part in parts if isinstance(part, OwnedFragment)]
        return [fragment.context.counter for fragment in owned]

    def release(self, sender: Worker, message: Release) -> None:
        self._update_horizon(message)  # Immediately, in the owner's order.
        fragment = self._state.contexts.get(message.context)
        if fragment is None:
            self._state.send(sender, Released(message.context, ()))
            return
        fragment.release = (sender, message)
        self._state.unlist(fragment)
        if message.abort or fragment.pending == 0:
            self.quiet(fragment)

    def quiet(self, fragment: Fragment) -> None:
        """Forget a released context without pending work, and answer its owner."""
        if fragment.release is None or fragment.context not in self._state.contexts:
            return
        owner, message = fragment.release
        failures = tuple(sorted(fragment.failures, key=_by_path))
        reply = Released(message.context, failures)
        if owner == self._state.worker:
            self.released(owner, reply)
        else:
            self._forget(fragment, partial(self._state.send, owner, reply))

    def _update_horizon(self, message: Release) -> None:
        state, context = self._state, message.context
        owner = (context.number, context.incarnation)
        before = state.horizons.get(owner, Horizon(0, ()))
        state.horizons[owner] = before.union(Horizon(context.counter, message.live))
        for fragment in tuple(state.contexts.values()) if message.abort else ():
            stray = fragment.release is None and fragment.context != context
            if stray and state.is_released(fragment.context):
                self._forget(fragment)

    def released(self, sender: Worker, message: Released) -> None:
        fragment = self._state.owned(message.context)
        if fragment is None or sender not in fragment.awaited:
            return
        del fragment.awaited[sender]
        # A worker may answer both a release and the abort that replaced it.
        fragment.gathered.extend(
            f for f in message.failures if f not in fragment.gathered
        )
        if fragment.awaited:
            return
        fragment.advance(Released)
        failures = tuple(sorted(fragment.gathered, key=_by_path))
        self._forget(fragment, partial(self._state.resume, fragment.waiter, failures))

    def _forget(self, fragment: Fragment, *callbacks: Callable[[], None]) -> None:
        """Drop a context's values once no job here reads them. Then run `callbacks`."""
        state = self._state
        fragment.released = True
        state.unlist(fragment)
        del state.contexts[fragment.context]
        failure = state.released_failure(fragment.context)
        self._passes.abandon(fragment)
        self._frames.abort(fragment, failure)
        if fragment.pending:
            for value in tuple(fragment.values.values()):
                if not value.settled:  # Reads and assignments may wait for the value.
                    state.settle(value, failure)
        jobs = [
            number
            for number, (_, part, _) in state.jobs.items()
            if part is fragment or (type(part) is Update and fragment in part.fragments)
        ]
        state.when_computed(jobs, partial(self._drop, fragment))
        for callback in callbacks:
            state.when_computed(jobs, callback)

    def _drop(self, fragment: Fragment) -> None:
        self._leaves.release(fragment)
        values, nodes = fragment.values.values(), fragment.nodes.values()
        keys = [v.stored for v in values if v.users and v.key.kind != "leaf"]
        gradients = [end.gradient for end in fragment.leaves.values()]
        keys += [gradient.stored for gradient in gradients if gradient is not None]
        keys += [node.residuals for node in nodes if node.residuals is not None]
        self._state.drop(keys)
        for value in values:  # Break reference cycles.
            value.producer = None
        fragment.past = None

    # ---------------------------------------------------------- lost workers

    def lost(self, event: LostEvent) -> None:
        state, worker = self._state, event.worker
        if worker in state.lost:
            return
        state.lost[worker] = event.why
        for fragment in tuple(state.contexts.values()):
            if fragment.owner == worker:
                self._forget(fragment)
        self._reads.lost(worker)
        self._plans.lost(worker)
        for fragment in tuple(state.contexts.values()):
            if isinstance(fragment, OwnedFragment):
                self._lost(fragment, worker)
        self._forwarding.lost(worker)
        self._frames.lost(worker)
        for fragment in tuple(state.contexts.values()):
            self._passes.lost(fragment, worker)

    def joined(self, event: Joined) -> None:
        state = self._state
        number = state.names.index(event.name)
        known = incarnation_of(state.workers[number])
        if event.incarnation <= known:
            return
        for former in range(known, event.incarnation):
            self.lost(LostEvent(incarnated(event.name, former)))
        state.workers[number] = worker = incarnated(event.name, event.incarnation)
        live, newest = self._live(), state.opened
        while newest in live:  # The number of iterations is bounded by `live`.
            newest -= 1
        if newest:
            context = ContextId(state.number, newest, state.incarnation)
            below = tuple(counter for counter in live if counter < newest)
            state.send(worker, Release(context, below, abort=True))

    def _lost(self, fragment: OwnedFragment, worker: Worker) -> None:
        if not _takes_part(fragment, worker):
            if worker in fragment.awaited:  # An abort goes to all workers.
                self.released(worker, Released(fragment.context, ()))
            return
        route = (self._state.worker, worker)
        fragment.lost = fragment.lost or self._state.lost_failure(worker, route)
        match fragment.phase:
            case Phase.OPEN:
                fragment.advance(LostEvent)
            case phase if End in NEXT[phase]:  # A pass is in progress.
                if fragment.live is not None:
                    fragment.live.failed = True
                self._passes.finish(fragment, Outcome.FAILED, fragment.lost)
            case Phase.ENDING:
                was_awaited = fragment.awaited.pop(worker, worker) is None
                if was_awaited and not fragment.awaited:
                    self._passes.conclude(fragment)
            case Phase.LEAVING:
                if fragment.lost not in fragment.gathered:
                    fragment.gathered.append(fragment.lost)
                if fragment.awaited:  # Otherwise `_leave` will run later, and abort.
                    self._leave(fragment, abort=True)
            case _:
                assert fragment.phase in (Phase.FAILED, Phase.RELEASED), fragment.phase

    def program_returned(self, context: ContextId, failure: Failure | None) -> None:
        """Record the loss of a worker that a returned program reports or involved."""
        fragment = self._state.owned(context)
        if fragment is None:
            return
        lost = failure is not None and failure.error == "WorkerLost"
        if lost and fragment.lost is None and fragment.phase is Phase.OPEN:
            fragment.lost = failure
            fragment.advance(LostEvent)
        for worker in self._state.lost:
            if fragment.lost is None and _takes_part(fragment, worker):
                self._lost(fragment, worker)


def _by_path(failure: Failure) -> tuple[Any, ...]:
    return (failure.path, failure.worker)


def _takes_part(fragment: Fragment, worker: Worker) -> bool:
    return any(worker in frame.workers for frame in fragment.frames.values())
