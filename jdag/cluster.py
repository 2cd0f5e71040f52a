"""A cluster: its workers, the leaves that they keep, and contexts over them.

Leaves are made, replaced and dropped here, outside of contexts, in one order for the
whole cluster: assignments are numbered as calls are. A driver runs it all; this module
knows the virtual-time one.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from jdag.activation import Activation, traced
from jdag.compute.avals import Aval, aval_of
from jdag.compute.pairs import Pair
from jdag.compute.pytrees import flatten, frozen, paths, split, unflatten
from jdag.context import Context, run_program
from jdag.engine.drawing import Drawing
from jdag.engine.vocabulary import (
    Assigned,
    ContextId,
    Dropped,
    Failure,
    Key,
    LeafId,
    Returned,
    Spawn,
)
from jdag.errors import ContextError, JdagError
from jdag.failures import exception_of
from jdag.functions import call_site, name_of
from jdag.home import Home, Port, PortReader
from jdag.ref import Leaf, Ref, is_ref
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
        self._contexts = 0
        self._leaves = 0
        self._assignments = 0

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
        self._home.closed = True
        self._driver.close()

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
        self._admit(ref)

    def seen(self, failure: Failure) -> JdagError:
        """Return a failure as an exception; outside of contexts nobody counts them."""
        return exception_of(failure)

    # ---------------------------------------------------------------- leaves

    def put(self, worker: str, tree: Any) -> Any:
        """Put values on a worker as leaves, in which gradients accumulate.

        Args:
            worker: who keeps them.
            tree: a pytree of arrays and numbers; in abstract mode of arrays or
                `jax.ShapeDtypeStruct`s.

        Returns:
            The same pytree of refs. Floats and complex numbers are tracked.

        Raises:
            JdagError: there is no such worker, or a leaf is no array.
            WorkerLost: the worker is gone.
        """
        self._home.check_open("cluster.put")
        self._home.check_worker(worker, "cluster.put")
        values, treedef = flatten(tree)
        arrays = [self._array(value, tree, place) for place, value in enumerate(values)]
        leaves = self._new_leaves(worker, [aval_of(array).strong for array in arrays])
        for leaf, array in zip(leaves, arrays, strict=True):
            self._port.put(leaf.key, array)
        try:
            self._assign(worker, None, (), leaves)
        except JdagError:
            self._port.drop([leaf.key for leaf in leaves])
            raise
        return unflatten(treedef, self._kept(leaves))

    def _array(self, value: Any, tree: Any, place: int) -> Any:
        """Return a value as an array of strong type, in abstract mode its aval."""
        where = paths(tree)[place] or "it"
        if is_ref(value):
            raise JdagError(
                f"cluster.put takes arrays, and {where} is a ref ({value!r}), already "
                "on a worker; ctx.move moves it"
            )
        if isinstance(value, jax.core.Tracer):
            raise ContextError(f"cluster.put takes arrays, and {where} is a tracer")
        if isinstance(value, jax.ShapeDtypeStruct) and not self._home.abstract:
            raise JdagError(
                f"cluster.put takes arrays, and {where} is a ShapeDtypeStruct, which "
                "stands for one only where values='abstract'"
            )
        aval = aval_of(frozen(value)).strong
        if self._home.abstract:
            return aval
        is_key = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
        return value if is_key else jnp.asarray(frozen(value), aval.dtype)

    def make(
        self, worker: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Make leaves on a worker by calling a function there.

        Args:
            worker: who runs it and keeps what it returns.
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
        self._home.check_worker(worker, "cluster.make")
        made, arguments, constants = self._traced(worker, fn, args, kwargs)
        leaves = self._new_leaves(worker, made.out_avals)
        self._assign(worker, made, arguments, leaves, constants)
        return unflatten(made.out_tree, self._kept(leaves))

    def update(self, fn: Callable[..., Any], refs: Any, /, *args: Any) -> Any:
        """Replace leaves by new versions, each computed by its owner.

        Leaf by leaf as `jax.tree.map(fn, refs, *args)`. The refs stay as they are and
        name the new versions from now on; a context that read the old ones keeps them.

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
        """
        leaves, treedef = flatten(refs, is_ref)
        columns = [
            self._column(arg, number, treedef) for number, arg in enumerate(args)
        ]
        for place, ref in enumerate(leaves):
            self.assign(fn, [ref], (ref, *[column[place] for column in columns]))
        return refs

    def _column(self, arg: Any, number: int, treedef: Any) -> Sequence[Any]:
        """Return an argument of `update` for each leaf, or the one for all."""
        leaves, found = flatten(arg)
        if not any(map(is_ref, leaves)):
            return [arg] * treedef.num_leaves
        if found != treedef or not all(map(is_ref, leaves)):
            raise JdagError(
                f"argument {number} of cluster.update has refs in it, so it has to "
                f"have the structure of the leaves, {treedef}; it is {found}"
            )
        return leaves

    def assign(
        self, fn: Callable[..., Any], refs: Sequence[Ref], args: tuple[Any, ...]
    ) -> None:
        """Replace several leaves of one worker by what one call of `fn` returns.

        Args:
            fn: a pure function; its outputs, in JAX's order, are the new values.
            refs: the leaves, on one worker; new values have their shapes and dtypes.
            args: its arguments; refs in them are on that worker.

        Raises:
            JdagError: as `update` does.
        """
        self._home.check_open("cluster.update")
        leaves = [self._leaf(ref) for ref in refs]
        worker = leaves[0].id.worker
        made, arguments, constants = self._traced(worker, fn, args, {})
        _check_outputs(made, leaves)
        for leaf in leaves:
            leaf.version += 1
        try:
            self._assign(worker, made, arguments, leaves, constants)
        except JdagError:
            for leaf in leaves:
                leaf.version -= 1
            raise

    def drop(self, refs: Any) -> None:
        """Drop leaves: what they hold goes, as soon as no context reads it any more.

        Args:
            refs: a pytree of leaves.

        Raises:
            JdagError: a ref is no leaf.
            ContextError: a leaf was dropped before.
        """
        self._home.check_open("cluster.drop")
        leaves = [self._leaf(ref) for ref in flatten(refs, is_ref)[0]]
        self._port.tell(Dropped(tuple(leaf.id for leaf in leaves)))
        for leaf in leaves:
            leaf.dropped = True
            del self._home.leaves[leaf.id]

    # ---------------------------------------------------------------- assignments

    def _admit(self, ref: Ref) -> None:
        if ref.holder.home is not self._home:
            raise ContextError(
                f"{ref!r} is of {ref.holder.home}, and this is {self._home}: refs do "
                "not leave their cluster; ref.fetch() gives the value"
            )
        if ref.leaf is None:
            ref.holder.check_readable(ref)
        elif ref.leaf.dropped:
            raise ContextError(f"{ref.leaf} was dropped by cluster.drop")

    def _leaf(self, ref: Ref) -> Leaf:
        self._admit(ref)
        if ref.leaf is None:
            raise JdagError(
                f"{ref!r} is no leaf; leaves are what cluster.put and cluster.make give"
            )
        return ref.leaf

    def _new_leaves(self, worker: str, avals: Sequence[Aval]) -> list[Leaf]:
        first = self._leaves
        self._leaves += len(avals)
        return [
            Leaf(LeafId(worker, first + place), aval)
            for place, aval in enumerate(avals)
        ]

    def _kept(self, leaves: Sequence[Leaf]) -> list[Ref]:
        """Remember new leaves; return their refs."""
        self._home.leaves.update({leaf.id: leaf for leaf in leaves})
        return [self._home.leaf_ref(leaf) for leaf in leaves]

    def _traced(
        self,
        worker: str,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[Pair, list[Key], list[tuple[Key, Any]]]:
        """Return a call's pair, the keys of its arguments, and its constants."""
        parts = split(args, kwargs, self._home.is_named)
        keys: list[Any] = [None] * parts.size
        avals: list[Any] = [None] * parts.size
        constants = []
        for place, value in (*parts.refs, *parts.constants):
            avals[place] = aval_of(value.aval if is_ref(value) else value)
            if is_ref(value):
                self._check_owner(worker, fn, value)
                keys[place] = value.key
            else:
                keys[place] = Key("constant", None, (self._assignments + 1,), place)
                constants.append((keys[place], self._home.value(value)))
        site = str(call_site())
        untracked = (False,) * parts.size
        made = traced(fn, parts, tuple(avals), untracked, worker, site)
        return made, keys, constants

    def _check_owner(self, worker: str, fn: Callable[..., Any], ref: Ref) -> None:
        self._admit(ref)
        if ref.worker != worker:
            raise JdagError(
                f"{name_of(fn)} makes leaves on {worker!r}, and an argument, {ref!r}, "
                f"lives on {ref.worker!r}; leaves are computed where they are kept: "
                f"ctx.move({worker!r}, ref) first"
            )

    def _assign(
        self,
        worker: str,
        made: Pair | None,
        arguments: Sequence[Key],
        leaves: Sequence[Leaf],
        constants: Sequence[tuple[Key, Any]] = (),
    ) -> None:
        """Have the next versions of leaves made; their number is taken either way."""
        if not leaves:
            return
        self._assignments += 1
        for key, value in constants:
            self._port.put(key, value)
        event = Assigned(
            (self._assignments,),
            worker,
            made,
            tuple(arguments),
            tuple(leaf.key for leaf in leaves),
            tuple(leaf.aval for leaf in leaves),
            str(call_site()),
        )
        try:
            self._port.tell(event)
        except JdagError:
            self._port.drop([key for key, _ in constants])
            raise


def _check_outputs(made: Pair, leaves: Sequence[Leaf]) -> None:
    if len(made.out_avals) != len(leaves):
        raise JdagError(
            f"{made.name} returned {len(made.out_avals)} arrays for {len(leaves)} "
            "leaves; it returns one new value for each"
        )
    for leaf, aval in zip(leaves, made.out_avals, strict=True):
        if aval != leaf.aval:
            raise JdagError(
                f"{made.name} returned {aval} for {leaf}, which is {leaf.aval}; new "
                "versions keep shape and dtype"
            )


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
