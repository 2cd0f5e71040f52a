"""Program frames: one run of a program in a context, and the calls that it makes.

A program tells its engine what it wants through the `ProgramPort` of the driver that
runs it, and waits there. Its calls are numbered from 1, so that the path of such
numbers from the top frame down is the place of a call in the program; keys, and the
order of every sum, are made from paths.

Invariants: a number is used once; a frame that is over sends nothing to the engine.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from enum import Enum
from typing import Any

import jax
from msgspec.structs import replace

from jdag.collectives import replicas
from jdag.compute.avals import aval_of, frozen, is_deleted
from jdag.compute.placed import placed
from jdag.compute.pytrees import (
    NUMBERS,
    Split,
    flatten,
    is_static,
    paths,
    unflatten,
)
from jdag.compute.refs import Identity, RefData, Reply
from jdag.context.cluster_state import ClusterState
from jdag.context.device_placement import Copies, at_home
from jdag.context.hosted import Hosted, is_live
from jdag.context.refs import Hold, Ref
from jdag.context.tags import tag_of
from jdag.context.tasks import Task, collected
from jdag.engine.functions import call_site, name_of, transferred
from jdag.engine.protocol import (
    Argument,
    Attached,
    Collected,
    ConstantKey,
    ContextId,
    Discarded,
    Failure,
    Hook,
    Issued,
    Key,
    Launched,
    LeafId,
    ObjectId,
    OutputKey,
    Path,
    Return,
    Tag,
    Worker,
    named,
)
from jdag.errors import SAID_MAX, ContextError, JdagError, abridged, kind_of
from jdag.runtime.failures import exception_of, traced
from jdag.runtime.worker_runtime import ProgramPort
from jdag.schedules import Action
from jdag.wire.trees import check_travels

Located = tuple[Key, Worker]


class FramePhase(Enum):
    """The state of a context in its program; values are texts for error messages."""

    NEW = "not entered yet: write `with cluster.context() as ctx:`"
    OPEN = "open"
    LEFT = "over: its values, graph and gradients are gone"


class ProgramFrame:
    """One run of a program: the values it holds and the calls it makes.

    What `Context` has of calls and hooks, it has by this, and in the oracle by
    `jdag.api.oracle.OracleFrame`.
    """

    replicas = replicas
    tag: Tag | None = None  # Of the calls from now on.

    def __init__(
        self,
        state: ClusterState,
        port: ProgramPort,
        id: ContextId,
        prefix: Path,
        program: str,
    ) -> None:
        self.state = state
        self.port = port
        self.id = id
        self.prefix = prefix
        self.program = program
        self.here = named(port.worker)
        self.phase = FramePhase.OPEN if prefix else FramePhase.NEW
        self.calls = 0  # What is numbered: calls, programs and hooks.
        self.noticed = False  # The engine may have notices to send.
        self.copies: Copies = {}  # Of leaves on named devices.
        self._waits: Sequence[object] = ()  # The call, pass or tasks it waits for.
        self.loose: deque[Located] = deque()  # Values whose last ref is gone.
        self._shared: Counter[Key] = Counter()  # Holds of a value beyond the first.
        self._seen: dict[Identity, None] = {}
        self._raised: list[tuple[JdagError, Failure]] = []
        self.objects: dict[ObjectId, Any] = {}  # That it was handed.
        self.serves = False  # It calls objects alone: no values, so a loss is no error.
        self.tasks: dict[Path, Task] = {}  # Running, or not collected.
        self._taken = 0  # News of these.
        # What a schedule lists, with the function; by path, its micro-batch; what was
        # moved to a worker since several of these read it.
        self.acted: dict[Action, str] = {}
        self.batches: dict[Path, int] = {}
        self.apart: dict[tuple[Key, Worker], None] = {}

    def __repr__(self) -> str:
        if self.prefix:
            return f"context {self.id} in {self.program} on {self.port.worker!r}"
        return f"context {self.id}"

    def wait(
        self,
        what: str | Sequence[object],
        event: Callable[..., Any],
        *fields: Any,
        values: Sequence[tuple[Key, Any]] = (),
    ) -> Any:
        """Ask the engine by an event of a waiter and these fields; wait for the answer.

        `what` is what it waits for, for errors.
        """
        waiter = self.port.waiter()
        self._waits = [what] if isinstance(what, str) else what
        try:
            self.port.tell(event(waiter, *fields), values)
            return self.port.wait(waiter)
        finally:
            self._waits = ()

    # ---------------------------------------------------------------- values held

    def read(self, refs: Sequence[Ref]) -> Sequence[Any]:
        """Return for each ref its value, or a `Failure`."""
        self.check("a fetch", refs[0])
        if self.loose or self.noticed:
            self.tell_discarded()
        return self.state.fetched(refs, self.port)

    def discarded(self) -> tuple[Located, ...]:
        """Return values whose last ref went since the last call, in program order."""
        loose, shared = self.loose, self._shared
        found = []
        while loose:
            located = loose.popleft()
            if shared and shared[located[0]]:
                shared[located[0]] -= 1
            else:
                found.append(located)
        self.noticed = self.noticed or bool(found)
        return tuple(sorted(found))

    def left(self, result: Any) -> tuple[Reply, tuple[Located, ...]]:
        """Return a program's reply, and the keys that no program can name any more.

        Refs that the program made are gone by now, except for those that it stored
        elsewhere, as in a closure. These are not counted: their values live on.
        """
        leaves = flatten(result)[0]
        owners = {leaf.key: leaf.owner for leaf in leaves if type(leaf) is RefData}
        gone = dict.fromkeys(self.discarded())
        kept = [
            (key.name, key.index)
            for key, owner in owners.items()
            if self._made(key) and (key, owner) not in gone
        ]
        left = [located for located in gone if located[0] not in owners]
        return Reply(result, tuple(self._seen), tuple(kept)), tuple(left)

    def _made(self, key: Key) -> bool:
        """Whether this frame, or a program that it called, made the value."""
        path: Path = key.name if key.kind == "output" else ()
        return key.kind != "newest" and path[: len(self.prefix)] == self.prefix

    def tell_discarded(self) -> None:
        """Tell the engine, before the program waits, which values may be dropped."""
        if self.loose or self.noticed:
            self.port.tell(Discarded(self.id, self.prefix, self.discarded()))
            self.noticed = False

    def check(self, what: str, ref: Ref | None = None) -> None:
        """Raise unless the context is open and its program is the one that runs.

        `what`, and the ref that it is of, are what errors say was tried.
        """
        state = self.state
        if (
            self.phase is not FramePhase.OPEN
            or self._waits
            or state.is_unusable()
            or state.driver.current is not self.port
        ):
            self._refuse(what if ref is None else f"{what} of {ref!r}")

    def _refuse(self, what: str) -> None:
        self.state.check_open(what)
        _ = self.state.driver.current  # Raises on a thread that runs no program.
        if self._waits:
            waits = ", ".join(map(str, self._waits))
            raise ContextError(
                f"{what} on {self!r}, whose program waits for {waits}; a program "
                "that runs on a worker uses the context that it is handed first"
            )
        if self.prefix and self.phase is FramePhase.LEFT:
            raise ContextError(f"{what} on {self!r}: its program has returned")
        self.state.check_current(what, self.port, self)
        raise ContextError(f"{what} on context {self.id}, which is {self.phase.value}")

    def seen(self, failure: Failure) -> JdagError:
        """Record that the program has seen a failure; return it as an exception."""
        self._seen[failure.worker, failure.path] = None
        exception = exception_of(failure)
        self._raised.append((exception, failure))
        return exception

    def has_seen(self, failure: Failure) -> bool:
        """Whether the program, or one that it called, has seen this failure."""
        return self.serves or (failure.worker, failure.path) in self._seen

    def failure_of(self, error: BaseException) -> Failure | None:
        """Return the failure for which an exception was raised, with notes, or None."""
        for raised, failure in self._raised:
            if raised is error:
                told = "\n".join([failure.traceback, *getattr(error, "__notes__", ())])
                return replace(failure, traceback=abridged(told.strip("\n"), SAID_MAX))
        return None

    def attach(self, ref: Ref, hook: Hook) -> None:
        """Attach a hook to a value, wherever that is."""
        self.port.tell(Attached(self.id, ref.owner, ref.key, hook))

    def issue(
        self, worker: Worker, device: str | None, fn: Callable[..., Any], parts: Split
    ) -> Any:
        """Call a function on a worker; return refs in the structure of its result."""
        site = str(call_site())
        path = (*self.prefix, self.calls + 1)
        here = self.port.worker
        avals: list[Any] = [None] * parts.size
        arguments, sources = avals.copy(), avals.copy()
        descends: LeafId | None = None
        constants = list(parts.constants)
        for index, ref in parts.refs:
            if ref.__class__ is Ref:
                if ref.holder is not self:
                    self.admit(ref)
                descends = descends or ref.descends
                aval = avals[index] = ref.aval
                if aval.device is not None:
                    if ref.owner != worker:  # Its worker brings it, by a call before.
                        return self.issue(
                            worker, device, fn, at_home(self, parts, worker)
                        )
                    avals[index] = aval.on(None)
                    sources[index] = aval.device
                arguments[index] = Argument(ref.key, ref.owner, ref.tracked)
            else:  # A ShapeDtypeStruct.
                constants.append((index, ref))
        for index, value in constants:
            key: Key = ConstantKey(self.id, path, index)
            avals[index] = parts.aval(index, value)
            arguments[index] = Argument(key, here, False)
        tracked = tuple([argument.tracked for argument in arguments])
        looked = self.state.configuration  # It is still the same: see `check`.
        found = tuple(avals)
        made = traced(fn, parts, found, tracked, worker, site, configured=looked)
        if device is not None or any(sources):
            # A move runs at its source.
            there = sources[0] if fn is transferred else device
            made = placed(made, there, sources, [device] * len(made.out_avals))
        tag = self.tag and tag_of(self, worker, device, fn)
        self.calls += 1
        issued = Issued(
            self.id,
            path,
            worker,
            made,
            made.name,
            tuple(arguments),
            made.out_tracked,
            site,
            self.discarded() if self.loose else (),
            tag,
        )
        value_of = self.state.value
        stored = [(arguments[index].key, value_of(value)) for index, value in constants]
        self.port.tell(issued, stored)
        refs = []
        for index, aval in enumerate(made.out_avals):
            key = OutputKey(self.id, path, index)
            hold = Hold(self.loose, key, worker)
            known, tracks = aval.on(device), made.out_tracked[index]
            refs.append(Ref(self, key, worker, known, tracks, descends, hold=hold))
        return unflatten(made.out_tree, refs)

    def admit(self, ref: Ref) -> None:
        """Raise ContextError unless this program may use the ref."""
        holder = ref.holder
        if holder is self:
            return
        if holder is not self.state or ref.leaf is None or ref.leaf.dropped:
            self.state.check_own(ref)
        if ref.leaf is None and ref.key.context != self.id:
            over = ", which is over," * (holder.phase is FramePhase.LEFT)
            raise ContextError(
                f"{ref!r} is of context {ref.key.context}{over} and this "
                f"is context {self.id}: refs do not leave their context; make it "
                "a leaf (cluster.put) or a constant (ref.fetch()) to take it along"
            )

    def start(
        self, worker: Worker, fn: Callable[..., Any], parts: Split, name: str = ""
    ) -> Task:
        """Start a program on a worker; `name` is what tasks and errors call it."""
        site = str(call_site())
        calls = f"{self.program} on {self.port.worker!r} calls {name_of(fn)}"
        if (depth := len(self.prefix)) >= (most := self.state.settings.nesting_max):
            raise JdagError(
                f"{calls} on {worker!r}, at {site}, and {depth} programs wait for each "
                f"other already: allowed is nesting_max = {most}, a setting of "
                "jdag.simulate, jdag.launch and files of clusters and scenarios"
            )
        name = name or name_of(fn)
        given = parts.filled((*parts.refs, *parts.constants))
        packed = self.packed(f"what {name}", worker, given)
        return self.launch(worker, fn, *packed, name, site)

    def packed(self, what: str, worker: Worker, given: Any) -> tuple[Any, list[Any]]:
        """Return what a program is given as data that can travel; refs and handles."""
        leaves, treedef = flatten(given)
        held = [leaf for leaf in leaves if is_live(leaf)]
        for one in held:
            self.admit(one)
        data = [leaf.data if is_live(leaf) else leaf for leaf in leaves]
        arguments = unflatten(treedef, data)
        if worker != self.port.worker:
            check_travels(f"{what} on {worker!r} is given", arguments)
        return arguments, held

    def launch(
        self, worker: Worker, fn: Any, arguments: Any, held: Any, name: str, site: str
    ) -> Task:
        """Start a program with what `packed` gave; `held` stays alive until it ends."""
        self.tell_discarded()
        self.calls += 1
        path = (*self.prefix, self.calls)
        objects = [one.data for one in held if isinstance(one, Hosted)]
        here = tuple(dict.fromkeys([one for one in objects if one.worker == worker]))
        self.port.tell(Launched(self.id, path, worker, fn, arguments, site, here))
        self.tasks[path] = task = Task(self, worker, name, site, held)
        return task

    @property
    def running(self) -> list[Task]:
        """The programs that it started and that have not ended, as far as it knows."""
        return [task for task in self.tasks.values() if task.end is None]

    @property
    def now_ns(self) -> int:
        """The time since the cluster was made."""
        now_ns: int = self.state.driver.now_ns
        return now_ns

    def join(
        self,
        tasks: Iterable[Task],
        due_ns: int | None = None,
        answer: Callable[[Task, Any], None] | None = None,
    ) -> bool:
        """Wait until all these tasks have ended; False if it is not before that time.

        `answer` is called with each task that has ended, or that asks, and with its
        `Return` or `Tell`.
        """
        while running := [task for task in tasks if task.end is None]:
            left_ns = None if due_ns is None else due_ns - self.now_ns
            if left_ns is not None and left_ns <= 0:
                return False
            self.tell_discarded()
            asked = (self.id, self.prefix, self._taken, left_ns)
            news = self.wait(running, Collected, *asked)
            self._taken += len(news)
            self.noticed = True
            for one in news:
                task = self.tasks[one.path]
                if one.__class__ is Return:
                    task.held = None
                    task.end = one
                if answer is not None:
                    answer(task, one)
        return True

    def finish(self) -> None:
        """Wait for all tasks; raise the errors of those whose result was not read."""
        self.join(self.tasks.values())
        unasked = [task for task in self.tasks.values() if not task.asked]
        self.tasks.clear()
        collected(unasked)

    def returned(self, task: Task) -> Any:
        """Return the result of a program, with refs that belong to this frame."""
        end: Return = task.end
        self.tasks.pop(end.path, None)
        if (failure := end.failure) is not None:
            if failure.function and failure.path == end.path:
                failure = replace(failure, function=task.name)
            raise self.seen(failure)
        result, seen, kept = end.result
        self._seen.update(dict.fromkeys(seen))
        holds: dict[Key, Hold] = {}
        for leaf in flatten(result)[0]:
            if type(leaf) is not RefData or leaf.key in holds:
                continue
            key = leaf.key
            if not self._made(key) or (key.name, key.index) in kept:
                continue  # It stays, or a caller of this program holds it.
            if key.kind != "output" or key.name[: len(end.path)] != end.path:
                self._shared[key] += 1  # This program made it, and holds it already.
            holds[key] = Hold(self.loose, key, leaf.owner)
        return self.bound(result, holds)

    def bound(self, tree: Any, holds: Mapping[Key, Hold]) -> Any:
        """Return the pytree with refs of this frame in place of their data."""
        leaves, treedef = flatten(tree)
        return unflatten(treedef, [self._bind(leaf, holds) for leaf in leaves])

    def _bind(self, leaf: Any, holds: Mapping[Key, Hold]) -> Any:
        if type(leaf) is ObjectId:
            held = leaf in self.objects
            return self.objects[leaf] if held else self.state.handle(leaf)
        if type(leaf) is not RefData:
            return leaf
        key, worker, aval, tracked = leaf.key, leaf.owner, leaf.aval, leaf.tracked
        if key.kind != "newest":
            hold = holds.get(key)
            descends = leaf.descends
            return Ref(self, key, worker, aval, tracked, descends, hold=hold)
        record = self.state.record(key.name, aval)
        hold = record.held()
        return Ref(self.state, key, worker, aval, tracked, leaf=record, hold=hold)

    def unbound(self, tree: Any) -> Any:
        """Return the result of a program as data, without holders.

        Raises:
            ContextError: it is, or has in it, what cannot be returned.
            JdagError: an array in it was deleted.
        """
        leaves, treedef = flatten(tree, what=f"what {self.program} returned")
        data = []
        names: Sequence[str] = ()
        for index, leaf in enumerate(leaves):
            if is_live(leaf):
                self.admit(leaf)
                data.append(leaf.data)
                continue
            if any([leaf is one for one in self.objects.values()]):
                raise ContextError(
                    f"{self.program} returned {kind_of(leaf)}, the object that it was "
                    "handed, which stays on its worker; return data of it"
                )
            if not (is_static(leaf) or isinstance(leaf, NUMBERS)):
                names = names or paths(tree)
                self._check_array(leaf, names[index] or "the top")
            data.append(frozen(leaf))  # A numpy array may be changed later.
        return unflatten(treedef, data)

    def _check_array(self, value: Any, where: str) -> None:
        try:
            aval = aval_of(value)
        except JdagError as error:
            raise ContextError(
                f"{self.program} returned {kind_of(value)} (at {where}); programs "
                "return pytrees of refs, arrays, numbers, strings and functions"
            ) from error
        if isinstance(value, jax.core.Tracer):
            raise ContextError(
                f"{self.program} returned a tracer of JAX (at {where}: {aval}), which "
                "has no value outside of the jit, vmap or grad that made it; return "
                "what the function that is traced returns"
            )
        if is_deleted(value):
            raise JdagError(
                f"{self.program} returned {aval} (at {where}), which was deleted or "
                "donated"
            )
