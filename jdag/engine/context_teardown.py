"""How contexts end, and what the loss of a worker ends.

Inputs:  Opened and Left from programs, Release and Released from other workers, Lost
         and Joined from the driver.
Outputs: Release and its answers, Resume and Drop.

Invariants
- Every context ends with one Release to each participating worker. A worker answers
  when it is quiet (all calls have run, all values are sent), so that no error is
  missed. An abort (a worker was lost, or a pass was interrupted) goes to all workers;
  each answers once no job of the context is running.
- If a worker is lost while a context is being left, the release becomes an abort, since
  other workers may wait for values that the lost one never sent.
- A worker whose transfer peer is lost during a pass fails the pass: no other worker
  knows that the cotangent will not arrive.
- After a release a worker keeps nothing of a context but its owner's horizon, which
  only rises, in whatever order the releases of several contexts arrive.
- A worker that joins again is a new worker. Others may learn of it at different times:
  a worker that learned early may have involved it in a context that its owner, unaware
  of the new worker, then aborted. So each worker that learns of it sends it its own
  horizon. A context below a horizon that was never released is a stray and is dropped.
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


class Ends(Struct, eq=False):
    """The end of contexts and the loss of workers, on one engine."""

    _state: State
    _leaves: Leaves
    _forwarding: Forwarding
    _frames: ProgramFrames
    _passes: Passes
    _reads: Reads
    _plans: Plans

    def opened(self, event: Opened) -> None:
        """A program here opened a context."""
        state, context = self._state, event.context
        assert context not in state.contexts and not state.gone(context), context
        assert context.incarnation == state.incarnation, context
        state.opened = context.counter
        own = state.contexts[context] = OwnedFragment(context, state.worker)
        own.frames[()] = FrameRecord((), None, workers={state.worker: None})

    # ---------------------------------------------------------- the end of a context

    def left(self, event: Left) -> None:
        """The top frame leaves the context."""
        own = self._passes.owned(event.context)
        top = own.frames[()]
        abort = own.phase is not Phase.OPEN or bool(top.launched)
        self._passes.never_began(own)
        own.advance(Left)
        own.waiter = event.waiter
        go = partial(self._leave, own, abort)
        if abort:
            self._frames.never_mind(top)
            self._passes.abandon(own)
            go()
        else:
            self._frames.when_acknowledged(top, go)

    def _leave(self, own: OwnedFragment, abort: bool) -> None:
        state = self._state
        abort = abort or own.lost is not None
        told = dict.fromkeys(own.frames[()].workers)
        if abort:
            told |= dict.fromkeys(state.workers)
        live = tuple(each for each in self._live() if each != own.context.counter)
        state.ask_all(own, told, Release(own.context, live, abort))

    def _live(self) -> list[int]:
        """Counters of this owner's contexts that some worker still holds."""
        parts = self._state.contexts.values()
        owned = [part for part in parts if isinstance(part, OwnedFragment)]
        return [own.context.counter for own in owned]

    def release(self, sender: Worker, message: Release) -> None:
        """The owner releases a context."""
        self._remember(message)  # At once, so that horizons follow the owner's order.
        fragment = self._state.contexts.get(message.context)
        if fragment is None:
            self._state.send(sender, Released(message.context, ()))
            return
        fragment.release = (sender, message)
        self._state.unlist(fragment)
        if message.abort or fragment.pending == 0:
            self.quiet(fragment)

    def quiet(self, fragment: Fragment) -> None:
        """Forget a released context once nothing of it is in progress, and answer."""
        if fragment.release is None or fragment.context not in self._state.contexts:
            return
        owner, message = fragment.release
        failures = tuple(sorted(fragment.failures, key=_by_path))
        reply = Released(message.context, failures)
        if owner == self._state.worker:
            self.released(owner, reply)
        else:
            self._forget(fragment, partial(self._state.send, owner, reply))

    def _remember(self, message: Release) -> None:
        state, context = self._state, message.context
        place = (context.number, context.incarnation)
        before = state.horizons.get(place, Horizon(0, ()))
        state.horizons[place] = before.and_(Horizon(context.counter, message.live))
        for fragment in tuple(state.contexts.values()) if message.abort else ():
            stray = fragment.release is None and fragment.context != context
            if stray and state.gone(fragment.context):
                self._forget(fragment)

    def released(self, sender: Worker, message: Released) -> None:
        """A participant has forgotten the context."""
        own = self._state.owned(message.context)
        if own is None or sender not in own.awaited:
            return
        del own.awaited[sender]
        # A worker may answer both a release and the abort that replaced it.
        own.gathered.extend(f for f in message.failures if f not in own.gathered)
        if own.awaited:
            return
        own.advance(Released)
        failures = tuple(sorted(own.gathered, key=_by_path))
        self._forget(own, partial(self._state.resume, own.waiter, failures))

    def _forget(self, fragment: Fragment, *then: Callable[[], None]) -> None:
        """Drop a context's values here once no job reads them; then run `then`."""
        state = self._state
        fragment.gone = True
        state.unlist(fragment)
        del state.contexts[fragment.context]
        failure = state.gone_failure(fragment.context)
        self._passes.abandon(fragment)
        self._frames.abort(fragment, failure)
        if fragment.pending:
            for value in tuple(fragment.values.values()):
                if not value.settled:  # Reads and assignments may wait for it.
                    state.settle(value, failure)
        jobs = [
            number
            for number, (_, part, _) in state.jobs.items()
            if part is fragment or (type(part) is Update and fragment in part.fragments)
        ]
        state.when_computed(jobs, partial(self._drop, fragment))
        for each in then:
            state.when_computed(jobs, each)

    def _drop(self, fragment: Fragment) -> None:
        self._leaves.release(fragment)
        values, nodes = fragment.values.values(), fragment.nodes.values()
        keys = [of.stored for of in values if of.users and of.key.kind != "leaf"]
        gradients = [end.gradient for end in fragment.leaves.values()]
        keys += [gradient.stored for gradient in gradients if gradient is not None]
        keys += [node.residuals for node in nodes if node.residuals is not None]
        self._state.drop(keys)
        for value in values:  # So that no cycle is left.
            value.producer = None
        fragment.past = None

    # ----------------------------------------------------------- the end of a worker

    def lost(self, event: LostEvent) -> None:
        """A worker is lost: end its contexts and those in which it participated."""
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
        """A worker joined again, as a new incarnation."""
        state = self._state
        number = state.names.index(event.name)
        known = incarnation_of(state.workers[number])
        if event.incarnation <= known:
            return
        for former in range(known, event.incarnation):
            self.lost(LostEvent(incarnated(event.name, former)))
        state.workers[number] = worker = incarnated(event.name, event.incarnation)
        live, over = self._live(), state.opened
        while over in live:  # Bounded by `live`.
            over -= 1
        if over:
            context = ContextId(state.number, over, state.incarnation)
            below = tuple(counter for counter in live if counter < over)
            state.send(worker, Release(context, below, abort=True))

    def _lost(self, own: OwnedFragment, worker: Worker) -> None:
        if not _takes_part(own, worker):
            if worker in own.awaited:  # An abort goes to all.
                self.released(worker, Released(own.context, ()))
            return
        route = (self._state.worker, worker)
        own.lost = own.lost or self._state.lost_failure(worker, route)
        match own.phase:
            case Phase.OPEN:
                own.advance(LostEvent)
            case phase if End in NEXT[phase]:  # A pass is in progress.
                if own.live is not None:
                    own.live.failed = True
                self._passes.finish(own, Outcome.FAILED, own.lost)
            case Phase.ENDING:
                if own.awaited.pop(worker, worker) is None and not own.awaited:
                    self._passes.conclude(own)
            case Phase.LEAVING:
                if own.lost not in own.gathered:
                    own.gathered.append(own.lost)
                if own.awaited:  # Otherwise it still waits to leave, and aborts then.
                    self._leave(own, abort=True)
            case _:
                assert own.phase in (Phase.FAILED, Phase.RELEASED), own.phase

    def program_returned(self, context: ContextId, failure: Failure | None) -> None:
        """Update a context after a program: it may have involved lost workers."""
        own = self._state.owned(context)
        if own is None:
            return
        lost = failure is not None and failure.error == "WorkerLost"
        if lost and own.lost is None and own.phase is Phase.OPEN:
            own.lost = failure
            own.advance(LostEvent)
        for worker in self._state.lost:
            if own.lost is None and _takes_part(own, worker):
                self._lost(own, worker)


def _by_path(failure: Failure) -> tuple[Any, ...]:
    return (failure.path, failure.worker)


def _takes_part(fragment: Fragment, worker: Worker) -> bool:
    return any(worker in frame.workers for frame in fragment.frames.values())
