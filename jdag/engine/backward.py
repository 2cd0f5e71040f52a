"""Backward on one worker: count the dependencies of a pass, then run its vjps.

Inputs:  Start, Mark, Go, Cotangent, Answer and Fail; results of jobs.
Outputs: Vjp and Fill jobs; Mark, Cotangent, Answer and Fail messages. The module
         `jdag.engine.gradients` sums complete cotangents, applies hooks and accumulates
         the gradients of leaves.

Invariants
- A worker counts all dependencies of a pass before a cotangent is delivered there.
  FAST counts once, when the worker first sees the pass. SMART counts as marks arrive;
  the owner sends Go when no mark is in flight.
- Each counted edge delivers exactly one contribution, possibly a symbolic zero. A
  vertex is ready when all its contributions have arrived. Its addends are then sorted
  by (path, position), seeds last. Recvs and leaves with more than eight counted edges
  sum their addends as they arrive, by a tree over that order (`addends`), and wait for
  the sums.
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
    # Set by the engine. Called on the pass's owner when no worker has work left, or
    # with a failure that has reached the owner.
    owner: Callable[[Pass, Failure | None], None]

    def __init__(self, state: State) -> None:
        self._state = state
        self.gradients = Gradients(state, self._compute)

    # ------------------------------------------------------------------- messages

    def credited(
        self, handler: Callable[[Pass, Any], None], sender: Worker, message: Credited
    ) -> None:
        """Handle a message that carries credit, unless its pass has ended or failed.

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
        if live.failed:  # Counting may be incomplete, so the values have no receiver.
            self._state.drop(landing(message))
            return
        before, credit = live.credit, message.credit
        live.credit = credit_sum(before, credit) if before.units else credit
        live.unreported += message.owed
        handler(live, message)
        self.settle(live)

    def start(self, live: Pass, message: Start) -> None:
        live.roots = message.roots
        if self.sight(live) and message.go:
            self.seed(live)

    def mark(self, live: Pass, message: Mark) -> None:
        self._count(live, marked(live, message.transfers))

    def cotangent(self, live: Pass, message: Cotangent) -> None:
        uncounted = live.mode is Mode.FAST and not live.sighted
        if uncounted and not self.sight(live):
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
                present = message.present[slot]
                key = CotangentKey(message.context, name, slot) if present else None
                self._deliver(live, value, send.path, slot, key)

    def fail_arrived(self, sender: Worker, message: Fail) -> None:
        fragment = self._state.contexts.get(message.context)
        live: Pass | None = None if fragment is None else fragment.live
        if live is not None and live.number == message.number:
            route = (self._state.worker, *message.failure.route)
            self.fail(live, replace(message.failure, route=route))

    def settle(self, live: Pass) -> None:
        """Process ready vertices and send the outbox. If passive, return the credit."""
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
        """Stop the pass on this worker and report its first failure."""
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
        receiver = fragment.owner if lost else live.parent
        self._state.send(receiver, Fail(fragment.context, live.number, failure))

    def fail_lost(self, live: Pass, worker: Worker) -> None:
        route = (self._state.worker, worker)
        self.fail(live, self._state.lost_failure(worker, route))

    # ------------------------------------------------------------------- counting

    def sight(self, live: Pass) -> bool:
        live.sighted = True
        return self._count(live, first(live))

    def _count(self, live: Pass, uses: list[Uses]) -> bool:
        """Count edges and their dependencies' edges. In SMART mode, also mark sends.

        Without retain_graph, counting spends the nodes. If a node was already spent, or
        a needed worker is lost, the pass fails and the result is False.
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
            transfers = tuple([Marked(r.path, tuple(m)) for r, m in masks.items()])
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
        self, live: Pass, job: Job, callback: Callable[[], None], call_site: str = ""
    ) -> None:
        """Request a job of a pass. `callback` runs unless the job or the pass fails."""
        live.busy += 1
        done = partial(self._computed, live, callback, call_site)
        self._state.compute(job, done, live.fragment)

    def _computed(
        self,
        live: Pass,
        callback: Callable[[], None],
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
        callback()
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
        """Deliver one contribution along an edge. `key=None` is a symbolic zero."""
        vertex = value.producer
        if vertex is None:  # The call that would have produced the value failed.
            self._state.drop(() if key is None else (key,))
            return
        due = live.dues[vertex]
        slot = value.index
        if key is not None and type(vertex) is LeafEnd:
            oldest, read = live.oldest, value.key.index
            oldest[vertex.leaf] = min(read, oldest.get(vertex.leaf, read))
        if due.edges is not None and len(due.edges) > ADDENDS_MAX:
            due.plant()
        tree = None if due.trees is None else due.trees.get(slot)
        if tree is not None:
            spot = 0, tree.ranks[path, position]
            self.gradients.put(live, vertex, tree, spot, key)
        elif key is not None:
            addends = due.addends[slot] or []
            addends.append((path, position, key))
            due.addends[slot] = addends
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
        due.remaining = len(slots)
        for slot, hooks in slots.items():
            callback = partial(self._gathered, live, vertex, due, slot)
            aval = hooks[0].aval if hooks else None
            addends = due.take(slot)
            self.gradients.total(live, vertex.path, addends, callback, hooks, aval=aval)

    def _gathered(
        self, live: Pass, vertex: LocalVertex, due: Due, slot: int, key: Key
    ) -> None:
        due.addends[slot] = [(SEED, 0, key)]
        live.count_down(vertex)

    def woken(self, fragment: Fragment, node: CallNode) -> None:
        """Resume the pass at a node that had its cotangents before its forward ran."""
        live: Pass | None = fragment.live
        if live is None or node not in live.dues:
            return
        live.busy -= 1
        live.ready.append(node)
        self.settle(live)

    def _zero(self, live: Pass, node: CallNode) -> None:
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
        head = (number, context, live.number, node.path, node.function, node.residuals)
        addends = tuple([ordered(addends) for addends in due.addends])
        last = not live.retain
        del live.dues[node]  # Removed early, to bound the memory of a long pass.
        if not live.retain:
            node.residuals = None
        tag = node.tag and live.fragment.tag(node)
        if tag is not None and live.retain:  # Schedules list no second backward.
            node.tag = replace(tag, listed=False)
        outputs = [ScratchKey(context, number, i) for i in range(len(node.inputs))]
        if tag is not None and tag.halves:
            weights = tuple([type(value.producer) is LeafEnd for value in node.inputs])
            inputs = tuple([o for o in outputs if not weights[o.index]])
            stash = ScratchKey(context, number, len(outputs))
            rest = addends, inputs, last, tag
            job: Vjp = VjpInputs(*head, *rest, weights=weights, stash=stash)
        else:
            job = Vjp(*head, addends, tuple(outputs), last, tag)
        callback = partial(self._vjped, live, node, job, addends)
        self._compute(live, job, callback, node.call_site)

    def _second_half(self, live: Pass, node: CallNode, first: VjpInputs) -> None:
        context, number = live.fragment.context, self._state.number_job()
        weights = enumerate(first.weights)
        outputs = tuple([ScratchKey(context, number, i) for i, on in weights if on])
        head = (number, context, live.number, node.path, node.function, first.stash)
        job = VjpWeights(*head, first.weights, outputs, first.tag)
        callback = partial(self._vjped, live, node, job, first.cotangents)
        self._compute(live, job, callback, node.call_site)

    def _vjped(
        self,
        live: Pass,
        node: CallNode,
        job: Vjp | VjpWeights,
        addends: Sequence[Sequence[Key]],
    ) -> None:
        if type(job) is VjpInputs:
            self._second_half(live, node, job)
        nonzero = [bool(keys) for keys in addends]
        for output in job.outputs:
            key: Key | None = output
            position = output.index
            if not any(map(and_, node.function.reaches[position], nonzero)):
                self._state.drop((output,))
                key = None
            self._deliver(live, node.inputs[position], node.path, position, key)

    def _recv(self, live: Pass, recv: RecvEnd) -> None:
        due = live.dues[recv]
        unsummed = {slot: () for slot, keys in enumerate(due.addends) if len(keys) > 1}
        if unsummed:
            self._gather(live, recv, due, unsummed)
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
            zeros = tuple([aval for aval, on, sent in slots if on and not sent])
        context, number = live.fragment.context, live.number
        message = partial(Cotangent, context, number, recv.path, present, live.retain)
        live.outbox.append(PendingSend(recv.source, message, keys, zeros))
