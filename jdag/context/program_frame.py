"""Program frames: a frame is one run of a program in a context, with its calls.

A frame sends events to its engine, and waits for answers, through the driver's
`ProgramPort`. The calls of a frame are numbered from 1. A call is identified by its
path: these numbers from the frame of the outermost program down. Keys of values, and
the order of every sum, are derived from paths.

Invariants: a number is used once; a frame that has ended sends no events.
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
from jdag.compute.pytrees import NUMBERS, Split, flatten, is_static, paths, unflatten
from jdag.compute.refs import Identity, RefData, Reply
from jdag.context.cluster_state import ClusterState
from jdag.context.device_placement import Copies, at_home
from jdag.context.hosted import Hosted, is_ref_or_handle
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
    """The state of a frame's context. The values are texts for error messages."""

    NEW = "not entered yet: write `with cluster.context() as ctx:`"
    OPEN = "open"
    LEFT = "over: its values, graph and gradients have been freed"


class ProgramFrame:
    """One run of a program: the values that it holds and the calls that it makes.

    A `Context` has a `ProgramFrame`, or in the oracle a `jdag.api.oracle.OracleFrame`.
    """

    replicas = replicas
    tag: Tag | None = None  # The tag of the following calls.

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
        self.calls = 0  # The number of calls, started programs and hooks.
        self.noticed = False  # Whether the engine may have notices to send.
        self.copies: Copies = {}  # Copies of leaves on named devices.
        self._waits: Sequence[object] = ()  # What the program waits for.
        self.loose: deque[Located] = deque()  # Values whose last ref was deleted.
        # By value: how many `Hold`s there are beyond the first.
        self._shared: Counter[Key] = Counter()
        self._seen: dict[Identity, None] = {}  # Failures that the program has seen.
        self._raised: list[tuple[JdagError, Failure]] = []
        self.objects: dict[ObjectId, Any] = {}  # Hosted objects in the arguments.
        # Whether this frame only calls hosted objects. It then holds no values, so the
        # loss of a worker is not an error.
        self.serves = False
        self.tasks: dict[Path, Task] = {}  # Running, or not collected.
        self._news_count = 0  # How many messages of tasks this frame has received.
        # Under a schedule: the function that was called for each action; the
        # micro-batch of each call; values that `tags.move_shared` has moved.
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
        """Send `event(waiter, *fields)` to the engine and wait for the answer.

        `what` describes the wait in errors.
        """
        waiter = self.port.waiter()
        self._waits = [what] if isinstance(what, str) else what
        try:
            self.port.tell(event(waiter, *fields), values)
            return self.port.wait(waiter)
        finally:
            self._waits = ()

    def read(self, refs: Sequence[Ref]) -> Sequence[Any]:
        self.check("a fetch", refs[0])
        if self.loose or self.noticed:
            self.tell_discarded()
        return self.state.fetched(refs, self.port)

    def discarded(self) -> tuple[Located, ...]:
        """Return the values whose last ref was deleted since the last call, sorted."""
        loose, shared = self.loose, self._shared
        discarded = []
        while loose:
            located = loose.popleft()
            if shared and shared[located[0]]:
                shared[located[0]] -= 1
            else:
                discarded.append(located)
        self.noticed = self.noticed or bool(discarded)
        return tuple(sorted(discarded))

    def reply(self, result: Any) -> tuple[Reply, tuple[Located, ...]]:
        """Return the program's reply, and values without refs that are not part of it.

        Refs that the program stored elsewhere, such as in a closure, keep their values.
        """
        leaves = flatten(result)[0]
        owners = {leaf.key: leaf.owner for leaf in leaves if type(leaf) is RefData}
        discarded = dict.fromkeys(self.discarded())
        kept = [
            (key.name, key.index)
            for key, owner in owners.items()
            if self._is_made_here(key) and (key, owner) not in discarded
        ]
        unnamed = [located for located in discarded if located[0] not in owners]
        return Reply(result, tuple(self._seen), tuple(kept)), tuple(unnamed)

    def _is_made_here(self, key: Key) -> bool:
        path: Path = key.name if key.kind == "output" else ()
        return key.kind != "newest" and path[: len(self.prefix)] == self.prefix

    def tell_discarded(self) -> None:
        if self.loose or self.noticed:
            self.port.tell(Discarded(self.id, self.prefix, self.discarded()))
            self.noticed = False

    def check(self, what: str, ref: Ref | None = None) -> None:
        """Raise unless the context is open and the running program is this frame's."""
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
                "that runs on a worker must use its own context, its first argument"
            )
        if self.prefix and self.phase is FramePhase.LEFT:
            raise ContextError(f"{what} on {self!r}: its program has returned")
        self.state.check_current(what, self.port, self)
        raise ContextError(f"{what} on context {self.id}, which is {self.phase.value}")

    def seen(self, failure: Failure) -> JdagError:
        self._seen[failure.worker, failure.path] = None
        exception = exception_of(failure)
        self._raised.append((exception, failure))
        return exception

    def has_seen(self, failure: Failure) -> bool:
        return self.serves or (failure.worker, failure.path) in self._seen

    def failure_of(self, error: BaseException) -> Failure | None:
        """Return the failure from which `seen` made this exception, with its notes."""
        for raised, failure in self._raised:
            if raised is error:
                text = "\n".join([failure.traceback, *getattr(error, "__notes__", ())])
                return replace(failure, traceback=abridged(text.strip("\n"), SAID_MAX))
        return None

    def attach(self, ref: Ref, hook: Hook) -> None:
        self.port.tell(Attached(self.id, ref.owner, ref.key, hook))

    def issue(
        self, worker: Worker, device: str | None, fn: Callable[..., Any], parts: Split
    ) -> Any:
        site = str(call_site())
        path = (*self.prefix, self.calls + 1)
        here = self.port.worker
        avals: list[Any] = [None] * (len(parts.refs) + len(parts.constants))
        arguments, sources = avals.copy(), avals.copy()
        descends: LeafId | None = None
        constants = list(parts.constants)
        config = self.state.configuration  # Unchanged: see `check`.
        for index, ref in parts.refs:
            if ref.__class__ is Ref:
                holder, leaf = ref.holder, ref.leaf
                if holder is not self and (
                    holder is not self.state or leaf is None or leaf.dropped
                ):
                    self.admit(ref)
                source, owner = ref.located
                descends = descends or ref.descends
                aval = avals[index] = ref.aval
                if aval.device is not None:
                    if owner != worker:  # First copy it to the default device.
                        return self.issue(
                            worker, device, fn, at_home(self, parts, worker)
                        )
                    avals[index] = aval.on(None)
                    sources[index] = aval.device
                arguments[index] = Argument(source, owner, ref.tracked)
            else:  # A ShapeDtypeStruct.
                constants.append((index, ref))
        for index, value in constants:
            key: Key = ConstantKey(self.id, path, index)
            avals[index] = parts.aval(index, value, config)
            arguments[index] = Argument(key, here, False)
        tracked = tuple([argument.tracked for argument in arguments])
        pair = traced(fn, parts, tuple(avals), tracked, worker, site, configured=config)
        if device is not None or any(sources):
            # A move runs on the device of its source.
            where = sources[0] if fn is transferred else device
            pair = placed(pair, where, sources, [device] * len(pair.out_avals))
        tag = self.tag and tag_of(self, worker, device, fn)
        self.calls += 1
        issued = Issued(
            self.id,
            path,
            worker,
            pair,
            pair.name,
            tuple(arguments),
            pair.out_tracked,
            site,
            self.discarded() if self.loose else (),
            tag,
        )
        value_of = self.state.value
        stored = [(arguments[index].key, value_of(value)) for index, value in constants]
        self.port.tell(issued, stored)
        refs = []
        for index, aval in enumerate(pair.out_avals):
            key = OutputKey(self.id, path, index)
            hold = Hold(self.loose, key, worker)
            placed_aval = aval if device is None else aval.on(device)
            fields = (placed_aval, pair.out_tracked[index], descends)
            refs.append(Ref(self, key, worker, *fields, hold=hold))
        return pair.out_tree.unflatten(refs)

    def admit(self, ref: Ref) -> None:
        holder = ref.holder
        if holder is self:
            return
        if holder is not self.state or ref.leaf is None or ref.leaf.dropped:
            self.state.check_own(ref)
        if ref.leaf is None and ref.key.context != self.id:
            over = ", which is over," * (holder.phase is FramePhase.LEFT)
            raise ContextError(
                f"{ref!r} is of context {ref.key.context}{over} and this "
                f"is context {self.id}: refs do not leave their context; to use the "
                "value elsewhere make a leaf (cluster.keep) or fetch it (ref.fetch())"
            )

    def start(
        self, worker: Worker, fn: Callable[..., Any], parts: Split, name: str = ""
    ) -> Task:
        site = str(call_site())
        if (depth := len(self.prefix)) >= (limit := self.state.settings.nesting_max):
            raise JdagError(
                f"{self.program} on {self.port.worker!r} calls {name_of(fn)} on "
                f"{worker!r}, at {site}, but {depth} nested programs "
                f"already wait for each other: expected nesting_max = {limit}, a "
                "setting of jdag.simulate, jdag.launch, and files of clusters and "
                "scenarios"
            )
        name = name or name_of(fn)
        arguments = parts.filled((*parts.refs, *parts.constants))
        packed = self.packed(f"what {name}", worker, arguments)
        return self.launch(worker, fn, *packed, name, site)

    def packed(self, what: str, worker: Worker, tree: Any) -> tuple[Any, list[Any]]:
        leaves, treedef = flatten(tree)
        live = [leaf for leaf in leaves if is_ref_or_handle(leaf)]
        for leaf in live:
            self.admit(leaf)
        data = [leaf.data if is_ref_or_handle(leaf) else leaf for leaf in leaves]
        arguments = unflatten(treedef, data)
        if worker != self.port.worker:
            check_travels(f"{what} on {worker!r} is given", arguments)
        return arguments, live

    def launch(
        self, worker: Worker, fn: Any, arguments: Any, live: Any, name: str, site: str
    ) -> Task:
        """Start a program. `packed` has returned `arguments` and `live`.

        The task keeps the refs and handles in `live` until the program has ended.
        """
        self.tell_discarded()
        self.calls += 1
        path = (*self.prefix, self.calls)
        objects = [leaf.data for leaf in live if isinstance(leaf, Hosted)]
        locked = tuple(dict.fromkeys([id for id in objects if id.worker == worker]))
        self.port.tell(Launched(self.id, path, worker, fn, arguments, site, locked))
        self.tasks[path] = task = Task(self, worker, name, site, live)
        return task

    @property
    def running(self) -> list[Task]:
        return [task for task in self.tasks.values() if task.end is None]

    def join(
        self,
        tasks: Iterable[Task],
        due_ns: int | None = None,
        answer: Callable[[Task, Any], None] | None = None,
    ) -> bool:
        """Return True once all these tasks have ended, or False at `due_ns`.

        `answer(task, news)` is called with each `Return` and `Tell` of a task.
        """
        while running := [task for task in tasks if task.end is None]:
            now_ns = self.state.driver.now_ns
            remaining_ns = None if due_ns is None else due_ns - now_ns
            if remaining_ns is not None and remaining_ns <= 0:
                return False
            self.tell_discarded()
            fields = (self.id, self.prefix, self._news_count, remaining_ns)
            messages = self.wait(running, Collected, *fields)
            self._news_count += len(messages)
            self.noticed = True
            for message in messages:
                task = self.tasks[message.path]
                if message.__class__ is Return:
                    task.held = None
                    task.end = message
                if answer is not None:
                    answer(task, message)
        return True

    def finish(self) -> None:
        """Wait for all tasks. Raise errors of tasks whose result was not requested."""
        self.join(self.tasks.values())
        tasks = [task for task in self.tasks.values() if not task.was_requested]
        self.tasks.clear()
        collected(tasks)

    def returned(self, task: Task) -> Any:
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
            if not self._is_made_here(key) or (key.name, key.index) in kept:
                continue  # A caller of this program or a stored ref holds the value.
            if key.kind != "output" or key.name[: len(end.path)] != end.path:
                self._shared[key] += 1  # This frame made it, and holds it already.
            holds[key] = Hold(self.loose, key, leaf.owner)
        return self.bound(result, holds)

    def bound(self, tree: Any, holds: Mapping[Key, Hold]) -> Any:
        """Convert received data: return refs of this frame, handles and objects."""
        leaves, treedef = flatten(tree)
        return unflatten(treedef, [self._bind(leaf, holds) for leaf in leaves])

    def _bind(self, leaf: Any, holds: Mapping[Key, Hold]) -> Any:
        if type(leaf) is ObjectId:
            is_argument = leaf in self.objects
            return self.objects[leaf] if is_argument else self.state.handle(leaf)
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
        """Convert a program's result to data that can be sent. Inverse of `bound`."""
        leaves, treedef = flatten(tree, what=f"what {self.program} returned")
        data = []
        names: Sequence[str] = ()
        for index, leaf in enumerate(leaves):
            if is_ref_or_handle(leaf):
                self.admit(leaf)
                data.append(leaf.data)
                continue
            if any([leaf is value for value in self.objects.values()]):
                raise ContextError(
                    f"{self.program} returned {kind_of(leaf)}, the hosted object that "
                    "it received, which cannot be sent; return data of the object"
                )
            if not (is_static(leaf) or isinstance(leaf, NUMBERS)):
                names = names or paths(tree)
                self._check_array(leaf, names[index] or "the top")
            data.append(frozen(leaf))  # A numpy array is mutable.
        return unflatten(treedef, data)

    def _check_array(self, value: Any, where: str) -> None:
        try:
            aval = aval_of(value)
        except JdagError as error:
            raise ContextError(
                f"{self.program} returned {kind_of(value)} (at {where}); programs may "
                "return pytrees of refs, arrays, numbers, strings and functions"
            ) from error
        if isinstance(value, jax.core.Tracer):
            raise ContextError(
                f"{self.program} returned a tracer of JAX (at {where}: {aval}), which "
                "has no value outside of the jit, vmap or grad that made it; return "
                "results of the traced function"
            )
        if is_deleted(value):
            raise JdagError(
                f"{self.program} returned {aval} (at {where}), which was deleted or "
                "donated"
            )
