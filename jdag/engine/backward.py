"""Backward on one worker: count what a pass owes, then run vjps as cotangents complete.

Told: Start, Go, Cotangent, Answer, Fail, and results of Vjp, Sum and Fill jobs. Asks
for those jobs and for Cotangent, Answer and Fail messages.

Invariants
- Counting is done once a pass and worker, on first sight, from its roots and all its
  sends.
- Each counted edge brings exactly one contribution, perhaps a symbolic zero; a vertex
  is ready when all have come, and its addends are then put in order of (path,
  position), seeds last.
- A gradient is staged in the pass; only `End(finished)` commits it.
- Nothing recurses: what one contribution makes ready waits in `Pass.ready`.
"""

from collections.abc import Callable
from dataclasses import replace
from math import inf

from jdag.engine.count import count, describe, path_of
from jdag.engine.graph import Fragment, LeafEnd, Node, RecvEnd, Value, Vertex
from jdag.engine.state import State, lost_failure
from jdag.engine.tree import Due, Pass
from jdag.engine.vocabulary import (
    Answer,
    Cotangent,
    Fail,
    Failure,
    Fill,
    Go,
    Job,
    Key,
    Path,
    Root,
    Start,
    Sum,
    Vjp,
    Worker,
)

SEED = (inf,)  # Sorts after every path: seeds come last.


