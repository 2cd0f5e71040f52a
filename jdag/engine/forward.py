"""Forward: calls, transfers and programs; the graph as it comes to be.

Told by programs here: Issued, Launched, Returned. Told by others: Call, Ship, Primal,
Run, Return, Acknowledge. Asks for Forward jobs, Primal messages, Spawn and Resume.

Invariants
- Only the issuer decides transfers: a value goes to a worker once per activation and
  tracking, a leaf once more after a pass that spends.
- A call, ship or program is acknowledged once; a program call leaves only when all
  earlier calls of its activation (and all assignments from here) are acknowledged, and
  a program returns only when its own are. So whoever learns of a ref can use it at
  once.
- A recv may exist before its call: data makes it empty, the call fills it.
- A call runs when all its inputs have settled; if any failed it does not run, and its
  results hold the first failure by position.
"""

from dataclasses import replace
from functools import partial
from typing import Any

from jdag.engine.graph import Activation, Fragment, Node, RecvEnd, SendEnd, Value
from jdag.engine.leaves import Leaves
from jdag.engine.state import State, first_failure, lost_failure
from jdag.engine.vocabulary import (
    Acknowledge,
    Call,
    ContextId,
    Failure,
    Forward,
    Incoming,
    Issued,
    Job,
    Key,
    Launched,
    Path,
    Primal,
    Resume,
    Return,
    Returned,
    Run,
    Ship,
    Spawn,
    Worker,
)
from jdag.errors import ContextError, WorkerLost


