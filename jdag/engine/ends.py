"""The owner's half of a pass, and how passes, contexts and workers end.

Told by programs: Opened, Differentiated, Left; by others: End, Ended, Release,
Released; by the driver: Lost. Asks for Start, Go, End, Release and their answers,
Resume and Drop.

Invariants - A pass begins when the top activation has no unacknowledged call; with
roots on several workers all are announced before any begins. - Every pass ends with one
End to every worker that took part, and is over when all have answered; gradients are
committed by End(finished) and by nothing else. - Every context ends with one Release to
every worker that took part. A worker answers it when it is quiet (all calls have run,
all values are shipped), so that no error goes unseen; an abort (a worker was lost, or a
pass was interrupted) goes to all workers and is answered at once. - After a release a
worker keeps of a context only its owner's horizon.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from jdag.engine.backward import Backward
from jdag.engine.forward import Forwarding
from jdag.engine.graph import Activation, Fragment, Node, Value
from jdag.engine.leaves import Held, Leaves
from jdag.engine.phases import Ownership, Phase
from jdag.engine.reads import Reads
from jdag.engine.state import Horizon, State, lost_failure
from jdag.engine.tree import Pass
from jdag.engine.vocabulary import (
    Differentiated,
    End,
    Ended,
    Failure,
    Go,
    Key,
    LeafId,
    Left,
    Opened,
    Outcome,
    Owed,
    PassResult,
    Release,
    Released,
    Resume,
    Root,
    Start,
    Worker,
)
from jdag.engine.vocabulary import Lost as LostEvent


class Ends:
    """Owner's passes, and the ends of passes, contexts and workers."""

    def __init__(
        self,
        state: State,
        leaves: Leaves,
        forwarding: Forwarding,
        backward: Backward,
        reads: Reads,
    ) -> None:
        self._state = state
        self._leaves = leaves
        self._forwarding = forwarding
        self._backward = backward
        self._reads = reads

    # -------------------------------------------------------------- the owner's pass

    def opened(self, event: Opened) -> None:
        """A program here opened a context."""
        fragment = self._state.fragment(event.context)
        assert fragment is not None and fragment.ownership is None, event.context
        fragment.ownership = Ownership()
        top = Activation((), None)
        top.workers[self._state.worker] = None
        fragment.activations[()] = top

    def owned(self, context: Any) -> tuple[Fragment, Ownership]:
        """A context that this engine owns."""
        fragment, _ = self._forwarding.activation(context, (0,))
        assert fragment.ownership is not None, context
        return fragment, fragment.ownership

    def differentiated(self, event: Differentiated) -> None:
        """The top activation asks for a pass."""
        fragment, own = self.owned(event.context)
        own.advance(event.context, Differentiated)
        own.passes += 1
        own.waiter = event.waiter
        own.roots = event.roots
        own.retain = event.retain
        own.owed, own.leaves = [], {}
        top = fragment.activations[()]
        if not event.retain:
            self._forwarding.move_leaves_again(top)
        self._forwarding.when_acknowledged(top, partial(self._begin, fragment, own))

    def _never_began(self, fragment: Fragment, own: Ownership) -> None:
        """A pass that ends while it gathers has its cotangents here, unused."""
        if own.phase is Phase.GATHERING:
            roots = [root for _, root in own.roots]
            self._state.drop(_seeds(fragment, own.passes, roots))

    def _begin(self, fragment: Fragment, own: Ownership) -> None:
        """All calls have arrived: announce the roots, or start where they all are."""
        if own.phase is not Phase.GATHERING:
            return  # A worker was lost meanwhile.
        state = self._state
        live = fragment.live = Pass(own.passes, own.retain, is_owner=True)
        by_worker: dict[Worker, list[Root]] = {}
        for worker, root in own.roots:
            by_worker.setdefault(worker, []).append(root)
        alone = len(by_worker) == 1
        own.advance(fragment.context, Go if alone else Start)
        for worker, roots in by_worker.items():
            if worker == state.worker:
                live.roots = tuple(roots)
                continue
            live.unanswered += 1
            seeds = _seeds(fragment, own.passes, roots)
            start = Start(fragment.context, own.passes, tuple(roots), own.retain, alone)
            state.send(worker, start, seeds)
            state.drop(seeds)
        if live.roots and self._backward.sight(fragment, live) and alone:
            self._backward.seed(fragment, live)
        self._backward.settle(fragment, live)

    def owner_passive(self, fragment: Fragment, live: Pass) -> None:
        """Nobody is engaged any more: wave one is over, or the pass is."""
        own = fragment.ownership
        assert own is not None, fragment.context
        if own.phase is Phase.RUNNING:
            stuck = live.unreported > 0
            self._end(fragment, own, Outcome.STUCK if stuck else Outcome.FINISHED, None)
            return
        own.advance(fragment.context, Go)
        for worker in dict.fromkeys(worker for worker, _ in own.roots):
            if worker != self._state.worker:
                live.unanswered += 1
                self._state.send(worker, Go(fragment.context, live.number, own.retain))
        self._backward.seed(fragment, live)
        self._backward.settle(fragment, live)

    def owner_failed(self, fragment: Fragment, failure: Failure) -> None:
        """A failure reached the root of the tree."""
        assert fragment.ownership is not None, fragment.context
        self._end(fragment, fragment.ownership, Outcome.FAILED, failure)

    def _end(
        self,
        fragment: Fragment,
        own: Ownership,
        outcome: Outcome,
        failure: Failure | None,
    ) -> None:
        """Tell everybody how the pass ended."""
        self._never_began(fragment, own)
        own.advance(fragment.context, End)
        own.outcome, own.failure = outcome, failure
        message = End(fragment.context, own.passes, outcome, own.retain)
        others = [
            worker
            for worker in fragment.activations[()].workers
            if worker != self._state.worker and worker not in self._state.lost
        ]
        own.awaited = dict.fromkeys(others)
        for worker in others:
            self._state.send(worker, message)
        own.awaited[self._state.worker] = None
        reply = self._close_pass(fragment, message)
        then = partial(self.ended, self._state.worker, reply)
        self._after_pass(fragment, message, then)

    def ended(self, sender: Worker, message: Ended) -> None:
        """A participant knows that the pass is over."""
        fragment = self._state.contexts.get(message.context)
        own = None if fragment is None else fragment.ownership
        if fragment is None or own is None or own.phase is not Phase.ENDING:
            return
        if sender in own.awaited and message.number == own.passes:
            del own.awaited[sender]
            self._note_end(own, message)
            if not own.awaited:
                self._conclude(fragment, own)

    def _note_end(self, own: Ownership, message: Ended) -> None:
        own.owed.extend(message.owed)
        for leaf in message.leaves:
            own.leaves[leaf] = None

    def _conclude(self, fragment: Fragment, own: Ownership) -> None:
        """Everybody knows: tell the program."""
        own.advance(fragment.context, Ended if own.lost is None else LostEvent)
        if own.lost is not None:
            own.outcome, own.failure = Outcome.FAILED, own.lost
        result = PassResult(
            own.passes,
            own.outcome,
            own.failure,
            tuple(sorted(own.owed)) if own.outcome is Outcome.STUCK else (),
            tuple(sorted(own.leaves)),
        )
        self._state.out.append(Resume(own.waiter, result))

    # ------------------------------------------------------------- the end of a pass

    def end(self, sender: Worker, message: End) -> None:
        """The pass is over, says the context's owner."""
        fragment = self._state.contexts.get(message.context)
        if fragment is None:
            reply = Ended(message.context, message.number, (), ())
            self._state.send(sender, reply)
        else:
            reply = self._close_pass(fragment, message)
            then = partial(self._state.send, sender, reply)
            self._after_pass(fragment, message, then)

    def _after_pass(
        self, fragment: Fragment, message: End, then: Callable[[], None]
    ) -> None:
        """Run `then` when no job of the pass runs here: a failed one may have some."""
        jobs = [
            number
            for number, (_, part, _, job) in self._state.jobs.items()
            if part is fragment and job.phase == message.number
        ]
        self._state.when_computed(jobs, then)

    def _close_pass(self, fragment: Fragment, message: End) -> Ended:
        """Commit or forget what the pass did here; leave only gradients of it."""
        fragment.ended = message.number
        live: Pass | None = fragment.live
        owed: tuple[Owed, ...] = ()
        leaves: tuple[LeafId, ...] = ()
        if live is not None:
            fragment.live = None
            owed = tuple(
                Owed(
                    send.path,
                    self._state.worker,
                    send.destination,
                    send.function,
                    send.call_site,
                )
                for send in live.owed.values()
            )
            if message.outcome is Outcome.FINISHED:
                leaves = tuple(live.staged)
                self._commit(fragment, live)
            self._clear(fragment, live, message.outcome)
        if message.outcome is not Outcome.FINISHED and not message.retain:
            self._spend(fragment)
        return Ended(message.context, message.number, owed, leaves)

    def _commit(self, fragment: Fragment, live: Pass) -> None:
        for leaf, staged in live.staged.items():
            end = fragment.leaves[leaf]
            if staged is not None:
                end.gradient = staged
            assert end.gradient is not None, leaf
            value = Value(Key("gradient", fragment.context, leaf, live.number), None, 0)
            value.stored = end.gradient
            value.settled = True
            fragment.values[value.key] = value

    def _clear(self, fragment: Fragment, live: Pass, outcome: Outcome) -> None:
        """Drop what was on its way in a pass."""
        left = [
            key
            for due in live.dues.values()
            for slot in due.addends
            for _, _, key in slot
        ]
        if outcome is not Outcome.FINISHED:
            left.extend(key for key in live.staged.values() if key is not None)
            left.extend(_seeds(fragment, live.number, live.roots))
        self._state.drop(left)
        for vertex in live.dues:
            if isinstance(vertex, Node):
                vertex.waited = False

    def _spend(self, fragment: Fragment) -> None:
        """Nothing recorded so far can be used again."""
        residuals = []
        for vertex in fragment.vertices():
            vertex.spent = True
            if isinstance(vertex, Node) and vertex.residuals is not None:
                residuals.append(vertex.residuals)
                vertex.residuals = None
        self._state.drop(residuals)

    # ---------------------------------------------------------- the end of a context

    def left(self, event: Left) -> None:
        """The top activation leaves the context."""
        fragment, own = self.owned(event.context)
        top = fragment.activations[()]
        abort = own.phase is not Phase.OPEN or bool(top.launched)
        self._never_began(fragment, own)
        own.advance(event.context, Left)
        own.waiter = event.waiter
        go = partial(self._leave, fragment, own, abort)
        if abort:
            self._forwarding.never_mind(top)
            self._abandon_pass(fragment)
            go()
        else:
            self._forwarding.when_acknowledged(top, go)

    def _abandon_pass(self, fragment: Fragment) -> None:
        """End a pass here without a word: an abort says it all."""
        if fragment.live is not None:
            number = fragment.live.number
            end = End(fragment.context, number, Outcome.FAILED, retain=True)
            self._close_pass(fragment, end)

    def _leave(self, fragment: Fragment, own: Ownership, abort: bool) -> None:
        state = self._state
        abort = abort or own.lost is not None
        told = state.workers if abort else tuple(fragment.activations[()].workers)
        others = [
            name for name in told if name != state.worker and name not in state.lost
        ]
        live = tuple(  # One whose release was said before this one is not.
            other.counter
            for other, kept in state.contexts.items()
            if kept.ownership is not None
            and kept.release is None
            and other != fragment.context
        )
        message = Release(fragment.context, live, abort)
        own.awaited = dict.fromkeys((*others, state.worker))
        for worker in others:
            state.send(worker, message)
        self._release(state.worker, fragment, message)

    def release(self, sender: Worker, message: Release) -> None:
        """The owner releases a context."""
        fragment = self._state.contexts.get(message.context)
        if fragment is None:
            self._remember(message)
            self._state.send(sender, Released(message.context, ()))
        else:
            self._release(sender, fragment, message)

    def _release(self, sender: Worker, fragment: Fragment, message: Release) -> None:
        self._remember(message)  # In the order in which the owner said it.
        fragment.release = (sender, message)
        if message.abort or fragment.pending == 0:
            self.quiet(fragment)

    def quiet(self, fragment: Fragment) -> None:
        """Nothing is under way here any more: forget the context and say so."""
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
        context = message.context
        place = (context.number, context.incarnation)
        before = self._state.horizons.get(place, Horizon(0, ()))
        counter = max(before.counter, context.counter)
        live = tuple(other for other in message.live if other <= counter)
        self._state.horizons[place] = Horizon(counter, live)

    def released(self, sender: Worker, message: Released) -> None:
        """A participant has forgotten the context."""
        fragment = self._state.contexts.get(message.context)
        own = None if fragment is None else fragment.ownership
        if fragment is None or own is None or sender not in own.awaited:
            return
        del own.awaited[sender]
        own.failures.extend(message.failures)
        if own.awaited:
            return
        own.advance(fragment.context, Released)
        failures = tuple(sorted(own.failures, key=_by_path))
        self._forget(fragment, partial(self._resume, own.waiter, failures))

    def _resume(self, waiter: int, failures: tuple[Failure, ...]) -> None:
        self._state.out.append(Resume(waiter, failures))

    def _forget(self, fragment: Fragment, then: Callable[[], None]) -> None:
        """Drop what is held of a context here, when no job reads it; then `then`."""
        state = self._state
        fragment.gone = True
        del state.contexts[fragment.context]
        failure = state.failure(
            "ContextError", f"context {fragment.context} was released"
        )
        self._abandon_pass(fragment)
        self._forwarding.abort(fragment, failure)
        if fragment.pending:
            for value in fragment.values.values():
                if not value.settled:  # Reads and assignments may wait for it.
                    state.settle(value, failure)
        jobs = [
            number
            for number, (_, part, _, _) in state.jobs.items()
            if part is fragment or (type(part) is Held and fragment in part.fragments)
        ]
        state.when_computed(jobs, partial(self._drop, fragment))
        state.when_computed(jobs, then)

    def _drop(self, fragment: Fragment) -> None:
        """Drop everything of a context that is held here."""
        self._leaves.release(fragment)
        keys = [
            value.stored
            for value in fragment.values.values()
            if value.key.kind != "leaf"
        ]
        for recv in fragment.recvs.values():
            keys.extend(value.stored for value in recv.outputs)
        keys.extend(
            node.residuals
            for node in fragment.nodes.values()
            if node.residuals is not None
        )
        self._state.drop(keys)

    # ----------------------------------------------------------- the end of a worker

    def lost(self, worker: Worker) -> None:
        """A worker is gone, and its contexts, and those that it took part in."""
        state = self._state
        if worker in state.lost:
            return
        state.lost[worker] = None
        for fragment in tuple(state.contexts.values()):
            if fragment.owner == worker:
                self._forget(fragment, _nothing)
        self._reads.lost(worker)
        for fragment in tuple(state.contexts.values()):
            if fragment.ownership is not None:
                self._lost(fragment, fragment.ownership, worker)
        self._forwarding.lost(worker)

    def _lost(self, fragment: Fragment, own: Ownership, worker: Worker) -> None:
        """A context here loses a worker: does that concern it, and how far was it?"""
        context = fragment.context
        if not self.takes_part(fragment, worker):
            if worker in own.awaited:  # An abort goes to all.
                self.released(worker, Released(context, ()))
            return
        own.lost = own.lost or replace(
            lost_failure(worker, self._state.worker), route=(self._state.worker, worker)
        )
        match own.phase:
            case Phase.OPEN:
                own.advance(context, LostEvent)
            case Phase.GATHERING | Phase.ANNOUNCING | Phase.RUNNING:
                if fragment.live is not None:
                    fragment.live.failed = True
                self._end(fragment, own, Outcome.FAILED, own.lost)
            case Phase.ENDING:
                if own.awaited.pop(worker, worker) is None and not own.awaited:
                    self._conclude(fragment, own)
            case Phase.LEAVING:
                self._lost_leaving(own, fragment, worker)
            case Phase.FAILED | Phase.RELEASED:
                pass

    def _lost_leaving(self, own: Ownership, fragment: Fragment, worker: Worker) -> None:
        assert own.lost is not None, worker
        if own.lost not in own.failures:
            own.failures.append(own.lost)
        if worker in own.awaited:
            self.released(worker, Released(fragment.context, ()))

    def takes_part(self, fragment: Fragment, worker: Worker) -> bool:
        """Whether a worker has, or may have, a part of a context."""
        return any(
            worker in activation.workers
            or any(where == worker for _, where in activation.unacknowledged)
            or any(where == worker for _, where in activation.launched.values())
            for activation in fragment.activations.values()
        )

    def program_returned(self, fragment: Fragment, own: Ownership) -> None:
        """A program may have lost a worker that only it knew to take part."""
        for worker in self._state.lost:
            if own.lost is None and self.takes_part(fragment, worker):
                self._lost(fragment, own, worker)


def _nothing() -> None:
    """Nobody is left who would have to be told."""


def _seeds(fragment: Fragment, number: int, roots: Sequence[Root]) -> tuple[Key, ...]:
    """Where the given cotangents of these roots are."""
    return tuple(
        Key("seed", fragment.context, number, root.number)
        for root in roots
        if root.given
    )


def _by_path(failure: Failure) -> tuple[Any, ...]:
    return (failure.path, failure.worker)
