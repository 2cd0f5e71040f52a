"""One worker's engine: takes events, returns the effects to carry out."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jdag.engine import protocol
from jdag.engine.backward import Backward
from jdag.engine.context_teardown import Ends
from jdag.engine.forward import Forwarding
from jdag.engine.graph import Fragment
from jdag.engine.graph_snapshot import GraphSnapshot, snapshot
from jdag.engine.leaves import Leaves
from jdag.engine.lifetimes import Lives
from jdag.engine.listing import WAITS, Lists
from jdag.engine.passes import Passes
from jdag.engine.phases import OF_CONTEXTS, PartPhase, Phase, Situation, phase_of
from jdag.engine.plans import Plans
from jdag.engine.program_frames import ProgramFrames
from jdag.engine.protocol import Worker, landing
from jdag.engine.reads import Reads
from jdag.engine.state import State
from jdag.engine.steps import Steps

# Events that are of no program: what a plan has staged is committed before all others.
_KEEPING = frozenset(
    (protocol.Lost, protocol.Joined, protocol.Expired, protocol.TimedOut)
)


class Engine:
    """The deterministic core of one worker: no clock, wire, file, chance or arithmetic.

    Args:
        worker: the name of this worker.
        workers: the names of all workers, in the order that numbers them.
        incarnation: how often this worker has been started before. After a restart,
            Joined and Lost events must report the state of the other workers.
    """

    def __init__(
        self,
        worker: Worker,
        workers: Sequence[Worker],
        incarnation: int = 0,
    ) -> None:
        self._state = state = State(worker, workers, incarnation)
        self._lives = Lives(state)
        self._leaves = Leaves(state, self._lives)
        self._backward = Backward(state)
        woken = self._backward.woken
        self._forwarding = Forwarding(state, self._leaves, self._lives, woken)
        self._frames = frames = ProgramFrames(state, self._lives)
        self._reads = Reads(state, self._leaves)
        self._steps = steps = Steps(state, self._leaves)
        self._plans = plans = Plans(state, self._lives, steps)
        steps.stepped, steps.came = plans.stepped, plans.came
        self._lists = lists = Lists(state, frames)
        self._passes = Passes(
            state, self._leaves, self._lives, frames, self._backward, lists
        )
        self._ends = Ends(
            state,
            self._leaves,
            self._forwarding,
            frames,
            self._passes,
            self._reads,
            self._plans,
        )
        state.on_quiet = self._ends.quiet
        self._backward.owner = self._passes.passive
        self._events = self._on_events()
        state.handlers = self._on_messages()

    @property
    def live_contexts(self) -> int:
        """Number of contexts that have a fragment here."""
        return len(self._state.contexts)

    @property
    def live_passes(self) -> int:
        """Number of passes in progress here."""
        return sum(part.live is not None for part in self._state.contexts.values())

    @property
    def plans(self) -> int:
        """Number of plans that have a part here."""
        return len(self._steps.parts)

    def clear(self) -> None:
        """Undo what its parts know of each other, so that no cycle of them is left."""
        del self._steps.stepped, self._steps.came
        for leaf in self._state.leaves.values():
            leaf.versions.clear()
        for part in (self._state, self._backward, self):
            vars(part).clear()

    def graph(self, context: protocol.ContextId) -> GraphSnapshot | None:
        """This worker's fragment of a context's graph; None if there is none."""
        fragment = self._state.contexts.get(context)
        return None if fragment is None else snapshot(fragment)

    def situations(self, event: protocol.Event) -> list[Situation]:
        """Phase and event, for each context that an event is about.

        To be asked before the event is handled; of what is in `phases.TAKES`.
        """
        state = self._state
        given: Any = event
        if event.__class__ is protocol.Arrived:
            given = None if given.sender in state.lost else given.message
        kind = given.__class__
        if kind not in OF_CONTEXTS:
            return []
        if kind is protocol.Lost or kind is protocol.Joined:
            return [(phase_of(part), kind) for part in state.contexts.values()]
        if kind is protocol.Computed:
            part = state.jobs[given.job][1]
            return [(phase_of(part), kind)] if isinstance(part, Fragment) else []
        context = getattr(given, "context", None)
        part = state.contexts.get(context)
        if part is not None:
            return [(phase_of(part), kind)]
        if context is None:
            return []
        if state.owner(context) == state.worker:
            return [(Phase.RELEASED, kind)]
        return [(PartPhase.RELEASED if state.gone(context) else PartPhase.ABSENT, kind)]

    def handle(self, event: protocol.Event) -> list[protocol.Effect]:
        """Process one event; return the effects that it requests, in order.

        Raises:
            ContextError: the phase of the context does not allow a program's event.
            WorkerLost: a program's event involves a lost worker.
        """
        state, kind = self._state, event.__class__
        if isinstance(event, protocol.Computed):
            done, _, job = state.jobs.pop(event.job)
            done(event.failure, job)
            if event.job in state.after:
                state.came(state.after.pop(event.job))
        elif not isinstance(event, protocol.Arrived):
            if self._plans.staged and kind not in _KEEPING:
                self._plans.commit(event)
            self._events[kind](event)
            if state.listing and kind in WAITS:
                self._lists.waits(event)
        elif event.sender in state.lost:
            state.drop(landing(event.message))
        else:
            state.handlers[event.message.__class__](event.sender, event.message)
        soon = state.soon
        while soon:
            soon.popleft()()
        out, state.out = state.out, []
        return out

    def _on_events(self) -> Mapping[type, Callable[[Any], None]]:
        frames, ends = self._frames, self._ends
        return {
            protocol.Issued: frames.issued,
            protocol.Discarded: self._lives.discarded,
            protocol.Fetched: self._reads.fetched,
            protocol.Launched: frames.launched,
            protocol.Collected: frames.collected,
            protocol.TimedOut: frames.timed_out,
            protocol.Asked: frames.asked,
            protocol.Answered: frames.answered,
            protocol.Awaited: frames.awaited,
            protocol.Attached: frames.attached,
            protocol.Returned: frames.returned,
            protocol.Opened: ends.opened,
            protocol.Left: ends.left,
            protocol.Planned: self._plans.planned,
            protocol.Compiled: self._plans.compiled,
            protocol.Stepping: self._plans.stepping,
            protocol.Unplanned: self._plans.unplanned,
            protocol.Lost: ends.lost,
            protocol.Joined: ends.joined,
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
            protocol.Acknowledge: frames.acknowledged,
            protocol.Run: frames.run,
            protocol.Return: self._program_ended,
            protocol.Tell: frames.told,
            protocol.Attach: frames.attach,
            protocol.Read: self._reads.read,
            protocol.Reading: self._reads.reading,
            protocol.Assign: self._leaves.assign,
            protocol.Forget: self._leaves.forget,
            protocol.Discard: lambda _, message: self._lives.discard(message.keys),
            protocol.Listing: self._lists.listing,
            protocol.Start: partial(backward.credited, backward.start),
            protocol.Mark: partial(backward.credited, backward.mark),
            protocol.Go: partial(backward.credited, backward.seed),
            protocol.Cotangent: partial(backward.credited, backward.cotangent),
            protocol.Answer: partial(backward.credited, lambda *_: None),
            protocol.Fail: backward.fail_arrived,
            protocol.End: self._passes.end,
            protocol.Ended: self._passes.ended,
            protocol.Release: self._ends.release,
            protocol.Released: self._ends.released,
            protocol.Prepare: self._steps.prepare,
            protocol.Step: self._steps.step,
            protocol.Hop: self._steps.hop,
            protocol.Stepped: self._plans.stepped,
            protocol.Settle: self._steps.settle,
        }

    def _program_ended(self, sender: Worker, message: protocol.Return) -> None:
        self._frames.program_ended(sender, message)
        self._ends.program_returned(message.context, message.failure)