class Forwarding:
    """The forward half of one engine."""

    def __init__(self, state: State, leaves: Leaves, woken: Any) -> None:
        self._state = state
        self._leaves = leaves
        self._woken = (
            woken  # Told of a node whose forward ran while a pass waited for it.
        )
        self._held: list[tuple[Activation, Any]] = []

    # -------------------------------------------------------------------- issuing

    def activation(self, context: ContextId, path: Path) -> tuple[Fragment, Activation]:
        """The activation here that makes the call of this path."""
        fragment = self._state.contexts.get(context)
        activation = None if fragment is None else fragment.activations.get(path[:-1])
        if fragment is None or activation is None:
            raise ContextError(
                f"context {context} is not open on {self._state.worker!r}: it was "
                "released, or the program that issues this call has ended"
            )
        return fragment, activation

    def _issuer(self, context: ContextId, path: Path) -> Activation | None:
        fragment = self._state.contexts.get(context)
        return None if fragment is None else fragment.activations.get(path[:-1])

    def issued(self, event: Issued) -> None:
        """Turn a call into messages: to the callee and to each owner of arguments."""
        state = self._state
        fragment, activation = self.activation(event.context, event.path)
        if fragment.ownership is not None:
            fragment.ownership.advance(event.context, Issued)
        self._refuse_lost(event)
        inputs, ships = self._transfers(event, activation)
        call = Call(
            event.context,
            event.path,
            event.function,
            tuple(inputs),
            tuple(argument.tracked for argument in event.arguments),
            event.outputs,
            tuple(
                Incoming(owner, tuple(tracked for _, tracked in slots))
                for owner, slots in ships.items()
            ),
            event.call_site,
        )
        for owner, slots in ships.items():
            ship = Ship(
                event.context,
                event.path,
                event.worker,
                tuple(key for key, _ in slots),
                tuple(tracked for _, tracked in slots),
                event.name,
                event.call_site,
            )
            if owner == state.worker:
                self._ship(fragment, ship)
            else:
                waits = (event.worker, len(slots))
                activation.unacknowledged[event.path, owner] = waits
                state.send(owner, ship)
        if event.worker == state.worker:
            self._call(fragment, call)
            return
        activation.unacknowledged[event.path, event.worker] = None
        constants = tuple(key for key in inputs if key.kind == "constant")
        state.send(event.worker, call, constants)
        state.drop(constants)

    def _refuse_lost(self, event: Issued) -> None:
        lost = self._state.lost
        if not lost:
            return
        for worker in (event.worker, *(argument.owner for argument in event.arguments)):
            if worker in lost:
                raise WorkerLost(
                    f"{event.name} cannot be called on {event.worker!r}: "
                    f"worker {worker!r} is lost"
                )

    def _transfers(
        self, event: Issued, activation: Activation
    ) -> tuple[list[Key], dict[Worker, list[tuple[Key, bool]]]]:
        """Each input as the callee will know it, and what each owner has to send."""
        inputs: list[Key] = []
        ships: dict[Worker, list[tuple[Key, bool]]] = {}
        for key, owner, tracked in event.arguments:
            if owner == event.worker or key.kind == "constant":
                inputs.append(key)
                continue
            what = (key, event.worker, tracked)
            moved = activation.moved.get(what)
            if moved is None:
                slots = ships.setdefault(owner, [])
                moved = Key("received", event.context, (event.path, owner), len(slots))
                slots.append((key, tracked))
                activation.moved[what] = moved
            inputs.append(moved)
        return inputs, ships

    def move_leaves_again(self, activation: Activation) -> None:
        """A pass spends transfers, but a leaf can be used again: in a new one."""
        activation.moved = {
            what: moved
            for what, moved in activation.moved.items()
            if not (what[0].kind == "leaf" and what[2])
        }

    def launched(self, event: Launched) -> None:
        """Call a program, once all that was issued before it has arrived."""
        fragment, activation = self.activation(event.context, event.path)
        if fragment.ownership is not None:
            fragment.ownership.advance(event.context, Launched)
        if event.worker in self._state.lost:
            raise WorkerLost(f"no program can run on {event.worker!r}: it is lost")
        activation.launched[event.path] = (event.waiter, event.worker)
        self.when_acknowledged(activation, partial(self._launch, fragment, event))

    def _launch(self, fragment: Fragment, event: Launched) -> None:
        run = Run(
            event.context, event.path, event.function, event.arguments, event.call_site
        )
        if event.worker == self._state.worker:
            self._run(fragment, run, self._state.worker)
        else:
            self._state.send(event.worker, run)

    def when_acknowledged(self, activation: Activation, then: Any) -> None:
        """Run `then` when nothing that was issued so far is unacknowledged."""
        if activation.unacknowledged or self._leaves.unacknowledged:
            self._held.append((activation, then))
        else:
            then()

    def never_mind(self, activation: Activation) -> None:
        """What was held back for an activation is not wanted any more."""
        self._held = [entry for entry in self._held if entry[0] is not activation]

    def acknowledged(self, sender: Worker, message: Acknowledge) -> None:
        """A call, ship or assignment has arrived."""
        if message.context is None:
            self._leaves.unacknowledged.pop((message.path, sender), None)
        else:
            activation = self._issuer(message.context, message.path)
            if activation is None:
                return
            activation.unacknowledged.pop((message.path, sender), None)
            activation.workers[sender] = None
        self.let_go()

    def let_go(self) -> None:
        """Run what was held back and need not be any more."""
        held, self._held = self._held, []
        for activation, then in held:
            self.when_acknowledged(activation, then)

    # ------------------------------------------------------------------- programs

    def run(self, sender: Worker, message: Run) -> None:
        """A program is to run here."""
        fragment = self._state.fragment(message.context)
        if fragment is not None:
            self._run(fragment, message, sender)
            return
        failure = self._gone(message.context)
        reply = Return(message.context, message.path, None, failure, ())
        self._state.send(sender, reply)

    def _gone(self, context: ContextId) -> Failure:
        """Why a context is not here any more: its sender may not know, and waits."""
        state = self._state
        owner = state.workers[context.number]
        if owner in state.lost:
            return lost_failure(owner, state.worker)
        return state.failure("ContextError", f"context {context} was released")

    def _run(self, fragment: Fragment, message: Run, issuer: Worker) -> None:
        activation = Activation(message.path, issuer)
        activation.workers[self._state.worker] = None
        fragment.activations[message.path] = activation
        self._state.out.append(
            Spawn(
                message.context,
                message.path,
                message.function,
                message.arguments,
                message.call_site,
            )
        )

    def returned(self, event: Returned) -> None:
        """A program that ran here ended; it returns when its calls are acknowledged."""
        fragment = self._state.contexts.get(event.context)
        if fragment is None or event.path not in fragment.activations:
            return  # Its context was released from under it.
        activation = fragment.activations[event.path]
        self.when_acknowledged(
            activation, partial(self._return, fragment, activation, event)
        )

    def _return(
        self, fragment: Fragment, activation: Activation, event: Returned
    ) -> None:
        if fragment.activations.pop(event.path, None) is None:
            return
        assert activation.issuer is not None, event.path
        # What it returns may need what is lost, and its issuer may not notice the loss.
        failure = activation.lost or event.failure
        result = event.result if failure is None else None
        workers = tuple(activation.workers)
        message = Return(event.context, event.path, result, failure, workers)
        if activation.issuer == self._state.worker:
            self.program_ended(message)
        else:
            self._state.send(activation.issuer, message)

    def program_ended(self, message: Return) -> None:
        """A program that was called from here returned."""
        activation = self._issuer(message.context, message.path)
        if activation is None:
            return
        for worker in message.workers:
            activation.workers[worker] = None
        if message.failure is not None and message.failure.error == "WorkerLost":
            activation.lost = activation.lost or message.failure
        launched = activation.launched.pop(message.path, None)
        if launched is not None:
            self._state.out.append(
                Resume(launched[0], (message.result, message.failure))
            )

    # ---------------------------------------------------------- calls and transfers

    def call(self, sender: Worker, message: Call) -> None:
        """A call from another worker."""
        fragment = self._state.fragment(message.context)
        if fragment is None:
            self._state.drop(key for key in message.inputs if key.kind == "constant")
        else:
            self._call(fragment, message)
        self._state.send(sender, Acknowledge(message.context, message.path))

    def _call(self, fragment: Fragment, message: Call) -> None:
        state = self._state
        for source, tracked in message.incoming:
            recv = self._recv(fragment, message.path, source, len(tracked))
            recv.tracked = tracked
        node = Node(message.path, message.function, message.call_site)
        node.arguments = tuple(self.value(fragment, key) for key in message.inputs)
        recorded = True in message.outputs
        results = []
        for index, recording in enumerate(message.outputs):
            key = Key("output", message.context, message.path, index)
            value = Value(key, node if recording else None, 0)
            fragment.values[key] = value
            results.append(value)
        node.results = tuple(results)
        if recorded:
            self._record(fragment, node, message)
        fragment.pending += 1
        state.when_settled(node.arguments, partial(self._start, fragment, node))

    def _record(self, fragment: Fragment, node: Node, message: Call) -> None:
        """Enter a call into the graph."""
        node.inputs = tuple(
            value
            for value, tracked in zip(node.arguments, message.tracked, strict=True)
            if tracked
        )
        node.outputs = tuple(value for value in node.results if value.producer is node)
        for index, value in enumerate(node.outputs):
            value.index = index
        node.residuals = Key("residuals", message.context, message.path, 0)
        fragment.nodes[message.path] = node

    def value(self, fragment: Fragment, key: Key) -> Value:
        """What an input of a call means here."""
        if key.kind == "leaf":
            return self._leaves.use(fragment, key)
        if key.kind == "received":
            path, source = key.name
            recv = fragment.recvs.get((path, source))
            return (
                self._leaves.missing(key) if recv is None else recv.outputs[key.index]
            )
        if key.kind == "constant":
            value = fragment.values[key] = Value(key, None, 0)
            value.settled = True
            return value
        known = fragment.values.get(key)
        return self._leaves.missing(key) if known is None else known

    def _start(self, fragment: Fragment, node: Node) -> None:
        if fragment.gone:
            return
        failure = first_failure(node.arguments)
        if failure is not None:
            self._settle(fragment, node, failure)
            return
        state = self._state
        job = Forward(
            state.number_job(),
            fragment.context,
            node.path,
            node.function,
            tuple([value.stored for value in node.arguments]),
            tuple([value.key for value in node.results]),
            node.residuals,
        )
        state.compute(job, self._forwarded, fragment, node)

    def _forwarded(
        self, failure: Failure | None, fragment: Fragment, node: Node, job: Job
    ) -> None:
        assert isinstance(job, Forward), job
        if fragment.gone:
            kept = () if job.residuals is None else (job.residuals,)
            self._state.drop((*job.outputs, *kept))
            return
        if failure is not None:
            failure = replace(failure, call_site=node.call_site)
            fragment.failures.append(failure)
        elif node.residuals is None and job.residuals is not None:
            self._state.drop((job.residuals,))  # Spent before it ran.
        self._settle(fragment, node, failure)

    def _settle(self, fragment: Fragment, node: Node, failure: Failure | None) -> None:
        state = self._state
        node.done = True
        node.failure = failure
        for value in node.arguments:
            if value.key.kind == "constant":
                state.drop((value.key,))
                del fragment.values[value.key]
        node.arguments = ()
        for value in node.results:
            state.settle(value, failure)
        if node.waited:
            node.waited = False
            self._woken(fragment, node)
        state.less_pending(fragment)

    def _recv(
        self, fragment: Fragment, path: Path, source: Worker, slots: int
    ) -> RecvEnd:
        """The recv of a transfer: made by whichever comes first, call or data."""
        recv = fragment.recvs.get((path, source))
        if recv is None:
            recv = RecvEnd(fragment.context, path, source, slots)
            fragment.recvs[path, source] = recv
            if source in self._state.lost:
                self.fail_recv(recv, source)
        return recv

    def fail_recv(self, recv: RecvEnd, source: Worker) -> None:
        """What has not come from a lost worker never will."""
        for value in recv.outputs:
            if not value.settled:
                self._state.settle(value, lost_failure(source, self._state.worker))

    def ship(self, sender: Worker, message: Ship) -> None:
        """A value here is wanted elsewhere, says another worker."""
        state = self._state
        fragment = state.fragment(message.context)
        if fragment is not None:
            self._ship(fragment, message)
        else:
            failures = (self._gone(message.context),) * len(message.keys)
            primal = Primal(message.context, message.path, state.worker, failures)
            state.send(message.destination, primal)
        state.send(sender, Acknowledge(message.context, message.path))

    def _ship(self, fragment: Fragment, message: Ship) -> None:
        values = tuple(self.value(fragment, key) for key in message.keys)
        if True in message.tracked:
            inputs = tuple(
                value if tracked else None
                for value, tracked in zip(values, message.tracked, strict=True)
            )
            fragment.sends[message.path] = SendEnd(
                message.path,
                message.destination,
                inputs,
                message.function,
                message.call_site,
            )
        fragment.pending += 1
        self._state.when_settled(
            values, partial(self._shipped, fragment, message, values)
        )

    def _shipped(
        self, fragment: Fragment, message: Ship, values: tuple[Value, ...]
    ) -> None:
        if fragment.gone:
            return
        state = self._state
        failures = tuple(value.failure for value in values)
        state.send(
            message.destination,
            Primal(message.context, message.path, state.worker, failures),
            tuple(value.stored for value in values if value.failure is None),
        )
        state.less_pending(fragment)

    def primal(self, message: Primal, landed: tuple[Key, ...]) -> None:
        """The values of a transfer are here."""
        state = self._state
        fragment = state.fragment(message.context)
        if fragment is None:
            state.drop(landed)
            return
        slots = len(message.failures)
        recv = self._recv(fragment, message.path, message.source, slots)
        for value, failure in zip(recv.outputs, message.failures, strict=True):
            if not value.settled:
                state.settle(value, failure)

    # ----------------------------------------------------------------------- ends

    def lost(self, worker: Worker) -> None:
        """A worker is gone: it sends nothing more, acknowledges nothing more."""
        for fragment in self._state.contexts.values():
            for recv in fragment.recvs.values():
                if recv.source == worker:
                    self.fail_recv(recv, worker)
            for activation in tuple(fragment.activations.values()):
                self._lost(fragment, activation, worker)
        self._leaves.lost(worker)
        self.let_go()

    def _lost(self, fragment: Fragment, activation: Activation, worker: Worker) -> None:
        state = self._state
        failure = lost_failure(worker, state.worker)
        if takes_part(activation, worker):
            activation.lost = activation.lost or failure
        for pending in [key for key in activation.unacknowledged if key[1] == worker]:
            waits = activation.unacknowledged.pop(pending)
            activation.workers[worker] = None
            if waits is not None and waits[0] != state.worker:
                # It may never have heard that it was to send: who waits is told so.
                failures = (failure,) * waits[1]
                primal = Primal(fragment.context, pending[0], worker, failures)
                state.send(waits[0], primal)
        for path, (waiter, where) in tuple(activation.launched.items()):
            if where == worker:
                del activation.launched[path]
                activation.workers[worker] = None
                state.out.append(Resume(waiter, (None, failure)))

    def abort(self, fragment: Fragment, failure: Failure) -> None:
        """The context is released from under its programs: they wait no longer."""
        for activation in fragment.activations.values():
            self.never_mind(activation)
            for waiter, _ in activation.launched.values():
                self._state.out.append(Resume(waiter, (None, failure)))
        fragment.activations.clear()


def takes_part(activation: Activation, worker: Worker) -> bool:
    """Whether a worker has, or may have, a part in what an activation did."""
    return (
        worker in activation.workers
        or any(where == worker for _, where in activation.unacknowledged)
        or any(where == worker for _, where in activation.launched.values())
    )
