"""The user's interface to a cluster: workers, leaves, contexts, programs, objects."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from itertools import chain
from typing import Any, NoReturn

from jdag.api import collectives
from jdag.api.program_launch import program_launch
from jdag.compute.refs import rebuild_objects
from jdag.context import hosted
from jdag.context.cluster_state import ClusterState
from jdag.context.context import Context
from jdag.context.hosted import Hosted
from jdag.context.leaves import Assignments, Change, leafwise_changes
from jdag.context.program_frame import ProgramFrame
from jdag.context.tasks import collected
from jdag.engine.functions import name_of, program, remote
from jdag.engine.protocol import ContextId, named
from jdag.errors import ContextError, JdagError, repr_of
from jdag.runtime.worker_runtime import ProgramPort
from jdag.training import recovery
from jdag.training.checkpoint import FilePath, load_checkpoint, save

CONTEXTS_MAX = (1 << 48) - 1


class Cluster:
    """A cluster of workers, which store leaves and compute; a context manager.

    `jdag.simulate`, `jdag.launch` and `jdag.connect` make the main program's cluster.
    Each program of `run` receives its own `Cluster` with the same workers, leaves and
    `state`.
    """

    def __init__(self, state: ClusterState, port: ProgramPort, ctx: Any = None) -> None:
        self.state = state
        self._port = port
        self._context = ctx  # The context of a program of `run`; None: this is main's.
        self._numbers = state.numbers(port.worker)
        self._assignments = Assignments(state, port)
        self._open: dict[int, Context] = {}  # By context id, in the order of entering.
        # By worker: frames of contexts that only call hosted objects.
        self._object_frames: dict[str, list[ProgramFrame]] = {}
        state.clusters[port] = self

    all_reduce = collectives.all_reduce
    all_gather = collectives.all_gather
    reduce_scatter = collectives.reduce_scatter
    all_to_all = collectives.all_to_all
    broadcast = collectives.broadcast
    barrier = collectives.barrier

    replicate_leaves = recovery.replicate_leaves
    recover = recovery.recover

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # `copy.copy`, `copy.deepcopy` and `pickle` call this.
        raise JdagError(f"{self!r} cannot be copied; pass the cluster itself")

    def __repr__(self) -> str:
        location = "" if self._is_main else f", on {self.here!r}"
        closed = ", closed" if self.state.closed else ""
        return f"Cluster({', '.join(map(repr, self.workers))}{location}{closed})"

    @property
    def _is_main(self) -> bool:
        return self._port is self.state.driver.port

    def _check(self, what: str) -> None:
        """Raise unless this program may use the cluster. Drop unreferenced leaves."""
        state = self.state
        if state.is_unusable():
            state.check_open(what)
        if state.driver.current is not self._port:
            state.check_current(what, self._port, self)
        self._assignments.forget()

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all workers."""
        return self.state.workers

    @property
    def here(self) -> str:
        """The name of the worker that runs this cluster's program."""
        return named(self._port.worker)

    @property
    def now_ns(self) -> int:
        """Nanoseconds since the cluster was made. A simulation has virtual time."""
        return self.state.driver.now_ns

    @property
    def trace(self) -> Any:
        """The recorded events, and their `digest`. See `jdag.runtime.trace`."""
        return self.state.driver.trace

    @property
    def driver(self) -> Any:
        """The driver, with its settings and counters."""
        return self.state.driver

    def info(self) -> Mapping[str, Mapping[str, Any]]:
        """Return the current counters of each worker, without waiting.

        They include `live_contexts`, `values_held`, `bytes_held`, `bytes_peak`,
        `messages_sent`, and `waits_for`: the schedule's action that the worker awaits.
        """
        return self.state.driver.info()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self._object_frames.clear()  # Do not wait for running calls of objects.
        try:
            self.close()
        except JdagError:
            if error is None:  # Otherwise the first exception propagates.
                raise

    def close(self) -> None:
        """Stop all programs and jobs, and free all values. May be called again.

        In a process that was forked after the cluster was made, this does nothing.

        Raises:
            ContextError: this is not the main program's cluster.
        """
        if self.state.process != os.getpid():
            return
        self.state.check_current("closing it", self._port, self)
        if not self._is_main:
            raise ContextError(
                f"{self!r} cannot be closed by a program that cluster.run runs; the "
                "main program closes it"
            )
        with ExitStack() as stack:
            stack.callback(setattr, self.state, "closed", True)
            stack.callback(self.state.close or self.state.driver.close)
            for frame in chain(*self._object_frames.values()):
                stack.push(self._open[frame.id.id])
            self._object_frames.clear()

    def context(self) -> Context:
        """Return a new context, to enter by `with`. Several contexts may be open.

        A context uses one version of each leaf: the newest at its first read of the
        leaf. Later updates by other programs do not change that. After an update by
        this program, the context reads that version or a newer one.

        Raises:
            ContextError: the cluster is closed or belongs to another program; the call
                is inside of a JAX transformation; or programs of this worker have
                already opened the maximum of 2^48 - 1 contexts.
        """
        self._check("a context")
        return Context(self._frame(), self)

    def _frame(self) -> ProgramFrame:
        name = "the main program" if self._is_main else f"a program on {self.here!r}"
        return ProgramFrame(self.state, self._port, self._next_id(), (), name)

    def _next_id(self) -> ContextId:
        numbers = self._numbers
        if numbers.contexts == CONTEXTS_MAX:
            raise ContextError(
                f"programs on {self.here!r} have already opened {CONTEXTS_MAX} contexts"
                ", the maximum of a cluster; make another cluster"
            )
        numbers.contexts += 1
        return ContextId(numbers.index, numbers.contexts, numbers.incarnation)

    def context_entered(self, context: Context, id: ContextId) -> ContextId:
        """Register an open context; return `id`, or a new id if `id` is not the newest.

        Ids increase in the order of entering: a release ends lower, closed contexts.
        """
        if id.counter != self._numbers.contexts:
            id = self._next_id()
        self._open[id.id] = context
        return id

    def context_left(self, context: Context) -> None:
        """Unregister a context that is not open any more."""
        del self._open[context.id]
        self._assignments.forget()

    def object_frame(self, worker: str, *, is_new: bool = False) -> ProgramFrame:
        """Return the frame that calls objects on a worker; its context has no others.

        With `is_new`, open a new frame: the loss of another worker has ended the
        context of the last one.
        """
        frames = self._object_frames.setdefault(worker, [])
        if is_new or not frames:
            frames.append(frame := self._frame())
            frame.serves = True
            Context(frame, self).__enter__()
        return frames[-1]

    def leave_all(self, *error: Any) -> None:
        """Leave all open contexts as `with` does, the last entered context first."""
        stack = ExitStack()
        for context in self._open.values():
            stack.push(context)
        stack.__exit__(*error)

    def run(self, programs: Mapping[str, Callable[["Cluster"], Any]]) -> dict[str, Any]:
        """Run a program on each of several workers, all at the same time.

        Each program is called with its own `Cluster`, whose `here` is its worker: it
        opens contexts and makes leaves there. It starts after all earlier assignments
        of the main program have arrived. It ends after its own assignments have
        arrived, and its open contexts are left then. Programs may share refs of leaves,
        even in closures. Updates of one leaf happen in the order in which requests
        reach its owner (in a simulation the seed decides), and no update is lost.

        Args:
            programs: by worker, which may be the main program's: a function or method,
                or a `functools.partial` of one, that takes a Cluster. An `Optimizer`
                among the arguments steps the same leaves and states in each program.

        Returns:
            The result of each program, by worker, in the order of `programs`: a pytree
            of arrays, numbers, strings and refs of leaves.

        Raises:
            JdagError: `programs` is empty, a worker is unknown, or a program cannot be
                called. In these cases no program has run.
            WorkerLost: a worker is lost.
            ContextError: this is not the main program's cluster.
            RemoteError: a program raised an exception; errors of jdag keep their class.
                The first error in the order of `programs` is raised, CollectiveErrors
                last, with the other errors as its notes.
        """
        self._check("cluster.run")
        if not self._is_main:
            raise ContextError(
                f"cluster.run in a program on {self.here!r} that cluster.run runs: "
                "only the main program may call it; inside of a context, ctx.call "
                "calls a program marked by jdag.program"
            )
        if not isinstance(programs, Mapping) or not programs:
            raise JdagError(
                "cluster.run takes a mapping from names of workers to programs, such "
                f"as {{'trainer0': train}}, with at least one, not {programs!r}"
            )
        frame = self._frame()
        launches = [program_launch(frame, *item, run_here) for item in programs.items()]
        log = self._assignments.recovery
        changing = nullcontext() if log is None else log.running()
        with changing, Context(frame, self) as ctx:
            tasks = [frame.launch(*launch) for launch in launches]
            coordinator = collectives.Coordinator(ctx, tuple(programs))
            frame.join(tasks, answer=coordinator.answer)
            return dict(zip(programs, collected(tasks), strict=True))

    def put(self, worker: str, tree: Any, *, tracked: bool = True) -> Any:
        """Put values on a worker as leaves, in which gradients accumulate.

        Args:
            worker: a worker, or a device of one, such as `ps0/cpu:1`.
            tree: a Python number, or a pytree of arrays; in abstract mode of arrays or
                `jax.ShapeDtypeStruct`s. Statics (str, bool, functions, `jdag.static`)
                and Python numbers inside a pytree, which warn, are returned unchanged.
            tracked: False for state without gradients, such as running statistics:
                differentiation then treats its floats as constants.

        Returns:
            The same pytree of refs. Floats and complex numbers are tracked.

        Raises:
            JdagError: the worker is unknown, or a leaf of the pytree is not an array.
            WorkerLost: the worker is lost.
        """
        self._check("cluster.put")
        self.state.place(worker, "cluster.put")
        return self._assignments.put(worker, tree, tracked)

    def make(
        self, worker: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Make leaves on a worker by calling a function there.

        Args:
            worker: a worker, or a device of one, that runs `fn` and stores its results.
            fn: a pure function that returns a pytree of arrays.
            *args: as for `ctx.call`, but refs must be on that worker.
            **kwargs: keyword arguments, as `args`.

        Returns:
            A pytree of refs in the structure of the function's result.

        Raises:
            RemoteError: the function cannot be traced with these arguments.
            JdagError: the worker is unknown, or a ref is on another worker.
        """
        self._check("cluster.make")
        place = self.state.place(worker, "cluster.make")
        return self._assignments.make(*place, fn, args, kwargs)

    def copy(self, refs: Any, *, tracked: bool = True) -> Any:
        """Copy leaves on their workers, for example for a target network or an average.

            average = cluster.copy(params, tracked=False)
            cluster.update(lambda old, new: 0.99 * old + 0.01 * new, average, params)

        Args:
            refs: a pytree of leaves; a leaf that occurs twice is copied once.
            tracked: False for copies without gradients; otherwise copies of tracked
                leaves are tracked.

        Returns:
            The same pytree of refs to new leaves, which have the newest values.

        Raises:
            JdagError, WorkerLost: `refs` has a non-leaf, or a leaf's worker is lost.
        """
        self._check("cluster.copy")
        return self._assignments.copy(refs, tracked)

    def keep(self, refs: Any) -> Any:
        """Keep values of an open context for later contexts, without fetching them.

        Each value stays on its worker as an untracked leaf, until its last ref is
        deleted or until `drop`; if a program of `run` returns the ref, until `drop`.

        Args:
            refs: a pytree of refs, such as the hidden state of a recurrent network.

        Returns:
            The same pytree of untracked refs, which any context may use.

        Raises:
            ContextError: the context of a ref is not open, or is another program's.
            JdagError, WorkerLost: `refs` has a non-ref, or a value's worker is lost.
        """
        self._check("cluster.keep")
        return self._assignments.keep(refs)

    def update(self, fn: Callable[..., Any], refs: Any, /, *args: Any) -> Any:
        """Replace leaves by new versions, each computed by its owner.

        Computes `jax.tree.map(fn, refs, *args)`, with one message to each owner. The
        refs name the new versions from now on; a context that has read a leaf keeps
        the version that it read.

        Args:
            fn: a pure function of a leaf, then one value of each of `args`; returns the
                new value, of the leaf's shape and dtype.
            refs: a pytree of leaves.
            *args: each a pytree of refs in the structure of `refs`, each on the worker
                of its leaf; or a constant, which is passed to all calls.

        Returns:
            `refs`.

        Raises:
            JdagError: a ref is not a leaf or occurs twice; an argument has another
                structure or is on another worker; or a new value has another shape or
                dtype.
            RemoteError: the function cannot be traced with these arguments.
            WorkerLost: an owner is lost; no leaf is replaced.
        """
        self.assign(leafwise_changes(fn, refs, args))
        return refs

    def assign(self, changes: Sequence[Change]) -> None:
        """Apply all of these changes of leaves, or none. Raises as `update` does."""
        self._check("cluster.update")
        self._assignments.assign(changes)
        self._reassigned()

    def _reassigned(self) -> None:
        for context in self._open.values():
            context._frame.copies.clear()

    def host(
        self, worker: str, factory: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Hosted:
        """Make a Python object on a worker, such as a simulated environment.

        The object is not part of a graph. It exists until `drop` or `close`.

        Args:
            worker: the name of a worker.
            factory: a class or function, which is sent by its name, as programs are.
            *args: as for a program.
            **kwargs: keyword arguments, as `args`.

        Returns:
            A handle, which all programs may use.

        Raises:
            RemoteError: the factory raised an exception.
            JdagError: the worker is unknown, or an argument cannot be sent.
            WorkerLost: the worker is lost.
        """
        self._check("cluster.host")
        owner, device = self.state.place(worker, "cluster.host")
        if device is not None or not callable(factory):
            raise JdagError(
                "cluster.host takes a worker, then a class or function that makes the "
                f"object, not {worker!r} and {repr_of(factory)}"
            )
        make, name = hosted.make, f"cluster.host of {name_of(factory)}"
        task = hosted.launched(self.state, make, name, owner, factory, *args, **kwargs)
        handle: Hosted = task.result()
        if (log := self._assignments.recovery) is not None:
            log.host(handle, worker, factory, args, kwargs)
        return handle

    def drop(self, refs: Any) -> None:
        """Drop leaves once no context reads them, and objects after calls made before.

        Args:
            refs: a pytree of leaves and handles of objects.

        Raises:
            JdagError: a pytree leaf of `refs` is neither a leaf nor a handle.
            ContextError: a leaf or object was dropped before.
            WorkerLost: the worker of an object is lost.
        """
        self._check("cluster.drop")
        rest = hosted.rest_of(self.state, refs)
        self._assignments.drop(rest)
        if rest is refs:
            return  # No object was dropped.
        for frames in self._object_frames.values():
            for frame in [frame for frame in frames if not frame.tasks]:
                frames.remove(frame)
                self._open[frame.id.id].__exit__(None, None, None)

    def save(self, path: FilePath, /, **parts: Any) -> None:
        """Write a checkpoint: a safetensors file with the current versions of leaves.

        An existing checkpoint is replaced entirely or not at all. One leaf is fetched
        at a time. Needs `pip install 'jdag[safetensors]'`.

        Args:
            path: the path of the file. A missing suffix `.safetensors` is added, and
                `~` is the home folder.
            **parts: pytrees of leaves, arrays and Python numbers, under any names; or
                an `Optimizer`, whose states are saved.

        Raises:
            JdagError: the file cannot be written, a value cannot be saved, or the
                cluster is abstract.
            RemoteError: a version could not be computed; the error names its leaf.
            WorkerLost: the owner of a leaf is lost; the error names both.
        """
        self._check("cluster.save")
        save(self._assignments, path, parts)

    def load(self, path: FilePath, /, **parts: Any) -> dict[str, Any]:
        """Restore values that `save` has written; leaves may be on any workers.

        Leaves get new versions, as by `update`. If this raises an error, no leaf gets a
        new version. Parts of the checkpoint without an argument here are ignored.

        Args:
            path: as for `save`.
            **parts: pytrees under the names and in the structures in which they were
                saved. Each pytree leaf is a leaf to assign to, the name of a worker
                where a new leaf is made, or an array or number in whose place the
                saved value is returned. Or an `Optimizer` of the same leaves.

        Returns:
            `{name: part}`, with refs to new leaves in place of names of workers, and
            saved values in place of arrays and numbers.

        Raises:
            JdagError: there is no checkpoint, it is damaged, or its structure, a shape
                or a dtype differs; the error names the saved and the expected one.
            WorkerLost: the owner of a leaf is lost.
        """
        self._check("cluster.load")
        loaded = load_checkpoint(self._assignments, path, parts)
        self._reassigned()
        return loaded


@remote
@program
def run_here(ctx: Context, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    state = ctx.state
    port = state.driver.current
    ctx._frame.program = name_of(fn)
    cluster = Cluster(state, port, ctx)
    with ExitStack() as stack:
        stack.callback(state.clusters.pop, port)
        stack.callback(cluster._assignments.forget)
        stack.push(cluster.leave_all)
        args, kwargs = rebuild_objects((args, kwargs))
        return fn(*args, cluster, **kwargs)
