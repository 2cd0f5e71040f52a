"""The state that the programs of a cluster share in one process."""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import jax
from jax._src.core import trace_ctx

from jdag.compute.avals import Aval, aval_of
from jdag.compute.buffers import delivered
from jdag.compute.configuration import configuration
from jdag.compute.devices import check_device, on_default, parsed_place
from jdag.compute.refs import is_ref
from jdag.context.hosted import Hosted
from jdag.context.refs import Leaf, Ref
from jdag.engine.protocol import (
    Failure,
    Fetched,
    LeafId,
    ObjectId,
    Worker,
    incarnated,
    incarnation_of,
    named,
)
from jdag.errors import ContextError, JdagError, meant
from jdag.runtime.failures import exception_of
from jdag.runtime.worker_runtime import ProgramPort
from jdag.settings.session_settings import RunSettings


@dataclass(slots=True)
class IdCounters:
    """Counters of what the programs of one worker make, each with its own numbers."""

    index: int  # Of the worker.
    incarnation: int
    contexts: int = 0
    leaves: int = 0
    assignments: int = 0


def _stands(value: object) -> bool:
    return is_ref(value) or isinstance(value, jax.ShapeDtypeStruct)


def given(value: Any) -> Any:
    """Return what a program gets of a value: in abstract mode its shape and dtype."""
    return value.struct() if value.__class__ is Aval else delivered(value)


