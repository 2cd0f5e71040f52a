"""The user's interface to a context: calls, backward passes, gradients.

Only the program that opened a context may call `backward` in it. Invariant: for each
leaf that a finished pass has reached, `_gradients` has a ref to the accumulated
gradient.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from jdag.compute.callables import called
from jdag.compute.pytrees import Split, flatten_refs, no_gradient, split, unflatten
from jdag.compute.refs import is_ref
from jdag.context import context_collectives
from jdag.context.cluster_state import ClusterState
from jdag.context.device_placement import move
from jdag.context.graph import ContextGraph
from jdag.context.outcome import (
    PassReport,
    expired,
    nanoseconds,
    remarked,
    stuck_pass_text,
)
from jdag.context.program_frame import FramePhase, ProgramFrame
from jdag.context.python_calls import is_waited_for, run_python
from jdag.context.refs import Hold, Ref
from jdag.context.roots import check_hook, seeded_roots, unreached
from jdag.context.tags import Tagged, move_shared, tagged
from jdag.context.tasks import Task
from jdag.engine.functions import call_site, is_program, is_unjitted, name_of
from jdag.engine.protocol import (
    Awaited,
    Differentiated,
    GradientKey,
    Hook,
    LeafId,
    Left,
    Mode,
    Opened,
    Outcome,
    PassResult,
)
from jdag.errors import (
    ContextError,
    GraphError,
    JdagError,
    PassTimeout,
    UnusedSendError,
)

_MODES = {mode.value: mode for mode in (Mode.SMART, Mode.FAST)}


class Context:
    """A recorded graph of calls and its backward passes; a context manager.

    `cluster.context()` makes one; a program on a worker receives one as its first
    argument. Values, graph and gradients exist until the context is left; a value is
    freed earlier once it has no refs and no call needs it. Several contexts may be
    open at once.

    Leaving the context waits for programs that `start` started. If no exception
    propagates, it then raises the first error, in program order, that the program has
    not seen: the error of a started program or, if there is none, of a call.

    Attributes:
        here: the name of the worker on which this program runs.
        state: the state of the cluster, shared by its programs in this process.
    """

    __jdag_context__ = True
    here: str

    replicate = context_collectives.replicate
    all_reduce = context_collectives.all_reduce
    all_gather = context_collectives.all_gather
    reduce_scatter = context_collectives.reduce_scatter
    all_to_all = context_collectives.all_to_all

    def __init__(self, frame: Any, opener: Any = None) -> None:
        self._frame: ProgramFrame = frame  # An `OracleFrame` in the oracle.
        self.here = frame.here
        self.state: ClusterState = frame.state
        self._opener = opener  # The `Cluster`; None in a called program.
        # Texts about optimizer steps, added to a WorkerLost raised when leaving.
        self.remarks: list[Callable[[], str]] = []
        self._passes = 0
        self._gradients: dict[LeafId, Ref] = {}

    @property
    def id(self) -> int:
        """The 64-bit id: its top 16 bits number the opener's worker; then a counter."""
        return self._frame.id.id

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all workers."""
        return self.state.workers

    def __repr__(self) -> str:
        return f"Context({self._frame}, {self._frame.phase.name.lower()})"

    def __enter__(self) -> "Context":
        frame = self._frame
        if frame.phase is not FramePhase.NEW:
            raise ContextError(
                f"{frame} was entered before; each `with` needs a new cluster.context()"
            )
        self.state.check_open("a context")
        self.state.check_current("entering it", frame.port, frame)
        if self._opener is not None:
            frame.id = self._opener.context_entered(self, frame.id)
        frame.port.tell(Opened(frame.id))
        frame.phase = FramePhase.OPEN
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        frame = self._frame
        frame.phase = FramePhase.LEFT
        if self._opener is not None:
            self._opener.context_left(self)
        if self.state.closed:
            return  # Closing the cluster has ended the context.
        try:
            try:
                if error is None or isinstance(error, Exception):
                    frame.finish()
            finally:  # This wait ends programs that still run.
                failures = frame.wait("leaving", Left, frame.id)
        except JdagError as raised:
            if error is None:
                raise remarked(raised, self.remarks)  # noqa: B904 - the same exception.
            return  # The exception that already propagates takes precedence.
        if error is None:
            for failure in failures:
                if not frame.has_seen(failure):
                    raise remarked(frame.seen(failure), self.remarks)

    def call(
        self, worker: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Call a function, or a program, on a worker.

        Args:
            worker: a worker. A function may also run on a device of a worker, such as
                `ps0/cpu:1` (platform and index). Arguments are then copied to the
                device, results stay there, and gradients flow back to the arguments'
                devices. In a simulation each named device is simulated separately.
            fn: a pure function of arrays, or a program, marked by `jdag.program`. If
                `fn` is a callable pytree, such as a module, or a method of a pytree,
                the arrays and refs in that pytree are arguments of the call.
            *args: pytrees of refs; of arrays and Python numbers, which are constants;
                and of statics, as with `static_argnums` of `jax.jit`: str, bool, None,
                functions, and values that `jdag.static` wraps. A program receives all
                arguments unchanged, except that `jdag.static` is removed.
            **kwargs: keyword arguments, as `args`.

        Returns:
            A pytree of refs in the structure of the function's result. The call does
            not wait for the results, unless the function is unjitted without `shapes`.
            A call of a program waits until the program has returned, and returns its
            result.

        Raises:
            RemoteError: the function cannot be traced with these arguments, or the
                program raised an exception; the error names the function, the worker,
                the call site and the user's lines.
            ContextError: an argument is a tracer, or a ref of another context; or the
                context is not open.
            WorkerLost: the worker, or the owner of an argument, is lost.
        """
        original, frame = (fn, args), self._frame
        checked = self._checked("ctx.call", worker, fn, args, kwargs)
        owner, device, fn, parts, runs_program = checked
        if is_unjitted(fn) and is_waited_for(self.state, fn, parts.refs):
            python = split((device, *called(*original)[:2], kwargs), {}, is_ref)
            task = frame.start(owner, run_python, python, name_of(fn))
        elif runs_program:
            task = frame.start(owner, fn, parts)
        else:
            if frame.tag is not None:
                move_shared(frame, self.move, owner, fn, parts)
            return frame.issue(owner, device, fn, parts)
        return task.called()

    def start(
        self, worker: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Task:
        """Start a program on a worker; it runs at the same time as this program.

        Sums use the order in which programs were started, so the bits of gradients do
        not depend on which program ends first. `backward`, and the end of this program
        or context, wait for running programs. If the result of a started program was
        not requested, the end of this program or context raises its error. Of several
        errors, the first in program order is raised, with the others as its notes.

        Args:
            worker: a worker.
            fn: a function marked by `jdag.program`.
            *args: as for `call`.
            **kwargs: keyword arguments, as for `call`.

        Returns:
            A `Task` of the running program. Its `result()` waits for the result.

        Raises:
            JdagError: `fn` is not a program. Also the errors of `call`.
        """
        checked = self._checked("ctx.start", worker, fn, args, kwargs)
        owner, _, fn, parts, runs_program = checked
        if not runs_program:
            raise JdagError(
                f"ctx.start takes a program, and {name_of(fn)} is a function: ctx.call "
                "returns refs to its results without waiting; jdag.program marks "
                "programs"
            )
        return self._frame.start(owner, fn, parts)

    def _checked(
        self, what: str, worker: str, fn: Any, args: Any, kwargs: Any
    ) -> tuple[str, str | None, Callable[..., Any], Split, bool]:
        self._frame.check(what)
        state = self.state
        owner, device = state.place(worker, what)
        fn, args, implicit = called(fn, args)
        runs_program = is_program(fn)
        is_ref_like = state.is_given if runs_program else state.is_named
        if device is not None and runs_program:
            raise JdagError(
                f"{name_of(fn)} is a program, which runs on a worker, but {worker!r} "
                "names a device; only calls of functions may name a device"
            )
        parts = split(args, kwargs, is_ref_like, implicit)
        return owner, device, fn, parts, runs_program

    def move(self, worker: str, refs: Any) -> Any:
        """Copy arrays to a worker; gradients flow back to the originals.

        Args:
            worker: a worker, or a device of one.
            refs: a pytree of refs or of constants. A moved constant is sent only once.
                Statics, and Python numbers inside the pytree, are returned unchanged.

        Returns:
            The same pytree of refs, on that worker.

        Raises:
            JdagError: as `call` does.
        """
        self._frame.check("ctx.move")
        self.state.place(worker, "ctx.move")
        return move(self.call, worker, refs)

    def tag(self, *, stage: int, micro_batch: int) -> Tagged:
        """Tag the calls in the `with` block with a stage and a micro-batch.

        Both numbers count from 0 and are part of traces. Under a schedule, tagged calls
        run in the schedule's order, and there is one call for each stage and
        micro-batch. Moves are not tagged.

        Raises:
            ScheduleError: a number is outside of the schedule's range. A call in the
                block raises this error if the schedule has the stage on another worker,
                or if the stage was called before for this micro-batch.
        """
        self._frame.check("ctx.tag")
        return tagged(self._frame, stage, micro_batch)

    def backward(
        self,
        *roots: Ref,
        cotangents: Any = None,
        retain_graph: bool = False,
        mode: Literal["smart", "fast"] = "smart",
        timeout_s: float | None = None,
    ) -> PassReport:
        """Run a backward pass: add the gradients of the sum of all roots to leaves.

        Waits until the pass has ended on all workers. SMART mode first finds the part
        of the graph that the roots depend on, and waits for that part alone. FAST skips
        this search, as PyTorch's distributed autograd does (dist_engine.cpp): on each
        worker that the pass reaches, it waits for the cotangents of all sends of the
        context. If the roots do not depend on a sent value, the pass is stuck.

        Args:
            *roots: tracked refs on any workers; a root that occurs twice counts twice.
            cotangents: None: ones, for roots of size 1. Otherwise a list with one
                cotangent for each root: an array or number of the root's shape and
                dtype, or None. For a single root the cotangent itself is allowed.
            retain_graph: keep the graph, so that a later pass may use it again.
            mode: "smart" or "fast". A pass that finishes in both modes computes the
                same bits in both, with one exception: a leaf that FAST reaches although
                the roots do not depend on it gets zeros in FAST, no gradient in SMART.
            timeout_s: the time limit in seconds of `cluster.now_ns`; None: no limit.
                Computations that have started run to their end.

        Returns:
            A `PassReport`, which names the leaves that were updated after the forward
            had read them.

        Raises:
            RootError: a root or a cotangent is unusable.
            GraphError: an earlier pass has used the graph; or double backward.
            UnusedSendError: a FAST pass is stuck: a sent value never gets a cotangent.
            PassTimeout: the pass took longer than `timeout_s`; the error names the
                missing cotangents.
            RemoteError: a forward, a vjp or a hook failed; the error names the path of
                workers. If several fail at the same time, timing decides which error is
                raised.
            WorkerLost: a worker of the context is lost.
            ContextError: another program opened the context.
        """
        self._check_top("ctx.backward")
        if mode not in _MODES:
            allowed = " or ".join(map(repr, _MODES))
            raise JdagError(f"mode={mode!r}: expected {allowed}")
        timeout_ns = nanoseconds(timeout_s)
        frame = self._frame
        due_ns = None if timeout_ns is None else frame.state.driver.now_ns + timeout_ns
        if frame.tasks and not frame.join(frame.running, due_ns):
            raise PassTimeout(
                f"a pass took longer than timeout_s={timeout_s!r}; it had not begun, "
                f"since it waited for {', '.join(map(str, frame.running))}"
            )
        if due_ns is not None:
            timeout_ns = max(due_ns - frame.state.driver.now_ns, 1)
        checked, seeds = seeded_roots(frame, self._passes + 1, roots, cotangents)
        frame.tell_discarded()
        fields = (frame.id, checked, _MODES[mode], retain_graph, timeout_ns)
        result: PassResult = frame.wait(
            "ctx.backward", Differentiated, *fields, values=seeds
        )
        frame.noticed = frame.noticed or not retain_graph
        return self._conclude(result, mode, timeout_s)

    def _conclude(
        self, result: PassResult, mode: str, timeout_s: float | None
    ) -> PassReport:
        frame = self._frame
        self._passes = result.number
        if result.outcome is Outcome.EXPIRED:
            raise PassTimeout(expired(result, timeout_s, frame.state), result.owed)
        if result.outcome is Outcome.STUCK:
            raise UnusedSendError(stuck_pass_text(result.owed), result.owed)
        leaves, ref_of = frame.state.leaves, frame.state.leaf_ref
        for id in result.leaves if result.outcome is Outcome.FINISHED else ():
            key = GradientKey(frame.id, id, result.number)
            hold = Hold(frame.loose, key, id.worker)
            if (leaf := leaves.get(id)) is not None:
                gradient = Ref(frame, key, id.worker, leaf.aval, False, id, hold=hold)
                self._gradients[id] = gradient
        if result.failure is not None:
            raise frame.seen(result.failure)
        stale = {
            ref_of(leaves[entry.leaf]): entry.newer
            for entry in sorted(result.stale, key=lambda entry: entry.leaf.number)
            if entry.leaf in leaves
        }
        return PassReport(result.number, mode, stale)

    def _check_top(self, what: str) -> None:
        self._frame.check(what)
        if self._frame.prefix:
            raise ContextError(
                f"{what} in {self._frame.program}, which runs on {self.here!r}: "
                "only the program that opened the context may call it; return the "
                "refs to that program"
            )

    def on_cotangent(self, ref: Ref, fn: Callable[[Any], Any]) -> None:
        """Attach a hook that sees, and may replace, the cotangent of a ref.

        Each later pass that reaches the ref calls the hook once, uncompiled, on the
        ref's worker. The hook's argument is the sum of all cotangents of the ref: an
        array of its shape and dtype, zeros if no cotangent arrives. If the hook returns
        an array, that replaces the cotangent. Several hooks are called in the order in
        which they were attached, each with the result of the hook before.

        A pass reaches all values that its roots depend on, and all results of a call if
        it reaches one of them. A FAST pass also reaches the values that were sent in
        one message with a value that it reaches; their cotangents are zeros.

        Args:
            ref: a leaf, or a tracked ref of this context.
            fn: a function of one array.

        Raises:
            GraphError: the ref is not tracked, so it has no cotangent.
            ContextError: the context is not open, or the ref is of another context.
            WorkerLost: the ref's worker is lost.
            JdagError: `ref` is not a ref, or `fn` is not callable.
        """
        self._hook("ctx.on_cotangent", ref, fn, replaces=True)

    def on_gradient(self, leaf: Ref, fn: Callable[[Any], Any]) -> None:
        """Attach a hook that sees the gradient that each later pass adds to a leaf.

        Each finished pass that reaches the leaf calls the hook once, on the leaf's
        worker, with that pass's gradient, after the gradient was accumulated. The
        hook's result is ignored; `backward` raises the hook's error after the pass.
        Several hooks are called in the order in which they were attached.

        Args:
            leaf: a leaf, float or complex.
            fn: a function of one array.

        Raises:
            JdagError: `leaf` is not a leaf. Also the errors of `on_cotangent`.
        """
        self._hook("ctx.on_gradient", leaf, fn, replaces=False)

    def _hook(self, what: str, ref: Ref, fn: Any, *, replaces: bool) -> None:
        frame = self._frame
        frame.check(what)
        check_hook(what, ref, fn, frame.admit, replaces=replaces)
        frame.calls += 1
        path = (*frame.prefix, frame.calls)
        frame.attach(ref, Hook(path, fn, replaces, ref.aval, str(call_site())))

    def gradient(self, refs: Any, *, allow_int: bool = False) -> Any:
        """Return the gradients of leaves, accumulated over all finished passes.

        Args:
            refs: a pytree of leaves, such as the result of `cluster.put`.
            allow_int: allow integers, bools and PRNG keys, such as the indices of a
                sparse array, which have no gradients.

        Returns:
            The same pytree of untracked refs, each on its leaf's worker, and None in
            place of constants. A later pass does not change the refs' values. With
            `allow_int`, a leaf without a gradient gets zeros of dtype float0, as in
            `jax.grad`.

        Raises:
            GraphError: a ref is not a leaf, or no finished pass has reached it.
            ContextError: the context is not open, or a ref is of another cluster.
        """
        self._check_top("ctx.gradient")
        leaves, form = flatten_refs(refs, is_ref)
        return unflatten(form.bare, [self._gradient(ref, allow_int) for ref in leaves])

    def _gradient(self, ref: Ref, allow_int: bool) -> Any:
        if allow_int and not ref.aval.inexact:
            return no_gradient(ref.aval, self.state.abstract)
        if ref.leaf is None:
            raise GraphError(
                f"{ref!r} is not a leaf: only leaves, the results of cluster.put and "
                "cluster.make, have gradients"
            )
        if ref.holder is not self.state:
            self.state.check_own(ref)
        if ref.leaf.id not in self._gradients:
            raise unreached(ref, self._passes, self.id)
        return self._gradients[ref.leaf.id]

    def gradients(self) -> Mapping[Ref, Ref]:
        """Return `{leaf: gradient}` of all leaves that a finished pass has reached.

        Leaves are in the order in which they were made; dropped leaves are left out.
        See `gradient`.
        """
        self._check_top("ctx.gradients")
        state, gradients = self.state, self._gradients
        ids = [id for id in gradients if id in state.leaves]
        ids.sort(key=lambda id: id.number)
        return {state.leaf_ref(state.leaves[id]): gradients[id] for id in ids}

    def graph(self) -> ContextGraph:
        """Return the graph recorded so far, by worker.

        In the program that opened the context, this waits until all calls have reached
        their workers. In a called program it does not wait.
        """
        frame = self._frame
        frame.check("ctx.graph")
        if not frame.prefix:
            frame.wait("ctx.graph", Awaited, frame.id)
        return ContextGraph(frame.state.driver.graph(frame.id))
