"""One worker's engine: it takes an event and returns the effects to be carried out."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jdag.engine.backward import Backward
from jdag.engine.drawing import Drawing, draw
from jdag.engine.ends import Ends
from jdag.engine.forward import Forwarding
from jdag.engine.leaves import Leaves
from jdag.engine.lives import Lives
from jdag.engine.passes import Passes
from jdag.engine.program_frames import ProgramFrames
from jdag.engine.protocol import (
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
    Fetched,
    Forget,
    Go,
    Issued,
    Joined,
    Launched,
    Left,
    Lost,
    Mark,
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
from jdag.engine.reads import Reads
from jdag.engine.state import State


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
        self._backward = Backward(state)
        self._forwarding = Forwarding(
            state, self._leaves, self._lives, self._backward.woken
        )
        self._frames = ProgramFrames(state, self._leaves, self._lives, self._forwarding)
        self._reads = Reads(state, self._leaves)
        self._passes = Passes(
            state, self._leaves, self._lives, self._frames, self._backward
        )
        self._ends = Ends(
            state,
            self._leaves,
            self._forwarding,
            self._frames,
            self._passes,
            self._reads,
        )
        state.on_quiet = self._ends.quiet
        self._backward.owner_passive = self._passes.owner_passive
        self._backward.owner_failed = self._passes.owner_failed
        self._events = self._on_events()
        self._messages = self._on_messages()

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
        self._events[event.__class__](event)
        soon = state.soon
        while soon:
            soon.popleft()()
        out, state.out = state.out, []
        return out

    def _on_events(self) -> Mapping[type, Callable[[Any], None]]:
        """What is done about each kind of event."""
        frames, ends = self._frames, self._ends
        return {
            Arrived: self._arrived,
            Computed: self._computed,
            Issued: frames.issued,
            Discarded: self._lives.discarded,
            Fetched: self._reads.fetched,
            Launched: frames.launched,
            Awaited: frames.awaited,
            Attached: frames.attached,
            Returned: self._returned,
            Opened: ends.opened,
            Left: ends.left,
            Lost: ends.lost,
            Joined: ends.joined,
            Differentiated: self._passes.differentiated,
            Expired: self._passes.expired,
            Assigned: self._assigned,
            Dropped: self._leaves.dropped,
        }

    def _on_messages(self) -> Mapping[type, Callable[[Worker, Any], None]]:
        """What is done about each kind of message, by its sender."""
        frames, forward, backward = self._frames, self._forwarding, self._backward
        return {
            Call: forward.call,
            Ship: forward.ship,
            Primal: forward.primal,
            Acknowledge: frames.acknowledged,
            Run: frames.run,
            Return: self._program_ended,
            Attach: frames.attach,
            Read: self._reads.read,
            Reading: self._reads.reading,
            Assign: self._leaves.arrived,
            Forget: self._leaves.forget,
            Discard: self._lives.discard_arrived,
            Start: partial(backward.credited, backward.start),
            Mark: partial(backward.credited, backward.mark),
            Go: partial(backward.credited, backward.go),
            Cotangent: partial(backward.credited, backward.cotangent),
            Answer: partial(backward.credited, backward.answer),
            Fail: backward.fail_arrived,
            End: self._passes.end,
            Ended: self._passes.ended,
            Release: self._ends.release,
            Released: self._ends.released,
        }

    def _arrived(self, event: Arrived) -> None:
        sender, message = event.sender, event.message
        if sender not in self._state.lost:
            self._messages[message.__class__](sender, message)
        else:
            self._state.drop(landing(message))

    def _computed(self, event: Computed) -> None:
        state = self._state
        done, _, job = state.jobs.pop(event.job)
        done(event.failure, job)
        if event.job in state.after:
            state.computed(event.job)

    def _assigned(self, event: Assigned) -> None:
        self._leaves.assigned(event)
        self._lives.assigned(event)

    def _returned(self, event: Returned) -> None:
        self._frames.returned(event)
        self._ends.program_returned(event.context, event.failure)

    def _program_ended(self, sender: Worker, message: Return) -> None:
        self._frames.program_ended(message)
        self._ends.program_returned(message.context, message.failure)
