"""Backward on one worker: count what a pass waits for, then run vjps as they get ready.

Inputs:  Start, Mark, Go, Cotangent, Answer and Fail; results of Vjp, Sum and Fill jobs.
Outputs: those jobs, and Mark, Cotangent, Answer and Fail messages. The sum of a
         vertex's cotangents is made in `jdag.engine.complete`, a leaf's gradient in
         `jdag.engine.gradients`.

Invariants
- No cotangent is delivered on a worker before everything that it will count is counted:
  FAST counts once, when the pass is first seen; SMART as marks come, and Go is sent
  when no mark is under way.
- Each counted edge brings exactly one contribution, perhaps a symbolic zero. A vertex
  is ready when all have come, and its addends are then put in order of (path,
  position), seeds last.
- A vjp's result for an input is a symbolic zero if no output that the input reaches had
  a cotangent (`function.reaches`, by tracked input and output).
- Nothing recurses: what one contribution makes ready waits in `Pass.ready`.
"""

from collections.abc import Callable
from functools import partial
from operator import and_, gt
from typing import Any

from msgspec.structs import replace

from jdag.engine.complete import Completion
from jdag.engine.credit import WHOLE
from jdag.engine.gradients import Gradients
from jdag.engine.graph import (
    Fragment,
    Node,
    RecvEnd,
    Value,
    Vertex,
    describe,
    path_of,
)
from jdag.engine.protocol import (
    Answer,
    Cotangent,
    CotangentKey,
    Fail,
    Failure,
    Fill,
    Go,
    Job,
    Key,
    Mark,
    Marked,
    Mode,
    Root,
    ScratchKey,
    SeedKey,
    Start,
    Vjp,
    Worker,
    landing,
)
from jdag.engine.share import SEED, Due, Pass, count, mark, ordered
from jdag.engine.state import State