class ClusterState:
    """The workers of a cluster, its leaves, and how its values are: real or abstract.

    It holds the refs of leaves, which every program may use. Programs run under the
    nesting of JAX's transformations and the configuration under which it was made.
    """

    # A `Simulation`, or a `Node`: the `port` of the main program, the `current`
    # one, `now_ns`, `trace`, `incarnations`; `info()` and `graph(context)`.
    driver: Any
    # What ends the driver and all that was started with it, if that is more than it.
    close: Callable[[], object] | None = None
    # While a program is recorded: the error of what it asks of the cluster there.
    recording: Callable[[str], JdagError] | None = None
    is_plain = False  # In the oracle, calls run at once.
    # The main program's `Recovery`, if it was asked for.
    recovery: Any = None

    def __init__(self, settings: RunSettings, abstract: bool) -> None:
        self.settings = settings
        self.workers = tuple(settings.workers)
        self.schedule = settings.schedule  # Of the work of pipelines.
        self.abstract = abstract
        self.leaves: dict[LeafId, Leaf] = {}
        self._far: WeakValueDictionary[LeafId, Leaf] = WeakValueDictionary()
        self.handles: WeakValueDictionary[ObjectId, Hosted] = WeakValueDictionary()
        self.closed = False
        self.trace = weakref.ref(trace_ctx.trace)  # Of the innermost transformation.
        self.configuration = configuration()
        self.process = os.getpid()
        # Whether an argument is a ref or, in abstract mode, a ShapeDtypeStruct.
        self.is_named: Callable[[object], bool] = _stands if abstract else is_ref
        self._numbers: dict[str, IdCounters] = {}
        self.recordings: Counter[Any] = Counter()  # By the code of the program.
        # Of the programs that run, by port.
        self.clusters: dict[ProgramPort, Any] = {}
        self.frames: dict[ProgramPort, Any] = {}  # Of those on workers.

    def __str__(self) -> str:
        return f"the cluster of {', '.join(map(repr, self.workers))}"

    def beside(self, other: "ClusterState") -> str:
        """Return the name of this cluster in a message that also names the other."""
        closed = ", which is closed," if self.closed else ""
        if self.workers == other.workers:
            return f"another cluster of the same names{closed}"
        return f"{self}{closed}"

    def numbers(self, worker: str) -> IdCounters:
        """Return the counters of a worker's incarnation."""
        index = self.workers.index(named(worker))
        made = IdCounters(index, incarnation_of(worker))
        return self._numbers.setdefault(worker, made)

    @property
    def cluster(self) -> Any:
        """The `Cluster` of the program that runs now.

        Raises:
            ContextError: it runs in a context, and has none.
        """
        port = self.driver.current
        if port not in self.clusters:
            raise ContextError(
                f"a program on {port.worker!r} that runs in a context of another has "
                "no cluster: leaves are made and replaced by the main program, and by "
                "those that cluster.run runs"
            )
        return self.clusters[port]

    def is_given(self, value: object) -> bool:
        """Whether an argument of a program is a ref, or a handle of an object."""
        return isinstance(value, Hosted) or self.is_named(value)

    def check_current(self, what: str, port: ProgramPort, on: object) -> None:
        """Raise ContextError unless the program of this port is the one that runs."""
        current = self.driver.current
        if current is not port:
            over = "" if port in self.clusters else ", which is over"
            raise ContextError(
                f"{what} on {on!r}, in a program on {current.worker!r}: it is of a "
                f"program on {port.worker!r}{over}. A program uses the cluster, or the "
                "context, that it is handed; leaves are for all"
            )

    @property
    def state(self) -> "ClusterState":
        """The state to which leaves belong: this one."""
        return self

    def read(self, refs: Sequence[Ref]) -> list[Any]:
        """Return for each ref to a leaf its value or a `Failure`."""
        if self.is_unusable():  # The repr of a ref takes longer than this check.
            self.check_open(f"a fetch of {refs[0]!r}")
        for ref in refs:
            if ref.leaf is None or ref.leaf.dropped:
                self.check_own(ref)
        return self.fetched(refs, self.driver.current)

    def fetched(self, refs: Sequence[Ref], port: ProgramPort) -> list[Any]:
        """Return for each ref its value or a `Failure`; the program of `port` waits."""
        waiter = port.waiter()
        port.tell(Fetched(waiter, tuple([(ref.key, ref.owner) for ref in refs])))
        found = port.wait(waiter)
        return list(map(given, found))

    def seen(self, failure: Failure) -> JdagError:
        """Return a failure as an exception; outside of contexts none is recorded."""
        return exception_of(failure)

    def living(self, info: Mapping[str, Mapping[str, Any]]) -> list[LeafId]:
        """The leaves whose owners are not gone, as `Cluster.info` tells it."""
        owners = [self._now(name) for name in info if not info[name]["lost"]]
        return [leaf for leaf in self.leaves if leaf.worker in owners]

    def record(self, id: LeafId, aval: Aval) -> Leaf:
        """Return the record of a leaf, which another process may have made."""
        # Many may be kept there in turn, and no pass looks for one that is untracked.
        is_far = id.untracked and id not in self.leaves
        return (self._far if is_far else self.leaves).setdefault(id, Leaf(id, aval))

    def handle(self, id: ObjectId) -> Hosted:
        """Return the handle of an object, of which there is one in this process."""
        return self.handles.setdefault(id, Hosted(self, id))

    def leaf_ref(self, leaf: Leaf) -> Ref:
        """Return a ref to a leaf."""
        of = leaf.key, leaf.id.worker, leaf.aval, leaf.tracked
        return Ref(self, *of, leaf=leaf, hold=leaf.held())

    def check_own(self, ref: Ref) -> None:
        """Raise ContextError unless the ref is of this cluster and names a value."""
        of = ref.holder.state
        if of is not self:
            to_do = "; ref.fetch() gives the value"
            raise ContextError(
                f"{ref!r} is of {of.beside(self)} and this is {self}: refs do not "
                f"leave their cluster{to_do * (is_ref(ref) and not of.closed)}"
            )
        if ref.leaf is not None and ref.leaf.dropped:
            raise ContextError(f"{ref.leaf} was dropped by cluster.drop")

    def value(self, value: Any) -> Any:
        """Return a value in stored form: in abstract mode only its shape and dtype."""
        return aval_of(value).on(None) if self.abstract else on_default(value)

    def is_unusable(self) -> bool:
        """Tell whether it is closed, or JAX's nesting or settings have changed."""
        now, then = configuration(), self.configuration
        return self.closed or trace_ctx.trace is not self.trace() or now != then

    def check_open(self, what: str) -> None:
        """Raise unless it is open and JAX's nesting and settings are unchanged.

        Raises:
            ContextError: it is closed; or this is inside of jit or its kin.
            JdagError: a setting of JAX that results depend on has changed.
        """
        if self.closed:
            raise ContextError(f"{what} on {self}, which is closed")
        if self.recording is not None and trace_ctx.trace is not self.trace():
            raise self.recording(what)
        if (now := configuration()) != self.configuration:
            then = dict(self.configuration.settings)
            changed = [
                f"{name} is {value!r} and was {then[name]!r} when it was made"
                for name, value in now.settings
                if value != then[name]
            ]
            raise JdagError(
                f"{what} on {self}: {', '.join(changed)}; the configuration of JAX is "
                "fixed per cluster: set it first, then make the cluster"
            )
        if trace_ctx.trace is not self.trace():
            raise ContextError(
                f"{what} inside of jax.jit, vmap, grad or another function that JAX "
                "traces: jdag runs outside of these. Put them inside of the functions "
                "that are called; ctx.backward and jdag.value_and_grad differentiate"
            )

    def place(self, place: object, what: str) -> tuple[str, str | None]:
        """Return the worker of a place and its device, None for the default one.

        The worker is the incarnation that takes part now, as engines name it.

        Raises:
            JdagError: there is no such worker, or it has no such device.
        """
        if isinstance(place, str) and place in self.workers:
            return self._now(place), None
        there = f"the workers are {', '.join(map(repr, self.workers))}"
        if not isinstance(place, str):
            said = f"{what} takes the name of a worker first, not {place!r}"
            raise JdagError(f"{said}; {there}")
        worker, device = parsed_place(place)
        if worker in self.workers and device is not None:
            if not self.abstract:
                check_device(device, worker, what)
            return self._now(worker), device
        hint, owner = meant(worker, self.workers), place.partition("/")[0]
        if owner in self.workers:
            hint = f"; a device of {owner!r} is named as in '{owner}/cpu:1'"
        raise JdagError(f"{what}: there is no worker {place!r}{hint}; {there}")

    def _now(self, worker: str) -> Worker:
        if self.recovery is not None and self.driver.current is self.driver.port:
            return str(self.recovery.now[worker])
        return incarnated(worker, self.driver.incarnations.get(worker, 0))
