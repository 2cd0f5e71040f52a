"""Activations: what programs here issue, who has heard of it, the programs they call.

Told by programs here: Issued, Launched, Attached, Returned. Told by others: Run,
Return, Attach, Acknowledge. Asks for Call, Ship, Run, Return and Attach messages, Spawn
and Resume.

Invariants
- Only the issuer decides transfers: a value goes to a worker once per activation and
  tracking, a leaf once more after a pass that spends.
- A call, ship or program is acknowledged once; a program call leaves only when all
  earlier calls of its activation (and all assignments from here) are acknowledged, and
  a program returns only when its own are. So whoever learns of a ref can use it at
  once.
- A program that lost a worker that took part does not return as if it had not.
"""

from functools import partial
from operator import attrgetter
from typing import Any

from jdag.engine.forward import Forwarding
from jdag.engine.graph import Activation, Fragment
from jdag.engine.leaves import Leaves
from jdag.engine.lives import Lives
from jdag.engine.state import State
from jdag.engine.vocabulary import (
    LEAF_KINDS,
    Acknowledge,
    Attach,
    Attached,
    Awaited,
    Call,
    ContextId,
    Failure,
    Hook,
    Incoming,
    Issued,
    Key,
    Launched,
    Path,
    Primal,
    ReceivedKey,
    Resume,
    Return,
    Returned,
    Run,
    Ship,
    Spawn,
    Worker,
)
from jdag.errors import ContextError, WorkerLost


