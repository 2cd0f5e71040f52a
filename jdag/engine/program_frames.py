"""Program frames: calls issued by programs here, and the programs that they call.

Inputs:  Issued, Launched, Attached and Returned from programs here; Run, Return, Attach
         and Acknowledge from other workers.
Outputs: Call, Ship, Run, Return and Attach messages, Spawn and Resume.

Invariants
- Only the issuer decides on transfers. A frame transfers a value to a worker once for
  each value of `tracked`; a leaf is transferred again after a pass that spends.
- A call, ship or program is acknowledged once. A program call is sent only when all
  earlier calls of its frame (and all assignments from here) are acknowledged, and a
  program returns only when its own are. So a worker that receives a ref can use it
  immediately.
- A program that lost a participating worker returns that failure.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter

from msgspec import Struct
from msgspec.structs import astuple

from jdag.engine.forward import Forwarding
from jdag.engine.graph import Fragment, ProgramFrame
from jdag.engine.lives import Lives
from jdag.engine.phases import OwnedFragment
from jdag.engine.protocol import (
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
    Return,
    Returned,
    Run,
    Ship,
    Spawn,
    Worker,
)
from jdag.engine.state import State
from jdag.errors import ContextError, WorkerLost


class ProgramFrames(Struct, eq=False):
    """The program frames of one worker."""

    _state: State
    _lives: Lives
    _forwarding: Forwarding
    _held: list[tuple[ProgramFrame, Callable[[], None]]] = []

    # -------------------------------------------------------------------- issuing

    def frame(
        self, context: ContextId, path: Path, cause: type | None = None
    ) -> tuple[Fragment, ProgramFrame]:
        """The frame here that issues the call of this path, if the phase allows it."""
        fragment = self._state.contexts.get(context)
        frame = None if fragment is None else fragment.frames.get(path[:-1])
        if fragment is None or frame is None:
            raise ContextError(
                f"context {context} is not open on {self._state.worker!r}: it was "
                "released, or the program that issues this call has ended"
            )
        if cause is not None and isinstance(fragment, OwnedFragment):
            fragment.advance(cause)
        return fragment, frame

    def _issuer(self, context: ContextId, path: Path) -> ProgramFrame | None:
        fragment = self._state.contexts.get(context)
        return None if fragment is None else fragment.frames.get(path[:-1])

    def issued(self, event: Issued) -> None:
        """Turn a call into messages to the callee and to each owner of arguments."""
        state, lives = self._state, self._lives
        context, path, worker = event.context, event.path, event.worker
        fragment, frame = self.frame(context, path, Issued)
        if state.lost:
            self._refuse_lost(event)
        if event.discarded:
            lives.note(frame, event.discarded)
        inputs, ships = self._transfers(event, frame)
        incoming = []
        for owner, slots in ships.items():
            tracked = tuple([tracked for _, tracked in slots])
            incoming.append(Incoming(owner, tracked))
            ship = Ship(
                context,
                path,
                worker,
                tuple([key for key, _ in slots]),
                tracked,
                event.name,
                event.call_site,
                tuple(frame.notices.pop(owner, ())),
            )
            if owner == state.worker:
                self._forwarding.make_send(fragment, ship)
            else:
                frame.unacknowledged[path, owner] = (worker, len(slots))
                frame.workers[owner] = None
                state.send(owner, ship)
        call = Call(
            context,
            path,
            event.function,
            tuple(inputs),
            tuple([argument.tracked for argument in event.arguments]),
            event.outputs,
            tuple(incoming),
            event.call_site,
            tuple(frame.notices.pop(worker, ())),
        )
        if worker == state.worker:
            self._forwarding.make_call(fragment, call)
            return
        frame.unacknowledged[path, worker] = None
        frame.workers[worker] = None
        constants = tuple([key for key in inputs if key.kind == "constant"])
        state.send(worker, call, constants)
        if constants:
            state.drop(constants)

    def _refuse_lost(self, event: Issued) -> None:
        said = f"{event.name} cannot be called on {event.worker!r}"
        self._state.check_there(event.worker, said)
        for argument in event.arguments:
            key, worker = argument.key, argument.owner
            if worker in self._state.lost:
                gone = f"{key.name} is gone, " * (key.kind in LEAF_KINDS)
                raise WorkerLost(f"{said}: {gone}{self._state.loss(worker)}")

    def _transfers(
        self, event: Issued, frame: ProgramFrame
    ) -> tuple[list[Key], dict[Worker, list[tuple[Key, bool]]]]:
        """The key of each input on the callee, and the slots each owner must send."""
        inputs: list[Key] = []
        ships: dict[Worker, list[tuple[Key, bool]]] = {}
        for argument in event.arguments:
            key, owner, tracked = argument.key, argument.owner, argument.tracked
            if owner == event.worker or key.kind == "constant":
                inputs.append(key)
                continue
            copies = frame.moved.get(key)
            if copies is None:
                copies = frame.moved[key] = {}
                if key.kind == "leaf":
                    self._lives.note_older(frame, key, event.arguments)
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
        """Call a program, once everything issued before it has arrived."""
        _, frame = self.frame(event.context, event.path, Launched)
        said = f"no program can run on {event.worker!r}"
        self._state.check_there(event.worker, said)
        frame.launched[event.path] = (event.waiter, event.worker)
        frame.workers[event.worker] = None
        self.when_acknowledged(frame, partial(self._launch, event))

    def awaited(self, event: Awaited) -> None:
        """The top frame waits until everything that it issued is acknowledged."""
        _, frame = self.frame(event.context, (0,))
        resume = partial(self._state.resume, event.waiter, None)
        self.when_acknowledged(frame, resume)

    def _launch(self, event: Launched) -> None:
        context, path, function = event.context, event.path, event.function
        run = Run(context, path, function, event.arguments, event.call_site)
        if event.worker == self._state.worker:
            self.run(self._state.worker, run)
        else:
            self._state.send(event.worker, run)

    def when_acknowledged(self, frame: ProgramFrame, then: Callable[[], None]) -> None:
        """Run `then` once everything issued so far is acknowledged."""
        if frame.unacknowledged or self._state.assignments:
            self._held.append((frame, then))
        else:
            then()

    def unacknowledged(self, frame: ProgramFrame) -> list[str]:
        """Describe what `when_acknowledged` waits for."""
        named = [f"call {path} on {to!r}" for path, to in frame.unacknowledged]
        leaves = self._state.assignments
        return [*named, *(f"assignment {path} on {to!r}" for path, to in leaves)]

    def never_mind(self, frame: ProgramFrame) -> None:
        """Discard the continuations that a frame holds back."""
        self._held = [entry for entry in self._held if entry[0] is not frame]

    def acknowledged(self, sender: Worker, message: Acknowledge) -> None:
        """A call, ship or assignment has arrived."""
        if message.context is None:
            self._state.assignments.pop((message.path, sender), None)
        else:
            frame = self._issuer(message.context, message.path)
            if frame is None:
                return
            frame.unacknowledged.pop((message.path, sender), None)
        if self._held:
            self.let_go()

    def let_go(self) -> None:
        """Run continuations that no longer wait for an acknowledgement."""
        held, self._held = self._held, []
        for frame, then in held:
            self.when_acknowledged(frame, then)

    # ---------------------------------------------------------------------- hooks

    def attached(self, event: Attached) -> None:
        """A program here attaches a hook to a value on any worker."""
        state = self._state
        path = event.hook.path
        fragment, frame = self.frame(event.context, path, Attached)
        state.check_there(event.worker, f"nothing can be hooked on {event.worker!r}")
        if event.worker == state.worker:
            _attach(fragment, event.key, event.hook)
            return
        frame.unacknowledged[path, event.worker] = None
        frame.workers[event.worker] = None
        state.send(event.worker, Attach(event.context, event.key, event.hook))

    def attach(self, sender: Worker, message: Attach) -> None:
        """A program elsewhere attaches a hook to a value here."""
        fragment = self._state.fragment(message.context)
        if fragment is not None:
            _attach(fragment, message.key, message.hook)
        self._state.send(sender, Acknowledge(message.context, message.hook.path))

    # ------------------------------------------------------------------- programs

    def run(self, sender: Worker, message: Run) -> None:
        """Start a program here."""
        state = self._state
        fragment = state.fragment(message.context)
        if fragment is None:
            failure = self._forwarding.gone(message.context)
            reply = Return(message.context, message.path, None, failure, (), ())
            state.send(sender, reply)
            return
        frame = ProgramFrame(message.path, sender, workers={state.worker: None})
        fragment.frames[message.path] = frame
        state.out.append(Spawn(*astuple(message)))  # Both have the same fields.

    def returned(self, event: Returned) -> None:
        """A program here ended; it returns when its calls are acknowledged."""
        fragment = self._state.contexts.get(event.context)
        if fragment is None or event.path not in fragment.frames:
            return  # Its context was released.
        frame = fragment.frames[event.path]
        self.when_acknowledged(frame, partial(self._return, fragment, frame, event))

    def _return(self, fragment: Fragment, frame: ProgramFrame, event: Returned) -> None:
        if fragment.frames.pop(event.path, None) is None:
            return
        assert frame.issuer is not None, event.path
        # Its result may depend on the lost worker, unnoticed by its issuer.
        failure = frame.lost or event.failure
        result = event.result if failure is None else None
        workers = tuple(frame.workers)
        self._lives.note(frame, event.discarded)
        notices = self._lives.returning(frame)
        message = Return(event.context, event.path, result, failure, workers, notices)
        if frame.issuer == self._state.worker:
            self.program_ended(message)
        else:
            self._state.send(frame.issuer, message)

    def program_ended(self, message: Return) -> None:
        """A program that was called from here returned."""
        frame = self._issuer(message.context, message.path)
        if frame is None:
            return
        for worker in message.workers:
            frame.workers[worker] = None
        if message.failure is not None and message.failure.error == "WorkerLost":
            frame.lost = frame.lost or message.failure
        self._lives.note(
            frame, [(key, of.worker) for of in message.notices for key in of.keys]
        )
        launched = frame.launched.pop(message.path, None)
        if launched is not None:
            self._state.resume(launched[0], (message.result, message.failure))

    # ----------------------------------------------------------------------- ends

    def lost(self, worker: Worker) -> None:
        """A worker is lost: end every wait for its acknowledgements and programs."""
        for fragment in self._state.contexts.values():
            for frame in tuple(fragment.frames.values()):
                self._lost(fragment, frame, worker)
        for pending in [key for key in self._state.assignments if key[1] == worker]:
            del self._state.assignments[pending]
        self.let_go()

    def _lost(self, fragment: Fragment, frame: ProgramFrame, worker: Worker) -> None:
        state = self._state
        failure = state.lost_failure(worker)
        if worker in frame.workers:
            frame.lost = frame.lost or failure
        for pending in [key for key in frame.unacknowledged if key[1] == worker]:
            waits = frame.unacknowledged.pop(pending)
            if waits is not None and waits[0] != state.worker:
                # The ship may never have arrived: fail the slots of the waiting callee.
                failures = (failure,) * waits[1]
                primal = Primal(fragment.context, pending[0], worker, failures)
                state.send(waits[0], primal)
        for path, (waiter, where) in tuple(frame.launched.items()):
            if where == worker:
                del frame.launched[path]
                state.resume(waiter, (None, failure))

    def abort(self, fragment: Fragment, failure: Failure) -> None:
        """The context is released while its programs wait: resume them."""
        state = self._state
        for frame in fragment.frames.values():
            self.never_mind(frame)
            issuer = frame.issuer
            if fragment.owner in state.lost and issuer not in (None, state.worker):
                # The issuer may not know of the loss and would wait.
                path = frame.path
                reply = Return(fragment.context, path, None, failure, (), ())
                state.send(issuer, reply)
            for waiter, _ in frame.launched.values():
                state.resume(waiter, (None, failure))
        fragment.frames.clear()


def _attach(fragment: Fragment, key: Key, hook: Hook) -> None:
    """Add a hook; those of one value stay in program order."""
    place = key.name if key.kind in LEAF_KINDS else key
    attached = (*fragment.hooks.get(place, ()), hook)
    fragment.hooks[place] = tuple(sorted(attached, key=attrgetter("path")))
