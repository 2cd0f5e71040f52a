"""Recovery: what a lost worker held is made again, from copies and a log, bit by bit.

The main program names things once and for all: workers by their first names, leaves and
contexts by the ids that they were made with. What it tells its engine passes through
here, where these become the names of now, and is kept in a log. To recover is to leave
the contexts that are open, to put leaves back to what they were when the log begins,
and to tell the log again, in its order, in new contexts.

Inputs:  events of the main program (`tell`), answers to it (`wait`).
Outputs: the same events in the names of now; copies of leaves.
Invariants: the log begins at a snapshot, which has copies of all leaves as they were
then, and no later than the oldest open context. A snapshot counts once all its copies
have arrived. An update whose snapshot fails is in no log. Leaves that are dropped stay
until the log begins after that. Nothing is logged that failed because of a loss.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from msgspec.structs import replace

from jdag.api.current_names import CurrentNames, Values
from jdag.api.leaves import Assignments
from jdag.api.log_entries import (
    Entry,
    changed_by,
    context_of,
    is_lost,
    place_of,
    used_by,
)
from jdag.api.reassigning import repeated, restored
from jdag.api.snapshots import Snapshot, Snapshots
from jdag.engine.functions import name_of
from jdag.engine.protocol import (
    Assigned,
    Assignment,
    Attached,
    Collected,
    ContextId,
    Differentiated,
    Discarded,
    Dropped,
    Expired,
    Issued,
    Launched,
    LeafId,
    Left,
    ObjectId,
    Opened,
    Outcome,
    PassResult,
    Path,
    Worker,
)
from jdag.errors import RecoveryError, WorkerLost
from jdag.runtime.failures import exception_of
from jdag.runtime.host import Port

_RUN = "jdag.api.cluster:run_here"
_MAKE, _DROP = "jdag.api.hosted:make", "jdag.api.hosted:drop"
_LOGGED = (Issued, Discarded, Attached, Launched)


class Recovery:
    """The log and the copies of one main program.

    Args:
        cluster: the main program's `Cluster`.
    """

    def __init__(self, cluster: Any) -> None:
        self.count = 0  # Of recoveries.
        self.workers: tuple[str, ...] = cluster.workers
        self.here: str = cluster.here
        self.driver = cluster.driver
        self._cluster = cluster
        self._state = state = cluster.state
        port = cluster._port
        self._port = Port(port.host, port.cause)  # This one translates nothing.
        port.via = state.recovery = self
        self.names = CurrentNames(state)
        self.copies = Snapshots(cluster, self.names)
        self._log: list[Entry] = []
        self._number = 0  # Of the next entry.
        self._began: dict[ContextId, int] = {}  # Of contexts that are open.
        self._there: dict[ContextId, None] = {}  # That the engine has, of these.
        self._asked: dict[int, tuple[Any, Values]] = {}  # By waiter.
        self._base: Snapshot = {}  # Of the begin of the log.
        self._latest: tuple[int, Snapshot] | None = None  # With the entry after it.
        # Changed since; whether the newest values are the caller's own.
        self._dirty: dict[LeafId, bool] = {}
        self._due = 0  # Updates since.
        self._made: dict[LeafId, None] = {}  # Leaves that are on their workers now.
        self._stale: dict[Worker, None] = {}  # Lost, and not made again.
        # Programs that make objects, while they run, and by what they have made.
        self._making: dict[tuple[ContextId, Path], Launched] = {}
        self._hosted: dict[ObjectId, Launched] = {}
        # Programs that a loss has ended, with the refs that they were given.
        self._ended: list[tuple[Path, Any, Any]] = []
        self._runs: dict[ContextId, None] = {}  # Of programs of `cluster.run`.
        self._paused = False

    # ------------------------------------------------------- between program and engine

    def tell(self, event: Any, values: Values = ()) -> None:
        """Tell the engine an event of the program; see `Port.tell`."""
        if type(event) is Dropped and (event := self._dropped(event)) is None:
            return
        self._port.tell(self.names.of(event), self.names.stored(values))
        if not self._paused:
            self._note(event, values)

    def wait(self, waiter: int) -> Any:
        """Wait for an answer, in the names of the program; see `Port.wait`."""
        event, values = self._asked.pop(waiter, (None, ()))
        kind = type(event)
        try:
            found = self._port.wait(waiter)
        finally:
            if kind is Left:
                self._left(event)
        if kind is Differentiated and not is_lost(found.failure):
            expired = found.outcome is Outcome.EXPIRED
            self._add(event, values, news=("expired",) * expired)
        elif kind is Collected:
            found = self.names.answer(found)
            self._collect(event, found)
            return found
        elif kind is Left and event.context in self._runs:
            del self._runs[event.context]
            if not any(map(is_lost, found)):  # Any leaf may have been replaced.
                self.replaced(self._own())
        elif kind is Left and not self._began and self._drops():
            with suppress(WorkerLost):  # Later will do.
                self.copy()
        return self.names.answer(found)

    def lost(self, worker: Worker) -> str | None:
        """The reason why a worker is lost, and not recovered."""
        return self._port.lost(self.names.workers.get(worker, worker))

    def context(self, id: ContextId) -> ContextId:
        """The engines' name of a context."""
        return self.names.contexts.get(id, id)

    def _note(self, event: Any, values: Values) -> None:
        """Log what the engine has taken."""
        kind = type(event)
        if kind is Opened:
            if not self._cluster._open[event.context.id]._frame.serves:
                self._began[event.context] = self._number
                self._there[event.context] = None
                self._add(event)
        elif kind is Launched and event.context not in self._began:
            name = name_of(event.function)
            if name == _MAKE:
                self._making[event.context, event.path] = event
            for id in event.objects if name == _DROP else ():
                self._hosted.pop(id, None)
        elif kind is Launched and name_of(event.function) == _RUN:
            self._runs[event.context] = None  # Its programs have effects of their own.
            self._forget(event.context)
        elif kind in _LOGGED:
            if event.context in self._began:
                self._add(event, values)
        elif kind in (Collected, Differentiated, Left):
            is_run = kind is Left and event.context in self._runs
            if is_run or event.context in self._began or self._making:
                self._asked[event.waiter] = event, values
        elif kind is Assigned:
            outputs = [key for part in event.parts for key in part.outputs]
            self._made.update(dict.fromkeys([key.name for key in outputs]))
            self._dirty.update(changed_by(event))
            replaces = any([key.kind == "newest" for key in outputs])
            self._due += replaces or bool(used_by(event))
            self._add(event, values)

    def _add(self, event: Any, values: Values = (), news: tuple[Any, ...] = ()) -> None:
        self._log.append(Entry(self._number, event, tuple(values), news))
        self._number += 1

    def _collect(self, event: Collected, news: Sequence[Any]) -> None:
        """Log which programs have ended; those that a loss ended are to run again."""
        for one in news if self._making else ():
            made = self._making.pop((event.context, one.path), None)
            if made is not None and one.failure is None:
                self._hosted[one.result.result] = made
        if event.context not in self._began:
            return
        tasks = self._cluster._open[event.context.id]._frame.tasks
        lost = [one.path for one in news if is_lost(one.failure)]
        self._add(event, news=tuple([n.path for n in news if n.path not in lost]))
        for path in lost:
            task = tasks[path]
            if task.is_call:  # What called it is to call it again.
                where = event.context, path
                self._log = [e for e in self._log if place_of(e.event) != where]
            else:
                self._ended.append((path, task, task.held))

    def _left(self, event: Left) -> None:
        """Drop from the log a context of which no update is made."""
        context = event.context
        if self._began.pop(context, None) is None:
            return
        self._there.pop(context, None)
        self._advance()
        events = [entry.event for entry in self._log]
        if any([context in used_by(one) for one in events if type(one) is Assigned]):
            self._add(event)
        else:
            self._forget(context)

    def _forget(self, context: ContextId) -> None:
        """Replay nothing of a context."""
        self._log = [e for e in self._log if context_of(e.event) != context]
        for names in (self._began, self._there, self.names.contexts):
            names.pop(context, None)

    def _drops(self) -> bool:
        return any([type(entry.event) is Dropped for entry in self._log])

    def _dropped(self, event: Dropped) -> Dropped | None:
        """Keep what the log needs; return what may be dropped at once."""
        copies = [leaf for leaf in event.leaves if leaf in self.copies.copied]
        for leaf in copies:
            del self.copies.copied[leaf]
        if len(copies) < len(event.leaves):
            rest = [leaf for leaf in event.leaves if leaf not in copies]
            self._add(Dropped(tuple(rest)))
        return Dropped(tuple(copies)) if copies else None

    # ------------------------------------------------------------------------- copies

    def updated(self) -> None:
        """The last entry of the log is an assignment: copy what is due.

        Raises:
            WorkerLost: the copies have not all arrived; then the update is in no log.
        """
        if self._paused or not self._due or self._due < self.copies.every:
            return
        update = self._log[-1]
        assert type(update.event) is Assigned, update
        try:
            self.copy()
        except WorkerLost:
            self._log = [entry for entry in self._log if entry is not update]
            for key in [key for part in update.event.parts for key in part.outputs]:
                if key.kind == "leaf":  # It is new, and nobody has a ref to it.
                    self._dirty.pop(key.name, None)
                    self._state.leaves.pop(key.name, None)
            raise

    def replaced(self, leaves: Iterable[LeafId]) -> None:
        """These leaves were replaced by what is not replayed: take a snapshot."""
        self._dirty.update(dict.fromkeys(leaves, False))
        self.copy()
        if self._latest is not None:
            _, snapshot = self._latest
            self._add(snapshot)
            self._latest = self._number, snapshot

    def replicate(self, every: int, to: str | None) -> None:
        """Keep copies of all leaves on peers from now on; make the first ones."""
        copies = self.copies
        before = copies.every, copies.to, self._dirty
        copies.every, copies.to = every, to
        self._dirty = dict.fromkeys(self._own(), False)
        try:
            self.copy()
        except WorkerLost:
            copies.every, copies.to, self._dirty = before
            raise

    def _own(self) -> list[LeafId]:
        """All leaves but copies, each once: programs may know it by another name."""
        leaves = [id for id in self._state.leaves if id not in self.copies.copied]
        return [id for id in leaves if self.names.leaf(id) == id]

    def copy(self) -> None:
        """Take a snapshot, and let the log begin there if it may.

        Raises:
            WorkerLost: not all copies have arrived.
        """
        before = self._base if self._latest is None else self._latest[1]
        with self._apart():
            snapshot = self.copies.taken(before, self._dirty)
        self._latest = self._number, snapshot
        self._dirty.clear()
        self._due = 0
        self._advance()

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """What is told meanwhile is of this module, and in no log."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def _advance(self) -> None:
        """Let the log begin at the latest snapshot, if it needs no context from before.

        Those are the contexts that are open, and those of which an update after the
        snapshot used values.
        """
        if self._latest is None:
            return
        number, snapshot = self._latest
        if any([began < number for began in self._began.values()]):
            return
        over = [entry.event for entry in self._log if entry.number < number]
        rest = [entry for entry in self._log if entry.number >= number]
        begun = [event.context for event in over if type(event) is Opened]
        updates = [e.event for e in rest if type(e.event) is Assigned]
        if any([context in begun for one in updates for context in used_by(one)]):
            return
        over += [entry.event for entry in rest if context_of(entry.event) in begun]
        self._log = [e for e in rest if context_of(e.event) not in begun]
        self._base, self._latest = snapshot, None
        for event in over:
            if type(event) is Dropped:
                for leaf in event.leaves:
                    self._made.pop(leaf, None)
                self._port.tell(self.names.of(event))
            elif type(event) is Left:
                self.names.contexts.pop(event.context, None)

    # ----------------------------------------------------------------------- recovering

    @property
    def gone(self) -> list[Worker]:
        """The workers that are lost, and not recovered."""
        return [one for one in self._state.workers if self.lost(one) is not None]

    @property
    def pending(self) -> list[Worker]:
        """These, and those of which not all was made again."""
        return [*self._stale, *self.gone]

    def name_of(self, worker: Worker) -> Worker:
        """The engines' name of a worker."""
        return self.names.workers.get(worker, worker)

    def moved(self, worker: Worker, now: Worker) -> None:
        """What was on a lost worker is to be made again on this one."""
        former = self.names.workers.get(worker, worker)
        for one in self._state.workers:  # Another may have been moved there.
            if self.names.workers.get(one, one) == former:
                self.names.workers[one] = now
                self._stale[one] = None
                for leaf in [leaf for leaf in self._made if leaf.worker == one]:
                    del self._made[leaf]

    def again(self) -> None:
        """Make again all that was lost; repeatable if another worker is lost meanwhile.

        Raises:
            RecoveryError: there is no copy of a leaf, or a context cannot be replayed.
            WorkerLost: a worker is lost.
        """
        with self._apart():
            for context in tuple(self._there):
                self._answered(Left, self.context(context))
                del self._there[context]
            kept = [e.event for e in self._log if type(e.event) is dict]
            self.copies.complete([self._base, *kept], self._stale)
            self._restore(self._base)
            self._host()
            came: dict[ContextId, dict[Path, Any]] = {}
            passes: dict[ContextId, int] = {}
            for entry in self._log:
                self._replay(entry, came, passes)
        self._resume(came, passes)
        self._stale.clear()
        self.count += 1
        if self._latest is not None:
            self._latest = None
            for entry in self._log:
                self._dirty.update(changed_by(entry.event))
        if self._dirty and self.copies.every:  # Else the log has what changed.
            self.copy()

    def _host(self) -> None:
        """Make lost objects anew, by the same factories."""
        for id in [one for one in self._hosted if one.worker in self._stale]:
            made = self._hosted[id]
            frame = self._cluster.caller(id.worker, anew=True)
            asked = made.function, made.arguments, (), id.name, made.call_site
            task = frame.launch(id.worker, *asked)
            frame.join([task])
            self.names.objects[id] = task.collect().data

    def _resume(
        self,
        came: Mapping[ContextId, Mapping[Path, Any]],
        passes: Mapping[ContextId, int],
    ) -> None:
        """Let open contexts go on where their replays have ended."""
        for path, task, held in self._ended:
            task.end, task.given, task.asked, task.held = None, None, False, held
            task.frame.tasks[path] = task
        self._ended.clear()
        for context in self._began:
            opened = self._cluster._open[context.id]
            opened._passes = passes.get(context, 0)
            news = came.get(context, {})
            opened._frame._taken = len(news)
            for path, task in opened._frame.tasks.items():
                if task.end is None and path in news:  # It has ended earlier this time.
                    task.held, task.end = None, self.names.news(news[path])

    def _restore(self, snapshot: Snapshot) -> None:
        assignments: Assignments = self._cluster._assignments
        self._told(*restored(assignments, snapshot, self._made))

    def _assign(self, event: Assigned, values: Values) -> None:
        assignments: Assignments = self._cluster._assignments
        self._told(*repeated(assignments, event, values, self._made))

    def _told(self, path: Path, parts: Sequence[Assignment], values: Values) -> None:
        """Tell an assignment that is in no log yet, or again."""
        self._state.numbers(self._port.worker).assignments += 1
        if parts:
            told = self.names.of(Assigned(path, tuple(parts)))
            self._port.tell(told, self.names.stored(values))
            made = [key.name for part in parts for key in part.outputs]
            self._made.update(dict.fromkeys(made))

    def _replay(
        self,
        entry: Entry,
        came: dict[ContextId, dict[Path, Any]],
        passes: dict[ContextId, int],
    ) -> None:
        """Tell an event of the log again, and wait where the program has waited."""
        event = entry.event
        kind = type(event)
        context = context_of(event)
        if kind is Opened:
            id = self._cluster._next_id()
            self.names.contexts[context] = id
            self._port.tell(Opened(id))
            self._there[context] = None
        elif kind is Assigned:
            self._assign(event, entry.values)
        elif kind is dict:
            self._restore(event)
        elif kind is Left:
            self._answered(Left, self.context(context))
            self._there.pop(context, None)
        elif kind is Differentiated:
            number = passes.get(context, 0) + 1
            passes[context] = self._differentiated(entry, number).number
        elif kind is Collected:
            self._ends(entry, came.setdefault(context, {}))
        elif kind is not Dropped:
            self._port.tell(self.names.of(event), self.names.stored(entry.values))

    def _differentiated(self, entry: Entry, number: int) -> PassResult:
        asked = replace(entry.event, waiter=self._port.waiter(), timeout_ns=None)
        told = self.names.of(asked)
        self._port.tell(told, self.names.stored(entry.values))
        if entry.news:  # It expires again, now at once.
            self._port.tell(Expired(told.context, number))
        result: PassResult = self._port.wait(asked.waiter)
        if result.failure is not None and is_lost(result.failure):
            raise exception_of(result.failure)
        if entry.news and result.outcome is not Outcome.EXPIRED:
            raise RecoveryError(
                f"context {entry.event.context} cannot be replayed: pass {number} took "
                "longer than its timeout_s, and now ends before it can; leave the "
                "context, then recover"
            )
        return result

    def _ends(self, entry: Entry, came: dict[Path, Any]) -> None:
        """Wait until the same programs have ended, perhaps in another order."""
        event = entry.event
        while not all([path in came for path in entry.news]):
            asked = self.context(event.context), event.path, len(came), None
            for one in self._answered(Collected, *asked):
                if is_lost(one.failure):
                    raise exception_of(one.failure)
                came[one.path] = one

    def _answered(self, event: Callable[..., Any], *fields: Any) -> Any:
        waiter = self._port.waiter()
        self._port.tell(event(waiter, *fields))
        return self._port.wait(waiter)
