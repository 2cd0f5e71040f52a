"""Program frames: the calls that programs here issue, and the programs that run here.

Inputs:  Issued, Launched, Collected, Asked, Answered, Attached and Returned from
         programs here; Run, Return, Tell and Attach; Acknowledged and TimedOut from
         the driver.
Outputs: Call, Ship, Run, Return, Tell and Attach messages, Spawn, Resume, Alarm.

Invariants
- Only the issuer decides on transfers. A frame transfers a value to a worker once for
  each value of `tracked`; a leaf is transferred again after a pass that spends the
  graph.
- A call, ship or program is acknowledged once. A program call is sent only when all
  earlier calls of its frame, and all assignments of this worker, are acknowledged. A
  program returns only when its calls are acknowledged and the programs that it called
  have returned. So a worker that receives a ref can use it immediately.
- A program that uses objects here holds their locks from Spawn to Returned.
- A frame stores messages (`news`) from the programs that it called until its program
  takes them.
- If a participating worker is lost, the program returns this failure.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from operator import attrgetter

from msgspec import Struct, field
from msgspec.structs import astuple

from jdag.engine.graph import Fragment, FrameRecord
from jdag.engine.lifetimes import Lifetimes
from jdag.engine.locks import Locks
from jdag.engine.phases import OwnedFragment
from jdag.engine.protocol import (
    LEAF_KINDS,
    Acknowledged,
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
from jdag.engine.state import State, Unhandled
from jdag.errors import ContextError, ProtocolError, WorkerLost


class ProgramFrames(Struct, eq=False):
    _state: State
    _lifetimes: Lifetimes
    # Frames that wait for acknowledgements: (frame, callback, `idle`).
    _waits: list[tuple[FrameRecord, Callable[[], None], bool]] = []
    _locks: Locks = field(default_factory=Locks)

    # -------------------------------------------------------------------- issuing

    def frame(
        self, context: ContextId, path: Path, cause: type | None = None
    ) -> FrameRecord:
        """Return the frame of this path; make the phase transition of `cause`."""
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
        state = self._state
        context, path, worker = event.context, event.path, event.worker
        frame = self.frame(context, path[:-1], Issued)
        if state.lost:
            self._refuse_lost(event)
        if event.discarded:
            self._lifetimes.note(frame, event.discarded)
        inputs, ships = self._transfers(event, frame)
        if event.tag is not None and event.tag.listed:
            frame.listed[worker] = None
            state.listing[context, frame.path] = None
        incoming = []
        for owner, slots in ships.items():
            keys, tracked = zip(*slots, strict=True)
            incoming.append(Incoming(owner, tracked))
            notices = tuple(frame.notices.pop(owner, ()))
            rest = event.name, event.call_site, notices
            ship = Ship(context, path, worker, keys, tracked, *rest)
            self._issue(frame, owner, path, ship, waits=(worker, len(slots)))
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
            event.tag,
        )
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
        is_remote = to != self._state.worker
        if is_remote:
            self._state.expect_handling(to, path, frame, waits)
            frame.workers[to] = None
        self._state.send(to, message, values)
        if values and is_remote:
            self._state.drop(values)

    def _refuse_lost(self, event: Issued) -> None:
        message = f"{event.name} cannot be called on {event.worker!r}"
        self._state.check_reachable(event.worker, message)
        for argument in event.arguments:
            key, worker = argument.key, argument.owner
            if worker in self._state.lost:
                leaf = f"{key.name} is lost, " * (key.kind in LEAF_KINDS)
                raise WorkerLost(f"{message}: {leaf}{self._state.loss(worker)}")

    def _transfers(
        self, event: Issued, frame: FrameRecord
    ) -> tuple[list[Key], dict[Worker, list[tuple[Key, bool]]]]:
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
                    self._lifetimes.note_older(frame, key, event.arguments)
            copy = copies.get((event.worker, tracked))
            if copy is None:
                slots = ships.setdefault(owner, [])
                copy = ReceivedKey(event.context, (event.path, owner), len(slots))
                slots.append((key, tracked))
                copies[event.worker, tracked] = copy
            inputs.append(copy)
        return inputs, ships

    def launched(self, event: Launched) -> None:
        frame = self.frame(event.context, event.path[:-1], Launched)
        worker = event.worker
        self._state.check_reachable(worker, f"no program can run on {worker!r}")
        frame.launched[event.path] = worker
        frame.workers[worker] = None
        call = event.function, event.arguments, event.call_site, event.objects
        run = Run(event.context, event.path, *call)
        self.when_acknowledged(frame, partial(self._state.send, event.worker, run))

    def awaited(self, event: Awaited) -> None:
        frame = self.frame(event.context, ())
        resume = partial(self._state.resume, event.waiter, None)
        self.when_acknowledged(frame, resume)

    def when_acknowledged(
        self, frame: FrameRecord, callback: Callable[[], None], *, idle: bool = False
    ) -> None:
        """Run `callback` once all that the frame issued is acknowledged.

        If `idle`, also wait until the programs that it called have ended.
        """
        busy = frame.unhandled or self._state.assignments
        if busy or (idle and frame.launched):
            self._waits.append((frame, callback, idle))
        else:
            callback()

    def unacknowledged(self, frame: FrameRecord) -> list[str]:
        return [
            f"{'call' if issuer is frame else 'assignment'} {path} on {to!r}"
            for to, sent in self._state.unhandled.items()
            for issuer, path, _ in sent
            if issuer is frame or issuer is None
        ]

    def discard_waits(self, frame: FrameRecord) -> None:
        self._waits = [entry for entry in self._waits if entry[0] is not frame]

    def acknowledged(self, event: Acknowledged) -> None:
        if event.sender in self._state.lost:
            return
        sent = self._state.unhandled.get(event.sender) or deque()
        if event.count > len(sent):
            raise ProtocolError(
                f"{event.sender!r} acknowledged {event.count} messages, but only "
                f"{len(sent)} are unacknowledged"
            )
        for _ in range(event.count):  # As if each had been acknowledged by itself.
            self._state.handled(sent.popleft())
            if self._waits:
                self.resume_waits()

    def resume_waits(self) -> None:
        waits, self._waits = self._waits, []
        for frame, callback, idle in waits:
            self.when_acknowledged(frame, callback, idle=idle)

    # ---------------------------------------------------------------------- hooks

    def attached(self, event: Attached) -> None:
        worker, path = event.worker, event.hook.path
        frame = self.frame(event.context, path[:-1], Attached)
        self._state.check_reachable(worker, f"no hook can be attached on {worker!r}")
        attach = Attach(event.context, event.key, event.hook)
        self._issue(frame, worker, path, attach)

    def attach(self, sender: Worker, message: Attach) -> None:
        fragment, key = self._state.fragment(message.context), message.key
        if fragment is not None:
            hooked = key.name if key.kind in LEAF_KINDS else key
            attached = (*fragment.hooks.get(hooked, ()), message.hook)
            fragment.hooks[hooked] = tuple(sorted(attached, key=attrgetter("path")))

    # ------------------------------------------------------------------- programs

    def run(self, sender: Worker, message: Run) -> None:
        state, context, path = self._state, message.context, message.path
        fragment, why = state.fragment(context), self._locks.refusal(message)
        if fragment is None or why:
            failure = state.failure("ContextError", why, path)
            failure = failure if why else state.released_failure(context)
            state.send(sender, Return(context, path, None, failure, (), ()))
            return
        fragment.frames[path] = FrameRecord(path, sender, workers={state.worker: None})
        spawn = Spawn(*astuple(message))  # Both have the same fields.
        state.out.extend(self._locks.acquire(spawn))

    def returned(self, event: Returned) -> None:
        """Send the Return of an ended program once its called programs have ended."""
        self._state.out.extend(self._locks.release(event.context, event.path))
        fragment = self._state.contexts.get(event.context)
        if fragment is None or event.path not in fragment.frames:
            return  # The program's context was released.
        frame = fragment.frames[event.path]
        callback = partial(self._return, fragment, frame, event)
        self.when_acknowledged(frame, callback, idle=True)

    def _return(self, fragment: Fragment, frame: FrameRecord, event: Returned) -> None:
        if fragment.frames.pop(event.path, None) is None:
            return
        assert frame.issuer is not None, event.path
        # The result may depend on a worker whose loss the issuer has not noticed.
        failure = frame.lost or event.failure
        result = event.result if failure is None else None
        workers = tuple(frame.workers)
        self._lifetimes.note(frame, event.discarded)
        notices = self._lifetimes.returning(frame)
        message = Return(event.context, event.path, result, failure, workers, notices)
        self._state.send(frame.issuer, message)

    def program_ended(self, _: Worker, message: Return) -> None:
        frame = self._state.frame(message.context, message.path[:-1])
        if frame is None:
            return
        for worker in message.workers:
            frame.workers[worker] = None
        if message.failure is not None and message.failure.error == "WorkerLost":
            frame.lost = frame.lost or message.failure
        for notice in message.notices:
            self._lifetimes.note(frame, [(key, notice.worker) for key in notice.keys])
        if frame.launched.pop(message.path, None) is not None:
            self._report(frame, message)
            self.resume_waits()

    def collected(self, event: Collected) -> None:
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
        frame = self.frame(event.context, event.path)
        if frame.collector == event.waiter:
            frame.collector = 0
            self._state.resume(event.waiter, ())

    def asked(self, event: Asked) -> None:
        frame = self.frame(event.context, event.path)
        frame.asker = event.waiter
        asks = Tell(event.context, event.path, event.data, answers=False)
        assert frame.issuer is not None, event.path
        send = partial(self._state.send, frame.issuer, asks)
        self.when_acknowledged(frame, send)

    def answered(self, event: Answered) -> None:
        frame = self.frame(event.context, event.path[:-1])
        if (worker := frame.launched.get(event.path)) is not None:
            tell = Tell(event.context, event.path, event.data, answers=True)
            self.when_acknowledged(frame, partial(self._state.send, worker, tell))

    def tell_arrived(self, sender: Worker, message: Tell) -> None:
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
        unhandled = self._state.unhandled.pop(worker, ())
        for sent in unhandled:
            self._state.handled(sent)
        for fragment in self._state.contexts.values():
            for frame in tuple(fragment.frames.values()):
                self._lost(fragment, frame, worker, unhandled)
        self.resume_waits()

    def _lost(
        self,
        fragment: Fragment,
        frame: FrameRecord,
        worker: Worker,
        unhandled: Iterable[Unhandled],
    ) -> None:
        state = self._state
        failure = state.lost_failure(worker)
        if worker in frame.workers:
            frame.lost = frame.lost or failure
        for issuer, path, waits in unhandled:
            if issuer is frame and waits is not None and waits[0] != state.worker:
                # The ship may not have arrived: fail the slots of the waiting callee.
                failures = (failure,) * waits[1]
                primal = Primal(fragment.context, path, worker, failures)
                state.send(waits[0], primal)
        for path, callee in tuple(frame.launched.items()):
            if callee == worker:
                del frame.launched[path]
                self._report(frame, _failed(fragment, path, failure))

    def abort(self, fragment: Fragment, failure: Failure) -> None:
        """Abort a released context's programs. Waits for them end with `failure`."""
        state = self._state
        state.out.extend(self._locks.forget(fragment.context))
        for frame in fragment.frames.values():
            self.discard_waits(frame)
            issuer = frame.issuer
            if fragment.owner in state.lost and issuer not in (None, state.worker):
                # The issuer waits, and may not have noticed the loss.
                state.send(issuer, _failed(fragment, frame.path, failure))
            ends = [_failed(fragment, path, failure) for path in frame.launched]
            self._report(frame, *ends)
            if frame.asker:
                state.resume(frame.asker, (None, failure))
        fragment.frames.clear()


def _failed(fragment: Fragment, path: Path, failure: Failure) -> Return:
    return Return(fragment.context, path, None, failure, (), ())
