"""One worker's engine: told an event, it answers with the effects that it asks for."""

from collections.abc import Sequence
from typing import assert_never

from jdag.engine.activations import Activations
from jdag.engine.backward import Backward
from jdag.engine.drawing import Drawing, draw
from jdag.engine.ends import Ends
from jdag.engine.forward import Forwarding
from jdag.engine.leaves import Leaves
from jdag.engine.lives import Lives
from jdag.engine.passes import Passes
from jdag.engine.reads import Reads
from jdag.engine.state import State
from jdag.engine.vocabulary import (
    Acknowledge,
    Answer,
    Arrived,
    Assign,
    Assigned,
    Attach,
    Attached,
    Awaited,
    Call,
    Computed,
    ContextId,
    Cotangent,
    Differentiated,
    Discard,
    Discarded,
    Dropped,
    Effect,
    End,
    Ended,
    Event,
    Expired,
    Fail,
    Failure,
    Fetched,
    Forget,
    Go,
    Issued,
    Joined,
    Launched,
    Left,
    Lost,
    Mark,
    Message,
    Opened,
    Primal,
    Read,
    Reading,
    Release,
    Released,
    Return,
    Returned,
    Run,
    Ship,
    Start,
    Worker,
    landing,
)


class Engine:
    """The deterministic core of one worker: no clock, wire, file, chance or arithmetic.

    Args:
        worker: the name of the worker whose engine this is.
        workers: the names of all workers, in the order that numbers them.
        incarnation: how often this worker has been started before. It has to be told
            which others have joined anew, and which are lost.
    """

    def __init__(
        self, worker: Worker, workers: Sequence[Worker], incarnation: int = 0
    ) -> None:
        self._state = state = State(worker, workers, incarnation)
        self._leaves = Leaves(state)
        self._lives = Lives(state)
        self._backward = Backward(state, self._owner_passive, self._owner_failed)
        self._forwarding = Forwarding(
            state, self._leaves, self._lives, self._backward.woken
        )
        self._activations = Activations(
            state, self._leaves, self._lives, self._forwarding
        )
        self._reads = Reads(state, self._leaves)
        self._passes = Passes(
            state, self._leaves, self._lives, self._activations, self._backward
        )
        self._ends = Ends(
            state,
            self._leaves,
            self._forwarding,
            self._activations,
            self._passes,
            self._reads,
        )
        state.on_quiet = self._ends.quiet

    def _owner_passive(self, fragment: object, live: object) -> None:
        self._passes.owner_passive(fragment, live)  # type: ignore[arg-type]

    def _owner_failed(self, fragment: object, failure: object) -> None:
        self._passes.owner_failed(fragment, failure)  # type: ignore[arg-type]

    @property
    def live_contexts(self) -> int:
        """How many contexts have a part here."""
        return len(self._state.contexts)

    @property
    def live_passes(self) -> int:
        """How many passes are in progress here."""
        return sum(part.live is not None for part in self._state.contexts.values())

    def graph(self, context: ContextId) -> Drawing | None:
        """The part of a context's graph that is here; None if there is none."""
        fragment = self._state.contexts.get(context)
        return None if fragment is None else draw(fragment)

    def handle(self, event: Event) -> list[Effect]:
        """Take one event; return the effects that it asks for, in order.

        Raises: ContextError: a program told something that its context's phase does not
        take. WorkerLost: a program asked something of a worker that is lost.
        """
        state = self._state
        match event:
            case Computed(job=number, failure=failure):
                done, fragment, owner, job = state.jobs.pop(number)
                done(failure, fragment, owner, job)
                if number in state.after:
                    state.computed(number)
            case Arrived(sender=sender, message=message):
                if sender not in state.lost:
                    self._arrived(sender, message)
                else:
                    state.drop(landing(message))
            case _:
                self._told(event)
        soon = state.soon
        while soon:
            soon.popleft()()
        out, state.out = state.out, []
        return out

    def _told(self, event: Event) -> None:
        match event:
            case Issued():
                self._activations.issued(event)
            case Discarded():
                self._lives.discarded(event)
            case Fetched():
                self._reads.fetched(event)
            case Launched():
                self._activations.launched(event)
            case Awaited():
                self._activations.awaited(event)
            case Returned():
                self._activations.returned(event)
                self._heed(event.context, event.failure)
            case _:
                self._told_seldom(event)

    def _told_seldom(self, event: Event) -> None:
        match event:
            case Opened():
                self._ends.opened(event)
            case Differentiated():
                self._passes.differentiated(event)
            case Left():
                self._ends.left(event)
            case Assigned():
                self._leaves.assigned(event)
                self._lives.assigned(event)
            case Dropped():
                self._leaves.dropped(event)
            case Attached():
                self._activations.attached(event)
            case Expired():
                self._passes.expired(event)
            case Lost(worker=worker, why=why):
                self._ends.lost(worker, why)
            case Joined():
                self._ends.joined(event)
            case (
                Computed()
                | Arrived()
                | Issued()
                | Discarded()
                | Fetched()
                | Launched()
                | Awaited()
                | Returned()
            ):
                raise AssertionError(event)
            case _:
                assert_never(event)

    def _arrived(self, sender: Worker, message: Message) -> None:
        match message:
            case Answer():
                self._backward.answer(message)
            case Cotangent():
                self._backward.cotangent(sender, message, landing(message))
            case Mark():
                self._backward.mark(sender, message)
            case Call():
                self._forwarding.call(sender, message)
            case Acknowledge():
                self._activations.acknowledged(sender, message)
            case Primal():
                self._forwarding.primal(message, landing(message))
            case Ship():
                self._forwarding.ship(sender, message)
            case Read():
                self._reads.read(sender, message)
            case Reading():
                self._reads.reading(message, landing(message))
            case _:
                self._arrived_seldom(sender, message)

    def _arrived_seldom(self, sender: Worker, message: Message) -> None:
        match message:
            case Start():
                self._backward.start(sender, message, landing(message))
            case Go():
                self._backward.go(sender, message)
            case End():
                self._passes.end(sender, message)
            case Ended():
                self._passes.ended(sender, message)
            case Release():
                self._ends.release(sender, message)
            case Released():
                self._ends.released(sender, message)
            case Run():
                self._activations.run(sender, message)
            case Return():
                self._activations.program_ended(message)
                self._heed(message.context, message.failure)
            case Fail():
                self._backward.fail_arrived(message)
            case Attach():
                self._activations.attach(sender, message)
            case Assign():
                self._leaves.arrived(sender, message)
            case Forget():
                self._leaves.forget(message)
            case Discard(keys=keys):
                self._lives.discard(keys)
            case (
                Answer()
                | Cotangent()
                | Mark()
                | Call()
                | Acknowledge()
                | Primal()
                | Ship()
                | Read()
                | Reading()
            ):
                raise AssertionError(message)
            case _:
                assert_never(message)

    def _heed(self, context: ContextId, failure: Failure | None) -> None:
        """After a program returned: did it lose a worker that it alone knew?"""
        fragment = self._state.contexts.get(context)
        if fragment is not None and fragment.ownership is not None:
            self._ends.program_returned(fragment, fragment.ownership, failure)
