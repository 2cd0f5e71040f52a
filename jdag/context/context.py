"""A context as users see it: calls, backward passes, gradients.

Only the program that opened a context differentiates in it. Invariant: `_gradients`
has, for each leaf that a finished pass has reached, the gradient after the last one.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from jdag.compute.callables import called
from jdag.compute.pytrees import Split, flatten_refs, no_gradient, split, unflatten
from jdag.compute.refs import is_ref
from jdag.context.cluster_state import ClusterState
from jdag.context.context_collectives import Exchanges
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


class Context(Exchanges):
    """One forward pass and its backward passes over all workers; a context manager.

    Made by `cluster.context()`; a program that runs on a worker takes one as its first
    argument. Its calls record a graph; values, graph and gradients live until it is
    left. A value that no ref names and no call waits for goes earlier. Several contexts
    may be open at once.

    Leaving waits for programs that `start` started, and raises the first error, in
    program order, of one of these or else of a call, which the program has not seen,
    unless another exception is already on its way.

    Attributes:
        here: the name of the worker on which this program runs.
        state: what all programs of its cluster share in this process.
    """

    __jdag_context__ = True
    here: str

    def __init__(self, frame: Any, opener: Any = None) -> None:
        self._frame: ProgramFrame = frame  # In the oracle an `OracleFrame`.
        self.here = frame.here
        self.state: ClusterState = frame.state
        self._opener = opener  # The `Cluster` of the program that opens contexts.
        self.remarks: list[Callable[[], str]] = []  # On steps, where a worker is lost.
        self._passes = 0
        self._gradients: dict[LeafId, Ref] = {}

    @property
    def id(self) -> int:
        """Its 64-bit id: the number of its owner in the top 16 bits, then a counter."""
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
                f"{frame} was entered before; each `with` takes a new cluster.context()"
            )
        self.state.check_open("a context")
        self.state.check_current("entering it", frame.port, frame)
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
            try:
                if error is None or isinstance(error, Exception):
                    frame.finish()
            finally:  # Ends programs that run where those were not waited for.
                failures = frame.wait("leaving", Left, frame.id)
        except JdagError as own:
            if error is None:
                raise remarked(own, self.remarks)  # noqa: B904 - it is the same one.
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
            worker: where it runs. A function may also run on a device of a worker, as
                in `ps0/cpu:1` (platform and index): arguments are put there, results
                stay there, and gradients flow back to where the arguments live. In
                virtual time each named device is a device of its own.
            fn: a pure function of arrays, or one that `jdag.program` marks. A callable
                pytree, such as a module, or the object of a method, is an argument of
                its own call: arrays and refs in it are arguments as any others.
            *args: pytrees of refs; of arrays and Python numbers, which are constants;
                and of statics, part of the function: str, bool, None, functions, and
                what `jdag.static` wraps. A program gets all as they are, statics
                unwrapped.
            **kwargs: the same, by keyword.

        Returns:
            At once a pytree of refs shaped like what the function returns; once it ran,
            if it is unjitted without `shapes`; of a program its result at its end.

        Raises:
            RemoteError: the function cannot be traced with these arguments, or the
                program raised; names function, worker, call site, the user's lines.
            ContextError: an argument is a tracer, or a ref of another context; or the
                context is not open.
            WorkerLost: that worker, or the owner of an argument, is gone.
        """
        given, frame = (fn, args), self._frame
        there, device, fn, parts = self._checked("ctx.call", worker, fn, args, kwargs)
        if is_unjitted(fn) and is_waited_for(self.state, fn, parts.refs):
            asked = split((device, *called(*given)[:2], kwargs), {}, is_ref)
            task = frame.start(there, run_python, asked, name_of(fn))
        elif is_program(fn):
            task = frame.start(there, fn, parts)
        else:
            move_shared(frame, self.move, there, fn, parts)
            return frame.issue(there, device, fn, parts)
        return task.called()

    def start(
        self, worker: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Task:
        """Start a program on a worker, to run at the same time as this one.

        Its place among the calls of this program is where it was started, so bits of
        gradients do not depend on which of several programs ends first. Those that are
        still running are waited for by `backward`, and at the end of this program or
        context, which raises the error of one whose result was not asked for; of
        several the first in program order, with the others as its notes.

        Args:
            worker: where it runs.
            fn: a function that `jdag.program` marks.
            *args: as for `call`.
            **kwargs: the same, by keyword.

        Returns:
            At once a `Task`, whose `result()` waits for what the program returns.

        Raises:
            JdagError: `fn` is no program; or as `call` does.
        """
        there, _, fn, parts = self._checked("ctx.start", worker, fn, args, kwargs)
        if not is_program(fn):
            raise JdagError(
                f"ctx.start takes a program, and {name_of(fn)} is a function: ctx.call "
                "of it returns refs at once; jdag.program marks programs"
            )
        return self._frame.start(there, fn, parts)

    def _checked(
        self, what: str, worker: str, fn: Any, args: Any, kwargs: Any
    ) -> tuple[str, str | None, Callable[..., Any], Split]:
        self._frame.check(what)
        state = self.state
        there, device = state.place(worker, what)
        fn, args, own = called(fn, args)
        taken = state.is_given if is_program(fn) else state.is_named
        if device is not None and is_program(fn):
            raise JdagError(
                f"{name_of(fn)} is a program, which runs on a worker, and {worker!r} "
                "names a device; the functions that it calls may name one"
            )
        return there, device, fn, split(args, kwargs, taken, own)

    def move(self, worker: str, refs: Any) -> Any:
        """Move arrays to a worker; gradients flow back through it.

        Args:
            worker: a worker, or a device of one.
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

    def tag(self, *, stage: int, micro_batch: int) -> Tagged:
        """Mark the calls in its `with` block as this stage of this micro-batch.

        Both count from 0. The trace tells them, and under a schedule, which has each
        as one call, jobs run in its order. Moves are not marked.

        Raises:
            ScheduleError: the schedule has no such number; or, by a call, it has the
                stage on another worker, or the stage was called before.
        """
        self._frame.check("ctx.tag")
        return tagged(self._frame, stage, micro_batch)

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
        were computed from, and waits for that alone. FAST saves this search, as PyTorch
        does in its distributed autograd (dist_engine.cpp): on each worker that the pass
        reaches, it waits for every send of the context's graph. A value that was sent
        and is not part of what the roots were computed from leaves the pass stuck.

        Args:
            *roots: tracked refs on any workers; one that is given twice counts twice.
            cotangents: None, where each root has size 1 and gets ones; or one for each
                root, an array or number of its shape and dtype, or None. For a single
                root its cotangent alone will do.
            retain_graph: keep the graph, so that a later pass may use it again.
            mode: "smart" or "fast". Where both finish they give the same bits; a leaf
                that FAST reaches and the roots do not need has zeros in FAST, and in
                SMART no gradient.
            timeout_s: None, or after how many seconds (of `cluster.now_ns`) to give up.
                Computations that have begun by then run to their end.

        Returns:
            A `PassReport`: among others, which leaves have newer versions than those
            that were differentiated.

        Raises:
            RootError: a root, or a cotangent, is not one that can be used.
            GraphError: the graph was used before; or double backward.
            UnusedSendError: a FAST pass is stuck: the cotangent of a sent value never
                comes.
            PassTimeout: it took longer than `timeout_s`; names what is owed.
            RemoteError: a forward, a vjp or a hook failed; names the route of workers.
                Which of two that fail at the same time depends on timing.
            WorkerLost: a worker of the context is gone.
            ContextError: this program is not the one that opened the context.
        """
        self._check_top("ctx.backward")
        if mode not in _MODES:
            allowed = " or ".join(map(repr, _MODES))
            raise JdagError(f"mode={mode!r}: allowed is {allowed}")
        timeout_ns = nanoseconds(timeout_s)
        frame = self._frame
        due_ns = None if timeout_ns is None else frame.now_ns + timeout_ns
        if not frame.join(frame.running, due_ns):
            raise PassTimeout(
                f"a pass took longer than timeout_s={timeout_s!r}; it had not begun: "
                f"it waited for {', '.join(map(str, frame.running))}"
            )
        if due_ns is not None:
            timeout_ns = max(due_ns - frame.now_ns, 1)
        told, stored = seeded_roots(frame, self._passes + 1, roots, cotangents)
        frame.tell_discarded()
        asked = (frame.id, told, _MODES[mode], retain_graph, timeout_ns)
        result: PassResult = frame.wait(
            "ctx.backward", Differentiated, *asked, values=stored
        )
        frame.noticed = frame.noticed or not retain_graph
        return self._conclude(result, mode, timeout_s)

    def _conclude(
        self, result: PassResult, mode: str, timeout_s: float | None
    ) -> PassReport:
        """Note the gradients of a pass that has ended; raise what it failed with."""
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
                of = (frame, key, id.worker, leaf.aval, False, id)
                self._gradients[id] = Ref(*of, hold=hold)
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

    def on_cotangent(self, ref: Ref, fn: Callable[[Any], Any]) -> None:
        """Have a function see, and perhaps replace, the complete cotangent of a ref.

        Each later pass that reaches the ref calls it once, on the ref's worker and not
        compiled, with the sum of all cotangents of the ref, an array of its shape and
        dtype, zeros where none came. What it returns replaces the cotangent; None
        leaves it as it is. Several hooks are called in the order in which they were
        attached, each with the result of the one before.

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

        Each finished pass that reaches the leaf calls it once, on the leaf's worker,
        with that pass's gradient, which has been accumulated by then. What it returns
        is ignored; what it raises, `backward` raises after the pass. Several hooks are
        called in the order in which they were attached.

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
            The same pytree of untracked refs, each on its leaf's worker; None in the
            place of constants. A later pass does not change what they name. With
            `allow_int`, zeros of dtype float0 stand for what has no gradient, as in
            `jax.grad`.

        Raises:
            GraphError: a ref is no leaf, or one that no finished pass has reached.
            ContextError: the context is not open, or the ref of another cluster.
        """
        self._check_top("ctx.gradient")
        leaves, form = flatten_refs(refs, is_ref)
        found = [self._gradient(ref, allow_int) for ref in leaves]
        return unflatten(form.bare, found)

    def _gradient(self, ref: Ref, allow_int: bool) -> Any:
        if allow_int and not ref.aval.inexact:
            return no_gradient(ref.aval, self.state.abstract)
        if ref.leaf is None:
            raise GraphError(
                f"{ref!r} is no leaf: gradients accumulate in what cluster.put and "
                "cluster.make give"
            )
        if ref.holder is not self.state:
            self.state.check_own(ref)
        if ref.leaf.id not in self._gradients:
            raise unreached(ref, self._passes, self.id)
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

        A mapping of workers to `GraphSnapshot`s, with `counts()` and `dot()`. The
        program that opened the context waits until all its calls have arrived; one that
        it called does not wait.
        """
        frame = self._frame
        frame.check("ctx.graph")
        if not frame.prefix:
            frame.wait("ctx.graph", Awaited, frame.id)
        return ContextGraph(frame.state.driver.graph(frame.id))
