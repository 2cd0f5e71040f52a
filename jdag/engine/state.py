"""State shared by the parts of one engine: contexts, jobs, pending effects.

Invariants: `out` holds the effects of the current event and nothing else; a job is in
`jobs` from its Compute to its Computed, and its inputs are not dropped in between;
callbacks that a settled value releases run from `soon`, in order, so that chains of any
length need no recursion.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
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
    Acknowledge,
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
    """Which contexts of an owner are gone: all up to `counter` except `live`."""

    counter: int
    live: tuple[int, ...]

    def passed(self, counter: int) -> bool:
        """Whether the context of this counter is gone."""
        return counter <= self.counter and counter not in self.live

    def and_(self, other: "Horizon") -> "Horizon":
        """The union of two horizons: what is gone never comes back."""
        live = [
            counter
            for counter in dict.fromkeys((*self.live, *other.live))
            if not (self.passed(counter) or other.passed(counter))
        ]
        return Horizon(max(self.counter, other.counter), tuple(live))


Done = Callable[[Failure | None, Job], None]


class State:
    """The state of one engine, and the common operations on it."""

    # Set by the engine: called for a released fragment with nothing in progress,
    on_quiet: Callable[[Fragment], None]
    handlers: Mapping[type, Callable[[Worker, Any], None]]  # and for each message.

    def __init__(
        self, worker: Worker, workers: Sequence[Worker], incarnation: int
    ) -> None:
        self.names = tuple(workers)
        self.number = self.names.index(worker)
        self.incarnation = incarnation
        self.worker = incarnated(worker, incarnation)
        self.workers = list(self.names)  # The known incarnation of each.
        self.workers[self.number] = self.worker
        self.contexts: dict[ContextId | None, Fragment] = {}  # Never has the key None.
        self.leaves: dict[LeafId, LeafVersions] = {}
        self.assignments: dict[tuple[Path, Worker], None] = {}  # Not acknowledged.
        self.opened = 0  # The counter of the newest context that programs here opened.
        self.horizons: dict[tuple[int, int], Horizon] = {}
        self.lost: dict[Worker, str] = {}  # With the cause of each loss.
        self.jobs: dict[int, tuple[Done, Any, Job]] = {}
        self.after: dict[int, list[Pending]] = {}  # What waits for a job.
        # Frames here with listed calls of which no Listing has been sent.
        self.listing: dict[tuple[ContextId, Path], None] = {}
        self.soon: deque[Callable[[], None]] = deque()
        self.out: list[Effect] = []
        self.number_job = count(1).__next__

    def fragment(self, context: ContextId) -> Fragment | None:
        """The part of a context here, created on first use; None once released.

        That of a context of this worker is created when it is opened.
        """
        fragment = self.contexts.get(context)
        if fragment is None and not self.gone(context):
            owner = self.owner(context)
            if owner == self.worker:
                return None
            fragment = Fragment(context, owner)
            self.contexts[context] = fragment
        return fragment

    def owned(self, context: ContextId) -> OwnedFragment | None:
        """A context of this worker that has not been released; None otherwise."""
        fragment = self.contexts.get(context)
        return fragment if isinstance(fragment, OwnedFragment) else None

    def frame(self, context: ContextId, path: Path) -> FrameRecord | None:
        """The frame of this path here; None once it, or its context, has ended."""
        fragment = self.contexts.get(context)
        return None if fragment is None else fragment.frames.get(path)

    def owner(self, context: ContextId) -> Worker:
        """The worker that opened a context."""
        return incarnated(self.names[context.number], context.incarnation)

    def gone(self, context: ContextId) -> bool:
        """Whether a context was released, or its owner is lost."""
        if self.owner(context) in self.lost:
            return True
        horizon = self.horizons.get((context.number, context.incarnation))
        return horizon is not None and horizon.passed(context.counter)

    def resume(self, waiter: int, result: Any) -> None:
        """Resume a program with what it waited for."""
        self.out.append(Resume(waiter, result))

    def send(
        self,
        to: Worker,
        message: Message,
        values: tuple[Key, ...] = (),
        zeros: tuple[Any, ...] = (),
    ) -> None:
        """Request that a message be sent; messages to lost workers are omitted.

        One to this worker is handled at once, and its values stay.
        """
        if to == self.worker:
            self.handlers[message.__class__](to, message)
        elif to not in self.lost:
            self.out.append(Send(to, message, values, zeros))

    def acknowledge(self, to: Worker, context: ContextId | None, path: Path) -> None:
        """Tell another worker that what it sent under this path has arrived."""
        if to != self.worker:
            self.send(to, Acknowledge(context, (path,)))

    def send_each(self, messages: Mapping[Worker, Message]) -> None:
        """Send these to the other workers; drop values that are only theirs.

        That of this worker is not sent, and its values stay.
        """
        kept: tuple[Key, ...] = ()
        gone: dict[Key, None] = {}
        for worker, message in messages.items():
            keys = landing(message)
            if worker == self.worker:
                kept = keys
            else:
                self.send(worker, message, keys)
                gone.update(dict.fromkeys(keys))
        for key in kept:
            gone.pop(key, None)
        self.drop(gone)

    def ask_all(
        self, own: OwnedFragment, workers: Iterable[Worker], message: Message
    ) -> None:
        """Send to all of these that are not lost, this worker last; await answers."""
        here_last = sorted(workers, key=self.worker.__eq__)
        own.awaited = dict.fromkeys([to for to in here_last if to not in self.lost])
        for worker in tuple(own.awaited):
            self.send(worker, message)

    def drop(self, keys: Iterable[Key]) -> None:
        """Request that values be dropped."""
        keys = tuple(keys)
        if keys:
            self.out.append(Drop(keys))

    def compute(self, job: Job, done: Done, fragment: Any) -> None:
        """Request a job; `done(failure, job)` runs afterwards."""
        self.jobs[job.id] = (done, fragment, job)
        self.out.append(Compute(job))

    def skip(self, fragment: Fragment, node: CallNode, actions: str) -> None:
        """Say that these actions of a call that is listed will not be asked for."""
        if fragment.listed and node.tag is not None and node.tag.listed:
            self.out.append(Skip(fragment.context, node.tag, actions))

    def unlist(self, fragment: Fragment) -> None:
        """Jobs of this context follow no schedule any more: some will not come."""
        if fragment.listed:
            fragment.listed = False
            self.out.append(Skip(fragment.context, None, ""))

    def when_settled(self, values: Sequence[Value], then: Callable[[], None]) -> None:
        """Run `then` once all values have settled; immediately if they have."""
        waiting = [value.waiters for value in values if not value.settled]
        if waiting:
            self._wait(waiting, then)
        else:
            then()

    def when_computed(self, jobs: Sequence[int], then: Callable[[], None]) -> None:
        """Run `then` once all these jobs are done; immediately if there are none."""
        waiting = [self.after.setdefault(number, []) for number in jobs]
        if waiting:
            self._wait(waiting, then)
        else:
            then()

    def _wait(self, waiting: list[list[Pending]], then: Callable[[], None]) -> None:
        pending = Pending(len(waiting), then)
        for pendings in waiting:
            pendings.append(pending)

    def came(self, waiting: Iterable[Pending]) -> None:
        """What these wait for is there: schedule those that wait for nothing else."""
        for pending in waiting:
            pending.missing -= 1
            if pending.missing == 0:
                self.soon.append(pending.then)

    def settle(self, value: Value, failure: Failure | None) -> None:
        """A value is available or has failed: schedule the callbacks waiting for it."""
        assert not value.settled, value.key
        value.settled = True
        value.failure = failure
        waiters = value.waiters
        if waiters:
            value.waiters = []
            self.came(waiters)
        if not value.users:
            self._free(value)

    def release(self, values: Iterable[Value]) -> None:
        """Remove one user of each value; drop values without users."""
        for value in values:
            value.users -= 1
            if value.users <= 0:
                assert value.users == 0, value.key
                if value.settled:
                    self._free(value)

    def _free(self, value: Value) -> None:
        """Drop a value's array, and forget the value if it is in no graph."""
        if type(value) is Version:
            del value.leaf.versions[value.key.index]
            if not value.leaf.versions:
                del self.leaves[value.key.name]
            if value.before is not None:  # It has the array of the previous version.
                self.release((value.before,))
                return
        if value.failure is None:
            self.drop((value.stored,))
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

    def less_pending(self, fragment: Fragment) -> None:
        """A pending call or transfer is done; a release may wait for the last."""
        fragment.pending -= 1
        assert fragment.pending >= 0, fragment.pending
        if fragment.pending == 0 and fragment.release is not None:
            self.soon.append(partial(self.on_quiet, fragment))

    def gone_failure(self, context: ContextId) -> Failure:
        """The failure to return for a context that no longer exists."""
        owner = self.owner(context)
        if owner in self.lost:
            return self.lost_failure(owner)
        return self.failure("ContextError", f"context {context} was released")

    def failure(self, error: str, message: str, path: Path = ()) -> Failure:
        """A failure of jdag itself that originates here."""
        return Failure(error, message, self.worker, path, route=(self.worker,))

    def loss(self, worker: Worker, noticed: str = "") -> str:
        """Describe the loss of a worker, its cause and whether it has rejoined.

        The cause comes last, since it may contain lines of the worker's output.
        """
        said = f"worker {worker!r} is lost"
        now = self.workers[self.names.index(named(worker))]
        if incarnation_of(now) > incarnation_of(worker):
            said += f"; {now!r}, which joined since, has nothing of what it held"
        why = self.lost[worker]
        return f"{said}{noticed}: {why}" if why else f"{said}{noticed}"

    def check_there(self, worker: Worker, said: str) -> None:
        """Raise WorkerLost, prefixed with `said`, if a worker is lost."""
        if worker in self.lost:
            raise WorkerLost(f"{said}: {self.loss(worker)}")

    def lost_failure(self, worker: Worker, route: tuple[Worker, ...] = ()) -> Failure:
        """The failure of whatever waits for a lost worker."""
        text = self.loss(worker, f" (noticed by {self.worker!r})")
        return Failure("WorkerLost", text, worker, route=route)


def first_failure(values: Iterable[Value]) -> Failure | None:
    """The first failure by position, which a computation on these values holds."""
    return next((value.failure for value in values if value.failure), None)
