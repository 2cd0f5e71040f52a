"""Passes: the owner's part of a pass, and the end of a pass on every worker.

Inputs:  Differentiated from programs; End and Ended from other workers; Expired from
         the driver; from `backward`: the owner is passive and holds the whole credit,
         or a failure reached it.
Outputs: Start, Go, End, Ended, Resume, Alarm and Drop.

Invariants
- A pass begins when the top frame has no unacknowledged call. SMART mode first marks
  from the roots; FAST mode with roots on several workers first announces them all. This
  first wave is over when the owner holds the whole credit; then it sends Go.
- Every pass ends with one End to each participating worker, and is over when all have
  answered: then no job of it runs anywhere, unless it timed out. Only End(finished)
  commits gradients.
"""

from collections.abc import Callable, Sequence
from functools import partial
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import replace

from jdag.engine.backward import Backward
from jdag.engine.credit import WHOLE
from jdag.engine.graph import CallNode, Fragment
from jdag.engine.leaves import Leaves
from jdag.engine.lifetimes import Lives
from jdag.engine.listing import Lists
from jdag.engine.phases import NEXT, OwnedFragment, Phase
from jdag.engine.program_frames import ProgramFrames
from jdag.engine.protocol import (
    Alarm,
    ContextId,
    Differentiated,
    End,
    Ended,
    Expired,
    Failure,
    Go,
    Key,
    Listing,
    Mark,
    Mode,
    Outcome,
    Owed,
    PassResult,
    Root,
    SeedKey,
    Start,
    Worker,
)
from jdag.engine.protocol import Lost as LostEvent
from jdag.engine.state import State
from jdag.engine.worker_pass import Pass, PendingSend


