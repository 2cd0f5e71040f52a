"""Backward on one worker: count the dependencies of a pass, then run its vjps.

Inputs:  Start, Mark, Go, Cotangent, Answer and Fail; results of jobs.
Outputs: Vjp and Fill jobs; Mark, Cotangent, Answer and Fail messages. Complete
         cotangents are summed and passed to hooks by `jdag.engine.gradients`, which
         also makes gradients of them.

Invariants
- A worker counts all dependencies of a pass before a cotangent is delivered there.
  FAST counts once, when the worker first sees the pass. SMART counts as marks arrive;
  the owner sends Go when no mark is in flight.
- Each counted edge delivers exactly one contribution, possibly a symbolic zero. A
  vertex is ready when all have arrived. Its addends are then sorted by (path,
  position), seeds last. Where more than eight are counted, recvs and leaves sum them by
  a tree over that order, as they arrive (`addends`); a vertex waits for these sums.
- A vjp's result for an input is a symbolic zero if no output that the input reaches had
  a cotangent (`function.reaches`, by tracked input and output).
- Nothing recurses: vertices that became ready wait in `Pass.ready`.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import and_, gt
from typing import Any

from msgspec.structs import replace

from jdag.engine.addends import ADDENDS_MAX
from jdag.engine.credit import WHOLE, credit_sum
from jdag.engine.gradients import Gradients
from jdag.engine.graph import (
    CallNode,
    Fragment,
    LeafEnd,
    LocalVertex,
    RecvEnd,
    SendEnd,
    Value,
    describe,
)
from jdag.engine.protocol import (
    Answer,
    Cotangent,
    CotangentKey,
    Credited,
    Fail,
    Failure,
    Fill,
    Go,
    Hook,
    Job,
    Key,
    Mark,
    Marked,
    Mode,
    ScratchKey,
    SeedKey,
    Start,
    Vjp,
    VjpInputs,
    VjpWeights,
    Worker,
    landing,
    made_by,
)
from jdag.engine.state import State
from jdag.engine.worker_pass import (
    SEED,
    Due,
    Pass,
    PendingSend,
    Uses,
    first,
    marked,
    ordered,
    walk,
)


class Backward:
    """The backward half of one engine."""

    # Set by the engine: at the owner, a pass is idle everywhere, or has failed.
    owner: Callable[[Pass, Failure | None], None]

    def __init__(self, state: State) -> None:
        self._state = state
        self.gradients = Gradients(state, self._compute)

    # ------------------------------------------------------------------- messages

    def credited(
        self, handler: Callable[[Pass, Any], None], sender: Worker, message: Credited
    ) -> None:
        """Handle a message with credit, unless its pass has ended or failed.

        The first message of a SMART pass on a worker is a Start or a Mark.
        """
        contexts, context = self._state.contexts, message.context
        fragment = contexts.get(context) or self._state.fragment(context)
        if fragment is None or message.number <= fragment.ended:
            self._state.drop(landing(message))
            return
        live: Pass | None = fragment.live
        if live is None:
            assert not isinstance(message, Answer), message
            mode = Mode.SMART if isinstance(message, Mark) else Mode.FAST
            if isinstance(message, Start):
                mode = message.mode
            live = Pass(fragment, message.number, mode, message.retain, sender)
            fragment.live = live
        assert live.number == message.number, (live.number, message)
        if live.failed:  # Counting may be incomplete: nothing can take these values.
            self._state.drop(landing(message))
            return
        held = live.credit
        live.credit = credit_sum(held, message.credit) if held.units else message.credit
        live.unreported += message.owed
        handler(live, message)
        self.settle(live)

    def start(self, live: Pass, message: Start) -> None:
        """Roots are here: count, and begin if the message asks for it."""
        live.roots = message.roots
        if self.sight(live) and message.go:
            self.seed(live)

    def mark(self, live: Pass, message: Mark) -> None:
        """SMART: the roots need these slots of sends here; count all behind them."""
        self._count(live, marked(live, message.transfers))

    def cotangent(self, live: Pass, message: Cotangent) -> None:
        """Deliver the cotangents of a transfer that was sent from here."""
        late = live.mode is Mode.FAST and not live.sighted
        if late and not self.sight(live):
            self._state.drop(landing(message))
            return
        counted = live.counted.get(message.path, ())
        if message.path not in live.owed or any(map(gt, message.present, counted)):
            self._state.drop(landing(message))
            self._fail_spent(live, live.fragment.sends[message.path])
            return
        send = live.owed.pop(message.path)
        live.unreported -= 1
        name = (message.number, message.path)
        for slot, value in enumerate(send.inputs):
            if counted[slot]:
                assert value is not None, (message, slot)
                here = message.present[slot]
                key = CotangentKey(message.context, name, slot) if here else None
                self._deliver(live, value, send.path, slot, key)

    def fail_arrived(self, sender: Worker, message: Fail) -> None:
        """A worker that first heard of the pass from this one failed: forward it."""
        fragment = self._state.contexts.get(message.context)
        live: Pass | None = None if fragment is None else fragment.live
        if live is not None and live.number == message.number:
            route = (self._state.worker, *message.failure.route)
            self.fail(live, replace(message.failure, route=route))

    def settle(self, live: Pass) -> None:
        """Process ready vertices, send the outbox and return the credit if passive."""
        if live.ready:
            self._work(live)
        if live.failed:
            return
        state, fragment = self._state, live.fragment
        if not live.outbox and not live.busy:
            if live.parent is None:
                if live.credit == WHOLE:
                    self.owner(live, None)
            elif live.credit.units:
                answer = partial(Answer, fragment.context, live.number)
                live.outbox.append(PendingSend(fragment.owner, answer))
        if live.outbox:
            for outgoing, message in live.parcel():
                state.send(outgoing.to, message, outgoing.values, outgoing.zeros)
                if outgoing.values:
                    state.drop(outgoing.values)

    def fail(self, live: Pass, failure: Failure) -> None:
        """Stop the pass here and report the failure, once."""
        if live.failed:
            return
        live.failed = True
        self._state.unlist(live.fragment)
        for outgoing in live.outbox:
            self._state.drop(outgoing.values)
        live.outbox = []
        if live.parent is None:
            self.owner(live, failure)
            return
        fragment = live.fragment
        lost = live.parent in self._state.lost
        told = fragment.owner if lost else live.parent
        self._state.send(told, Fail(fragment.context, live.number, failure))

    def fail_lost(self, live: Pass, worker: Worker) -> None:
        """Fail the pass because a worker that it needs is lost."""
        route = (self._state.worker, worker)
        self.fail(live, self._state.lost_failure(worker, route))

    # ------------------------------------------------------------------- counting

    def sight(self, live: Pass) -> bool:
        """Count the dependencies that are known when the pass is first seen."""
        live.sighted = True
        return self._count(live, first(live))

    def _count(self, live: Pass, uses: list[Uses]) -> bool:
        """Count these edges and all behind them, and mark slots of other workers.

        Without retain_graph, counting spends the nodes. If a node was already spent, or
        a worker that is needed is lost, the pass fails and this returns False.
        """
        nodes, received = walk(uses, live.dues)
        for node in nodes:
            if node.spent:
                self._fail_spent(live, node)
                return False
            node.spent = not live.retain
        by_source: dict[Worker, dict[RecvEnd, list[bool]]] = {}
        for recv, slot in received if live.mode is Mode.SMART else ():
            value = recv.outputs[slot]
            if value not in live.needed:
                live.needed[value] = None
                masks = by_source.setdefault(recv.source, {})
                masks.setdefault(recv, [False] * len(recv.outputs))[slot] = True
        for source, masks in by_source.items():
            if source in self._state.lost:
                self.fail_lost(live, source)
                return False
            transfers = tuple([Marked(to.path, tuple(of)) for to, of in masks.items()])
            context, number = live.fragment.context, live.number
            marks = partial(Mark, context, number, transfers, live.retain)
            live.outbox.append(PendingSend(source, marks))
        return True

    def _fail_spent(self, live: Pass, vertex: LocalVertex | SendEnd) -> None:
        message = (
            f"{describe(vertex)} on {self._state.worker!r} was already used by a "
            "backward pass; call the earlier backward with retain_graph=True to use "
            "the graph again"
        )
        self.fail(live, self._state.failure("GraphError", message, vertex.path))

    def seed(self, live: Pass, _: Go | None = None) -> None:
        """Deliver the first cotangent to each root here: the given one, or ones."""
        context, number = live.fragment.context, live.number
        for root in live.roots:
            key = SeedKey(context, number, root.number)
            value = live.fragment.values[root.key]
            deliver = partial(self._deliver, live, value, SEED, root.number, key)
            if root.given:
                deliver()
                continue
            id = self._state.number_job()
            fill = Fill(id, context, number, root.key.name, root.aval, 1, key)
            self._compute(live, fill, deliver)
        live.seeded = True

    # ----------------------------------------------------------------------- jobs

    def _compute(
        self, live: Pass, job: Job, then: Callable[[], None], call_site: str = ""
    ) -> None:
        """Request a job of a pass; `then` runs unless the job or the pass fails."""
        live.busy += 1
        done = partial(self._computed, live, then, call_site)
        self._state.compute(job, done, live.fragment)

    def _computed(
        self,
        live: Pass,
        then: Callable[[], None],
        call_site: str,
        failure: Failure | None,
        job: Any,
    ) -> None:
        if live.fragment.live is not live or live.failed:
            self._state.drop(made_by(job))
            return
        live.busy -= 1
        if failure is not None:
            site = call_site or failure.call_site
            route = (self._state.worker,)
            self.fail(live, replace(failure, call_site=site, route=route))
            return
        then()
        self.settle(live)

    # ------------------------------------------------------------------ delivering

    def _deliver(
        self,
        live: Pass,
        value: Value,
        path: tuple[float, ...],
        position: int,
        key: Key | None,
    ) -> None:
        """Deliver one contribution along one edge; None is a symbolic zero."""
        vertex = value.producer
        if vertex is None:  # Sent as tracked, but it has no producer here.
            self._state.drop(() if key is None else (key,))
            return
        due = live.dues[vertex]
        slot = value.index
        if key is not None and type(vertex) is LeafEnd:
            oldest, read = live.oldest, value.key.index
            oldest[vertex.leaf] = min(read, oldest.get(vertex.leaf, read))
        if due.edges is not None and len(due.edges) > ADDENDS_MAX:
            due.plant()
        tree = due.trees.get(slot)
        if tree is not None:
            spot = 0, tree.ranks[path, position]
            self.gradients.put(live, vertex, tree, spot, key)
        elif key is not None:
            due.addends[slot].append((path, position, key))
        due.remaining -= 1
        if due.remaining == 0:
            live.ready.append(vertex)

    def _work(self, live: Pass) -> None:
        ready = live.ready
        while ready and not live.failed:
            vertex = ready.pop()
            if type(vertex) is CallNode:
                self._node(live, vertex)
            elif type(vertex) is RecvEnd:
                self._recv(live, vertex)
            else:
                self.gradients.reached(live, vertex)

    def _node(self, live: Pass, node: CallNode) -> None:
        due = live.dues[node]
        hooks = live.fragment.hooks
        if hooks and not due.hooked:
            due.hooked = True
            slots = {v.index: hooks[v.key] for v in node.outputs if v.key in hooks}
            if slots:
                self._gather(live, node, due, slots)
                return
        if not any(due.addends):
            self._zero(live, node)
        elif not node.done:
            node.waited = True
            live.busy += 1
        elif node.failure is not None:
            self.fail(live, replace(node.failure, route=(self._state.worker,)))
        else:
            self._vjp(live, node, due)

    def _gather(
        self,
        live: Pass,
        vertex: CallNode | RecvEnd,
        due: Due,
        slots: Mapping[int, Sequence[Hook]],
    ) -> None:
        """Sum the addends of these slots, apply hooks, continue with the vertex."""
        due.remaining = len(slots)
        for slot, hooks in slots.items():
            then = partial(self._gathered, live, vertex, due, slot)
            aval = hooks[0].aval if hooks else None
            addends = due.taken(slot)
            self.gradients.total(live, vertex.path, addends, then, hooks, aval=aval)

    def _gathered(
        self, live: Pass, vertex: LocalVertex, due: Due, slot: int, key: Key
    ) -> None:
        due.addends[slot] = [(SEED, 0, key)]
        live.less(vertex)

    def woken(self, fragment: Fragment, node: CallNode) -> None:
        """The forward of a node that a pass waits for has run."""
        live: Pass | None = fragment.live
        if live is None or node not in live.dues:
            return
        live.busy -= 1
        live.ready.append(node)
        self.settle(live)

    def _zero(self, live: Pass, node: CallNode) -> None:
        """Skip the vjp of a node that received only symbolic zeros."""
        if not live.retain and node.residuals is not None:
            self._state.drop((node.residuals,))
            node.residuals = None
        self._state.skip(live.fragment, node, "BIW")
        if node.tag is not None:
            node.tag = replace(node.tag, listed=False)
        for position, value in enumerate(node.inputs):
            self._deliver(live, value, node.path, position, None)

    def _vjp(self, live: Pass, node: CallNode, due: Due) -> None:
        number = self._state.number_job()
        context = live.fragment.context
        assert node.residuals is not None, node.path
        of = (number, context, live.number, node.path, node.function, node.residuals)
        addends = tuple([ordered(addends) for addends in due.addends])
        last = not live.retain
        del live.dues[node]  # Freed early, so that a long pass stays small.
        if not live.retain:
            node.residuals = None
        tag = live.fragment.tag(node)
        if tag is not None and live.retain:  # A second backward is in no schedule.
            node.tag = replace(tag, listed=False)
        outputs = [ScratchKey(context, number, at) for at in range(len(node.inputs))]
        if tag is not None and tag.halves:
            weights = tuple([type(of.producer) is LeafEnd for of in node.inputs])
            given = addends, tuple([o for o in outputs if not weights[o.index]])
            stash = ScratchKey(context, number, len(outputs))
            job: Vjp = VjpInputs(*of, *given, last, tag, weights=weights, stash=stash)
        else:
            job = Vjp(*of, addends, tuple(outputs), last, tag)
        then = partial(self._vjped, live, node, job, addends)
        self._compute(live, job, then, node.call_site)

    def _second_half(self, live: Pass, node: CallNode, first: VjpInputs) -> None:
        """Ask for the cotangents of weights."""
        context, number = live.fragment.context, self._state.number_job()
        weights = enumerate(first.weights)
        outputs = tuple([ScratchKey(context, number, at) for at, on in weights if on])
        of = (number, context, live.number, node.path, node.function, first.stash)
        job = VjpWeights(*of, first.weights, outputs, first.tag)
        then = partial(self._vjped, live, node, job, first.cotangents)
        self._compute(live, job, then, node.call_site)

    def _vjped(
        self,
        live: Pass,
        node: CallNode,
        job: Vjp | VjpWeights,
        addends: Sequence[Sequence[Key]],
    ) -> None:
        """Deliver the cotangents of inputs; an output's index is its input's."""
        if type(job) is VjpInputs:
            self._second_half(live, node, job)
        came = [bool(of) for of in addends]
        for output in job.outputs:
            key: Key | None = output
            position = output.index
            if not any(map(and_, node.function.reaches[position], came)):
                self._state.drop((output,))
                key = None
            self._deliver(live, node.inputs[position], node.path, position, key)

    def _recv(self, live: Pass, recv: RecvEnd) -> None:
        due = live.dues[recv]
        wide = {slot: () for slot, came in enumerate(due.addends) if len(came) > 1}
        if wide:
            self._gather(live, recv, due, wide)
            return
        if recv.source in self._state.lost:
            self.fail_lost(live, recv.source)
            return
        keys = tuple([addends[0][2] for addends in due.addends if addends])
        present = tuple([bool(addends) for addends in due.addends])
        due.addends = []
        zeros: tuple[Any, ...] = ()
        if len(keys) < len(present):
            slots = zip(recv.avals, recv.tracked, present, strict=True)
            zeros = tuple([aval for aval, on, here in slots if on and not here])
        context, number = live.fragment.context, live.number
        message = partial(Cotangent, context, number, recv.path, present, live.retain)
        live.outbox.append(PendingSend(recv.source, message, keys, zeros))
