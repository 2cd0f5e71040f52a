"""Passes: the owner's part of a pass, and the end of a pass on every worker.

Inputs:  Differentiated from programs; End and Ended from other workers; Expired from
         the driver; calls of `passive` by `backward`.
Outputs: Start, Go, End, Ended, Resume, Alarm and Drop.

Invariants
- A pass begins when the top frame has no unacknowledged call. SMART mode first marks
  the sends that the roots need. FAST mode with roots on several workers first announces
  all roots. When the owner holds the full credit, this phase is over, and the owner
  sends Go.
- Every pass ends with one End to each participating worker, and is over when all these
  workers have answered. Then no worker runs a job of the pass, unless the pass timed
  out. Only End(finished) commits gradients.
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
from jdag.engine.lifetimes import Lifetimes
from jdag.engine.listing import Listings
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
    _state: State
    _leaves: Leaves
    _lifetimes: Lifetimes
    _frames: ProgramFrames
    _backward: Backward
    _listings: Listings

    # -------------------------------------------------------------- the owner's pass

    def owned(self, context: ContextId) -> OwnedFragment:
        self._frames.frame(context, ())
        fragment = self._state.owned(context)
        assert fragment is not None, context
        return fragment

    def differentiated(self, event: Differentiated) -> None:
        fragment = self.owned(event.context)
        fragment.advance(Differentiated)
        fragment.passes += 1
        fragment.waiter = event.waiter
        fragment.roots = event.roots
        fragment.retain = event.retain
        fragment.answers = []
        top = fragment.frames[()]
        if event.timeout_ns is not None:
            expired = Expired(event.context, fragment.passes)
            self._state.out.append(Alarm(event.waiter, expired, event.timeout_ns))
        if not event.retain:
            self._lifetimes.note_leaves(top)
        begin = partial(self._begin, fragment, event.mode)
        self._frames.when_acknowledged(top, begin)

    def never_began(self, fragment: OwnedFragment) -> None:
        if fragment.phase is Phase.GATHERING:
            roots = [root for _, root in fragment.roots]
            self._state.drop(_seeds(fragment, fragment.passes, roots))

    def _begin(self, fragment: OwnedFragment, mode: Mode) -> None:
        if fragment.phase is not Phase.GATHERING:
            return  # The pass has ended: a worker was lost, or the timeout passed.
        context, number, retain = fragment.context, fragment.passes, fragment.retain
        live = Pass(fragment, number, mode, retain, parent=None, credit=WHOLE)
        fragment.live = live
        by_worker: dict[Worker, list[Root]] = {}
        for worker, root in fragment.roots:
            by_worker.setdefault(worker, []).append(root)
        alone = len(by_worker) == 1 and mode is Mode.FAST
        announced = Go if alone else Start
        fragment.advance(Mark if mode is Mode.SMART else announced)
        for worker, given in by_worker.items():
            roots = tuple(given)
            if worker == self._state.worker:
                live.roots = roots
            else:
                start = partial(Start, context, number, roots, mode, retain, alone)
                seeds = _seeds(fragment, number, roots)
                live.outbox.append(PendingSend(worker, start, seeds))
        if live.roots and self._backward.sight(live) and alone:
            self._backward.seed(live)
        if alone:
            listing = Listing(context, number, False)
            self._listings.announce(fragment.frames[()], listing)
        self._backward.settle(live)

    def passive(self, live: Pass, failure: Failure | None) -> None:
        fragment = live.fragment
        assert isinstance(fragment, OwnedFragment), fragment
        if failure is not None:
            self.finish(fragment, Outcome.FAILED, failure)
            return
        if fragment.phase is Phase.RUNNING:
            stuck = live.unreported > 0
            outcome = Outcome.STUCK if stuck else Outcome.FINISHED
            self.finish(fragment, outcome, None)
            return
        fragment.advance(Go)
        go = partial(Go, fragment.context, live.number, fragment.retain)
        for worker in dict.fromkeys(worker for worker, _ in fragment.roots):
            if worker != self._state.worker:
                live.outbox.append(PendingSend(worker, go))
        marked = Listing(fragment.context, live.number, live.mode is Mode.SMART)
        self._listings.announce(fragment.frames[()], marked)
        self._backward.seed(live)
        self._backward.settle(live)

    def expired(self, event: Expired) -> None:
        fragment = self._state.owned(event.context)
        if fragment is None or fragment.passes != event.number:
            return
        if fragment.phase is Phase.ENDING and fragment.outcome is Outcome.FAILED:
            # Stop waiting for jobs of the failed pass.
            message = End(
                fragment.context, fragment.passes, Outcome.EXPIRED, fragment.retain
            )
            self._state.ask_all(fragment, fragment.awaited, message)
        if End not in NEXT[fragment.phase]:
            return  # The pass is already ending.
        top = fragment.frames[()]
        waits = self._frames.unacknowledged(top)
        why = f"acknowledgements of {', '.join(waits)}" if waits else ""
        self._frames.discard_waits(top)
        failure = self._state.failure("PassTimeout", why)
        self.finish(fragment, Outcome.EXPIRED, failure)

    def finish(
        self, fragment: OwnedFragment, outcome: Outcome, failure: Failure | None
    ) -> None:
        self.never_began(fragment)
        fragment.advance(End)
        fragment.outcome, fragment.failure = outcome, failure
        # Sent even if the pass did not begin: workers must mark their calls as spent.
        message = End(fragment.context, fragment.passes, outcome, fragment.retain)
        self._state.ask_all(fragment, fragment.frames[()].workers, message)

    def ended(self, sender: Worker, message: Ended) -> None:
        fragment = self._state.owned(message.context)
        if fragment is None or fragment.phase is not Phase.ENDING:
            return
        if sender in fragment.awaited and message.number == fragment.passes:
            del fragment.awaited[sender]
            fragment.answers.append(message)
            if not fragment.awaited:
                self.conclude(fragment)

    def conclude(self, fragment: OwnedFragment) -> None:
        fragment.advance(Ended if fragment.lost is None else LostEvent)
        if fragment.lost is not None:
            fragment.outcome, fragment.failure = Outcome.FAILED, fragment.lost
        answers = fragment.answers
        raised = [each.failure for each in answers if each.failure is not None]
        waits = fragment.outcome in (Outcome.STUCK, Outcome.EXPIRED)
        result = PassResult(
            fragment.passes,
            fragment.outcome,
            fragment.failure or min(raised, key=attrgetter("path"), default=None),
            tuple(sorted(owed for each in answers if waits for owed in each.owed)),
            tuple(sorted(leaf for each in answers for leaf in each.leaves)),
            tuple(sorted(stale for each in answers for stale in each.stale)),
        )
        self._state.resume(fragment.waiter, result)

    # ------------------------------------------------------------- the end of a pass

    def end(self, sender: Worker, message: End) -> None:
        fragment = self._state.contexts.get(message.context)
        if fragment is None:
            self._state.send(sender, Ended(message.context, message.number))
        else:
            self._close_pass(fragment, message, partial(self._state.send, sender))

    def _close_pass(
        self, fragment: Fragment, message: End, reply: Callable[[Ended], None]
    ) -> None:
        """Commit or discard the gradients of a pass here. Nothing else is kept.

        Calls `reply` after all hooks that only observe gradients have run or, if the
        pass failed, after its jobs have ended.
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
                live, lambda why: reply(replace(answer, failure=why))
            )
        elif message.outcome is Outcome.FAILED:  # Jobs may still be running.
            jobs = self._jobs(fragment, message.number)
            self._state.when_computed(jobs, partial(reply, answer))
        else:
            reply(answer)

    def _jobs(self, fragment: Fragment, number: int) -> list[int]:
        parts = self._state.jobs.values()
        jobs = [job for _, part, job in parts if part is fragment]
        return [job.id for job in jobs if job.phase == number]

    def _ended(self, live: Pass, answer: Ended) -> Ended:
        if live.outcome is Outcome.FINISHED:
            for leaf, staged in live.staged.items():
                self._backward.gradients.commit(live, leaf, staged)
            stale = self._leaves.stale(live.oldest) if live.oldest else ()
            return replace(answer, leaves=tuple(live.staged), stale=stale)
        worker = self._state.worker
        owed = tuple(
            Owed(send.path, worker, send.destination, send.function, send.call_site)
            for send in live.owed.values()
        )
        return replace(answer, owed=owed)

    def _clear(self, live: Pass) -> None:
        state, fragment = self._state, live.fragment
        dues = live.dues.values()
        keys = [key for due in dues for key in due.waiting()]
        keys.extend(key for key in live.staged.values() if key is not None)
        if not live.seeded:
            keys.extend(_seeds(fragment, live.number, live.roots))
        state.drop(keys)
        # Running sums may read the observed gradients.
        observed, live.observed = tuple(live.observed.values()), {}
        jobs = self._jobs(fragment, live.number) if observed else ()
        state.when_computed(jobs, partial(state.drop, observed))
        for vertex in live.dues:
            if isinstance(vertex, CallNode):
                vertex.waited = False

    def _spend(self, fragment: Fragment) -> None:
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
        live: Pass | None = fragment.live
        if live is None or live.parent is None:
            return
        peers = [send.destination for send in fragment.sends.values()]
        peers += [recv.source for recv in fragment.recvs.values()]
        if worker in peers:
            self._backward.fail_lost(live, worker)

    def abandon(self, fragment: Fragment) -> None:
        """End a pass here without an answer, since an abort ends it on all workers."""
        if fragment.live is not None:
            number = fragment.live.number
            end = End(fragment.context, number, Outcome.FAILED, retain=True)
            self._close_pass(fragment, end, lambda _: None)


def _seeds(fragment: Fragment, number: int, roots: Sequence[Root]) -> tuple[Key, ...]:
    return tuple(
        SeedKey(fragment.context, number, root.number) for root in roots if root.given
    )
