"""A cluster: its workers, the leaves that they keep, and contexts over them.

A driver runs it all; this module knows the virtual-time one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

from jdag.activation import Activation
from jdag.assignments import Assignments, Change
from jdag.checkpoint import Folder, load, save
from jdag.compute.pytrees import flatten, is_static
from jdag.context import Context, run_program
from jdag.engine.drawing import Drawing
from jdag.engine.vocabulary import ContextId, Failure, Returned, Spawn
from jdag.errors import ContextError, JdagError
from jdag.failures import exception_of
from jdag.home import Home, Port, PortReader
from jdag.ref import Ref, is_ref
from jdag.sim.simulation import Simulation

CONTEXTS_MAX = (1 << 48) - 1


class Driver(Protocol):
    """What runs a cluster."""

    @property
    def port(self) -> Port:
        """The port of the main program, which runs at home."""

    @property
    def now_ns(self) -> int:
        """The time."""

    @property
    def trace(self) -> Any:
        """The record of the run, None if none is kept."""

    def info(self) -> Mapping[str, Mapping[str, Any]]:
        """What each worker holds, and has sent."""

    def settle(self) -> None:
        """Let all happen that is to happen."""

    def graph(self, context: ContextId) -> Mapping[str, Drawing]:
        """The graph of a context: what each worker has of it."""

    def close(self) -> None:
        """Let go of everything."""


RunProgram = Callable[[Port, Spawn], Returned]


class Cluster:
    """Workers that keep leaves and compute; a context manager that closes it.

    Made by `jdag.simulate`.
    """

    def __init__(
        self, workers: Sequence[str], abstract: bool, drive: Callable[[RunProgram], Any]
    ) -> None:
        self._home = Home(workers, abstract)
        self._home.cluster = self
        self._driver: Driver = drive(partial(run_program, self._home))
        self._home.graph = self._driver.graph
        self._home.settle = self._driver.settle
        self._port = self._driver.port
        self._reader = PortReader(self._port)
        self._assignments = Assignments(self._home, self._port)
        self._contexts = 0

    def __repr__(self) -> str:
        closed = ", closed" if self._home.closed else ""
        return f"Cluster({', '.join(map(repr, self.workers))}{closed})"

    # ---------------------------------------------------------------- what it is

    @property
    def workers(self) -> tuple[str, ...]:
        """The names of all workers."""
        return self._home.workers

    @property
    def here(self) -> str:
        """The name of the worker on which the main program runs."""
        return self._port.worker

    @property
    def now_ns(self) -> int:
        """The time since the cluster was made, in nanoseconds: here virtual."""
        return self._driver.now_ns

    @property
    def trace(self) -> Any:
        """The ordered record of the run, with its `digest`; see `jdag.trace`."""
        return self._driver.trace

    @property
    def driver(self) -> Any:
        """What runs it, with its own settings and counts."""
        return self._driver

    @property
    def home(self) -> Home:
        """What all programs of the cluster share in this process."""
        return self._home

    @property
    def reader(self) -> PortReader:
        """Reads leaves for the main program."""
        return self._reader

    def info(self) -> Mapping[str, Mapping[str, Any]]:
        """Return for each worker what it holds and what it has sent so far.

        Among others `live_contexts`, `live_passes`, `values_held`, `bytes_held`,
        `bytes_peak`, `messages_sent`, `bytes_sent` (with headers and resends).
        """
        return self._driver.info()

    # ---------------------------------------------------------------- its life

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all that runs and let go of all values; closing twice is once."""
        self._driver.close()  # Which refuses where it is what runs.
        self._home.closed = True

    def context(self) -> Context:
        """Return a new context, to be entered by `with`; several may be open at once.

        Raises:
            ContextError: the cluster is closed, or this is inside of jit or its kin; or
                2^48 - 1 contexts were made, which is all the numbers that there are.
        """
        self._home.check_open("a context")
        id, who = self._next_id(), "the main program"
        return Context(Activation(self._home, self._port, id, (), who), self._newest)

    def _next_id(self) -> ContextId:
        if self._contexts == CONTEXTS_MAX:
            raise ContextError(
                f"{self._home} has had {CONTEXTS_MAX} contexts; there are no more "
                "numbers: make another cluster"
            )
        self._contexts += 1
        return ContextId(self.workers.index(self.here), self._contexts, 0)

    def _newest(self, id: ContextId) -> ContextId:
        """An id, or another in its place if contexts were made after it."""
        return id if id.counter == self._contexts else self._next_id()

    def check_readable(self, ref: Ref) -> None:
        """Raise ContextError where a leaf cannot be read any more."""
        self._home.check_open(f"a fetch of {ref!r}")
        self._assignments.admit(ref)

    def seen(self, failure: Failure) -> JdagError:
        """Return a failure as an exception; outside of contexts nobody counts them."""
        return exception_of(failure)

    # ---------------------------------------------------------------- leaves

    def put(self, worker: str, tree: Any) -> Any:
        """Put values on a worker as leaves, in which gradients accumulate.

        Args:
            worker: who keeps them, or on which device of whom: `ps0/cpu:1`.
            tree: a pytree of arrays and numbers; in abstract mode of arrays or
                `jax.ShapeDtypeStruct`s. Statics in it (str, bool, functions, what
                `jdag.static` wraps) stay as they are, as in a module.

        Returns:
            The same pytree of refs. Floats and complex numbers are tracked.

        Raises:
            JdagError: there is no such worker, or a leaf is no array.
            WorkerLost: the worker is gone.
        """
        self._home.check_open("cluster.put")
        self._home.place(worker, "cluster.put")
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
        self._home.check_open("cluster.make")
        where = self._home.place(worker, "cluster.make")
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
            JdagError: a ref is no leaf, or an argument is of another structure or on
                another worker; or the new value has another shape or dtype.
            RemoteError: the function cannot be traced with these arguments.
            WorkerLost: an owner is gone; then no leaf is replaced.
        """
        leaves, treedef = flatten(refs, is_ref)
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
        if all(is_ref(leaf) or is_static(leaf) for leaf in leaves):
            leaves, found = flatten(arg, is_ref)
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
        self._home.check_open("cluster.update")
        self._assignments.assign(changes)

    def drop(self, refs: Any) -> None:
        """Drop leaves: what they hold goes, as soon as no context reads it any more.

        Args:
            refs: a pytree of leaves.

        Raises:
            JdagError: a ref is no leaf.
            ContextError: a leaf was dropped before.
        """
        self._home.check_open("cluster.drop")
        self._assignments.drop(refs)

    # ---------------------------------------------------------------- checkpoints

    def save(self, folder: Folder, /, **parts: Any) -> None:
        """Write a checkpoint, with the newest versions of leaves, read by one request.

        It replaces the former one in that folder, as a whole: whatever happens on the
        way, one of the two is there. By Orbax: `pip install 'jdag[checkpoint]'`.

        Args:
            folder: its own: new, empty, or that of a former checkpoint.
            **parts: by any names: pytrees of leaves, arrays and Python numbers; or an
                `Optimizer`, of which its states are kept.

        Raises:
            JdagError: the folder holds something else or cannot be written; or there is
                something that cannot be saved; or the cluster is abstract.
            RemoteError: a leaf's version could not be computed; it is named.
            WorkerLost: the owner of a leaf is gone; they are named.
        """
        save(self._assignments, self._reader, folder, parts)

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
            JdagError: there is no checkpoint; or its structure, or a shape or a dtype
                is another: the path, what is found and what is wanted are named.
            WorkerLost: the owner of a leaf is gone.
        """
        return load(self._assignments, folder, parts)


def simulate(
    workers: Sequence[str],
    *,
    seed: int,
    home: str | None = None,
    values: str = "real",
    **settings: Any,
) -> Cluster:
    """Make a cluster in virtual time, in this process; a context manager.

    The same program with the same settings and seed does the same, event by event.

    Args:
        workers: their names, all different; their order numbers them.
        seed: the one source of chance: of jitter, faults, and schedules.
        home: the worker where the main program runs; the first if None.
        values: "real", where JAX computes, or "abstract", where only shapes are known
            and a thousand workers fit on a laptop.
        **settings: `network`, `faults`, `devices`, `policy`, `link`, `detect_ns`,
            `events_max`, `trace`; see `jdag.sim.simulation.Simulation`. Without a
            network messages take no time, without devices computing takes none.

    Raises:
        ScenarioError: names a setting that is unusable, its value and what is allowed.
    """
    names = tuple(workers) if not isinstance(workers, str) else workers
    first = names[0] if names else ""

    def drive(run_program: RunProgram) -> Simulation:
        return Simulation(
            names,
            seed=seed,
            home=first if home is None else home,
            values=values,
            run_program=run_program,
            **settings,
        )

    return Cluster(names, values == "abstract", drive)
