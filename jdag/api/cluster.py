"""A cluster: its workers, the leaves that they keep, and contexts over them."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from functools import partial
from itertools import chain
from typing import Any, NoReturn

from jdag.api.collectives import Collectives, Coordinator
from jdag.compute.pytrees import flatten, flatten_refs, unflatten
from jdag.compute.refs import is_ref, taken
from jdag.context import hosted
from jdag.context.cluster_state import ClusterState
from jdag.context.context import Context
from jdag.context.hosted import Hosted
from jdag.context.leaves import Assignments, Change, Copying, column
from jdag.context.program_frame import ProgramFrame
from jdag.context.tasks import collected
from jdag.engine.functions import call_site, is_program, name_of, program, remote
from jdag.engine.protocol import ContextId, named
from jdag.errors import ContextError, JdagError, WorkerLost, repr_of
from jdag.runtime.worker_runtime import ProgramPort
from jdag.training.checkpoint import FilePath, load_checkpoint, save
from jdag.training.recovery import Recoverable

CONTEXTS_MAX = (1 << 48) - 1


class Cluster(Collectives, Copying, Recoverable):
    """Workers that keep leaves and compute; a context manager that closes it.

    `jdag.simulate`, `launch` and `connect` make it for the main program. Each program
    that `run` runs is handed one of its own, over the same workers and leaves, with the
    same `state`.
    """

    def __init__(self, state: ClusterState, port: ProgramPort, ctx: Any = None) -> None:
        self.state = state
        self._port = port
        self._context = ctx  # In which `run` runs its program.
        self._numbers = state.numbers(port.worker)
        self._assignments = Assignments(state, port)
        self._open: dict[int, Context] = {}
        self._callers: dict[str, list[ProgramFrame]] = {}  # Of objects, by worker.
        state.clusters[port] = self

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        # What `copy.copy`, `copy.deepcopy` and `pickle` ask for.
        raise JdagError(f"{self!r} cannot be copied: a cluster is there once")

    def __repr__(self) -> str:
        on = "" if self._is_main else f", on {self.here!r}"
        closed = ", closed" if self.state.closed else ""
        return f"Cluster({', '.join(map(repr, self.workers))}{on}{closed})"

    @property
    def _is_main(self) -> bool:
        return self._port is self.state.driver.port

    def _check(self, what: str) -> None:
        """Raise ContextError unless this program may do that here and now."""
        self.state.check_open(what)
        self.state.check_current(what, self._port, self)
        self._assignments.forget()

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all workers."""
        return self.state.workers

    @property
    def here(self) -> str:
        """The name of the worker on which the program runs whose cluster this is."""
        return named(self._port.worker)

    @property
    def now_ns(self) -> int:
        """The time since the cluster was made, in nanoseconds: here virtual."""
        return self.state.driver.now_ns

    @property
    def trace(self) -> Any:
        """The record of the run in order, with its `digest`: `jdag.runtime.trace`."""
        return self.state.driver.trace

    @property
    def driver(self) -> Any:
        """What runs it, with its own settings and counts."""
        return self.state.driver

    def info(self) -> Mapping[str, Mapping[str, Any]]:
        """Return for each worker what it holds and has sent so far, without waiting.

        Among others `live_contexts`, `values_held`, `bytes_held`, `bytes_peak`,
        `messages_sent`, and `waits_for`, the action for which a schedule's list waits.
        """
        return self.state.driver.info()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self._callers.clear()  # What still runs is not waited for.
        try:
            self.close()
        except JdagError:
            if error is None:  # Else that came first.
                raise

    def close(self) -> None:
        """End all that runs and let go of all values; closing twice is once.

        In a process that was forked from the one that made the cluster it does nothing.

        Raises:
            ContextError: this is not the main program's.
        """
        if self.state.process != os.getpid():
            return
        self.state.check_current("closing it", self._port, self)
        if not self._is_main:
            raise ContextError(
                f"{self!r} cannot be closed by a program that cluster.run runs; the "
                "main program closes it"
            )
        with ExitStack() as leaving:
            leaving.callback(setattr, self.state, "closed", True)
            leaving.callback(self.state.close or self.state.driver.close)
            for frame in chain(*self._callers.values()):
                leaving.push(self._open[frame.id.id])
            self._callers.clear()

    def context(self) -> Context:
        """Return a new context, to be entered by `with`; several may be open at once.

        A context reads one version of each leaf: the newest when it first reads it,
        whatever other programs assign meanwhile. After an update by this program it
        reads that version or a newer one.

        Raises:
            ContextError: the cluster is closed, or another program's, or this is inside
                of jit or its kin; or the programs of this worker have made 2^48 - 1
                contexts, the largest number.
        """
        self._check("a context")
        return Context(self._frame(), self)

    def _frame(self) -> ProgramFrame:
        who = "the main program" if self._is_main else f"a program on {self.here!r}"
        return ProgramFrame(self.state, self._port, self._next_id(), (), who)

    def _next_id(self) -> ContextId:
        numbers = self._numbers
        if numbers.contexts == CONTEXTS_MAX:
            raise ContextError(
                f"the programs on {self.here!r} have had {CONTEXTS_MAX} contexts; "
                "there are no more numbers: make another cluster"
            )
        numbers.contexts += 1
        return ContextId(numbers.index, numbers.contexts, numbers.incarnation)

    def entered(self, context: Context, id: ContextId) -> ContextId:
        """Return the id of an entered context: a new one if others were made since.

        Ids increase in the order of entering: a release ends all lower ones not open.
        """
        if id.counter != self._numbers.contexts:
            id = self._next_id()
        self._open[id.id] = context
        return id

    def caller(self, worker: str, *, anew: bool = False) -> ProgramFrame:
        """The top frame of calls of objects on a worker, in a context for these alone.

        A loss ends the contexts in which that worker took part: `anew` then.
        """
        frames = self._callers.setdefault(worker, [])
        if anew or not frames:
            frames.append(frame := self._frame())
            frame.serves = True
            Context(frame, self).__enter__()
        return frames[-1]

    def left(self, context: Context) -> None:
        """Note that a context is not open any more."""
        del self._open[context.id]
        self._assignments.forget()

    def leave_all(self, *error: Any) -> None:
        """Leave the contexts that are still open, the last first, as `with` does."""
        leaving = ExitStack()
        for context in self._open.values():
            leaving.push(context)
        leaving.__exit__(*error)

    def run(self, programs: Mapping[str, Callable[["Cluster"], Any]]) -> dict[str, Any]:
        """Run a program on each of several workers, all at the same time.

        Each is called with a `Cluster` of its own, whose `here` is its worker: it opens
        contexts, makes leaves and updates them from there. It begins when all that the
        main program assigned before has arrived, and has ended when its own assignments
        have; contexts that it left open are left then. Refs of leaves may be used by
        all of them, and by closures. Updates of one leaf are made in the order in which
        requests reach its owner, in virtual time that of the seed; none is lost.

        Args:
            programs: for each worker, the main program's included, a function or
                method, or a `functools.partial` of one, that takes a Cluster. Of an
                `Optimizer` among the arguments each gets its own, of the same states.

        Returns:
            What each program returned, by worker, in the order of `programs`: a pytree
            of arrays, numbers, strings and refs of leaves.

        Raises:
            JdagError: there are no programs, or no such worker, or one of the programs
                cannot be called. Nothing has run then.
            WorkerLost: a worker is gone, or went meanwhile.
            ContextError: this is not the main program's cluster.
            RemoteError: a program raised: which, on which worker, with its traceback;
                an error of jdag keeps its class. When all have ended, the first in the
                order of `programs`, CollectiveErrors last; the rest are in its notes.
        """
        self._check("cluster.run")
        if not self._is_main:
            raise ContextError(
                f"cluster.run in a program on {self.here!r} that cluster.run runs: "
                "only the main program runs programs at once; in a context, ctx.call "
                "runs what jdag.program marks"
            )
        if not isinstance(programs, Mapping) or not programs:
            raise JdagError(
                "cluster.run takes a mapping from names of workers to programs, such "
                f"as {{'trainer0': train}}, with at least one; this is {programs!r}"
            )
        frame = self._frame()
        launches = [self._launch(frame, *item) for item in programs.items()]
        recovery = self._assignments.recovery
        changing = nullcontext() if recovery is None else recovery.running()
        with changing, Context(frame, self) as ctx:
            tasks = [frame.launch(*launch) for launch in launches]
            frame.join(tasks, answer=Coordinator(ctx, tuple(programs)).answer)
            found = collected(tasks)
            return dict(zip(programs, found, strict=True))

    def _launch(self, frame: ProgramFrame, worker: str, program: Any) -> Any:
        there, device = self.state.place(worker, "cluster.run")
        if device is not None:
            raise JdagError(f"cluster.run: programs run on workers, not on {worker!r}")
        if (why := self._port.lost(there)) is not None:
            said = f"no program can run on {there!r}: it is lost"
            raise WorkerLost(f"{said}: {why}" if why else said)
        fn, args, kwargs = program, (), {}
        if isinstance(program, partial):
            fn, args, kwargs = program.func, program.args, program.keywords
        if not callable(fn) or not hasattr(fn, "__qualname__"):
            raise JdagError(
                f"cluster.run: what is to run on {worker!r} is {program!r}; it takes a "
                "function or method, or a functools.partial of one, that takes a "
                "Cluster"
            )
        if is_program(fn):
            raise JdagError(
                f"cluster.run: {name_of(fn)}, to run on {worker!r}, is marked by "
                "jdag.program, so it takes a context: ctx.call calls it. Here it takes "
                "a function of a Cluster"
            )
        name = f"what {name_of(fn)} is given"
        leaves, treedef = flatten(((fn, args), kwargs), what=name)
        given = [
            one.__jdag_handed__() if hasattr(one, "__jdag_handed__") else one
            for one in leaves
        ]
        (called, own), keywords = unflatten(treedef, given)
        what = f"cluster.run: what {name_of(fn)}"
        packed = frame.packed(what, there, ((called, *own), keywords))
        return there, run_here, *packed, name_of(fn), str(call_site())

    def put(self, worker: str, tree: Any, *, tracked: bool = True) -> Any:
        """Put values on a worker as leaves, in which gradients accumulate.

        Args:
            worker: where they are kept: a worker, or a device of one, `ps0/cpu:1`.
            tree: a Python number, or a pytree of arrays; in abstract mode of arrays or
                `jax.ShapeDtypeStruct`s. Python numbers inside a pytree are constants:
                they and statics (str, bool, functions, what `jdag.static` wraps) stay
                as they are, and the first number warns.
            tracked: False for state without gradients, such as running statistics:
                floats are then constants to what is differentiated.

        Returns:
            The same pytree of refs. Floats and complex numbers are tracked.

        Raises:
            JdagError: there is no such worker, or a leaf is no array.
            WorkerLost: the worker is gone.
        """
        self._check("cluster.put")
        self.state.place(worker, "cluster.put")
        return self._assignments.put(worker, tree, tracked)

    def make(
        self, worker: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Make leaves on a worker by calling a function there.

        Args:
            worker: where it runs and its results are kept: a worker or a device.
            fn: a pure function that returns a pytree of arrays.
            *args: as for `ctx.call`, but refs have to be on that worker.
            **kwargs: the same, by keyword.

        Returns:
            A pytree of refs shaped like what the function returns.

        Raises:
            RemoteError: the function cannot be traced with these arguments.
            JdagError: there is no such worker, or a ref is on another one.
        """
        self._check("cluster.make")
        where = self.state.place(worker, "cluster.make")
        return self._assignments.make(*where, fn, args, kwargs)

    def update(self, fn: Callable[..., Any], refs: Any, /, *args: Any) -> Any:
        """Replace leaves by new versions, each computed by its owner.

        Leaf by leaf as `jax.tree.map(fn, refs, *args)`, by one message to each owner.
        The refs name the new versions from now on; a context that read the old ones
        keeps them.

        Args:
            fn: a pure function of a leaf, then one value of each of `args`; returns the
                new value, of the leaf's shape and dtype.
            refs: a pytree of leaves.
            *args: each a pytree of refs in the structure of `refs`, each on the worker
                of its leaf; or a constant, which all calls are given.

        Returns:
            `refs`.

        Raises:
            JdagError: a ref is no leaf, or there twice, or an argument is of another
                structure or on another worker; or the new value has another shape or
                dtype.
            RemoteError: the function cannot be traced with these arguments.
            WorkerLost: an owner is gone; then no leaf is replaced.
        """
        leaves, treedef = flatten_refs(refs, is_ref)
        columns = [column(arg, number, treedef) for number, arg in enumerate(args)]
        rows = zip(leaves, *columns, strict=True)
        self.assign([Change(fn, [ref], (ref, *rest)) for ref, *rest in rows])
        return refs

    def assign(self, changes: Sequence[Change]) -> None:
        """Replace leaves, several at once: all by one message to each owner, or none.

        Raises:
            JdagError, RemoteError, WorkerLost: as `update` does.
        """
        self._check("cluster.update")
        self._assignments.assign(changes)
        self._reassigned()

    def _reassigned(self) -> None:
        for context in self._open.values():
            context._frame.copies.clear()

    def host(
        self, worker: str, factory: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Hosted:
        """Make a Python object on a worker, such as an environment; it is in no graph.

        It stays until it is dropped or the cluster is closed.

        Args:
            worker: where.
            factory: a class or function, which goes by name, as programs do.
            *args: as for a program.
            **kwargs: the same, by keyword.

        Returns:
            A handle, which all programs may use.

        Raises:
            RemoteError: the factory raised; has its traceback.
            WorkerLost: the worker is gone.
            JdagError: there is no such worker, or an argument cannot travel there.
        """
        self._check("cluster.host")
        there, device = self.state.place(worker, "cluster.host")
        if device is not None or not callable(factory):
            raise JdagError(
                "cluster.host takes a worker, then a class or function that makes the "
                f"object, and got {worker!r} and {repr_of(factory)}"
            )
        name = f"cluster.host of {name_of(factory)}"
        start = partial(hosted.launched, self.state, hosted.make, name, there)
        made: Hosted = start(factory, *args, **kwargs).result()
        if (recovery := self._assignments.recovery) is not None:
            recovery.host(made, worker, factory, args, kwargs)
        return made

    def drop(self, refs: Any) -> None:
        """Drop leaves, when no context reads them any more, and objects.

        Objects are dropped when calls that came before have ended.

        Args:
            refs: a pytree of leaves and handles of objects.

        Raises:
            JdagError: something is neither.
            ContextError: a leaf or object was dropped before.
            WorkerLost: the worker of an object is gone.
        """
        self._check("cluster.drop")
        rest = hosted.rest_of(self.state, refs)
        self._assignments.drop(rest)
        for frames in self._callers.values() if rest is not refs else ():
            for frame in [one for one in frames if not one.tasks]:
                frames.remove(frame)
                self._open[frame.id.id].__exit__(None, None, None)

    def save(self, path: FilePath, /, **parts: Any) -> None:
        """Write a checkpoint, a file of safetensors, which any reader of these opens.

        It has the versions that leaves have now, replaces a former checkpoint whole or
        not at all, and fetches one leaf at a time. `pip install 'jdag[safetensors]'`.

        Args:
            path: of the file; its suffix is `.safetensors`, which is added if it is
                missing. `~` is the home folder.
            **parts: by any names: pytrees of leaves, arrays and Python numbers; or an
                `Optimizer`, of which its states are kept.

        Raises:
            JdagError: the file cannot be written, or something cannot be saved; or the
                cluster is abstract.
            RemoteError: a leaf's version could not be computed; names the leaf.
            WorkerLost: the owner of a leaf is gone; names both.
        """
        self._check("cluster.save")
        save(self._assignments, path, parts)

    def load(self, path: FilePath, /, **parts: Any) -> dict[str, Any]:
        """Restore what `save` has written, on this or any other placement.

        Leaves get their next versions, as by `update`: all of them, or none where
        something is raised. Parts of the checkpoint that are not named stay there.

        Args:
            path: as for `save`.
            **parts: by the names that they were saved under, each in the structure that
                was saved, with leaves that are to get the values, names of workers
                where new leaves are made of them, or arrays and numbers like them, to
                be returned. Or an `Optimizer` of the same leaves.

        Returns:
            `{name: part}`: what was given, with new refs for the names of workers, and
            saved values in the place of arrays and numbers.

        Raises:
            JdagError: there is no checkpoint, or it is damaged; or its structure, or a
                shape or a dtype is another: what is found and wanted are named.
            WorkerLost: the owner of a leaf is gone.
        """
        self._check("cluster.load")
        loaded = load_checkpoint(self._assignments, path, parts)
        self._reassigned()
        return loaded


@remote
@program
def run_here(ctx: Context, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn` with a cluster of its own, on this worker; see `Cluster.run`."""
    state = ctx.state
    port = state.driver.current
    ctx._frame.program = name_of(fn)
    cluster = Cluster(state, port, ctx)
    with ExitStack() as stack:
        stack.callback(state.clusters.pop, port)
        stack.callback(cluster._assignments.forget)
        stack.push(cluster.leave_all)
        args, kwargs = taken((args, kwargs))
        return fn(*args, cluster, **kwargs)