class Activations:
    """The programs of one worker, as its engine sees them."""

    def __init__(
        self, state: State, leaves: Leaves, lives: Lives, forwarding: Forwarding
    ) -> None:
        self._state = state
        self._leaves = leaves
        self._lives = lives
        self._forwarding = forwarding
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
        lives = self._lives
        lives.note(activation, event.discarded)
        inputs, ships = self._transfers(event, activation)
        call = Call(
            event.context,
            event.path,
            event.function,
            tuple(inputs),
            tuple([argument.tracked for argument in event.arguments]),
            event.outputs,
            tuple(
                [
                    Incoming(owner, tuple([tracked for _, tracked in slots]))
                    for owner, slots in ships.items()
                ]
            ),
            event.call_site,
            lives.riding(activation, event.worker),
        )
        for owner, slots in ships.items():
            ship = Ship(
                event.context,
                event.path,
                event.worker,
                tuple([key for key, _ in slots]),
                tuple([tracked for _, tracked in slots]),
                event.name,
                event.call_site,
                lives.riding(activation, owner),
            )
            if owner == state.worker:
                self._forwarding.make_send(fragment, ship)
            else:
                waits = (event.worker, len(slots))
                activation.unacknowledged[event.path, owner] = waits
                state.send(owner, ship)
        if event.worker == state.worker:
            self._forwarding.make_call(fragment, call)
            return
        activation.unacknowledged[event.path, event.worker] = None
        constants = tuple([key for key in inputs if key.kind == "constant"])
        state.send(event.worker, call, constants)
        state.drop(constants)

    def _refuse_lost(self, event: Issued) -> None:
        lost = self._state.lost
        if not lost:
            return
        said = f"{event.name} cannot be called on {event.worker!r}: "
        if event.worker in lost:
            raise WorkerLost(f"{said}{self._state.loss(event.worker)}")
        for argument in event.arguments:
            key, worker = argument.key, argument.owner
            if worker in lost:
                gone = f"{key.name} is gone, " * (key.kind in LEAF_KINDS)
                raise WorkerLost(f"{said}{gone}{self._state.loss(worker)}")

    def _transfers(
        self, event: Issued, activation: Activation
    ) -> tuple[list[Key], dict[Worker, list[tuple[Key, bool]]]]:
        """Each input as the callee will know it, and what each owner has to send."""
        inputs: list[Key] = []
        ships: dict[Worker, list[tuple[Key, bool]]] = {}
        for argument in event.arguments:
            key, owner, tracked = argument.key, argument.owner, argument.tracked
            if owner == event.worker or key.kind == "constant":
                inputs.append(key)
                continue
            copies = activation.moved.get(key)
            if copies is None:
                copies = activation.moved[key] = {}
                if key.kind == "leaf":
                    self._lives.note_older(activation, key, event.arguments)
            what = (event.worker, tracked)
            moved = copies.get(what)
            if moved is None:
                slots = ships.setdefault(owner, [])
                moved = ReceivedKey(event.context, (event.path, owner), len(slots))
                slots.append((key, tracked))
                copies[what] = moved
            inputs.append(moved)
        return inputs, ships

    def launched(self, event: Launched) -> None:
        """Call a program, once all that was issued before it has arrived."""
        fragment, activation = self.activation(event.context, event.path)
        if fragment.ownership is not None:
            fragment.ownership.advance(event.context, Launched)
        if event.worker in self._state.lost:
            why = self._state.loss(event.worker)
            raise WorkerLost(f"no program can run on {event.worker!r}: {why}")
        activation.launched[event.path] = (event.waiter, event.worker)
        self.when_acknowledged(activation, partial(self._launch, fragment, event))

    def awaited(self, event: Awaited) -> None:
        """The top activation waits until others know all that it has issued."""
        _, activation = self.activation(event.context, (0,))
        self.when_acknowledged(activation, partial(self._resume, event.waiter))

    def _resume(self, waiter: int) -> None:
        self._state.out.append(Resume(waiter, None))

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

    def unacknowledged(self, activation: Activation) -> list[str]:
        """Name what `when_acknowledged` waits for."""
        named = [f"call {path} on {to!r}" for path, to in activation.unacknowledged]
        leaves = self._leaves.unacknowledged
        return [*named, *(f"assignment {path} on {to!r}" for path, to in leaves)]

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

    # ---------------------------------------------------------------------- hooks

    def attached(self, event: Attached) -> None:
        """A program here hooks a value, wherever that is."""
        state = self._state
        path = event.hook.path
        fragment, activation = self.activation(event.context, path)
        if fragment.ownership is not None:
            fragment.ownership.advance(event.context, Attached)
        if event.worker in state.lost:
            why = state.loss(event.worker)
            raise WorkerLost(f"nothing can be hooked on {event.worker!r}: {why}")
        if event.worker == state.worker:
            _attach(fragment, event.key, event.hook)
            return
        activation.unacknowledged[path, event.worker] = None
        state.send(event.worker, Attach(event.context, event.key, event.hook))

    def attach(self, sender: Worker, message: Attach) -> None:
        """A program elsewhere hooks a value that is here."""
        fragment = self._state.fragment(message.context)
        if fragment is not None:
            _attach(fragment, message.key, message.hook)
        self._state.send(sender, Acknowledge(message.context, message.hook.path))

    # ------------------------------------------------------------------- programs

    def run(self, sender: Worker, message: Run) -> None:
        """A program is to run here."""
        fragment = self._state.fragment(message.context)
        if fragment is not None:
            self._run(fragment, message, sender)
            return
        failure = self._forwarding.gone(message.context)
        reply = Return(message.context, message.path, None, failure, (), ())
        self._state.send(sender, reply)

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
        self._lives.note(activation, event.discarded)
        notices = self._lives.returning(activation)
        message = Return(event.context, event.path, result, failure, workers, notices)
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
        self._lives.note_notices(activation, message.notices)
        launched = activation.launched.pop(message.path, None)
        if launched is not None:
            self._state.out.append(
                Resume(launched[0], (message.result, message.failure))
            )

    # ----------------------------------------------------------------------- ends

    def lost(self, worker: Worker) -> None:
        """A worker is gone: it acknowledges nothing, its programs do not return."""
        for fragment in self._state.contexts.values():
            for activation in tuple(fragment.activations.values()):
                self._lost(fragment, activation, worker)
        self._leaves.lost(worker)
        self.let_go()

    def _lost(self, fragment: Fragment, activation: Activation, worker: Worker) -> None:
        state = self._state
        failure = state.lost_failure(worker)
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
        state = self._state
        for activation in fragment.activations.values():
            self.never_mind(activation)
            issuer = activation.issuer
            if fragment.owner in state.lost and issuer not in (None, state.worker):
                # The issuer may not have lost the owner, and waits.
                path = activation.path
                reply = Return(fragment.context, path, None, failure, (), ())
                state.send(issuer, reply)
            for waiter, _ in activation.launched.values():
                self._state.out.append(Resume(waiter, (None, failure)))
        fragment.activations.clear()


def _attach(fragment: Fragment, key: Key, hook: Hook) -> None:
    """The hooks of one value are in the order of the program, however they came."""
    place = key.name if key.kind in LEAF_KINDS else key
    attached = (*fragment.hooks.get(place, ()), hook)
    fragment.hooks[place] = tuple(sorted(attached, key=attrgetter("path")))


def takes_part(activation: Activation, worker: Worker) -> bool:
    """Whether a worker has, or may have, a part in what an activation did."""
    return (
        worker in activation.workers
        or any(where == worker for _, where in activation.unacknowledged)
        or any(where == worker for _, where in activation.launched.values())
    )