class Backward:
    """The backward half of one engine."""

    # What the owner of a pass does when nothing of it goes on anywhere, and when it
    # fails; the engine sets both.
    owner_passive: Callable[[Fragment, Pass], None]
    owner_failed: Callable[[Fragment, Failure], None]

    def __init__(self, state: State) -> None:
        self._state = state
        self._complete = Completion(state, self._current, self.settle)
        self.gradients = Gradients(state, self._complete)

    # ------------------------------------------------------------------- messages

    def start(self, sender: Worker, message: Start) -> None:
        """Roots are here: count, and begin if the message says so."""
        taken = self._take(sender, message, message.mode)
        if taken is None:
            return
        fragment, live = taken
        live.roots = message.roots
        if self.sight(fragment, live) and message.go:
            self.seed(fragment, live)
        self.settle(fragment, live)

    def mark(self, sender: Worker, message: Mark) -> None:
        """SMART: the roots need these slots of sends here, and all behind them."""
        taken = self._take(sender, message, Mode.SMART)
        if taken is None:
            return
        fragment, live = taken
        self._counted(fragment, live, mark(fragment, live, message.transfers))
        self.settle(fragment, live)

    def go(self, sender: Worker, message: Go) -> None:
        """The announced pass begins."""
        taken = self._take(sender, message, Mode.FAST)
        if taken is None:
            return
        fragment, live = taken
        self.seed(fragment, live)
        self.settle(fragment, live)

    def cotangent(self, sender: Worker, message: Cotangent) -> None:
        """The cotangents of a transfer that was sent from here."""
        taken = self._take(sender, message, Mode.FAST)
        if taken is None:
            return
        fragment, live = taken
        late = live.mode is Mode.FAST and not live.sighted
        if late and not self.sight(fragment, live):
            self._state.drop(landing(message))
            return
        counted = live.counted.get(message.path, ())
        if message.path not in live.owed or any(map(gt, message.present, counted)):
            self._state.drop(landing(message))
            self._fail_spent(fragment, live, fragment.sends[message.path])
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
        self.settle(fragment, live)

    def answer(self, sender: Worker, message: Answer) -> None:
        """A worker has nothing of the pass to do, and its credit is back here."""
        known = self._known(message)
        if known is not None:
            fragment, live = known
            assert live.parent is None, message
            live.take(message.credit, message.owed)
            self.settle(fragment, live)

    def fail_arrived(self, sender: Worker, message: Fail) -> None:
        """A worker that this one told of the pass failed: tell the owner."""
        known = self._known(message)
        if known is not None:
            route = (self._state.worker, *message.failure.route)
            self.fail(*known, replace(message.failure, route=route))

    def _known(self, message: Answer | Fail) -> tuple[Fragment, Pass] | None:
        """The pass of a message if it is in progress here."""
        fragment = self._state.contexts.get(message.context)
        live: Pass | None = None if fragment is None else fragment.live
        if fragment is None or live is None or live.number != message.number:
            return None
        return fragment, live

    def _take(
        self,
        sender: Worker,
        message: Start | Mark | Go | Cotangent,
        mode: Mode,
    ) -> tuple[Fragment, Pass] | None:
        """A message's pass, with the credit it brings; None if it ended or failed.

        Where it is the first of its pass here, that is of this mode: a SMART pass is
        first heard of by a Start or a Mark.
        """
        number = message.number
        fragment = self._state.fragment(message.context)
        if fragment is None or number <= fragment.ended:
            self._state.drop(landing(message))
            return None
        if fragment.live is None:
            fragment.live = Pass(number, mode, message.retain, sender)
        live: Pass = fragment.live
        assert live.number == number, (live.number, number)
        if live.failed:  # Perhaps in mid-count: what came has nowhere to go.
            self._state.drop(landing(message))
            return None
        live.take(message.credit, message.owed)
        return fragment, live

    def settle(self, fragment: Fragment, live: Pass) -> None:
        """Work off what is ready, say what is to be said, and let go of the credit."""
        if live.ready:
            self._work(fragment, live)
        if live.failed:
            return
        state = self._state
        is_passive = live.passive
        if live.outbox:
            for outgoing, message in live.parcel(is_passive):
                state.send(outgoing.to, message, outgoing.values, outgoing.zeros)
                if outgoing.values:
                    state.drop(outgoing.values)
        if not is_passive:
            return
        if live.parent is None:
            if live.credit == WHOLE:
                self.owner_passive(fragment, live)
        elif live.credit.units:
            answer = Answer(fragment.context, live.number, *live.hand_back())
            state.send(fragment.owner, answer)

    def fail(self, fragment: Fragment, live: Pass, failure: Failure) -> None:
        """The pass cannot finish: report that once, and stop."""
        if live.failed:
            return
        live.failed = True
        for outgoing in live.outbox:
            self._state.drop(outgoing.values)
        live.outbox = []
        if live.parent is None:
            self.owner_failed(fragment, failure)
            return
        lost = live.parent in self._state.lost
        told = fragment.owner if lost else live.parent
        self._state.send(told, Fail(fragment.context, live.number, failure))

    def fail_lost(self, fragment: Fragment, live: Pass, worker: Worker) -> None:
        """The pass cannot finish: a worker whose part it needs is gone."""
        here = self._state.worker
        lost = self._state.lost_failure(worker)
        self.fail(fragment, live, replace(lost, route=(here, worker)))

    # ------------------------------------------------------------------- counting

    def sight(self, fragment: Fragment, live: Pass) -> bool:
        """Count the dependencies that are known at first sight of a pass."""
        live.sighted = True
        return self._counted(fragment, live, count(fragment, live))

    def _counted(self, fragment: Fragment, live: Pass, spent: Node | None) -> bool:
        """After counting: fail on a spent node, or send marks for what is needed."""
        if spent is not None:
            self._fail_spent(fragment, live, spent)
            return False
        by_source: dict[Worker, list[Marked]] = {}
        for recv, needed in live.untold.items():
            slots = tuple([slot in needed for slot in range(len(recv.outputs))])
            by_source.setdefault(recv.source, []).append(Marked(recv.path, slots))
        live.untold = {}
        for source, transfers in by_source.items():
            if source in self._state.lost:
                self.fail_lost(fragment, live, source)
                return False
            context, number, retain = fragment.context, live.number, live.retain
            live.say(source, partial(Mark, context, number, tuple(transfers), retain))
        return True

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
            key = SeedKey(fragment.context, live.number, root.number)
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
        live.seeded = True

    def _filled(
        self,
        failure: Failure | None,
        fragment: Fragment,
        owner: tuple[Pass, Root],
        job: Job,
    ) -> None:
        assert isinstance(job, Fill), job
        live, root = owner
        if self._current(fragment, live, failure, (job.output,)):
            self._seeded(fragment, live, root, job.output)
            self.settle(fragment, live)

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
                self.gradients.reached(fragment, live, vertex)

    def _node(self, fragment: Fragment, live: Pass, node: Node) -> None:
        due = live.dues[node]
        if fragment.hooks and not due.hooked and self._hooked(fragment, live, node):
            return
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

    def _hooked(self, fragment: Fragment, live: Pass, node: Node) -> bool:
        """Hand what is complete to its hooks, if it has some: the node goes on then."""
        due = live.dues[node]
        due.hooked = True
        attached = [
            (slot, fragment.hooks[value.key])
            for slot, value in enumerate(node.outputs)
            if value.key in fragment.hooks
        ]
        due.remaining = len(attached)
        for slot, hooks in attached:
            then = partial(self._replaced, live, node, slot)
            addends = due.taken(slot)
            aval = hooks[0].aval
            self._complete.total(
                fragment, live, node.path, addends, then, aval=aval, hooks=hooks
            )
        return bool(attached)

    def _replaced(self, live: Pass, node: Node, slot: int, key: Key) -> None:
        if live.dues[node].replace(slot, key):
            live.ready.append(node)

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
            outputs: tuple[Key, ...] = (ScratchKey(context, number, 0),)
        else:
            positions = range(len(node.inputs))
            outputs = tuple([ScratchKey(context, number, p) for p in positions])
        job = Vjp(
            number,
            context,
            live.number,
            node.path,
            node.function,
            node.residuals,
            tuple([ordered(addends) for addends in due.addends]),
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
        came = [bool(addends) for addends in job.cotangents]
        for position, reached in enumerate(node.function.reaches):
            key: Key | None = job.outputs[position]
            if not any(map(and_, reached, came)):
                self._state.drop((job.outputs[position],))
                key = None
            self._deliver(live, node.inputs[position], node.path, position, key)
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

    # --------------------------------------------------------------------- recvs

    def _recv(self, fragment: Fragment, live: Pass, recv: RecvEnd) -> None:
        """All cotangents of a transfer are here: sum each slot, then send them."""
        due = live.dues[recv]
        wide = [slot for slot, addends in enumerate(due.addends) if len(addends) > 1]
        if not wide:
            self._send_cotangents(fragment, live, recv)
            return
        due.remaining = len(wide)  # From here on: sums under way.
        for slot in wide:
            then = partial(self._summed, fragment, live, recv, slot)
            addends = due.taken(slot)
            self._complete.total(fragment, live, recv.path, addends, then)

    def _summed(
        self, fragment: Fragment, live: Pass, recv: RecvEnd, slot: int, key: Key
    ) -> None:
        if live.dues[recv].replace(slot, key):
            self._send_cotangents(fragment, live, recv)

    def _send_cotangents(self, fragment: Fragment, live: Pass, recv: RecvEnd) -> None:
        if recv.source in self._state.lost:
            self.fail_lost(fragment, live, recv.source)
            return
        due = live.dues[recv]
        keys = tuple([addends[0][2] for addends in due.addends if addends])
        present = tuple([bool(addends) for addends in due.addends])
        due.addends = []
        zeros: tuple[Any, ...] = ()
        if len(keys) < len(present):
            slots = zip(recv.avals, recv.tracked, present, strict=True)
            zeros = tuple([aval for aval, on, here in slots if on and not here])
        context, number = fragment.context, live.number
        message = partial(Cotangent, context, number, recv.path, present, live.retain)
        live.say(recv.source, message, keys, zeros)
