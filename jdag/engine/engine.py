"""One worker's engine: takes events, returns the effects to carry out."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jdag.engine import protocol
from jdag.engine.backward import Backward
from jdag.engine.context_teardown import ContextTeardown
from jdag.engine.forward import Forwarding
from jdag.engine.graph import Fragment
from jdag.engine.graph_snapshot import GraphSnapshot, snapshot
from jdag.engine.leaves import Leaves
from jdag.engine.lifetimes import Lifetimes
from jdag.engine.listing import WAIT_EVENTS, Listings
from jdag.engine.passes import Passes
from jdag.engine.phases import OF_CONTEXTS, PartPhase, Phase, Situation, phase_of
from jdag.engine.plans import Plans
from jdag.engine.program_frames import ProgramFrames
from jdag.engine.protocol import StepFrame, Worker, landing
from jdag.engine.reads import Reads
from jdag.engine.state import State
from jdag.engine.steps import Steps
from jdag.engine.tables import StepDriver

# Events from drivers. Before any other event, staged steps of plans are committed.
_DRIVER_EVENTS = frozenset(
    (
        *(protocol.Acknowledged, protocol.Lost, protocol.Joined),
        *(protocol.Expired, protocol.TimedOut),
    )
)


class Engine:
    """The deterministic core of one worker: no clock, I/O, randomness or arithmetic.

    Args:
        worker: the name of this worker.
        workers: the names of all workers; a worker's number is its index here.
        incarnation: number of earlier starts of this worker. After a restart, Joined
            and Lost events must report the state of the other workers.
    """

    def __init__(
        self, worker: Worker, workers: Sequence[Worker], incarnation: int = 0
    ) -> None:
        self._state = state = State(worker, workers, incarnation)
        self._lifetimes = Lifetimes(state)
        self._leaves = Leaves(state, self._lifetimes)
        self._backward = Backward(state)
        woken = self._backward.woken
        self._forwarding = Forwarding(state, self._leaves, self._lifetimes, woken)
        self._frames = frames = ProgramFrames(state, self._lifetimes)
        self._reads = Reads(state, self._leaves)
        self._steps = steps = Steps(state, self._leaves)
        self._plans = plans = Plans(state, self._lifetimes, steps)
        steps.stepped = plans.stepped
        steps.finished = plans.finished
        self._listings = listings = Listings(state, frames)
        self._passes = Passes(
            state, self._leaves, self._lifetimes, frames, self._backward, listings
        )
        parts = self._leaves, self._forwarding, frames, self._passes, self._reads
        self._teardown = ContextTeardown(state, *parts, plans)
        state.on_quiet = self._teardown.quiet
        self._backward.owner = self._passes.passive
        self._events = self._on_events()
        state.handlers = self._on_messages()

    @property
    def live_contexts(self) -> int:
        return len(self._state.contexts)

    @property
    def live_passes(self) -> int:
        return sum(part.live is not None for part in self._state.contexts.values())

    @property
    def plans(self) -> int:
        return len(self._steps.tables)

    def drive(self, driver: StepDriver) -> None:
        """Set how steps of plans use values. Required before any plan is prepared."""
        self._steps.driver = driver

    def clear(self) -> None:
        """Break all reference cycles, so that the engine is freed without the GC."""
        del self._steps.stepped, self._steps.finished
        for leaf in self._state.leaves.values():
            leaf.versions.clear()
        for table in self._steps.tables.values():
            table.steps.clear()
        for part in (self._state, self._backward, self):
            vars(part).clear()

    def graph(self, context: protocol.ContextId) -> GraphSnapshot | None:
        fragment = self._state.contexts.get(context)
        return None if fragment is None else snapshot(fragment)

    def situations(self, event: protocol.Event) -> list[Situation]:
        """List (phase, event type) of the contexts of `event`, before it is handled."""
        state = self._state
        cause: Any = event
        if event.__class__ is protocol.Arrived:
            cause = None if cause.sender in state.lost else cause.message
        kind = cause.__class__
        if kind not in OF_CONTEXTS:
            return []
        context = getattr(cause, "context", None)
        part = state.contexts.get(context)
        if part is not None:
            return [(phase_of(part), kind)]
        if kind is protocol.Lost or kind is protocol.Joined:
            return [(phase_of(part), kind) for part in state.contexts.values()]
        if kind is protocol.Acknowledged:
            sent = [*state.unhandled.get(cause.sender, ())][: cause.count]
            frames = [frame for frame, _, _ in sent if frame is not None]
            parts = state.contexts.values()
            return [
                (phase_of(part), kind)
                for part in parts
                if any([frame in frames for frame in part.frames.values()])
            ]
        if kind is protocol.Computed:
            part = state.jobs[cause.job][1]
            return [(phase_of(part), kind)] if isinstance(part, Fragment) else []
        if context is None:
            return []
        if state.owner(context) == state.worker:
            return [(Phase.RELEASED, kind)]
        released = state.is_released(context)
        return [(PartPhase.RELEASED if released else PartPhase.ABSENT, kind)]

    def arrived(
        self, sender: Worker, frame: StepFrame, values: Sequence[Any]
    ) -> list[protocol.Effect]:
        """Process a step frame, as `handle` does."""
        state = self._state
        if sender not in state.lost:
            self._steps.arrived(sender, frame, values)
        return self._effects() if state.out or state.callbacks else []

    def handle(self, event: protocol.Event) -> list[protocol.Effect]:
        """Process one event; return the effects that it requests, in order.

        Raises:
            ContextError: the phase of the context does not allow a program's event.
            WorkerLost: a program's event involves a lost worker.
        """
        state, kind = self._state, event.__class__
        if isinstance(event, protocol.Arrived):
            message, sender = event.message, event.sender
            if message.__class__ is StepFrame:
                return self.arrived(sender, message, event.values)
            if sender in state.lost:
                state.drop(landing(message))
            else:
                state.handlers[message.__class__](sender, message)
        elif isinstance(event, protocol.Computed):
            done, _, job = state.jobs.pop(event.job)
            done(event.failure, job)
            if event.job in state.after:
                state.count_down(state.after.pop(event.job))
        else:
            if self._plans.staged and kind not in _DRIVER_EVENTS:
                self._plans.commit(event)
            self._events[kind](event)
            if state.listing and kind in WAIT_EVENTS:
                self._listings.program_waits(event)
        return self._effects() if state.out or state.callbacks else []

    def _effects(self) -> list[protocol.Effect]:
        state, callbacks = self._state, self._state.callbacks
        while callbacks:
            pending = callbacks.popleft()
            pending.callback(*pending.args)
        out, state.out = state.out, []
        return out

    def _on_events(self) -> Mapping[type, Callable[[Any], None]]:
        frames, teardown = self._frames, self._teardown
        return {
            protocol.Issued: frames.issued,
            protocol.Discarded: self._lifetimes.discarded,
            protocol.Fetched: self._reads.fetched,
            protocol.Launched: frames.launched,
            protocol.Collected: frames.collected,
            protocol.TimedOut: frames.timed_out,
            protocol.Asked: frames.asked,
            protocol.Answered: frames.answered,
            protocol.Awaited: frames.awaited,
            protocol.Attached: frames.attached,
            protocol.Acknowledged: frames.acknowledged,
            protocol.Returned: frames.returned,
            protocol.Opened: teardown.opened,
            protocol.Left: teardown.left,
            protocol.Planned: self._plans.planned,
            protocol.Compiled: self._plans.compiled,
            protocol.Stepping: self._plans.stepping,
            protocol.Unplanned: self._plans.unplanned,
            protocol.Lost: teardown.lost,
            protocol.Joined: teardown.joined,
            protocol.Differentiated: self._passes.differentiated,
            protocol.Expired: self._passes.expired,
            protocol.Assigned: self._leaves.assigned,
            protocol.Dropped: self._leaves.dropped,
        }

    def _on_messages(self) -> Mapping[type, Callable[[Worker, Any], None]]:
        frames, forward, backward = self._frames, self._forwarding, self._backward
        return {
            protocol.Call: forward.call,
            protocol.Ship: forward.ship,
            protocol.Primal: forward.primal,
            protocol.Run: frames.run,
            protocol.Return: self._program_ended,
            protocol.Tell: frames.tell_arrived,
            protocol.Attach: frames.attach,
            protocol.Read: self._reads.read,
            protocol.Reading: self._reads.reading,
            protocol.Assign: self._leaves.assign,
            protocol.Forget: self._leaves.forget,
            protocol.Discard: lambda _, message: self._lifetimes.discard(message.keys),
            protocol.Listing: self._listings.listing,
            protocol.Start: partial(backward.credited, backward.start),
            protocol.Mark: partial(backward.credited, backward.mark),
            protocol.Go: partial(backward.credited, backward.seed),
            protocol.Cotangent: partial(backward.credited, backward.cotangent),
            protocol.Answer: partial(backward.credited, lambda *_: None),
            protocol.Fail: backward.fail_arrived,
            protocol.End: self._passes.end,
            protocol.Ended: self._passes.ended,
            protocol.Release: self._teardown.release,
            protocol.Released: self._teardown.released,
            protocol.Prepare: self._steps.prepare,
            protocol.Stepped: self._plans.stepped,
            protocol.Settle: self._steps.settle,
        }

    def _program_ended(self, sender: Worker, message: protocol.Return) -> None:
        self._frames.program_ended(sender, message)
        self._teardown.program_returned(message.context, message.failure)