class Backward:
    """The backward half of one engine."""

    def __init__(
        self,
        state: State,
        owner_passive: Callable[[Fragment, Pass], None],
        owner_failed: Callable[[Fragment, Failure], None],
    ) -> None:
        self._state = state
        self._owner_passive = owner_passive
        self._owner_failed = owner_failed

    # ------------------------------------------------------------------- messages

    def start(self, sender: Worker, message: Start, landed: tuple[Key, ...]) -> None:
        """Roots live here: count, and begin if told to."""
        taken = self._take(
            sender, message.context, message.number, message.retain, landed
        )
        if taken is None:
            return
        fragment, live, engaged = taken
        live.roots = message.roots
        if self.sight(fragment, live) and message.go:
            self.seed(fragment, live)
        self._close(fragment, live, sender, engaged)

    def go(self, sender: Worker, message: Go) -> None:
        """The announced pass begins."""
        taken = self._take(sender, message.context, message.number, message.retain, ())
        if taken is None:
            return
        fragment, live, engaged = taken
        self.seed(fragment, live)
        self._close(fragment, live, sender, engaged)

    def cotangent(
        self, sender: Worker, message: Cotangent, landed: tuple[Key, ...]
    ) -> None:
        """The cotangents of a transfer that was sent from here."""
        context, number = message.context, message.number
        taken = self._take(sender, context, number, message.retain, landed)
        if taken is None:
            return
        fragment, live, engaged = taken
        if not live.sighted and not self.sight(fragment, live):
            self._state.drop(landed)
            return
        send = live.owed.pop(message.path, None)
        if send is None:
            self._state.drop(landed)
            self._fail_spent(fragment, live, fragment.sends[message.path])
            return
        live.unreported -= 1
        name = (number, message.path)
        for slot, value in enumerate(send.inputs):
            if value is not None:
                here = message.present[slot]
                key = Key("cotangent", context, name, slot) if here else None
                self._deliver(live, value, send.path, slot, key)
        self._close(fragment, live, sender, engaged)

    def answer(self, message: Answer) -> None:
        """A message of the pass is done with."""
        fragment = self._state.contexts.get(message.context)
        live: Pass | None = None if fragment is None else fragment.live
        if fragment is None or live is None or live.number != message.number:
            return
        live.unanswered -= 1
        assert live.unanswered >= 0, message
        live.unreported += message.owed
        self.settle(fragment, live)

    def fail_arrived(self, message: Fail) -> None:
        """A child in the tree cannot finish: pass it on towards the owner."""
        fragment = self._state.contexts.get(message.context)
        live: Pass | None = None if fragment is None else fragment.live
        if fragment is None or live is None or live.number != message.number:
            return
        route = (self._state.worker, *message.failure.route)
        self.fail(fragment, live, replace(message.failure, route=route))

    def _take(
        self,
        sender: Worker,
        context: object,
        number: int,
        retain: bool,
        landed: tuple[Key, ...],
    ) -> tuple[Fragment, Pass, bool] | None:
        """A message's pass and whether it engaged; None if it ended or failed."""
        fragment = self._state.fragment(context)  # type: ignore[arg-type]
        if fragment is None or number <= fragment.ended:
            self._state.drop(landed)
            return None
        if fragment.live is None:
            fragment.live = Pass(number, retain, is_owner=False)
        live: Pass = fragment.live
        assert live.number == number, (live.number, number)
        if live.failed:  # Perhaps in mid-count: what came has nowhere to go.
            self._state.drop(landed)
            return None
        return fragment, live, live.engage(sender)

    def _close(
        self, fragment: Fragment, live: Pass, sender: Worker, engaged: bool
    ) -> None:
        """Work off what is ready and answer if it is time."""
        self._work(fragment, live)
        if not engaged and not live.failed:
            change = 0 if live.is_owner else live.report()
            self._state.send(sender, Answer(fragment.context, live.number, change))
        self.settle(fragment, live)

    def settle(self, fragment: Fragment, live: Pass) -> None:
        """Answer the parent, or conclude the pass, if this worker is passive."""
        self._work(fragment, live)
        if live.failed or not live.engaged or not live.passive:
            return
        if live.is_owner:
            self._owner_passive(fragment, live)
            return
        live.engaged = False
        assert live.parent is not None, live.number
        parent, live.parent = live.parent, None
        self._state.send(parent, Answer(fragment.context, live.number, live.report()))

    def fail(self, fragment: Fragment, live: Pass, failure: Failure) -> None:
        """The pass cannot finish: say so up the tree, once, and do no more."""
        if live.failed:
            return
        live.failed = True
        if live.is_owner:
            self._owner_failed(fragment, failure)
        else:
            assert live.parent is not None, failure
            self._state.send(live.parent, Fail(fragment.context, live.number, failure))

    def fail_lost(self, fragment: Fragment, live: Pass, worker: Worker) -> None:
        """The pass cannot finish: a worker whose part it needs is gone."""
        here = self._state.worker
        lost = lost_failure(worker, here)
        self.fail(fragment, live, replace(lost, route=(here, worker)))

    # ------------------------------------------------------------------- counting

    def sight(self, fragment: Fragment, live: Pass) -> bool:
        """Count the dependencies of everything behind the roots and sends here."""
        live.sighted = True
        spent = count(fragment, live)
        if spent is not None:
            self._fail_spent(fragment, live, spent)
        return spent is None

    def _fail_spent(self, fragment: Fragment, live: Pass, vertex: Vertex) -> None:
        message = (
            f"{describe(vertex)} on {self._state.worker!r} was already used by a "
            "backward pass; call backward with retain_graph=True where the graph is to "
            "be used again"
        )
        self.fail(
            fragment, live, self._state.failure("GraphError", message, path_of(vertex))
        )

    def seed(self, fragment: Fragment, live: Pass) -> None:
        """Hand each root here its first cotangent: the one given, or ones."""
        for root in live.roots:
            key = Key("seed", fragment.context, live.number, root.number)
            if root.given:
                self._seeded(fragment, live, root, key)
                continue
            live.computing += 1
            job = Fill(
                self._state.number_job(),
                fragment.context,
                live.number,
                root.key.name,
                root.aval,
                1,
                key,
            )
            self._state.compute(job, self._filled, fragment, (live, root))
        live.roots = ()

    def _seeded(self, fragment: Fragment, live: Pass, root: Root, key: Key) -> None:
        self._deliver(live, fragment.values[root.key], SEED, root.number, key)

    # ------------------------------------------------------------------ delivering

    def _deliver(
        self,
        live: Pass,
        value: Value,
        path: tuple[float, ...],
        position: int,
        key: Key | None,
    ) -> None:
        """One contribution along one edge; None is a symbolic zero."""
        vertex = value.producer
        if vertex is None:  # Sent as tracked, but nothing here made it.
            self._state.drop(() if key is None else (key,))
            return
        due = live.dues[vertex]
        if key is not None:
            due.addends[value.index].append((path, position, key))
        due.remaining -= 1
        if due.remaining == 0:
            live.ready.append(vertex)

    def _work(self, fragment: Fragment, live: Pass) -> None:
        """Go on with every vertex that is ready."""
        ready = live.ready
        while ready and not live.failed:
            vertex = ready.pop()
            if type(vertex) is Node:
                self._node(fragment, live, vertex)
            elif type(vertex) is RecvEnd:
                self._recv(fragment, live, vertex)
            else:
                self._leaf(fragment, live, vertex)

    def _node(self, fragment: Fragment, live: Pass, node: Node) -> None:
        due = live.dues[node]
        if not any(due.addends):
            self._zero(fragment, live, node)
        elif not node.done:
            node.waited = True
            live.waiting += 1
        elif node.failure is not None:
            route = (self._state.worker,)
            self.fail(fragment, live, replace(node.failure, route=route))
        else:
            self._vjp(fragment, live, node, due)

    def woken(self, fragment: Fragment, node: Node) -> None:
        """The forward of a node that a pass waits for has run."""
        live: Pass | None = fragment.live
        if live is None or node not in live.dues:
            return
        live.waiting -= 1
        live.ready.append(node)
        self.settle(fragment, live)

    def _zero(self, fragment: Fragment, live: Pass, node: Node) -> None:
        """A node that got only symbolic zeros is not run."""
        if not live.retain and node.residuals is not None:
            self._state.drop((node.residuals,))
            node.residuals = None
        for position, value in enumerate(node.inputs):
            self._deliver(live, value, node.path, position, None)

    def _vjp(self, fragment: Fragment, live: Pass, node: Node, due: Due) -> None:
        state = self._state
        number = state.number_job()
        context = fragment.context
        assert node.residuals is not None, node.path
        if len(node.inputs) == 1:
            outputs: tuple[Key, ...] = (Key("scratch", context, number, 0),)
        else:
            positions = range(len(node.inputs))
            outputs = tuple([Key("scratch", context, number, p) for p in positions])
        job = Vjp(
            number,
            context,
            live.number,
            node.path,
            node.function,
            node.residuals,
            tuple([_ordered(addends) for addends in due.addends]),
            outputs,
            not live.retain,
        )
        del live.dues[node]  # Nothing more can come: a long pass stays small.
        if not live.retain:
            node.residuals = None
        live.computing += 1
        state.compute(job, self._vjped, fragment, (live, node))

    def _vjped(
        self,
        failure: Failure | None,
        fragment: Fragment,
        owner: tuple[Pass, Node],
        job: Job,
    ) -> None:
        assert isinstance(job, Vjp), job
        live, node = owner
        if failure is not None:
            failure = replace(failure, call_site=node.call_site)
        if not self._current(fragment, live, failure, job.outputs):
            return
        for position, value in enumerate(node.inputs):
            self._deliver(live, value, node.path, position, job.outputs[position])
        self.settle(fragment, live)

    def _current(
        self,
        fragment: Fragment,
        live: Pass,
        failure: Failure | None,
        outputs: tuple[Key, ...],
    ) -> bool:
        """Whether a job's result still matters; if not, it is dropped."""
        if fragment.live is not live or live.failed:
            self._state.drop(outputs)
            return False
        live.computing -= 1
        if failure is not None:
            route = (self._state.worker,)
            self.fail(fragment, live, replace(failure, route=route))
            return False
        return True

    # -------------------------------------------------------------- recvs and leaves

    def _recv(self, fragment: Fragment, live: Pass, recv: RecvEnd) -> None:
        """All cotangents of a transfer are here: sum each slot, then send them."""
        due = live.dues[recv]
        wide = [slot for slot, addends in enumerate(due.addends) if len(addends) > 1]
        if not wide:
            self._send_cotangents(fragment, live, recv)
            return
        due.remaining = len(wide)  # From here on: sums under way.
        for slot in wide:
            addends = _ordered(due.addends[slot])
            owner = (live, recv, slot)
            output = self._sum(fragment, live, recv.path, addends, None, owner)
            due.addends[slot] = [(SEED, 0, output)]

    def _sum(
        self,
        fragment: Fragment,
        live: Pass,
        path: Path,
        addends: tuple[Key, ...],
        base: Key | None,
        owner: object,
    ) -> Key:
        state = self._state
        number = state.number_job()
        output = Key("scratch", fragment.context, number, 0)
        job = Sum(number, fragment.context, live.number, path, addends, base, output)
        live.computing += 1
        state.compute(job, self._summed, fragment, owner)
        return output

    def _summed(
        self,
        failure: Failure | None,
        fragment: Fragment,
        owner: tuple[Pass, RecvEnd | LeafEnd, int],
        job: Job,
    ) -> None:
        assert isinstance(job, Sum), job
        live, vertex, _ = owner
        if not self._current(fragment, live, failure, (job.output,)):
            return
        if isinstance(vertex, LeafEnd):
            live.staged[vertex.leaf] = job.output
        else:
            due = live.dues[vertex]
            due.remaining -= 1
            if due.remaining == 0:
                self._send_cotangents(fragment, live, vertex)
        self.settle(fragment, live)

    def _send_cotangents(self, fragment: Fragment, live: Pass, recv: RecvEnd) -> None:
        if recv.source in self._state.lost:
            self.fail_lost(fragment, live, recv.source)
            return
        due = live.dues[recv]
        keys = tuple(addends[0][2] for addends in due.addends if addends)
        present = tuple(bool(addends) for addends in due.addends)
        due.addends = []
        message = Cotangent(
            fragment.context, live.number, recv.path, present, live.retain
        )
        live.unanswered += 1
        self._state.send(recv.source, message, keys)
        self._state.drop(keys)

    def _leaf(self, fragment: Fragment, live: Pass, end: LeafEnd) -> None:
        """The gradient of a leaf is complete: stage it."""
        due = live.dues[end]
        versions = zip(end.outputs, due.addends, strict=True)
        read = [value.key.index for value, addends in versions if addends]
        if read:
            live.oldest[end.leaf] = min(read)
        addends = _ordered([addend for version in due.addends for addend in version])
        due.addends = []
        if len(addends) > 1 or (addends and end.gradient is not None):
            self._sum(fragment, live, (), addends, end.gradient, (live, end, 0))
        elif addends:
            live.staged[end.leaf] = addends[0]
        elif end.gradient is not None:
            live.staged[end.leaf] = (
                None  # Reached by zeros alone: what was there stays.
            )
        else:
            self._fill_zero(fragment, live, end)

    def _fill_zero(self, fragment: Fragment, live: Pass, end: LeafEnd) -> None:
        """A leaf that a pass reached has an explicit zero."""
        number = self._state.number_job()
        output = Key("scratch", fragment.context, number, 0)
        job = Fill(number, fragment.context, live.number, (), end.aval, 0, output)
        live.computing += 1
        self._state.compute(job, self._filled, fragment, (live, end))

    def _filled(
        self,
        failure: Failure | None,
        fragment: Fragment,
        owner: tuple[Pass, Root | LeafEnd],
        job: Job,
    ) -> None:
        assert isinstance(job, Fill), job
        live, what = owner
        if not self._current(fragment, live, failure, (job.output,)):
            return
        if isinstance(what, LeafEnd):
            live.staged[what.leaf] = job.output
        else:
            self._seeded(fragment, live, what, job.output)
        self.settle(fragment, live)


def _ordered(addends: list[tuple[tuple[float, ...], int, Key]]) -> tuple[Key, ...]:
    """The addends in the order of the program, whatever order they came in."""
    if len(addends) == 1:
        return (addends[0][2],)
    return tuple([key for _, _, key in sorted(addends)])
