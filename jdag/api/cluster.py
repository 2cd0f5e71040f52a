"""A cluster: its workers, the leaves that they keep, and contexts over them.

A driver runs it all (`jdag.api.drivers`).
"""

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

    Made by `jdag.simulate`, for the main program. The programs that `run` runs on
    workers are handed one of their own, over the same workers and leaves.
    """

    def __init__(self, state: ClusterState, port: Port) -> None:
        self._state = state
        self._port = port
        self._numbers = state.numbers(port.worker)
        self._assignments = Assignments(state, port)
        self._open: dict[int, Context] = {}
        state.began(port, self)

    def __repr__(self) -> str:
        on = "" if self._is_main else f", on {self.here!r}"
        closed = ", closed" if self._state.closed else ""
        return f"Cluster({', '.join(map(repr, self.workers))}{on}{closed})"

    @property
    def _is_main(self) -> bool:
        return self._port is self._state.driver.port

    def _check(self, what: str) -> None:
        """Raise ContextError unless this program may do that here and now."""
        self._state.check_open(what)
        self._state.check_current(f"{what} on {self!r}", self._port)

    # ---------------------------------------------------------------- what it is

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all workers."""
        return self._state.workers

    @property
    def here(self) -> str:
        """The name of the worker on which the program runs whose cluster this is."""
        return named(self._port.worker)

    @property
    def now_ns(self) -> int:
        """The time since the cluster was made, in nanoseconds: here virtual."""
        return self._state.driver.now_ns

    @property
    def trace(self) -> Any:
        """The record of the run in order, with its `digest`: `jdag.runtime.trace`."""
        return self._state.driver.trace

    @property
    def driver(self) -> Any:
        """What runs it, with its own settings and counts."""
        return self._state.driver

    @property
    def state(self) -> ClusterState:
        """What all programs of the cluster share in this process."""
        return self._state

    def info(self) -> Mapping[str, Mapping[str, Any]]:
        """Return for each worker what it holds and what it has sent so far.

        It waits for nothing: what is on its way to a worker is not held there yet.
        Among others `live_contexts`, `live_passes`, `values_held`, `bytes_held`,
        `bytes_peak`, `messages_sent`, `bytes_sent` (with headers and resends).
        """
        return self._state.driver.info()

    # ---------------------------------------------------------------- its life

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
        if self._state.process != os.getpid():
            return
        self._state.check_current(f"closing {self!r}", self._port)
        if not self._is_main:
            raise ContextError(
                f"{self!r} cannot be closed by a program that cluster.run runs; the "
                "main program closes it"
            )
        self._state.driver.close()
        self._state.closed = True

    def context(self) -> Context:
        """Return a new context, to be entered by `with`; several may be open at once.

        Of each leaf a context reads one version: the newest when it first reads it,
        whatever other programs make of it meanwhile. After an update by this program
        it reads that, or what others have made of it since.

        Raises:
            ContextError: the cluster is closed, or another program's, or this is inside
                of jit or its kin; or the programs of this worker have made 2^48 - 1
                contexts, which is all the numbers that there are.
        """
        self._check("a context")
        return Context(self._frame(), self)

    def _frame(self) -> ProgramFrame:
        who = "the main program" if self._is_main else f"a program on {self.here!r}"
        return ProgramFrame(self._state, self._port, self._next_id(), (), who)

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
        """Return the id of a context that is entered: another if some were made since.

        Numbers are given out in the order of entering: a release says of all lower ones
        that are not open that they are over.
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

    # ---------------------------------------------------------------- programs at once

    def run(self, programs: Mapping[str, Callable[["Cluster"], Any]]) -> dict[str, Any]:
        """Run a program on each of several workers, all at the same time.

        Each is called with a `Cluster` of its own, whose `here` is its worker: it opens
        contexts, makes leaves and updates them from there, as the main program does
        from home. It begins when all that the main program assigned before has arrived,
        and has ended when all that it assigned itself has; contexts that it left open
        are left then. Refs of leaves may be used by all of them, and by closures.

        Programs update one leaf in the order in which their requests reach its owner,
        in virtual time that of the seed: each update starts from the one before it, and
        none is lost. See `context` for what a context reads.

        Args:
            programs: for each worker, home included, a function or method, or a
                `functools.partial` of one, that takes a Cluster.

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
                `programs`, when all others have ended; the rest are in its notes.
        """
        self._check("cluster.run")
        if not self._is_main:
            raise ContextError(
                f"cluster.run in a program on {self.here!r} that cluster.run runs: "
                "only the main program runs programs at once; in a context, ctx.call "
                "runs what jdag.program marks"
            )
        launches = [self._launch(*item) for item in _items(programs)]
        site = str(call_site())
        activation = self._frame()
        with Context(activation, self):
            ended = activation.launch(launches, site)
            _raise_first(launches, ended)
            return {
                worker: activation.returned(one)
                for worker, one in zip(programs, ended, strict=True)
            }

    def _launch(self, worker: str, program: Any) -> Launch:
        """Return where to launch what, and with which arguments; or refuse it."""
        there, device = self._state.place(worker, "cluster.run")
        if device is not None:
            raise JdagError(f"cluster.run: programs run on workers, not on {worker!r}")
        if (why := self._port.lost(there)) is not None:
            said = f"no program can run on {there!r}: it is lost"
            raise WorkerLost(f"{said}: {why}" if why else said)
        fn: Any = program
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
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
        data = [_unbound(self._assignments, leaf) for leaf in leaves]
        (called, given), keywords = unflatten(treedef, data)
        return there, run_here, ((called, *given), keywords)

    # ---------------------------------------------------------------- leaves

    def put(self, worker: str, tree: Any) -> Any:
        """Put values on a worker as leaves, in which gradients accumulate.

        Args:
            worker: who keeps them, or on which device of whom: `ps0/cpu:1`.
            tree: a Python number, or a pytree of arrays; in abstract mode of arrays or
                `jax.ShapeDtypeStruct`s. Python numbers inside a pytree are constants:
                these and statics (str, bool, functions, what `jdag.static` wraps) stay
                as they are, as in a module, and the first number warns.

        Returns:
            The same pytree of refs. Floats and complex numbers are tracked.

        Raises:
            JdagError: there is no such worker, or a leaf is no array.
            WorkerLost: the worker is gone.
        """
        self._check("cluster.put")
        self._state.place(worker, "cluster.put")
        return self._assignments.put(worker, tree)

    def make(
        self, worker: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Make leaves on a worker by calling a function there.

        Args:
            worker: who runs it and keeps what it returns, or on which device.
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
        where = self._state.place(worker, "cluster.make")
        return self._assignments.make(*where, fn, args, kwargs)

    def update(self, fn: Callable[..., Any], refs: Any, /, *args: Any) -> Any:
        """Replace leaves by new versions, each computed by its owner.

        Leaf by leaf as `jax.tree.map(fn, refs, *args)`, by one message to each owner.
        The refs stay as they are and name the new versions from now on; a context that
        read the old ones keeps them.

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

    # ---------------------------------------------------------------- checkpoints

    def save(self, folder: Folder, /, **parts: Any) -> None:
        """Write a checkpoint, with the newest versions of leaves, read by one request.

        It replaces the former one in that folder, as a whole: whatever happens on the
        way, one of the two is there. Another save or load of it is waited for, up to
        30 s. By Orbax: `pip install 'jdag[checkpoint]'`.

        Args:
            folder: its own: new, empty, or that of a former checkpoint. Files of others
                that are beside a former checkpoint stay there.
            **parts: by any names: pytrees of leaves, arrays and Python numbers; or an
                `Optimizer`, of which its states are kept.

        Raises:
            JdagError: the folder holds something else, is in use or cannot be written;
                or something cannot be saved; or the cluster is abstract.
            RemoteError: a leaf's version could not be computed; it is named.
            WorkerLost: the owner of a leaf is gone; they are named.
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
                was saved: a leaf that is to get the value; or the name of a worker,
                where a new leaf is made of it; or an array or number like it, in the
                place of which it is returned. Or an `Optimizer` of the same leaves.

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
        stack.callback(state.ended, port)
        stack.push(cluster.leave_all)
        return fn(*args, cluster, **kwargs)


def _items(programs: Any) -> Sequence[tuple[Any, Any]]:
    if not isinstance(programs, Mapping) or not programs:
        raise JdagError(
            f"cluster.run takes a mapping from names of workers to programs, such as "
            f"{{'trainer0': train}}, with at least one; this is {programs!r}"
        )
    return list(programs.items())


def _unbound(assignments: Assignments, leaf: Any) -> Any:
    if not is_ref(leaf):
        return leaf
    assignments.admit(leaf)
    return leaf.data


def _raise_first(launches: Sequence[Launch], ended: Sequence[FrameEnd]) -> None:
    """Raise the first failure, with the others in its notes."""
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
