"""A cluster: its workers, the leaves that they keep, and contexts over them."""

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

from msgspec.structs import replace

from jdag.api.checkpoint import Folder, load, save
from jdag.api.cluster_state import ClusterState
from jdag.api.context import Context
from jdag.api.leaves import Assignments, Change
from jdag.api.program_frame import FrameEnd, ProgramFrame
from jdag.compute.pytrees import flatten, flatten_refs, is_constant, unflatten
from jdag.compute.refs import is_ref
from jdag.engine.functions import call_site, is_program, name_of, program, remote
from jdag.engine.protocol import ContextId, named
from jdag.errors import ContextError, JdagError, WorkerLost
from jdag.runtime.failures import exception_of
from jdag.runtime.host import Port

CONTEXTS_MAX = (1 << 48) - 1

Launch = tuple[str, Callable[..., Any], Any]  # Where, what, and its arguments.


class Cluster:
    """Workers that keep leaves and compute; a context manager that closes it.

    `jdag.simulate`, `launch` and `connect` make it for the main program. Each program
    that `run` runs is handed one of its own, over the same workers and leaves, with the
    same `state`.
    """

    def __init__(self, state: ClusterState, port: Port) -> None:
        self.state = state
        self._port = port
        self._numbers = state.numbers(port.worker)
        self._assignments = Assignments(state, port)
        self._open: dict[int, Context] = {}
        state.clusters[port] = self

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
        self.state.check_current(f"{what} on {self!r}", self._port)

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

        Among others `live_contexts`, `live_passes`, `values_held`, `bytes_held`,
        `bytes_peak`, `messages_sent`, `bytes_sent` (with headers and resends).
        """
        return self.state.driver.info()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
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
        self.state.check_current(f"closing {self!r}", self._port)
        if not self._is_main:
            raise ContextError(
                f"{self!r} cannot be closed by a program that cluster.run runs; the "
                "main program closes it"
            )
        self.state.driver.close()
        self.state.closed = True

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

    def left(self, context: Context) -> None:
        """Note that a context is not open any more."""
        del self._open[context.id]

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
                method, or a `functools.partial` of one, that takes a Cluster.

        Returns:
            What each program returned, by worker, in the order of `programs`: a pytree
            of arrays, numbers, strings and refs of leaves.

        Raises:
            JdagError: there are no programs, or no such worker, or one of the programs
                cannot be called. Nothing has run then.
            WorkerLost: a worker is gone, or went meanwhile.
            ContextError: this is not the main program's cluster.
            RemoteError: a program raised: which, on which worker, with its traceback;
                an error of jdag keeps its class. Of several the first in the order of
                `programs`, when all have ended; the rest are in its notes.
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
        launches = [self._launch(*item) for item in programs.items()]
        site = str(call_site())
        frame = self._frame()
        with Context(frame, self):
            ended = frame.launch(launches, site)
            _raise_first(launches, ended)
            returned = [frame.returned(one) for one in ended]
            return dict(zip(programs, returned, strict=True))

    def _launch(self, worker: str, program: Any) -> Launch:
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
        leaves, treedef = flatten(
            ((fn, args), kwargs), what=f"what {name_of(fn)} is given"
        )
        for leaf in leaves if there != self._port.worker else ():
            if why := getattr(type(leaf), "__jdag_stays__", ""):
                raise JdagError(f"cluster.run, {name_of(fn)} on {worker!r}: {why}")
        for leaf in filter(is_ref, leaves):
            self._assignments.admit(leaf)
        data = [leaf.data if is_ref(leaf) else leaf for leaf in leaves]
        (called, given), keywords = unflatten(treedef, data)
        return there, run_here, ((called, *given), keywords)

    def put(self, worker: str, tree: Any) -> Any:
        """Put values on a worker as leaves, in which gradients accumulate.

        Args:
            worker: where they are kept: a worker, or a device of one, `ps0/cpu:1`.
            tree: a Python number, or a pytree of arrays; in abstract mode of arrays or
                `jax.ShapeDtypeStruct`s. Python numbers inside a pytree are constants:
                they and statics (str, bool, functions, what `jdag.static` wraps) stay
                as they are, and the first number warns.

        Returns:
            The same pytree of refs. Floats and complex numbers are tracked.

        Raises:
            JdagError: there is no such worker, or a leaf is no array.
            WorkerLost: the worker is gone.
        """
        self._check("cluster.put")
        self.state.place(worker, "cluster.put")
        return self._assignments.put(worker, tree)

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
        columns = [
            self._column(arg, number, treedef) for number, arg in enumerate(args)
        ]
        rows = zip(leaves, *columns, strict=True)
        self.assign([Change(fn, [ref], (ref, *rest)) for ref, *rest in rows])
        return refs

    def _column(self, arg: Any, number: int, treedef: Any) -> Sequence[Any]:
        """Return an argument of `update` for each leaf, or the one for all."""
        leaves, found = flatten(arg)
        if not any(map(is_ref, leaves)):
            return [arg] * treedef.num_leaves
        if all(is_ref(leaf) or is_constant(leaf) for leaf in leaves):
            leaves, found = flatten_refs(arg, is_ref)
        if treedef != found:  # In this order: a treedef calls itself equal to a Form.
            raise JdagError(
                f"argument {number} of cluster.update has refs in it, so it has to "
                f"have the structure of the leaves, {treedef}; it is {found}"
            )
        return leaves

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
            context.reassigned()

    def drop(self, refs: Any) -> None:
        """Drop leaves: what they hold goes, as soon as no context reads it any more.

        Args:
            refs: a pytree of leaves.

        Raises:
            JdagError: a ref is no leaf.
            ContextError: a leaf was dropped before.
        """
        self._check("cluster.drop")
        self._assignments.drop(refs)

    def save(self, folder: Folder, /, **parts: Any) -> None:
        """Write a checkpoint, with the newest versions of leaves, read by one request.

        It replaces the former one in that folder, whole or not at all, and waits up to
        30 s for another save or load of it. By Orbax: `pip install 'jdag[checkpoint]'`.

        Args:
            folder: its own: new, empty, or that of a former checkpoint. Files of others
                that are beside a former checkpoint stay there.
            **parts: by any names: pytrees of leaves, arrays and Python numbers; or an
                `Optimizer`, of which its states are kept.

        Raises:
            JdagError: the folder holds something else, is in use or cannot be written;
                or something cannot be saved; or the cluster is abstract.
            RemoteError: a leaf's version could not be computed; names the leaf.
            WorkerLost: the owner of a leaf is gone; names both.
        """
        self._check("cluster.save")
        save(self._assignments, folder, parts)

    def load(self, folder: Folder, /, **parts: Any) -> dict[str, Any]:
        """Restore what `save` has written, on this or any other placement.

        Leaves get their next versions, as by `update`: all of them, or none where
        something is raised. Parts of the checkpoint that are not named stay there.

        Args:
            folder: as for `save`.
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
        loaded = load(self._assignments, folder, parts)
        self._reassigned()
        return loaded


@remote
@program
def run_here(ctx: Context, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `fn` with a cluster of its own, on this worker; see `Cluster.run`."""
    state = ctx.state
    port = state.driver.current
    cluster = Cluster(state, port)
    with ExitStack() as stack:
        stack.callback(state.clusters.pop, port)
        stack.push(cluster.leave_all)
        return fn(*args, cluster, **kwargs)


def _raise_first(launches: Sequence[Launch], ended: Sequence[FrameEnd]) -> None:
    failures = []
    for (worker, _, ((fn, *_), _)), one in zip(launches, ended, strict=True):
        if one.failure is not None:
            name = one.failure.function and name_of(fn)  # A loss is of no function.
            failures.append((worker, replace(one.failure, function=name)))
    if failures:
        error = exception_of(failures[0][1])
        for worker, failure in failures[1:]:
            error.add_note(f"so did the program on {worker!r}: {exception_of(failure)}")
        raise error