class Passes(Struct, eq=False):
    """The owner's passes, and the end of a pass on any worker."""

    _state: State
    _leaves: Leaves
    _lives: Lives
    _frames: ProgramFrames
    _backward: Backward
    _lists: Lists

    # -------------------------------------------------------------- the owner's pass

    def owned(self, context: ContextId) -> OwnedFragment:
        """A context owned by this engine."""
        self._frames.frame(context, ())
        own = self._state.owned(context)
        assert own is not None, context
        return own

    def differentiated(self, event: Differentiated) -> None:
        """The top frame requests a pass."""
        own = self.owned(event.context)
        own.advance(Differentiated)
        own.passes += 1
        own.waiter = event.waiter
        own.roots = event.roots
        own.retain = event.retain
        own.answers = []
        top = own.frames[()]
        if event.timeout_ns is not None:
            expired = Expired(event.context, own.passes)
            self._state.out.append(Alarm(event.waiter, expired, event.timeout_ns))
        if not event.retain:
            self._lives.note_leaves(top)
        begin = partial(self._begin, own, event.mode)
        self._frames.when_acknowledged(top, begin)

    def never_began(self, own: OwnedFragment) -> None:
        """Drop the given cotangents of a pass that ends while it gathers."""
        if own.phase is Phase.GATHERING:
            roots = [root for _, root in own.roots]
            self._state.drop(_seeds(own, own.passes, roots))

    def _begin(self, own: OwnedFragment, mode: Mode) -> None:
        """All calls have arrived: announce the roots, or start where they all are."""
        if own.phase is not Phase.GATHERING:
            return  # It ended meanwhile: a worker was lost, or the timeout passed.
        context, number, retain = own.context, own.passes, own.retain
        live = Pass(own, number, mode, retain, parent=None, credit=WHOLE)
        own.live = live
        by_worker: dict[Worker, list[Root]] = {}
        for worker, root in own.roots:
            by_worker.setdefault(worker, []).append(root)
        alone = len(by_worker) == 1 and mode is Mode.FAST
        announced = Go if alone else Start
        own.advance(Mark if mode is Mode.SMART else announced)
        for worker, given in by_worker.items():
            roots = tuple(given)
            if worker == self._state.worker:
                live.roots = roots
            else:
                start = partial(Start, context, number, roots, mode, retain, alone)
                seeds = _seeds(own, number, roots)
                live.outbox.append(PendingSend(worker, start, seeds))
        if live.roots and self._backward.sight(live) and alone:
            self._backward.seed(live)
        if alone:
            self._lists.tell(own.frames[()], Listing(context, number, False))
        self._backward.settle(live)

    def passive(self, live: Pass, failure: Failure | None) -> None:
        """No worker has anything to do: the first wave, or the pass, is over.

        Or a failure of the pass has reached its owner.
        """
        own = live.fragment
        assert isinstance(own, OwnedFragment), own
        if failure is not None:
            self.finish(own, Outcome.FAILED, failure)
            return
        if own.phase is Phase.RUNNING:
            stuck = live.unreported > 0
            outcome = Outcome.STUCK if stuck else Outcome.FINISHED
            self.finish(own, outcome, None)
            return
        own.advance(Go)
        go = partial(Go, own.context, live.number, own.retain)
        for worker in dict.fromkeys(worker for worker, _ in own.roots):
            if worker != self._state.worker:
                live.outbox.append(PendingSend(worker, go))
        marked = Listing(own.context, live.number, live.mode is Mode.SMART)
        self._lists.tell(own.frames[()], marked)
        self._backward.seed(live)
        self._backward.settle(live)

    def expired(self, event: Expired) -> None:
        """The timeout of a pass has passed: end it; answers report the owed sends."""
        own = self._state.owned(event.context)
        if own is None or own.passes != event.number:
            return
        if own.phase is Phase.ENDING and own.outcome is Outcome.FAILED:
            # Do not wait any longer for jobs of the failed pass.
            message = End(own.context, own.passes, Outcome.EXPIRED, own.retain)
            self._state.ask_all(own, own.awaited, message)
        if End not in NEXT[own.phase]:
            return  # It is already ending.
        top = own.frames[()]
        waits = self._frames.unacknowledged(top)
        why = f"acknowledgements of {', '.join(waits)}" if waits else ""
        self._frames.never_mind(top)
        failure = self._state.failure("PassTimeout", why)
        self.finish(own, Outcome.EXPIRED, failure)

    def finish(
        self,
        own: OwnedFragment,
        outcome: Outcome,
        failure: Failure | None,
    ) -> None:
        """Send the end of the pass to every worker that took part."""
        self.never_began(own)
        own.advance(End)
        own.outcome, own.failure = outcome, failure
        # A pass that did not begin also ends on workers that have acknowledged nothing:
        # calls still on their way to them are spent too.
        message = End(own.context, own.passes, outcome, own.retain)
        self._state.ask_all(own, own.frames[()].workers, message)

    def ended(self, sender: Worker, message: Ended) -> None:
        """A participant answered End."""
        own = self._state.owned(message.context)
        if own is None or own.phase is not Phase.ENDING:
            return
        if sender in own.awaited and message.number == own.passes:
            del own.awaited[sender]
            own.answers.append(message)
            if not own.awaited:
                self.conclude(own)

    def conclude(self, own: OwnedFragment) -> None:
        """All have answered: resume the program."""
        own.advance(Ended if own.lost is None else LostEvent)
        if own.lost is not None:
            own.outcome, own.failure = Outcome.FAILED, own.lost
        answers = own.answers
        raised = [each.failure for each in answers if each.failure is not None]
        waits = own.outcome in (Outcome.STUCK, Outcome.EXPIRED)
        result = PassResult(
            own.passes,
            own.outcome,
            own.failure or min(raised, key=attrgetter("path"), default=None),
            tuple(sorted(owed for each in answers if waits for owed in each.owed)),
            tuple(sorted(leaf for each in answers for leaf in each.leaves)),
            tuple(sorted(stale for each in answers for stale in each.stale)),
        )
        self._state.resume(own.waiter, result)

    # ------------------------------------------------------------- the end of a pass

    def end(self, sender: Worker, message: End) -> None:
        """The context's owner ended the pass."""
        fragment = self._state.contexts.get(message.context)
        if fragment is None:
            self._state.send(sender, Ended(message.context, message.number))
        else:
            self._close_pass(fragment, message, partial(self._state.send, sender))

    def _close_pass(
        self, fragment: Fragment, message: End, tell: Callable[[Ended], None]
    ) -> None:
        """Commit or discard the local part of a pass; only gradients remain.

        `tell` is called with the answer when observing hooks have run or, after a
        failure, when no job of the pass runs.
        """
        fragment.ended = message.number
        live: Pass | None = fragment.live
        fragment.live = None
        finished = message.outcome is Outcome.FINISHED
        if not finished and not message.retain:
            self._spend(fragment)
        answer = Ended(message.context, message.number)
        if live is not None:
            fragment.past = live
            live.outcome = message.outcome
            answer = self._ended(live, answer)
            if not finished:
                self._clear(live)
            live.dues, live.needed = {}, {}
        if finished and live is not None and live.observed:
            self._backward.gradients.show(
                live, lambda why: tell(replace(answer, failure=why))
            )
        elif message.outcome is Outcome.FAILED:  # Jobs may still be running.
            jobs = self._jobs(fragment, message.number)
            self._state.when_computed(jobs, partial(tell, answer))
        else:
            tell(answer)

    def _jobs(self, fragment: Fragment, number: int) -> list[int]:
        jobs = self._state.jobs.items()
        return [
            id
            for id, (_, part, job) in jobs
            if part is fragment and job.phase == number
        ]

    def _ended(self, live: Pass, answer: Ended) -> Ended:
        """The answer of a worker with a part in the pass; commits gradients."""
        if live.outcome is Outcome.FINISHED:
            for leaf, staged in live.staged.items():
                self._backward.gradients.commit(live, leaf, staged)
            stale = self._leaves.stale(live.oldest) if live.oldest else ()
            return replace(answer, leaves=tuple(live.staged), stale=stale)
        here = self._state.worker
        owed = tuple(
            Owed(send.path, here, send.destination, send.function, send.call_site)
            for send in live.owed.values()
        )
        return replace(answer, owed=owed)

    def _clear(self, live: Pass) -> None:
        """Drop intermediate values of a pass that did not finish."""
        state, fragment = self._state, live.fragment
        dues = live.dues.values()
        left = [key for due in dues for key in due.held()]
        left.extend(key for key in live.staged.values() if key is not None)
        if not live.seeded:
            left.extend(_seeds(fragment, live.number, live.roots))
        state.drop(left)
        # A running sum may still read these.
        observed, live.observed = tuple(live.observed.values()), {}
        jobs = self._jobs(fragment, live.number) if observed else ()
        state.when_computed(jobs, partial(state.drop, observed))
        for vertex in live.dues:
            if isinstance(vertex, CallNode):
                vertex.waited = False

    def _spend(self, fragment: Fragment) -> None:
        """Mark everything recorded so far as spent."""
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
        """A transfer peer is lost: fail the pass, whose cotangents will not arrive."""
        live: Pass | None = fragment.live
        if live is None or live.parent is None:
            return
        peers = [send.destination for send in fragment.sends.values()]
        peers += [recv.source for recv in fragment.recvs.values()]
        if worker in peers:
            self._backward.fail_lost(live, worker)

    def abandon(self, fragment: Fragment) -> None:
        """End a pass here without a message: an abort ends it elsewhere."""
        if fragment.live is not None:
            number = fragment.live.number
            end = End(fragment.context, number, Outcome.FAILED, retain=True)
            self._close_pass(fragment, end, lambda _: None)


def _seeds(fragment: Fragment, number: int, roots: Sequence[Root]) -> tuple[Key, ...]:
    return tuple(
        SeedKey(fragment.context, number, root.number) for root in roots if root.given
    )
