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
from jdag.compute.devices import check_device, on_default, split_place
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
    """Counters for the ids that the programs of one worker assign."""

    index: int  # Of the worker.
    incarnation: int
    contexts: int = 0
    leaves: int = 0
    assignments: int = 0


def _is_ref_or_struct(value: object) -> bool:
    return is_ref(value) or isinstance(value, jax.ShapeDtypeStruct)


def user_value(value: Any) -> Any:
    """Convert a stored value for users: in abstract mode to `jax.ShapeDtypeStruct`."""
    return value.struct() if value.__class__ is Aval else delivered(value)


class ClusterState:
    """The state of a cluster in this process: settings, workers, leaves and handles.

    Refs of leaves, which every program may use, have this object as their `holder`.
    Programs must run inside of the same JAX transformations, and with the same
    configuration of JAX, as the code that made the object.
    """

    # A `Simulation` or `Node`, which has: the `port` of the main program, the `current`
    # port, `now_ns`, `trace`, `incarnations`, `info()`, `graph(context)`.
    driver: Any
    # Closes the driver and the processes started with it; None: `driver.close`.
    close: Callable[[], object] | None = None
    # While a program is recorded: returns the error of a forbidden operation.
    recording: Callable[[str], JdagError] | None = None
    is_plain = False  # True in `OracleRun`, which replaces this class in the oracle.
    # The main program's `Recovery`, with recover=True.
    recovery: Any = None

    def __init__(self, settings: RunSettings, abstract: bool) -> None:
        self.settings = settings
        self.workers = tuple(settings.workers)
        self._names = frozenset(self.workers)
        self.schedule = settings.schedule  # The order of the work of pipelines.
        self.abstract = abstract
        self.leaves: dict[LeafId, Leaf] = {}
        self._far: WeakValueDictionary[LeafId, Leaf] = WeakValueDictionary()
        self.handles: WeakValueDictionary[ObjectId, Hosted] = WeakValueDictionary()
        self.closed = False
        self.trace = weakref.ref(trace_ctx.trace)  # The innermost JAX transformation.
        self.configuration = configuration()
        self.process = os.getpid()
        # Whether an argument is a ref or, in abstract mode, a ShapeDtypeStruct.
        self.is_named: Callable[[object], bool]
        self.is_named = _is_ref_or_struct if abstract else is_ref
        self._numbers: dict[str, IdCounters] = {}
        self.recordings: Counter[Any] = Counter()  # By the code of the program.
        # By port: the `Cluster` of each program that has one, and the frame of each
        # program that an engine started.
        self.clusters: dict[ProgramPort, Any] = {}
        self.frames: dict[ProgramPort, Any] = {}

    def __str__(self) -> str:
        return f"the cluster of {', '.join(map(repr, self.workers))}"

    def beside(self, other: "ClusterState") -> str:
        closed = ", which is closed," if self.closed else ""
        if self.workers == other.workers:
            return f"another cluster of the same names{closed}"
        return f"{self}{closed}"

    def numbers(self, worker: str) -> IdCounters:
        index = self.workers.index(named(worker))
        counters = IdCounters(index, incarnation_of(worker))
        return self._numbers.setdefault(worker, counters)

    @property
    def cluster(self) -> Any:
        """The `Cluster` of the running program. Raises ContextError if it has none."""
        port = self.driver.current
        if port not in self.clusters:
            raise ContextError(
                f"a program on {port.worker!r} that was called in a context has no "
                "cluster: only the main program, and programs that cluster.run runs, "
                "may make and replace leaves"
            )
        return self.clusters[port]

    def is_given(self, value: object) -> bool:
        return isinstance(value, Hosted) or self.is_named(value)

    def check_current(self, what: str, port: ProgramPort, target: object) -> None:
        current = self.driver.current
        if current is not port:
            over = "" if port in self.clusters else ", which is over"
            raise ContextError(
                f"{what} on {target!r}, in a program on {current.worker!r}: it belongs "
                f"to a program on {port.worker!r}{over}. A program may use only its "
                "own cluster or context; all programs may use leaves"
            )

    @property
    def state(self) -> "ClusterState":
        return self

    def read(self, refs: Sequence[Ref]) -> list[Any]:
        if self.is_unusable():  # The repr of a ref takes longer than this check.
            self.check_open(f"a fetch of {refs[0]!r}")
        for ref in refs:
            if ref.leaf is None or ref.leaf.dropped:
                self.check_own(ref)
        return self.fetched(refs, self.driver.current)

    def fetched(self, refs: Sequence[Ref], port: ProgramPort) -> list[Any]:
        """Return each ref's value or `Failure`. Blocks the program of `port`."""
        waiter = port.waiter()
        port.tell(Fetched(waiter, tuple([ref.located for ref in refs])))
        return list(map(user_value, port.wait(waiter)))

    def seen(self, failure: Failure) -> JdagError:
        """Convert a failure to an exception. Only a frame's `seen` also records it."""
        return exception_of(failure)

    def living(self, info: Mapping[str, Mapping[str, Any]]) -> list[LeafId]:
        """Return the leaves whose owners are not lost, according to `Cluster.info`."""
        owners = [self._incarnation(name) for name in info if not info[name]["lost"]]
        return [leaf for leaf in self.leaves if leaf.worker in owners]

    def record(self, id: LeafId, aval: Aval) -> Leaf:
        # Other programs may keep many untracked leaves, one after another. Passes do
        # not need records of these leaves, so weak references to them suffice.
        is_far = id.untracked and id not in self.leaves
        return (self._far if is_far else self.leaves).setdefault(id, Leaf(id, aval))

    def handle(self, id: ObjectId) -> Hosted:
        """Return the handle of an object; this process has only one for each object."""
        return self.handles.setdefault(id, Hosted(self, id))

    def leaf_ref(self, leaf: Leaf) -> Ref:
        key, owner, hold = leaf.key, leaf.id.worker, leaf.held()
        return Ref(self, key, owner, leaf.aval, leaf.tracked, leaf=leaf, hold=hold)

    def check_own(self, ref: Ref) -> None:
        state = ref.holder.state
        if state is not self:
            remedy = "; ref.fetch() returns the value"
            raise ContextError(
                f"{ref!r} is of {state.beside(self)} and this is {self}: refs do not "
                f"leave their cluster{remedy * (is_ref(ref) and not state.closed)}"
            )
        if ref.leaf is not None and ref.leaf.dropped:
            raise ContextError(f"{ref.leaf} was dropped by cluster.drop")

    def value(self, value: Any) -> Any:
        """Return a value as workers store it: in abstract mode only shape and dtype."""
        return aval_of(value).on(None) if self.abstract else on_default(value)

    def is_unusable(self) -> bool:
        is_nested = trace_ctx.trace is not self.trace()
        current, own = configuration(), self.configuration
        return self.closed or is_nested or (current is not own and current != own)

    def check_open(self, what: str) -> None:
        """Raise if the cluster is closed, or if JAX is tracing or was reconfigured."""
        if self.closed:
            raise ContextError(f"{what} on {self}, which is closed")
        if self.recording is not None and trace_ctx.trace is not self.trace():
            raise self.recording(what)
        if (current := configuration()) != self.configuration:
            former = dict(self.configuration.settings)
            changed = [
                f"{name} is {value!r} and was {former[name]!r} when it was made"
                for name, value in current.settings
                if value != former[name]
            ]
            raise JdagError(
                f"{what} on {self}: {', '.join(changed)}; the configuration of JAX "
                "must not change: set it first, then make the cluster"
            )
        if trace_ctx.trace is not self.trace():
            raise ContextError(
                f"{what} inside of jax.jit, vmap, grad or another function that JAX "
                "traces: jdag runs outside of these. Use them inside of the functions "
                "that ctx.call takes; ctx.backward and jdag.value_and_grad "
                "differentiate"
            )

    def place(self, place: object, what: str) -> tuple[str, str | None]:
        """Return the worker of a place, as an incarnation, and its device or None."""
        if isinstance(place, str) and place in self._names:
            return self._incarnation(place), None
        workers = f"the workers are {', '.join(map(repr, self.workers))}"
        if not isinstance(place, str):
            raise JdagError(
                f"{what} takes the name of a worker first, not {place!r}; {workers}"
            )
        worker, device = split_place(place)
        if worker in self.workers and device is not None:
            if not self.abstract:
                check_device(device, worker, what)
            return self._incarnation(worker), device
        hint, owner = meant(worker, self.workers), place.partition("/")[0]
        if owner in self.workers:
            hint = f"; a device of {owner!r} has a name such as '{owner}/cpu:1'"
        raise JdagError(f"{what}: there is no worker {place!r}{hint}; {workers}")

    def _incarnation(self, worker: str) -> Worker:
        if self.recovery is not None and self.driver.current is self.driver.port:
            return str(self.recovery.current[worker])
        incarnation = self.driver.incarnations.get(worker, 0)
        return incarnated(worker, incarnation) if incarnation else worker
