"""What the programs of one cluster share in one process, and the port of each."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, Protocol

import jax
from jax.extend.core import get_opaque_trace_state

from jdag.compute.avals import Aval, aval_of, is_deleted
from jdag.compute.devices import check, on_default, parsed
from jdag.compute.machine import deleted
from jdag.compute.pairs import configuration
from jdag.engine.drawing import Drawing
from jdag.engine.vocabulary import ContextId, Event, Fetched, Key, LeafId
from jdag.errors import ContextError, JdagError
from jdag.ref import Holder, Leaf, Ref, is_ref


class Port(Protocol):
    """A program's way to the engine of its worker, and to the values held there."""

    @property
    def worker(self) -> str:
        """The worker on which the program runs."""

    def tell(self, event: Event) -> None:
        """Have the engine handle the event; never blocks. May raise JdagError."""

    def waiter(self) -> int:
        """Return a new number to wait for."""

    def wait(self, waiter: int) -> Any:
        """Block until the engine resumes that waiter; return what it was given."""

    def put(self, key: Key, value: Any) -> None:
        """Hold a value here."""

    def get(self, key: Key) -> Any:
        """Return a value that is held here."""

    def drop(self, keys: Sequence[Key]) -> None:
        """Let go of values that are held here."""


class PortReader:
    """Reads the values of refs through a port."""

    def __init__(self, port: Port) -> None:
        self._port = port

    def read(self, refs: Sequence[Ref]) -> list[Any]:
        """Return for each ref its value or a `Failure`; waits for all of them."""
        port = self._port
        waiter = port.waiter()
        keys = tuple([(ref.key, ref.worker) for ref in refs])
        port.tell(Fetched(waiter, keys))
        values = []
        read = []
        for found in port.wait(waiter):
            is_key = type(found) is Key
            value = port.get(found) if is_key else found
            gone = is_key and is_deleted(value)
            values.append(deleted(value, found, port.worker) if gone else value)
            if is_key and found.kind == "reading":
                read.append(found)
        port.drop(read)
        return [v.struct() if isinstance(v, Aval) else v for v in values]


def trace_state() -> Any:
    """Return what tells one nesting of jit, vmap and grad from another."""
    return get_opaque_trace_state(convention="flax")  # type: ignore[no-untyped-call]


def _no_driver(context: ContextId) -> Mapping[str, Drawing]:
    raise AssertionError(context)  # The cluster puts its driver's here.


def _no_driver_yet() -> None:
    raise AssertionError  # Likewise.


class Home:
    """The workers of a cluster, its leaves, and how its values are: real or abstract.

    Refs belong to the home whose program made them. It remembers under which nesting of
    JAX's transformations, and under which configuration, it was made: jdag's programs
    run under these alone.
    """

    def __init__(self, workers: Sequence[str], abstract: bool) -> None:
        self.workers = tuple(workers)
        self.abstract = abstract
        self.leaves: dict[LeafId, Leaf] = {}
        self.closed = False
        self.trace = trace_state()
        self.configuration = configuration()
        self._cluster: Holder | None = None
        self.graph: Callable[[ContextId], Mapping[str, Drawing]] = _no_driver
        self.settle: Callable[[], None] = _no_driver_yet

    def __str__(self) -> str:
        return f"the cluster of {', '.join(map(repr, self.workers))}"

    @property
    def cluster(self) -> Holder:
        """Who holds the refs of leaves."""
        assert self._cluster is not None, self.workers
        return self._cluster

    @cluster.setter
    def cluster(self, cluster: Holder) -> None:
        self._cluster = cluster

    def leaf_ref(self, leaf: Leaf) -> Ref:
        """Return a ref to the newest version of a leaf."""
        worker = leaf.id.worker
        return Ref(self.cluster, None, worker, leaf.aval, leaf.aval.inexact, leaf=leaf)

    def value(self, value: Any) -> Any:
        """Return a value as the store holds it: in abstract mode its shape alone."""
        return aval_of(value).on(None) if self.abstract else on_default(value)

    def is_named(self, value: object) -> bool:
        """Tell whether an argument is a ref or, in abstract mode, stands for arrays."""
        return is_ref(value) or (
            self.abstract and isinstance(value, jax.ShapeDtypeStruct)
        )

    def check_open(self, what: str) -> None:
        """Raise unless the cluster is open, and JAX as it was when that was made.

        Raises:
            ContextError: it is closed; or this is inside of jit or its kin.
            JdagError: a setting of JAX that results depend on has changed.
        """
        if self.closed:
            raise ContextError(f"{what} on {self}, which is closed")
        if configuration() != self.configuration:
            self._refuse_configuration(what)
        if trace_state() != self.trace:
            raise ContextError(
                f"{what} inside of jax.jit, vmap, grad or another function that JAX "
                "traces: jdag runs outside of these. Put them inside of the functions "
                "that are called; ctx.backward and jdag.value_and_grad differentiate"
            )

    def _refuse_configuration(self, what: str) -> None:
        settings = zip(configuration(), self.configuration, strict=True)
        changed = [
            f"{name} is {now!r} and was {then!r} when it was made"
            for name, (now, then) in zip(
                self.configuration._fields, settings, strict=True
            )
            if now != then
        ]
        raise JdagError(
            f"{what} on {self}: {', '.join(changed)}; the configuration of JAX is "
            "fixed per cluster: set it first, then make the cluster"
        )

    def place(self, place: object, what: str) -> tuple[str, str | None]:
        """Return the worker of a place and its device, None for the default one.

        Raises:
            JdagError: there is no such worker, or it has no such device.
        """
        if place in self.workers:
            return str(place), None
        if not isinstance(place, str):
            raise JdagError(
                f"{what} takes the name of a worker first, not {place!r}; the workers "
                f"are {', '.join(map(repr, self.workers))}"
            )
        worker, device = parsed(place)
        if worker in self.workers and device is not None:
            if not self.abstract:
                check(device, worker, what)
            return worker, device
        close = get_close_matches(worker, self.workers, n=1)
        hint = f", did you mean {close[0]!r}?" if close else ";"
        owner = place.partition("/")[0]
        if owner in self.workers:
            hint = f"; a device of {owner!r} is named as in '{owner}/cpu:1';"
        raise JdagError(
            f"{what}: there is no worker {place!r}{hint} the workers are "
            f"{', '.join(map(repr, self.workers))}"
        )
