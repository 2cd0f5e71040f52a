"""A context as users see it: calls, backward passes, gradients.

Only the program that opened a context differentiates in it. Invariant: `_gradients`
names, of each leaf that a finished pass has reached, the last such pass.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from msgspec.structs import replace

from jdag.api.cluster_state import ClusterState
from jdag.api.device_placement import move, refuse_device
from jdag.api.graph import ContextGraph
from jdag.api.outcome import PassReport, expired, nanoseconds, remarked, stuck
from jdag.api.program_frame import FramePhase, ProgramFrame
from jdag.api.refs import Ref
from jdag.api.roots import check_hook, checked_roots
from jdag.compute.callables import called
from jdag.compute.pytrees import flatten_refs, no_gradient, split, unflatten
from jdag.compute.refs import is_ref
from jdag.engine.functions import call_site, is_program, name_of
from jdag.engine.protocol import (
    Awaited,
    Differentiated,
    GradientKey,
    Hook,
    Key,
    LeafId,
    Left,
    Mode,
    Opened,
    Outcome,
    PassResult,
    Returned,
    Root,
    SeedKey,
    Spawn,
)
from jdag.errors import (
    ContextError,
    GraphError,
    JdagError,
    PassTimeout,
    UnusedSendError,
)
from jdag.parallel.routes import How
from jdag.runtime.failures import failure_of
from jdag.runtime.host import Port

_MODES = {mode.value: mode for mode in (Mode.SMART, Mode.FAST)}


class Context:
    """One forward pass and its backward passes over all workers; a context manager.

    Made by `cluster.context()`; a program that runs on a worker is handed one as its
    first argument. Within it calls record a graph; gradients live in it, and all that
    it holds goes when it is left. A value goes before that when no ref names it any
    more and no call waits for it. Several may be open at once.

    Leaving raises the first error, in program order, of a call in it that nobody has
    seen, unless another exception is already on its way.
    """

    __jdag_context__ = True

    def __init__(self, frame: Any, opener: Any = None) -> None:
        self._frame: ProgramFrame = frame  # In the oracle an `OracleFrame`.
        self._opener = opener  # The `Cluster` of the program that opens contexts.
        self.remarks: list[Callable[[], str]] = []  # On steps, where a worker is lost.
        self._passes = 0
        self._gradients: dict[LeafId, Ref] = {}

    @property
    def id(self) -> int:
        """Its 64-bit id: the number of its owner in the top 16 bits, then a counter."""
        return self._frame.id.id

    @property
    def here(self) -> str:
        """The name of the worker on which this program runs."""
        return self._frame.here

    @property
    def state(self) -> ClusterState:
        """What all programs of its cluster share in this process."""
        return self._frame.state

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all workers."""
        return self.state.workers

    def reassigned(self) -> None:
        """Its program has assigned to leaves: the next calls read the new versions."""
        self._frame.moved.clear()

    def __repr__(self) -> str:
        return f"Context({self._frame}, {self._frame.phase.name.lower()})"

    def __enter__(self) -> "Context":
        frame = self._frame
        if frame.phase is not FramePhase.NEW:
            raise ContextError(
                f"{frame} was entered before; each `with` takes a new cluster.context()"
            )
        self.state.check_open("a context")
        self.state.check_current(f"entering {frame}", frame.port)
        if self._opener is not None:
            frame.id = self._opener.entered(self, frame.id)
        frame.port.tell(Opened(frame.id))
        frame.phase = FramePhase.OPEN
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        frame = self._frame
        frame.phase = FramePhase.LEFT
        if self._opener is not None:
            self._opener.left(self)
        if self.state.closed:
            return  # The cluster went first, with all that it held.
        try:
            failures = frame.wait("leaving", lambda waiter: Left(waiter, frame.id))
        except JdagError:
            if error is None:
                raise
            return  # The exception that is on its way came first.
        if error is None:
            for failure in failures:
                if not frame.has_seen(failure):
                    raise remarked(frame.seen(failure), self.remarks)

    # ---------------------------------------------------------------- calls

    def call(
        self, worker: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function, or a program, on a worker.

        Args:
            worker: where it runs; of a function also a device of a worker, as in
                `ps0/cpu:1` (platform and index; without it the default device). Then
                its arguments are put there, gradients flow back to where these live,
                and the results stay on that device. In virtual time each device that
                is named is one of its own.
            fn: a pure function of arrays, or one that `jdag.program` marks. A callable
                pytree, such as a module, is an argument of its own call: arrays and
                refs in it are arguments as any others; so is that of a method of one.
            *args: pytrees of refs; of arrays and Python numbers, which are constants;
                and of statics, part of the function: str, bool, None, functions, and
                what `jdag.static` wraps. A program gets all as they are, statics
                unwrapped.
            **kwargs: the same, by keyword.

        Returns:
            A pytree of refs shaped like what the function returns, at once; of a
            program its result, refs or plain data, once it has returned.

        Raises:
            RemoteError: the function cannot be traced with these arguments, or the
                program raised; names function, worker, call site, the user's lines.
            ContextError: an argument is a tracer, or a ref of another context; or the
                context is not open.
            WorkerLost: that worker, or the owner of an argument, is gone.
        """
        frame = self._frame
        frame.check("ctx.call")
        there, device = frame.state.place(worker, "ctx.call")
        fn, args, own = called(fn, args)
        parts = split(args, kwargs, frame.state.is_named, own)
        if not is_program(fn):
            return frame.issue(there, device, fn, parts)
        refuse_device(fn, worker, device)
        return frame.run(there, fn, parts)

    def move(self, worker: str, refs: Any) -> Any:
        """Move arrays to a worker; gradients flow back through it.

        Args:
            worker: where they are to be: a worker, or a device of one.
            refs: a pytree of refs, or of constants, which then travel once. Statics in
                it, and Python numbers inside it, stay as they are.

        Returns:
            The same pytree of refs, on that worker.

        Raises:
            JdagError: as `call` does.
        """
        self._frame.check("ctx.move")
        self.state.place(worker, "ctx.move")
        return move(self.call, worker, refs)

    def replicate(self, workers: Sequence[str], refs: Any, how: How = "owner") -> Any:
        """Copy arrays to workers; what flows back from there is added on its way.

        Args:
            workers: where the replicas are to be: workers, or devices of them.
            refs: a pytree of refs; what is untracked is copied as well.
            how: "owner", "tree" or "ring"; see `jdag.parallel.routes`.

        Returns:
            A tuple of such pytrees of refs, one for each worker, in order.

        Raises:
            JdagError: no workers, one twice or unknown; no refs; no such `how`.
        """
        self._frame.check("ctx.replicate")
        replicas = self._frame.replicas
        return replicas.replicate(self, workers, refs, how, self.state.place)

    def all_reduce(self, refs_by_worker: Mapping[str, Any], how: How = "owner") -> Any:
        """Add up equal pytrees, such as gradients, for each worker that gives one.

        Args:
            refs_by_worker: for each worker, or device of one, its pytree of refs.
            how: "owner", "tree" or "ring"; see `jdag.parallel.routes`.

        Returns:
            For each worker the sum, the same to the last bit; tracked.

        Raises:
            JdagError: two are not equal in structure, shapes and dtypes, which cannot
                be added; or as `replicate` does.
        """
        self._frame.check("ctx.all_reduce")
        replicas = self._frame.replicas
        return replicas.all_reduce(self, refs_by_worker, how, self.state.place)

    # ---------------------------------------------------------------- backward

    def backward(
        self,
        *roots: Ref,
        cotangents: Any = None,
        retain_graph: bool = False,
        mode: Literal["smart", "fast"] = "smart",
        timeout_s: float | None = None,
    ) -> PassReport:
        """Run a backward pass: gradients of the sum of all roots, added to the leaves'.

        Waits until the pass has ended everywhere. SMART mode first finds what the roots
        were computed from, and waits for that alone. FAST is the rule of PyTorch's
        distributed autograd (dist_engine.cpp), which saves the finding: wherever the
        pass comes by, every send of the context's graph is waited for, so that a value
        that was sent and then not used, or used for something else, leaves it stuck.

        Args:
            *roots: refs, tracked, on any workers; one that is given twice counts twice.
            cotangents: None, where each root has size 1 and gets ones; or one for each
                root (of a single root: it alone will do), an array or number of the
                root's shape and dtype, or None.
            retain_graph: keep the graph, so that a later pass may use it again.
            mode: "smart" or "fast". Where both finish they give the same bits; a leaf
                that FAST reaches and the roots do not need has zeros in FAST, and in
                SMART no gradient.
            timeout_s: None, or after how many seconds (of `cluster.now_ns`) to give it
                up. What its devices compute by then they compute to the end.

        Returns:
            A `PassReport`: among others, which leaves have newer versions by now than
            those that were differentiated.

        Raises:
            RootError: a root, or a cotangent, is not one that can be used.
            GraphError: the graph was used before; or double backward.
            UnusedSendError: a FAST pass is stuck: some value was sent whose cotangent
                never comes.
            PassTimeout: it took longer than `timeout_s`; names what is owed.
            RemoteError: a forward, a vjp or a hook failed, with the route of workers to
                it; which of two that fail at the same time depends on timing.
            WorkerLost: a worker of the context is gone.
            ContextError: this program is not the one that opened the context.
        """
        self._check_top("ctx.backward")
        if mode not in _MODES:
            allowed = " or ".join(map(repr, _MODES))
            raise JdagError(f"mode={mode!r}: allowed is {allowed}")
        timeout_ns = nanoseconds(timeout_s)
        frame = self._frame
        told, stored = self._seeded(roots, cotangents)
        frame.tell_discarded()
        result: PassResult = frame.wait(
            "ctx.backward",
            lambda waiter: Differentiated(
                waiter, frame.id, told, _MODES[mode], retain_graph, timeout_ns
            ),
            stored,
        )
        frame.noticed = frame.noticed or not retain_graph
        return self._conclude(result, mode, timeout_s)

    def _seeded(
        self, roots: tuple[Ref, ...], cotangents: Any
    ) -> tuple[tuple[tuple[str, Root], ...], list[tuple[Key, Any]]]:
        """Check roots; return them for the engine, and cotangents as values."""
        frame = self._frame
        for root in roots:
            if is_ref(root) and root.leaf is None:
                frame.admit(root)
        told: list[tuple[str, Root]] = []
        stored: list[tuple[Key, Any]] = []
        for index, seed in enumerate(checked_roots(roots, cotangents)):
            root, given = roots[index], seed is not None
            told.append((root.owner, Root(root.key, root.aval, given, index)))
            if given:
                key = SeedKey(frame.id, self._passes + 1, index)
                stored.append((key, frame.state.value(seed)))
        return tuple(told), stored

    def _conclude(
        self, result: PassResult, mode: str, timeout_s: float | None
    ) -> PassReport:
        """Note the gradients of a pass that has ended; raise what it failed with."""
        frame = self._frame
        self._passes = result.number
        if result.outcome is Outcome.EXPIRED:
            raise PassTimeout(expired(result, timeout_s), result.owed)
        if result.outcome is Outcome.STUCK:
            raise UnusedSendError(stuck(result.owed), result.owed)
        leaves, ref_of = frame.state.leaves, frame.state.leaf_ref
        for id in result.leaves if result.outcome is Outcome.FINISHED else ():
            key = GradientKey(frame.id, id, result.number)
            hold = frame.hold(key, id.worker)
            if (leaf := leaves.get(id)) is not None:
                self._gradients[id] = Ref(
                    frame, key, id.worker, leaf.aval, False, id, hold=hold
                )
        if result.failure is not None:
            raise frame.seen(result.failure)
        stale = sorted(result.stale, key=lambda one: one.leaf.number)
        newer = [(leaves[one.leaf], one.newer) for one in stale if one.leaf in leaves]
        report = {ref_of(leaf): versions for leaf, versions in newer}
        return PassReport(result.number, mode, report)

    def _check_top(self, what: str) -> None:
        self._frame.check(what)
        if self._frame.prefix:
            raise ContextError(
                f"{what} in {self._frame.program}, which runs on {self.here!r}: "
                "only the program that opened the context takes gradients; return the "
                "refs to it"
            )

    # ---------------------------------------------------------------- hooks

    def on_cotangent(self, ref: Ref, fn: Callable[[Any], Any]) -> None:
        """Have a function see, and perhaps replace, the complete cotangent of a ref.

        In each later pass that reaches the ref it is called once, on the ref's worker,
        with the sum of all its cotangents, an array of the ref's shape and dtype, zeros
        where nothing came. What it returns goes on in its place; None leaves it as it
        is. Several are called in the order in which they were attached, each with what
        the one before gave. It runs as it is, not compiled.

        A pass reaches what its roots were computed from, and with one result of a call
        all others; in FAST mode also what was sent together with that, with zeros.

        Args:
            ref: a leaf, or a tracked ref of this context.
            fn: a function of one array.

        Raises:
            GraphError: the ref is not tracked, so it has no cotangent.
            ContextError: the context is not open, or the ref of another one.
            WorkerLost: the ref's worker is gone.
            JdagError: `ref` is no ref, or `fn` cannot be called.
        """
        self._hook("ctx.on_cotangent", ref, fn, replaces=True)

    def on_gradient(self, leaf: Ref, fn: Callable[[Any], Any]) -> None:
        """Have a function see what each later pass adds to the gradient of a leaf.

        It is called once for each finished pass that reaches the leaf, on the leaf's
        worker, when that pass's gradient, its argument, has been accumulated. What it
        returns is ignored. Several are called in the order in which they were attached.
        What it raises `backward` raises, after the pass has finished.

        Args:
            leaf: a leaf, float or complex.
            fn: a function of one array.

        Raises:
            JdagError: as `on_cotangent` does; or `leaf` is not one.
        """
        self._hook("ctx.on_gradient", leaf, fn, replaces=False)

    def _hook(self, what: str, ref: Ref, fn: Any, *, replaces: bool) -> None:
        frame = self._frame
        frame.check(what)
        check_hook(what, ref, fn, frame.admit, replaces=replaces)
        frame.calls += 1
        path = (*frame.prefix, frame.calls)
        frame.attach(ref, Hook(path, fn, replaces, ref.aval, str(call_site())))

    # ---------------------------------------------------------------- gradients

    def gradient(self, refs: Any, *, allow_int: bool = False) -> Any:
        """Return the gradients of leaves, accumulated over all finished passes.

        Args:
            refs: a pytree of leaves, as `cluster.put` gave them.
            allow_int: whether there may be leaves without gradients, as the indices of
                a sparse array: integers, bools and PRNG keys.

        Returns:
            The same pytree of refs, each on its leaf's worker, untracked; None in the
            place of constants. What one names stays as it is when another pass adds to
            the gradient. With `allow_int`, an array of zeros of dtype float0 stands for
            what has no gradient, as in `jax.grad`.

        Raises:
            GraphError: a ref is no leaf, or one that no finished pass has reached.
            ContextError: the context is not open, or the ref of another cluster.
        """
        self._check_top("ctx.gradient")
        leaves, form = flatten_refs(refs, is_ref)
        abstract = self.state.abstract
        return unflatten(
            form.bare,
            [
                no_gradient(ref.aval, abstract)
                if allow_int and not ref.aval.inexact
                else self._gradient(ref)
                for ref in leaves
            ],
        )

    def _gradient(self, ref: Ref) -> Ref:
        if ref.leaf is None:
            raise GraphError(
                f"{ref!r} is no leaf: gradients accumulate in what cluster.put and "
                "cluster.make give"
            )
        if ref.holder is not self.state:
            self.state.check_own(ref)
        if ref.leaf.id not in self._gradients:
            why = f"was reached by no pass, of {self._passes} in context {self.id}"
            if not ref.aval.inexact:
                why = f"is not inexact ({ref.aval}; see allow_int)"
            elif ref.leaf.dropped:
                why = "was dropped by cluster.drop"
            raise GraphError(
                f"{ref.leaf} {why}, so it has "
                "no gradient; ctx.gradients() has those that there are, and "
                "jdag.value_and_grad fills in zeros"
            )
        return self._gradients[ref.leaf.id]

    def gradients(self) -> Mapping[Ref, Ref]:
        """Return `{leaf: gradient}` of all leaves that a finished pass has reached.

        In the order in which leaves were made, without those dropped. See `gradient`.
        """
        self._check_top("ctx.gradients")
        state, found = self.state, self._gradients
        there = [id for id in found if id in state.leaves]
        there.sort(key=lambda id: id.number)
        return {state.leaf_ref(state.leaves[id]): found[id] for id in there}

    def graph(self) -> ContextGraph:
        """Return the recorded graph as it is now: for each worker its part.

        A mapping of workers to `Drawing`s, with `counts()` and `dot()`. Who opened the
        context waits until all calls in it have arrived; in a program that it called,
        those that have not arrived yet are not in it.
        """
        frame = self._frame
        frame.check("ctx.graph")
        if not frame.prefix:
            frame.wait("ctx.graph", lambda waiter: Awaited(waiter, frame.id))
        return ContextGraph(frame.state.driver.graph(frame.id))


def run_program(state: ClusterState, port: Port, spawn: Spawn) -> Returned:
    """Run a program on a worker, in a context of its own frame.

    What it raises is the failure that it returns.
    """
    name = name_of(spawn.function)
    frame = ProgramFrame(state, port, spawn.context, spawn.path, name)
    result = failure = None
    try:
        args, kwargs = frame.bound(spawn.arguments, {})
        returned = spawn.function(Context(frame), *args, **kwargs)
        result = frame.unbound(returned)
    except (Exception, SystemExit) as error:
        # What began elsewhere keeps its place, so that it counts as seen there too.
        failure = frame.failure_of(error) or replace(
            failure_of(error, port.worker, spawn.path, name), call_site=spawn.call_site
        )
    finally:
        frame.phase = FramePhase.LEFT
    args = kwargs = returned = None  # What is still held now is held elsewhere.
    reply, discarded = frame.left(result)
    return Returned(spawn.context, spawn.path, reply, failure, discarded)
