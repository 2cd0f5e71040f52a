"""Program frames: calls issued by programs here, and the programs that they call.

Inputs:  Issued, Launched, Collected, Asked, Answered, Attached and Returned from
         programs here; Run, Return, Tell, Attach and Acknowledge; TimedOut from the
         driver.
Outputs: Call, Ship, Run, Return, Tell and Attach messages, Spawn, Resume, Alarm.

Invariants
- Only the issuer decides on transfers. A frame transfers a value to a worker once for
  each value of `tracked`; a leaf is transferred again after a pass that spends.
- A call, ship or program is acknowledged once. A program call is sent only when all
  earlier calls of its frame (and all assignments from here) are acknowledged, and a
  program returns only when its own are, and when the programs that it called have
  returned. So a worker that receives a ref can use it immediately.
- A program that is handed an object here holds its lock from Spawn to Returned.
- News of programs are kept until their caller says that it has taken them.
- A program that lost a participating worker returns that failure.
"""

from collections.abc import Callable
from functools import partial
from operator import attrgetter

from msgspec import Struct, field
from msgspec.structs import astuple

from jdag.engine.graph import Fragment, FrameRecord
from jdag.engine.lifetimes import Lives
from jdag.engine.locks import Locks
from jdag.engine.phases import OwnedFragment
from jdag.engine.protocol import (
    LEAF_KINDS,
    Acknowledge,
    Alarm,
    Answered,
    Asked,
    Attach,
    Attached,
    Awaited,
    Call,
    Collected,
    ContextId,
    Failure,
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
    Tell,
    TimedOut,
    Worker,
)
from jdag.engine.state import State
from jdag.errors import ContextError, WorkerLost


