"""State shared by the parts of one engine: contexts, jobs, pending effects.

Invariants: `out` has exactly the effects of the current event; a job is in `jobs` from
its Compute to its Computed, and its inputs are not dropped in between; callbacks that
wait for a value are queued in `callbacks` when it settles, so that chains of any length
need no recursion.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from typing import Any, NamedTuple

from jdag.engine.graph import (
    CallNode,
    Fragment,
    FrameRecord,
    LeafVersions,
    Pending,
    RecvEnd,
    Value,
    Version,
)
from jdag.engine.phases import OwnedFragment
from jdag.engine.protocol import (
    Compute,
    ContextId,
    Drop,
    Effect,
    Failure,
    Job,
    Key,
    LeafId,
    Message,
    Path,
    Resume,
    Send,
    Skip,
    Worker,
    incarnated,
    incarnation_of,
    landing,
    named,
)
from jdag.errors import WorkerLost


class Horizon(NamedTuple):
    """The released contexts of an owner: all up to `counter` except `live`."""

    counter: int
    live: tuple[int, ...]

    def passed(self, counter: int) -> bool:
        return counter <= self.counter and counter not in self.live

    def union(self, other: "Horizon") -> "Horizon":
        live = [
            counter
            for counter in dict.fromkeys((*self.live, *other.live))
            if not (self.passed(counter) or other.passed(counter))
        ]
        return Horizon(max(self.counter, other.counter), tuple(live))


Done = Callable[[Failure | None, Job], None]
# A sent message: the frame that issued it (None: an assignment, or the end of a step),
# its path, and for a ship the waiting callee and its number of slots.
Unhandled = tuple[FrameRecord | None, Path, tuple[Worker, int] | None]


class State:
    # Set by the engine. `on_quiet` is called for a released fragment when its calls and
    # transfers are done; `handlers` handle messages by type.
    on_quiet: Callable[[Fragment], None]
    handlers: Mapping[type, Callable[[Worker, Any], None]]

    def __init__(
        self, worker: Worker, workers: Sequence[Worker], incarnation: int
    ) -> None:
        self.names = tuple(workers)
        self.number = self.names.index(worker)
        self.incarnation = incarnation
        self.worker = incarnated(worker, incarnation)
        self.workers = list(self.names)  # The newest incarnation of each worker.
        self.workers[self.number] = self.worker
        self.contexts: dict[ContextId | None, Fragment] = {}  # Never None.
        self.leaves: dict[LeafId, LeafVersions] = {}
        # By receiver, in order, the sent messages of `ACKNOWLEDGED` that are not known
        # to be handled. `assignments` counts those that belong to no frame.
        self.unhandled: dict[Worker, deque[Unhandled]] = {}
        self.assignments = 0
        self.opened = 0  # The counter of the newest context opened here.
        self.horizons: dict[tuple[int, int], Horizon] = {}
        self.lost: dict[Worker, str] = {}  # The cause of each worker's loss.
        self.jobs: dict[int, tuple[Done, Any, Job]] = {}
        self.after: dict[int, list[Pending]] = {}  # Callbacks that wait for a job.
        # Frames here with scheduled calls that no Listing has announced.
        self.listing: dict[tuple[ContextId, Path], None] = {}
        self.callbacks: deque[Pending] = deque()
        self.out: list[Effect] = []
        self.number_job = count(1).__next__

    def fragment(self, context: ContextId) -> Fragment | None:
        """Return the fragment of a context, created at first use; None if released.

        The fragment of a context that this worker owns is created by `Opened`.
        """
        fragment = self.contexts.get(context)
        if fragment is None and not self.is_released(context):
            owner = self.owner(context)
            if owner == self.worker:
                return None
            fragment = Fragment(context, owner)
            self.contexts[context] = fragment
        return fragment

    def owned(self, context: ContextId) -> OwnedFragment | None:
        fragment = self.contexts.get(context)
        return fragment if isinstance(fragment, OwnedFragment) else None

    def frame(self, context: ContextId, path: Path) -> FrameRecord | None:
        fragment = self.contexts.get(context)
        return None if fragment is None else fragment.frames.get(path)

    def owner(self, context: ContextId) -> Worker:
        return incarnated(self.names[context.number], context.incarnation)

    def is_released(self, context: ContextId) -> bool:
        if self.owner(context) in self.lost:
            return True
        horizon = self.horizons.get((context.number, context.incarnation))
        return horizon is not None and horizon.passed(context.counter)

    def resume(self, waiter: int, result: Any) -> None:
        self.out.append(Resume(waiter, result))

    def send(
        self,
        to: Worker,
        message: Message,
        values: tuple[Key, ...] = (),
        zeros: tuple[Any, ...] = (),
    ) -> None:
        """Send a message, unless the receiver is lost.

        A message to this worker is handled immediately, and its values stay where they
        are.
        """
        if to == self.worker:
            self.handlers[message.__class__](to, message)
        elif to not in self.lost:
            self.out.append(Send(to, message, values, zeros))

    def expect_handling(
        self,
        to: Worker,
        path: Path,
        frame: FrameRecord | None = None,
        waits: tuple[Worker, int] | None = None,
    ) -> None:
        """Record that a message of `ACKNOWLEDGED` is about to be sent."""
        if to != self.worker and to not in self.lost:
            self.unhandled.setdefault(to, deque()).append((frame, path, waits))
            if frame is not None:
                frame.unhandled += 1
            else:
                self.assignments += 1

    def handled(self, sent: Unhandled) -> None:
        frame = sent[0]
        if frame is not None:
            frame.unhandled -= 1
        else:
            self.assignments -= 1

    def send_each(self, messages: Mapping[Worker, Message]) -> None:
        """Send all messages except this worker's own, whose values are kept here."""
        sent: dict[Key, None] = {}
        for worker, message in messages.items():
            if worker != self.worker:
                keys = landing(message)
                self.send(worker, message, keys)
                sent.update(dict.fromkeys(keys))
        if (message_here := messages.get(self.worker)) is not None:
            for key in landing(message_here):
                sent.pop(key, None)
        self.drop(sent)

    def ask_all(
        self, fragment: OwnedFragment, workers: Iterable[Worker], message: Message
    ) -> None:
        """Send to all workers that are not lost, this one last, and await answers."""
        receivers = sorted(workers, key=self.worker.__eq__)
        awaited = dict.fromkeys([to for to in receivers if to not in self.lost])
        fragment.awaited = awaited
        for worker in tuple(awaited):
            self.send(worker, message)

    def drop(self, keys: Iterable[Key]) -> None:
        keys = tuple(keys)
        if keys:
            self.out.append(Drop(keys))

    def compute(self, job: Job, done: Done, fragment: Any) -> None:
        self.jobs[job.id] = (done, fragment, job)
        self.out.append(Compute(job))

    def skip(self, fragment: Fragment, node: CallNode, actions: str) -> None:
        if fragment.listed and node.tag is not None and node.tag.listed:
            self.out.append(Skip(fragment.context, node.tag, actions))

    def unlist(self, fragment: Fragment) -> None:
        """Stop applying a schedule to this context: some jobs will not be requested."""
        if fragment.listed:
            fragment.listed = False
            self.out.append(Skip(fragment.context, None, ""))

    def when_settled(
        self, values: Sequence[Value], callback: Callable[..., None], *args: Any
    ) -> None:
        """Run `callback(*args)` once all values have settled, possibly immediately."""
        unsettled = [value for value in values if not value.settled]
        for value in unsettled:
            value.waiters = value.waiters or []
        self._wait([value.waiters for value in unsettled], callback, args)

    def when_computed(self, jobs: Sequence[int], callback: Callable[[], None]) -> None:
        """Run `callback` once all these jobs are done, possibly immediately."""
        self._wait([self.after.setdefault(job, []) for job in jobs], callback, ())

    def _wait(self, waiting: list[list[Pending]], callback: Any, args: Any) -> None:
        if not waiting:
            callback(*args)
            return
        pending = Pending(len(waiting), callback, args)
        for pendings in waiting:
            pendings.append(pending)

    def count_down(self, waiting: Iterable[Pending]) -> None:
        for pending in waiting:
            pending.missing -= 1
            if pending.missing == 0:
                self.callbacks.append(pending)

    def settle(self, value: Value, failure: Failure | None) -> None:
        assert not value.settled, value.key
        value.settled = True
        value.failure = failure
        if value.waiters:
            waiters, value.waiters = value.waiters, ()
            self.count_down(waiters)
        if not value.users:
            self._free(value)

    def release(self, values: Iterable[Value]) -> None:
        for value in values:
            value.users -= 1
            if value.users <= 0:
                assert value.users == 0, value.key
                if value.settled:
                    self._free(value)

    def _free(self, value: Value) -> None:
        if type(value) is Version:
            del value.leaf.versions[value.key.index]
            if not value.leaf.versions:
                del self.leaves[value.key.name]
            if value.before is not None:  # Its array is the previous version's.
                self.release((value.before,))
                return
        if value.failure is None:
            self.out.append(Drop((value.stored,)))
        producer = value.producer
        fragment = self.contexts.get(value.key.context)
        if fragment is None:
            return
        if producer is None:
            fragment.values.pop(value.key, None)
        elif type(producer) is RecvEnd and not (
            True in producer.tracked or any([slot.users for slot in producer.outputs])
        ):
            fragment.recvs.pop((producer.path, producer.source), None)
            for slot in producer.outputs:
                fragment.values.pop(slot.key, None)

    def pending_done(self, fragment: Fragment) -> None:
        fragment.pending -= 1
        assert fragment.pending >= 0, fragment.pending
        if fragment.pending == 0 and fragment.release is not None:
            self.callbacks.append(Pending(0, self.on_quiet, (fragment,)))

    def released_failure(self, context: ContextId) -> Failure:
        owner = self.owner(context)
        if owner in self.lost:
            return self.lost_failure(owner)
        return self.failure("ContextError", f"context {context} was released")

    def failure(self, error: str, message: str, path: Path = ()) -> Failure:
        return Failure(error, message, self.worker, path, route=(self.worker,))

    def loss(self, worker: Worker, noticed: str = "") -> str:
        """Return an error text: the loss of a worker, and whether it has joined again.

        The cause comes last, since it may contain lines of the worker's output.
        """
        text = f"worker {worker!r} is lost"
        newest = self.workers[self.names.index(named(worker))]
        if incarnation_of(newest) > incarnation_of(worker):
            text += f"; {newest!r}, which joined later, does not have its values"
        why = self.lost[worker]
        return f"{text}{noticed}: {why}" if why else f"{text}{noticed}"

    def check_reachable(self, worker: Worker, text: str) -> None:
        if worker in self.lost:
            raise WorkerLost(f"{text}: {self.loss(worker)}")

    def lost_failure(self, worker: Worker, route: tuple[Worker, ...] = ()) -> Failure:
        text = self.loss(worker, f" (noticed by {self.worker!r})")
        return Failure("WorkerLost", text, worker, route=route)


def first_failure(values: Iterable[Value]) -> Failure | None:
    return next((value.failure for value in values if value.failure), None)
