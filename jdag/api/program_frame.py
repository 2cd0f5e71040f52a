"""Program frames: one run of a program in a context, and the calls that it makes.

A program tells its engine what it wants through the `Port` of the driver that runs it,
and waits there. Its calls are numbered from 1, so that the path of such numbers from
the top frame down is the place of a call in the program; keys, and the order of
every sum, are made from paths.

Invariants: a number is used once; a frame that is over sends nothing to the engine.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, NamedTuple

import jax

from jdag.api.cluster_state import ClusterState
from jdag.api.device_placement import Left, at_home, move, refuse_device
from jdag.api.refs import Hold, Leaf, Ref
from jdag.api.roots import check_hook
from jdag.compute.avals import Aval, aval_of, is_deleted
from jdag.compute.callables import called
from jdag.compute.pairs import Pair, pair
from jdag.compute.placed import placed
from jdag.compute.pytrees import (
    Split,
    flatten,
    is_static,
    paths,
    split,
    unflatten,
)
from jdag.compute.refs import Identity, RefData, Reply, is_ref
from jdag.engine.functions import call_site, is_program, name_of, transferred
from jdag.engine.protocol import (
    Argument,
    Attached,
    ConstantKey,
    ContextId,
    Discarded,
    Failure,
    Hook,
    Issued,
    Key,
    Launched,
    LeafId,
    OutputKey,
    Path,
    Worker,
)
from jdag.errors import ContextError, JdagError, kind_of
from jdag.runtime.failures import exception_of, remote_error
from jdag.runtime.host import Port

Place = tuple[Key, Worker]


class FramePhase(Enum):
    """The state of a context in its program; values are texts for error messages."""

    NEW = "not entered yet: write `with cluster.context() as ctx:`"
    OPEN = "open"
    LEFT = "over: its values, graph and gradients are gone"


class FrameEnd(NamedTuple):
    """How a program ended: with a reply or a failure."""

    path: Path
    reply: Any
    failure: Failure | None


class ProgramFrame:
    """One run of a program: the values it holds and the calls it makes."""

    def __init__(
        self, state: ClusterState, port: Port, id: ContextId, prefix: Path, program: str
    ) -> None:
        self.state = state
        self.port = port
        self.id = id
        self.prefix = prefix
        self.program = program
        self.phase = FramePhase.OPEN if prefix else FramePhase.NEW
        self._waits = ""  # The call or pass that its program waits for.
        self._calls = 0
        self._loose: deque[Place] = deque()  # Values whose last ref is gone.
        self._holds: dict[Key, int] = {}  # Extra holds of a value, by key.
        self._noticed = False  # The engine may have notices to send.
        self._left: Left = {}
        self._seen: dict[Identity, None] = {}
        self._raised: list[tuple[JdagError, Failure]] = []

    def __repr__(self) -> str:
        if self.prefix:
            return f"context {self.id} in {self.program} on {self.port.worker!r}"
        return f"context {self.id}"

    def wait(
        self,
        what: str,
        event_of: Callable[[int], Any],
        values: Sequence[tuple[Key, Any]] = (),
    ) -> Any:
        """Pass a request to the engine and wait for its answer."""
        waiter = self.port.waiter()
        self._waits = what
        try:
            self.port.tell(event_of(waiter), values)
            return self.port.wait(waiter)
        finally:
            self._waits = ""

    # ---------------------------------------------------------------- values held

    def read(self, refs: Sequence[Ref]) -> Sequence[Any]:
        """Return for each ref its value, or a `Failure`."""
        if self._loose or self._noticed:
            self.tell_discarded()
        return self.state.read(refs, self.port)

    def hold(self, key: Key, worker: Worker) -> Hold:
        """Return a hold that keeps a value of this frame alive."""
        return Hold(self._loose, key, worker)

    def discarded(self) -> tuple[Place, ...]:
        """Return values whose last ref went since the last call, in program order."""
        loose, more = self._loose, self._holds
        found = []
        while loose:
            place = loose.popleft()
            if not more or place[0] not in more:
                found.append(place)
            elif more[place[0]] > 1:
                more[place[0]] -= 1
            else:
                del more[place[0]]
        self._noticed = self._noticed or bool(found)
        return tuple(sorted(found))

    def left(self, result: Any) -> tuple[Reply, tuple[Place, ...]]:
        """Return a program's reply, and the keys that no program can name any more.

        All refs that it made itself are gone by now, but those that got elsewhere: into
        a closure, say. Nobody counts these any more: what they name lives on.
        """
        leaves = flatten(result)[0]
        owners = {leaf.key: leaf.owner for leaf in leaves if type(leaf) is RefData}
        gone = dict.fromkeys(self.discarded())
        kept = [
            (key.name, key.index)
            for key, owner in owners.items()
            if self._made(key) and (key, owner) not in gone
        ]
        left = [place for place in gone if place[0] not in owners]
        return Reply(result, tuple(self._seen), tuple(kept)), tuple(left)

    def _made(self, key: Key) -> bool:
        """Whether this frame, or a program that it called, made the value."""
        path: Path = key.name if key.kind == "output" else ()
        return key.kind != "newest" and path[: len(self.prefix)] == self.prefix

    def tell_discarded(self) -> None:
        """Tell the engine, before the program waits, which values may be dropped."""
        if self._loose or self._noticed:
            self.port.tell(Discarded(self.id, self.prefix, self.discarded()))
            self._noticed = False

    def reassigned(self) -> None:
        """Forget moved copies of leaves, after the program has assigned to leaves."""
        self._left.clear()

    def leaves_notices(self) -> None:
        """Note that a program or pass may have left notices for the engine to send."""
        self._noticed = True

    def check(self, what: str) -> None:
        """Raise unless the context is open and its program is the one that runs."""
        if self._cannot():
            self._refuse(what)

    def _cannot(self) -> bool:
        return (
            self.phase is not FramePhase.OPEN
            or bool(self._waits)
            or self.state.is_unusable()
            or self.state.driver.current is not self.port
        )

    def _refuse(self, what: str) -> None:
        self.state.check_open(what)
        _ = self.state.driver.current  # Raises on a thread that runs no program.
        if self._waits:
            raise ContextError(
                f"{what} on {self!r}, whose program waits for {self._waits}; a program "
                "that runs on a worker uses the context that it is handed first"
            )
        if self.prefix and self.phase is FramePhase.LEFT:
            raise ContextError(f"{what} on {self!r}: its program has returned")
        self.state.check_current(f"{what} on {self!r}", self.port)
        raise ContextError(f"{what} on context {self.id}, which is {self.phase.value}")

    def check_readable(self, ref: Ref) -> None:
        """Raise ContextError where a ref cannot be read any more."""
        if self._cannot():  # The repr of a ref takes longer than this check.
            self._refuse(f"a fetch of {ref!r}")

    def seen(self, failure: Failure) -> JdagError:
        """Record that the program has seen a failure; return it as an exception."""
        self._seen[failure.worker, failure.path] = None
        exception = exception_of(failure)
        self._raised.append((exception, failure))
        return exception

    def has_seen(self, failure: Failure) -> bool:
        """Whether the program, or one that it called, has seen this failure."""
        return (failure.worker, failure.path) in self._seen

    def failure_of(self, error: BaseException) -> Failure | None:
        """Return the failure for which an exception was raised, or None."""
        for raised, failure in self._raised:
            if raised is error:
                return failure
        return None

    def call(
        self, place: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function or a program; see `jdag.Context.call`."""
        self.check("ctx.call")
        worker, device = self.state.place(place, "ctx.call")
        fn, args, own = called(fn, args)
        parts = split(args, kwargs, self.state.is_named, own)
        site = str(call_site())
        if is_program(fn):
            refuse_device(fn, place, device)
            return self._launch(worker, fn, parts, site)
        parts = at_home(parts, worker, self._left, self.admit, self.move)
        return self._issue(worker, device, fn, parts, site)

    def hook(self, what: str, ref: Any, fn: Any, *, replaces: bool) -> None:
        """Attach a hook; see `jdag.Context.on_cotangent` and `on_gradient`."""
        self.check(what)
        check_hook(what, ref, fn, self.admit, replaces=replaces)
        self._calls += 1
        path = (*self.prefix, self._calls)
        hook = Hook(path, fn, replaces, ref.aval, str(call_site()))
        self.port.tell(Attached(self.id, ref.owner, ref.key, hook))

    def move(self, place: str, tree: Any) -> Any:
        """Move arrays to a worker; see `jdag.Context.move`."""
        self.check("ctx.move")
        self.state.place(place, "ctx.move")
        return move(self.call, place, tree)

    def _issue(
        self,
        worker: str,
        device: str | None,
        fn: Callable[..., Any],
        parts: Split,
        site: str,
    ) -> Any:
        path = (*self.prefix, self._calls + 1)
        here = self.port.worker
        size = parts.size
        avals: list[Any] = [None] * size
        arguments: list[Any] = [None] * size
        sources: list[str | None] = [None] * size
        descends: LeafId | None = None
        constants = []
        for place, ref in parts.refs:
            if is_ref(ref):
                self.admit(ref)
                descends = descends or ref.descends
                avals[place] = ref.aval.on(None)
                sources[place] = ref.device
                arguments[place] = Argument(ref.key, ref.owner, ref.tracked)
            else:
                constants.append((place, aval_of(ref)))
        for place, value in (*parts.constants, *constants):
            key: Key = ConstantKey(self.id, path, place)
            avals[place] = parts.aval(place, value)
            arguments[place] = Argument(key, here, False)
        tracked = tuple([argument.tracked for argument in arguments])
        found = traced(fn, parts, tuple(avals), tracked, worker, site)
        # A move runs at its source.
        there = sources[0] if fn is transferred else device
        made = placed(found, there, sources, [device] * len(found.out_avals))
        self._calls += 1
        stored = []
        for place, value in (*parts.constants, *constants):
            stored.append((arguments[place].key, self.state.value(value)))
        issued = Issued(
            self.id,
            path,
            worker,
            made,
            made.name,
            tuple(arguments),
            made.out_tracked,
            site,
            self.discarded() if self._loose else (),
        )
        self.port.tell(issued, stored)
        refs = []
        for index, aval in enumerate(made.out_avals):
            key = OutputKey(self.id, path, index)
            hold = Hold(self._loose, key, worker)
            known, tracks = aval.on(device), made.out_tracked[index]
            refs.append(
                Ref(self, key, worker, known, tracks, descends=descends, hold=hold)
            )
        return unflatten(made.out_tree, refs)

    def admit(self, ref: Ref) -> None:
        """Raise ContextError unless this program may use the ref."""
        holder: Any = ref.holder
        if holder is self:
            return
        self.state.check_own(ref)
        if ref.leaf is not None:
            if ref.leaf.dropped:
                raise ContextError(f"{ref.leaf} was dropped by cluster.drop")
            return
        context = ref.key.context
        if context != self.id:
            over = holder.phase is FramePhase.LEFT
            raise ContextError(
                f"{ref!r} is of context {context}{', which is over,' * over} and this "
                f"is context {self.id}: refs do not leave their context; make it "
                "a leaf (cluster.put) or a constant (ref.fetch()) to take it along"
            )

    def _launch(
        self, worker: str, fn: Callable[..., Any], parts: Split, site: str
    ) -> Any:
        calls = f"{self.program} on {self.port.worker!r} calls {name_of(fn)}"
        self.state.check_nesting(len(self.prefix), f"{calls} on {worker!r}, at {site}")
        values: list[Any] = [None] * parts.size
        for place, ref in parts.refs:
            if is_ref(ref):
                self.admit(ref)
            values[place] = ref.data if is_ref(ref) else ref
        for place, value in parts.constants:
            values[place] = value
        arguments = parts.template.rebuild(values)
        (ended,) = self.launch([(worker, fn, arguments)], site)
        if ended.reply is not None:
            self._seen.update(dict.fromkeys(ended.reply.seen))
        if ended.failure is not None:
            raise self.seen(ended.failure)
        return self.returned(ended)

    def launch(
        self, programs: Sequence[tuple[Worker, Callable[..., Any], Any]], site: str
    ) -> list[FrameEnd]:
        """Run programs on workers at the same time; return their ends."""
        self.tell_discarded()
        self._waits = ", ".join(f"{name_of(fn)} on {w!r}" for w, fn, _ in programs)
        begun = []
        try:
            for worker, fn, arguments in programs:
                self._calls += 1
                path = (*self.prefix, self._calls)
                waiter = self.port.waiter()
                begun.append((path, waiter))
                self.port.tell(
                    Launched(waiter, self.id, path, worker, fn, arguments, site)
                )
            return [FrameEnd(path, *self.port.wait(waiter)) for path, waiter in begun]
        finally:
            self._waits = ""
            self.leaves_notices()

    def returned(self, ended: FrameEnd) -> Any:
        """Return the result of a program, with refs that belong to this frame."""
        return self.bound(ended.reply.result, self._holds_of(ended.reply, ended.path))

    def _holds_of(self, reply: Reply, path: Path) -> dict[Key, Hold]:
        """Return holds of the values in a reply of the program with this path."""
        holds: dict[Key, Hold] = {}
        for leaf in flatten(reply.result)[0]:
            if type(leaf) is not RefData or leaf.key in holds:
                continue
            key = leaf.key
            if not self._made(key) or (key.name, key.index) in reply.kept:
                continue  # It stays, or a caller of this program holds it.
            if key.kind != "output" or key.name[: len(path)] != path:
                # This program made it, and holds it already.
                self._holds[key] = self._holds.get(key, 0) + 1
            holds[key] = self.hold(key, leaf.owner)
        return holds

    def bound(self, tree: Any, holds: Mapping[Key, Hold]) -> Any:
        """Return the pytree with refs of this frame in place of their data."""
        leaves, treedef = flatten(tree)
        return unflatten(treedef, [self._bind(leaf, holds) for leaf in leaves])

    def _bind(self, leaf: Any, holds: Mapping[Key, Hold]) -> Any:
        if type(leaf) is not RefData:
            return leaf
        key, worker, aval, tracked = leaf.key, leaf.owner, leaf.aval, leaf.tracked
        if key.kind != "newest":
            hold = holds.get(key)
            descends = leaf.descends
            return Ref(self, key, worker, aval, tracked, descends=descends, hold=hold)
        # A program of another process may have made the leaf; register it here.
        record = self.state.leaves.setdefault(key.name, Leaf(key.name, aval))
        return Ref(self.state, None, worker, aval, tracked, leaf=record)

    def unbound(self, tree: Any) -> Any:
        """Return the result of a program as data, without holders.

        Raises:
            ContextError: it is, or has in it, what cannot be returned.
            JdagError: an array in it was deleted.
        """
        leaves, treedef = flatten(tree, what=f"what {self.program} returned")
        data = []
        for place, leaf in enumerate(leaves):
            if is_ref(leaf):
                self.admit(leaf)
                data.append(leaf.data)
            elif is_static(leaf) or isinstance(leaf, int | float | complex):
                data.append(leaf)
            else:
                try:
                    aval_of(leaf)
                except JdagError as error:
                    raise ContextError(
                        f"{self.program} returned {kind_of(leaf)} "
                        f"(at {paths(tree)[place] or 'the top'}); programs return "
                        "pytrees of refs, arrays, numbers, strings and functions"
                    ) from error
                data.append(_there(leaf, self.program, tree, place))
        return unflatten(treedef, data)


def _there(array: Any, program: str, tree: Any, place: int) -> Any:
    """Return an array that a program returns, unless it is a tracer, or was deleted."""
    if isinstance(array, jax.core.Tracer):
        raise ContextError(
            f"{program} returned a tracer of JAX (at {paths(tree)[place] or 'the top'}:"
            f" {aval_of(array)}), which has no value outside of the jit, vmap or grad "
            "that made it; return what the function that is traced returns"
        )
    if is_deleted(array):
        raise JdagError(
            f"{program} returned {aval_of(array)} (at {paths(tree)[place] or 'the top'}"
            "), which was deleted or donated"
        )
    return array


def traced(
    fn: Callable[..., Any],
    parts: Split,
    avals: tuple[Aval, ...],
    tracked: tuple[bool, ...],
    worker: str,
    site: str,
) -> Pair:
    """Return the forward/vjp pair of a call.

    Raises:
        RemoteError: the function raised while it was traced.
    """
    try:
        return pair(fn, parts.template, avals, tracked)
    except Exception as error:
        raise remote_error(error, fn, worker, site) from error