class ProgramFrames(Struct, eq=False):
    """The program frames of one worker."""

    _state: State
    _lives: Lives
    _held: list[tuple[FrameRecord, Callable[[], None], bool]] = []
    _locks: Locks = field(default_factory=Locks)

    # -------------------------------------------------------------------- issuing

    def frame(
        self, context: ContextId, path: Path, cause: type | None = None
    ) -> FrameRecord:
        """The frame of this path here, if the phase allows what it is to do."""
        fragment = self._state.contexts.get(context)
        frame = None if fragment is None else fragment.frames.get(path)
        if frame is None:
            raise ContextError(
                f"context {context} is not open on {self._state.worker!r}: it was "
                "released, or the program that issues this call has ended"
            )
        if cause is not None and isinstance(fragment, OwnedFragment):
            fragment.advance(cause)
        return frame

    def issued(self, event: Issued) -> None:
        """Turn a call into messages to the callee and to each owner of arguments."""
        state = self._state
        context, path, worker = event.context, event.path, event.worker
        frame = self.frame(context, path[:-1], Issued)
        if state.lost:
            self._refuse_lost(event)
        if event.discarded:
            self._lives.note(frame, event.discarded)
        inputs, ships = self._transfers(event, frame)
        if event.tag is not None and event.tag.listed:
            frame.listed[worker] = None
            state.listing[context, frame.path] = None
        incoming = []
        for owner, slots in ships.items():
            keys, tracked = zip(*slots, strict=True)
            incoming.append(Incoming(owner, tracked))
            of = event.name, event.call_site, tuple(frame.notices.pop(owner, ()))
            ship = Ship(context, path, worker, keys, tracked, *of)
            self._issue(frame, owner, path, ship, waits=(worker, len(slots)))
        edges = tuple([argument.tracked for argument in event.arguments])
        notices = tuple(frame.notices.pop(worker, ()))
        given = context, path, event.function, tuple(inputs), edges, event.outputs
        call = Call(*given, tuple(incoming), event.call_site, notices, event.tag)
        constants = tuple([key for key in inputs if key.kind == "constant"])
        self._issue(frame, worker, path, call, constants)

    def _issue(
        self,
        frame: FrameRecord,
        to: Worker,
        path: Path,
        message: Call | Ship | Attach,
        values: tuple[Key, ...] = (),
        waits: tuple[Worker, int] | None = None,
    ) -> None:
        """Send what a frame issues, which another worker acknowledges."""
        here = to == self._state.worker
        if not here:
            frame.unacknowledged[path, to] = waits
            frame.workers[to] = None
        self._state.send(to, message, values)
        if values and not here:
            self._state.drop(values)

    def _refuse_lost(self, event: Issued) -> None:
        said = f"{event.name} cannot be called on {event.worker!r}"
        self._state.check_there(event.worker, said)
        for argument in event.arguments:
            key, worker = argument.key, argument.owner
            if worker in self._state.lost:
                gone = f"{key.name} is gone, " * (key.kind in LEAF_KINDS)
                raise WorkerLost(f"{said}: {gone}{self._state.loss(worker)}")

    def _transfers(
        self, event: Issued, frame: FrameRecord
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
        frame = self.frame(event.context, event.path[:-1], Launched)
        said = f"no program can run on {event.worker!r}"
        self._state.check_there(event.worker, said)
        frame.launched[event.path] = event.worker
        frame.workers[event.worker] = None
        given, site = event.arguments, event.call_site
        run = Run(event.context, event.path, event.function, given, site, event.objects)
        self.when_acknowledged(frame, partial(self._state.send, event.worker, run))

    def awaited(self, event: Awaited) -> None:
        """The top frame waits until everything that it issued is acknowledged."""
        frame = self.frame(event.context, ())
        resume = partial(self._state.resume, event.waiter, None)
        self.when_acknowledged(frame, resume)

    def when_acknowledged(
        self, frame: FrameRecord, then: Callable[[], None], *, idle: bool = False
    ) -> None:
        """Run `then` once everything that the frame issued is acknowledged.

        With `idle`, once the programs that it called have returned, too.
        """
        busy = frame.unacknowledged or self._state.assignments
        if busy or (idle and frame.launched):
            self._held.append((frame, then, idle))
        else:
            then()

    def unacknowledged(self, frame: FrameRecord) -> list[str]:
        """Describe what `when_acknowledged` waits for."""
        named = [f"call {path} on {to!r}" for path, to in frame.unacknowledged]
        leaves = self._state.assignments
        return [*named, *(f"assignment {path} on {to!r}" for path, to in leaves)]

    def never_mind(self, frame: FrameRecord) -> None:
        """Discard the continuations that a frame holds back."""
        self._held = [entry for entry in self._held if entry[0] is not frame]

    def acknowledged(self, sender: Worker, message: Acknowledge) -> None:
        """Calls, ships or assignments have arrived."""
        for path in message.paths:
            if message.context is None:
                self._state.assignments.pop((path, sender), None)
            elif (frame := self._state.frame(message.context, path[:-1])) is not None:
                frame.unacknowledged.pop((path, sender), None)
        if self._held:
            self.let_go()

    def let_go(self) -> None:
        """Run continuations that no longer wait for an acknowledgement."""
        held, self._held = self._held, []
        for frame, then, idle in held:
            self.when_acknowledged(frame, then, idle=idle)

    # ---------------------------------------------------------------------- hooks

    def attached(self, event: Attached) -> None:
        """A program here attaches a hook to a value on any worker."""
        worker, path = event.worker, event.hook.path
        frame = self.frame(event.context, path[:-1], Attached)
        self._state.check_there(worker, f"nothing can be hooked on {worker!r}")
        attach = Attach(event.context, event.key, event.hook)
        self._issue(frame, worker, path, attach)

    def attach(self, sender: Worker, message: Attach) -> None:
        """Attach a hook to a value here; those of one value stay in program order."""
        fragment, key = self._state.fragment(message.context), message.key
        if fragment is not None:
            place = key.name if key.kind in LEAF_KINDS else key
            attached = (*fragment.hooks.get(place, ()), message.hook)
            fragment.hooks[place] = tuple(sorted(attached, key=attrgetter("path")))
        self._state.acknowledge(sender, message.context, message.hook.path)

    # ------------------------------------------------------------------- programs

    def run(self, sender: Worker, message: Run) -> None:
        """Start a program here, once no other has the objects that it is handed."""
        state, context, path = self._state, message.context, message.path
        fragment, why = state.fragment(context), self._locks.refusal(message)
        if fragment is None or why:
            failure = state.failure("ContextError", why, path)
            failure = failure if why else state.gone_failure(context)
            state.send(sender, Return(context, path, None, failure, (), ()))
            return
        fragment.frames[path] = FrameRecord(path, sender, workers={state.worker: None})
        spawn = Spawn(*astuple(message))  # Both have the same fields.
        state.out.extend(self._locks.acquire(spawn))

    def returned(self, event: Returned) -> None:
        """A program here ended; it returns when all that it called has."""
        self._state.out.extend(self._locks.release(event.context, event.path))
        fragment = self._state.contexts.get(event.context)
        if fragment is None or event.path not in fragment.frames:
            return  # Its context was released.
        frame = fragment.frames[event.path]
        then = partial(self._return, fragment, frame, event)
        self.when_acknowledged(frame, then, idle=True)

    def _return(self, fragment: Fragment, frame: FrameRecord, event: Returned) -> None:
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
        self._state.send(frame.issuer, message)

    def program_ended(self, _: Worker, message: Return) -> None:
        """A program that was called from here returned."""
        frame = self._state.frame(message.context, message.path[:-1])
        if frame is None:
            return
        for worker in message.workers:
            frame.workers[worker] = None
        if message.failure is not None and message.failure.error == "WorkerLost":
            frame.lost = frame.lost or message.failure
        self._lives.note(
            frame, [(key, of.worker) for of in message.notices for key in of.keys]
        )
        if frame.launched.pop(message.path, None) is not None:
            self._report(frame, message)
            self.let_go()

    def collected(self, event: Collected) -> None:
        """A program here waits for news of those that it called."""
        frame = self.frame(event.context, event.path)
        del frame.news[: event.taken - frame.taken]
        frame.taken = event.taken
        frame.collector = event.waiter
        if event.timeout_ns is not None:
            late = TimedOut(event.waiter, event.context, event.path)
            self._state.out.append(Alarm(event.waiter, late, event.timeout_ns))
        self._report(frame)

    def _report(self, frame: FrameRecord, *news: Return | Tell) -> None:
        frame.news.extend(news)
        if frame.collector and frame.news:
            waiter, frame.collector = frame.collector, 0
            self._state.resume(waiter, tuple(frame.news))

    def timed_out(self, event: TimedOut) -> None:
        """No news came in time."""
        frame = self.frame(event.context, event.path)
        if frame.collector == event.waiter:
            frame.collector = 0
            self._state.resume(event.waiter, ())

    def asked(self, event: Asked) -> None:
        """A program here asks its caller, which may use all that it issued before."""
        frame = self.frame(event.context, event.path)
        frame.asker = event.waiter
        asks = Tell(event.context, event.path, event.data, answers=False)
        assert frame.issuer is not None, event.path
        send = partial(self._state.send, frame.issuer, asks)
        self.when_acknowledged(frame, send)

    def answered(self, event: Answered) -> None:
        """A program here answers one that it called."""
        frame = self.frame(event.context, event.path[:-1])
        if (worker := frame.launched.get(event.path)) is not None:
            tell = Tell(event.context, event.path, event.data, answers=True)
            self.when_acknowledged(frame, partial(self._state.send, worker, tell))

    def told(self, sender: Worker, message: Tell) -> None:
        """A program that was called from here asks, or one here is answered."""
        context, path = message.context, message.path
        if not message.answers:
            caller = self._state.frame(context, path[:-1])
            if caller is not None and caller.launched.get(path) == sender:
                self._report(caller, message)
            return
        frame = self.frame(context, path)
        waiter, frame.asker = frame.asker, 0
        if waiter and frame.issuer == sender:
            self._state.resume(waiter, (message.data, None))

    # ----------------------------------------------------------------------- ends

    def lost(self, worker: Worker) -> None:
        """A worker is lost: end every wait for its acknowledgements and programs."""
        for fragment in self._state.contexts.values():
            for frame in tuple(fragment.frames.values()):
                self._lost(fragment, frame, worker)
        for pending in [key for key in self._state.assignments if key[1] == worker]:
            del self._state.assignments[pending]
        self.let_go()

    def _lost(self, fragment: Fragment, frame: FrameRecord, worker: Worker) -> None:
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
        for path, where in tuple(frame.launched.items()):
            if where == worker:
                del frame.launched[path]
                self._report(frame, _failed(fragment, path, failure))

    def abort(self, fragment: Fragment, failure: Failure) -> None:
        """The context is released while its programs wait: resume them."""
        state = self._state
        state.out.extend(self._locks.forget(fragment.context))
        for frame in fragment.frames.values():
            self.never_mind(frame)
            issuer = frame.issuer
            if fragment.owner in state.lost and issuer not in (None, state.worker):
                # The issuer may not know of the loss and would wait.
                state.send(issuer, _failed(fragment, frame.path, failure))
            over = [_failed(fragment, path, failure) for path in frame.launched]
            self._report(frame, *over)
            if frame.asker:
                state.resume(frame.asker, (None, failure))
        fragment.frames.clear()


def _failed(fragment: Fragment, path: Path, failure: Failure) -> Return:
    return Return(fragment.context, path, None, failure, (), ())
