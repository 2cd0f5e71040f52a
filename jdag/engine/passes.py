"""Passes: the owner's half of a pass, and how it ends on every worker.

Inputs:  Differentiated from programs; End and Ended from other workers; Expired from
         the driver; from `backward`, that the owner has nothing to do and holds the
         whole credit, or that a failure reached it.
Outputs: Start, Go, End, Ended, Resume, Alarm and Drop.

Invariants
- A pass begins when the top frame has no unacknowledged call. In SMART mode marking
  starts from the roots; in FAST mode with roots on several workers all are announced
  first. That wave is over when the owner holds the whole credit: then it sends Go.
- Every pass ends with one End to each worker that took part, and is over when all have
  answered: then no job of it runs anywhere, unless its time ran out. Only
  End(finished) commits gradients.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from jdag.engine.backward import Backward
from jdag.engine.graph import Fragment, Node, Past
from jdag.engine.leaves import Leaves
from jdag.engine.lives import Lives
from jdag.engine.phases import NEXT, Ownership, Phase
from jdag.engine.program_frames import ProgramFrames
from jdag.engine.protocol import (
    Alarm,
    Differentiated,
    End,
    Ended,
    Expired,
    Failure,
    Go,
    Key,
    LeafId,
    Mark,
    Mode,
    Outcome,
    Owed,
    PassResult,
    Root,
    SeedKey,
    Stale,
    Start,
    Worker,
)
from jdag.engine.protocol import Lost as LostEvent
from jdag.engine.share import Pass
from jdag.engine.state import State


class Passes:
    """The owner's passes, and the end of a pass on any worker."""

    def __init__(
        self,
        state: State,
        leaves: Leaves,
        lives: Lives,
        frames: ProgramFrames,
        backward: Backward,
    ) -> None:
        self._state = state
        self._leaves = leaves
        self._lives = lives
        self._frames = frames
        self._backward = backward
        self._gradients = backward.gradients

    # -------------------------------------------------------------- the owner's pass

    def owned(self, context: Any) -> tuple[Fragment, Ownership]:
        """A context that this engine owns."""
        fragment, _ = self._frames.frame(context, (0,))
        assert fragment.ownership is not None, context
        return fragment, fragment.ownership

    def differentiated(self, event: Differentiated) -> None:
        """The top frame asks for a pass."""
        fragment, own = self.owned(event.context)
        own.advance(event.context, Differentiated)
        own.passes += 1
        own.waiter = event.waiter
        own.roots = event.roots
        own.mode = event.mode
        own.retain = event.retain
        own.owed, own.leaves, own.stale, own.seen = [], {}, [], None
        top = fragment.frames[()]
        if event.timeout_ns is not None:
            expired = Expired(event.context, own.passes)
            self._state.out.append(Alarm(event.waiter, expired, event.timeout_ns))
        if not event.retain:
            self._lives.note_leaves(top)
        self._frames.when_acknowledged(top, partial(self._begin, fragment, own))

    def never_began(self, fragment: Fragment, own: Ownership) -> None:
        """A pass that ends while it gathers has its cotangents here, unused."""
        if own.phase is Phase.GATHERING:
            roots = [root for _, root in own.roots]
            self._state.drop(_seeds(fragment, own.passes, roots))

    def _begin(self, fragment: Fragment, own: Ownership) -> None:
        """All calls have arrived: announce the roots, or start where they all are."""
        if own.phase is not Phase.GATHERING:
            return  # A worker was lost meanwhile.
        state = self._state
        live = Pass(own.passes, own.mode, own.retain, None)
        fragment.live = live
        by_worker: dict[Worker, list[Root]] = {}
        for worker, root in own.roots:
            by_worker.setdefault(worker, []).append(root)
        alone = len(by_worker) == 1 and own.mode is Mode.FAST
        if own.mode is Mode.SMART:
            own.advance(fragment.context, Mark)
        else:
            own.advance(fragment.context, Go if alone else Start)
        for worker, roots in by_worker.items():
            if worker == state.worker:
                live.roots = tuple(roots)
                continue
            start = partial(
                Start,
                fragment.context,
                own.passes,
                tuple(roots),
                own.mode,
                own.retain,
                alone,
            )
            live.say(worker, start, _seeds(fragment, own.passes, roots))
        if live.roots and self._backward.sight(fragment, live) and alone:
            self._backward.seed(fragment, live)
        self._backward.settle(fragment, live)

    def owner_passive(self, fragment: Fragment, live: Pass) -> None:
        """Nothing goes on anywhere: the wave before the pass, or the pass, is over."""
        own = fragment.ownership
        assert own is not None, fragment.context
        if own.phase is Phase.RUNNING:
            stuck = live.unreported > 0
            self.finish(
                fragment, own, Outcome.STUCK if stuck else Outcome.FINISHED, None
            )
            return
        own.advance(fragment.context, Go)
        for worker in dict.fromkeys(worker for worker, _ in own.roots):
            if worker != self._state.worker:
                go = partial(Go, fragment.context, live.number, own.retain)
                live.say(worker, go)
        self._backward.seed(fragment, live)
        self._backward.settle(fragment, live)

    def owner_failed(self, fragment: Fragment, failure: Failure) -> None:
        """A failure reached the owner."""
        assert fragment.ownership is not None, fragment.context
        self.finish(fragment, fragment.ownership, Outcome.FAILED, failure)

    def expired(self, event: Expired) -> None:
        """The time of a pass is over; what is owed is collected as it ends."""
        owned = self._state.owned(event.context)
        if owned is None or owned[1].passes != event.number:
            return
        fragment, own = owned
        if own.phase is Phase.ENDING and own.outcome is Outcome.FAILED:
            # Who waits for the jobs of what has failed waits for them no longer.
            self._tell_all(fragment, own, Outcome.EXPIRED)
        if End not in NEXT[own.phase]:
            return  # It is ending already.
        top = fragment.frames[()]
        waits = self._frames.unacknowledged(top)
        why = f"acknowledgements of {', '.join(waits)}" if waits else ""
        self._frames.never_mind(top)
        failure = self._state.failure("PassTimeout", why)
        self.finish(fragment, own, Outcome.EXPIRED, failure)

    def finish(
        self,
        fragment: Fragment,
        own: Ownership,
        outcome: Outcome,
        failure: Failure | None,
    ) -> None:
        """Send the end of the pass to every worker that took part."""
        self.never_began(fragment, own)
        own.advance(fragment.context, End)
        own.outcome, own.failure = outcome, failure
        top = fragment.frames[()]
        # A pass that did not begin ends for those as well that have acknowledged
        # nothing: what they are about to hear of is spent there too.
        told = (*top.workers, *(worker for _, worker in top.unacknowledged))
        own.awaited = {
            worker: None
            for worker in told
            if worker != self._state.worker and worker not in self._state.lost
        }
        own.awaited[self._state.worker] = None
        self._tell_all(fragment, own, outcome)

    def _tell_all(self, fragment: Fragment, own: Ownership, outcome: Outcome) -> None:
        """Send the end to all that have not answered; this worker is last."""
        here = self._state.worker
        message = End(fragment.context, own.passes, outcome, own.retain)
        awaited = tuple(own.awaited)
        for worker in awaited:
            if worker != here:
                self._state.send(worker, message)
        if here in awaited:
            self._close_pass(fragment, message, partial(self.ended, here))

    def ended(self, sender: Worker, message: Ended) -> None:
        """A participant knows that the pass is over."""
        owned = self._state.owned(message.context)
        if owned is None or owned[1].phase is not Phase.ENDING:
            return
        fragment, own = owned
        if sender in own.awaited and message.number == own.passes:
            del own.awaited[sender]
            self._note_end(own, message)
            if not own.awaited:
                self.conclude(fragment, own)

    def _note_end(self, own: Ownership, message: Ended) -> None:
        own.owed.extend(message.owed)
        for leaf in message.leaves:
            own.leaves[leaf] = None
        own.stale.extend(message.stale)
        seen = message.failure
        if seen is not None and (own.seen is None or seen.path < own.seen.path):
            own.seen = seen

    def conclude(self, fragment: Fragment, own: Ownership) -> None:
        """All have answered: resume the program."""
        own.advance(fragment.context, Ended if own.lost is None else LostEvent)
        if own.lost is not None:
            own.outcome, own.failure = Outcome.FAILED, own.lost
        waits = own.outcome in (Outcome.STUCK, Outcome.EXPIRED)
        result = PassResult(
            own.passes,
            own.outcome,
            own.failure or own.seen,
            tuple(sorted(own.owed)) if waits else (),
            tuple(sorted(own.leaves)),
            tuple(sorted(own.stale)),
        )
        self._state.resume(own.waiter, result)

    # ------------------------------------------------------------- the end of a pass

    def end(self, sender: Worker, message: End) -> None:
        """The pass is over, says the context's owner."""
        fragment = self._state.contexts.get(message.context)
        if fragment is None:
            reply = Ended(message.context, message.number, (), (), (), None)
            self._state.send(sender, reply)
        else:
            self._close_pass(fragment, message, partial(self._state.send, sender))

    def _jobs(self, fragment: Fragment, number: int) -> tuple[int, ...]:
        """The jobs of a pass that are under way here."""
        return tuple(
            id
            for id, (_, part, _, job) in self._state.jobs.items()
            if part is fragment and job.phase == number
        )

    def _close_pass(
        self, fragment: Fragment, message: End, tell: Callable[[Ended], None]
    ) -> None:
        """Commit or forget what the pass did here; leave only gradients of it.

        `tell` is called with the answer when hooks have seen these, and no job runs.
        """
        fragment.ended = message.number
        live: Pass | None = fragment.live
        owed: tuple[Owed, ...] = ()
        leaves: tuple[LeafId, ...] = ()
        stale: tuple[Stale, ...] = ()
        if live is not None:
            fragment.live = None
            fragment.past = Past(
                message.number,
                live.mode,
                message.outcome,
                live.roots,
                live.counted,
                tuple(live.owed),
            )
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
                stale = self._leaves.stale(live.oldest)
                for leaf, staged in live.staged.items():
                    end = fragment.leaves[leaf]
                    self._lives.commit(fragment, end, staged, live.number)
            self._clear(fragment, live, message.outcome)
        if message.outcome is not Outcome.FINISHED and not message.retain:
            self._spend(fragment)

        def reply(failure: Failure | None) -> None:
            tell(Ended(message.context, message.number, owed, leaves, stale, failure))

        if live is not None and live.observed:
            self._gradients.show(fragment, live, reply)
        else:
            # A failed pass may have jobs left; one that ran out of time does not wait.
            expired = message.outcome is Outcome.EXPIRED
            jobs = () if expired else self._jobs(fragment, message.number)
            self._state.when_computed(jobs, partial(reply, None))

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
            if not live.seeded:
                left.extend(_seeds(fragment, live.number, live.roots))
            # A sum that is under way may still read these.
            observed, live.observed = tuple(live.observed.values()), {}
            jobs = self._jobs(fragment, live.number) if observed else ()
            self._state.when_computed(jobs, partial(self._state.drop, observed))
        self._state.drop(left)
        for vertex in live.dues:
            if isinstance(vertex, Node):
                vertex.waited = False

    def _spend(self, fragment: Fragment) -> None:
        """Nothing recorded so far can be used again."""
        residuals = []
        for node in fragment.nodes.values():
            node.spent = True
            if node.residuals is not None:
                residuals.append(node.residuals)
                node.residuals = None
        for send in fragment.sends.values():
            send.spent = [True] * len(send.spent)
        self._state.drop(residuals)

    def lost(self, fragment: Fragment, worker: Worker) -> None:
        """The other end of a transfer is lost: what it owes this pass never comes."""
        live: Pass | None = fragment.live
        if live is None or live.parent is None:
            return
        peers = [send.destination for send in fragment.sends.values()]
        peers += [recv.source for recv in fragment.recvs.values()]
        if worker in peers:
            self._backward.fail_lost(fragment, live, worker)

    def abandon(self, fragment: Fragment) -> None:
        """End a pass here without a message: an abort ends it elsewhere."""
        if fragment.live is not None:
            number = fragment.live.number
            end = End(fragment.context, number, Outcome.FAILED, retain=True)
            self._close_pass(fragment, end, lambda _: None)


def _seeds(fragment: Fragment, number: int, roots: Sequence[Root]) -> tuple[Key, ...]:
    """Where the given cotangents of these roots are."""
    return tuple(
        SeedKey(fragment.context, number, root.number) for root in roots if root.given
    )
