"""Plans: a program is recorded once, and each step runs the recording.

A `CompiledStep` holds one `Plan` for each set of abstract arguments. The workers
prepare a plan once; a step then is one message to each of them.
Invariants: steps of a plan are numbered from 1, also those that fail. A plan that no
program names any more is dropped when the cluster is used next.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import repeat
from typing import Any

import jax
import numpy as np

from jdag.api.cluster import Cluster
from jdag.api.value_and_grad import check_leaf, check_program, gradient_or_zeros
from jdag.compute.avals import Aval, aval_of
from jdag.compute.cutting import CutPlan, cut_graph
from jdag.compute.duals import is_array_type
from jdag.compute.pairs import ANEW_MAX
from jdag.compute.pytrees import Split, flatten_refs, split, unflatten
from jdag.compute.refs import is_ref
from jdag.context.cluster_state import given
from jdag.context.context import Context
from jdag.context.graph import Graph
from jdag.context.program_frame import FramePhase
from jdag.context.refs import Hold, Ref
from jdag.context.tags import check_steps
from jdag.engine.functions import call_site, code_of, name_of
from jdag.engine.protocol import (
    Compiled,
    Failure,
    Key,
    LeafId,
    NewestKey,
    Planned,
    SlotKey,
    Stepping,
)
from jdag.errors import (
    JdagError,
    RemoteError,
    WorkerLost,
    kind_of,
    no_arrays,
)
from jdag.plans.plan_picture import graph_of_plan, table_of_plan
from jdag.plans.progress import Bar
from jdag.plans.recording import (
    RecordedGraph,
    Recording,
    RecordingFrame,
    check_same,
    record,
    roots_of,
)
from jdag.runtime.failures import exception_of
from jdag.training.optimizer import Optimizer

_KNOWN_MAX = 256  # Types of arguments whose plan is found at once.


def compile(
    program: Callable[..., Any],
    cluster: Cluster,
    optimizer: Optimizer | None = None,
    *,
    exact: bool = False,
) -> "CompiledStep":
    """Record a program once, and run steps from the recording.

    The program runs at the first call with new arguments, on values that are not known
    yet, and twice, to see that it does the same each time. From then on a step is one
    message to each worker, and what a worker computes between two transfers is compiled
    as one. Shapes, dtypes, statics, and the leaves among the arguments select the
    recording, as in `jax.jit`; arrays and Python numbers among them are the inputs of a
    step. Arrays that the program makes, and what it closes over, are constants.

    Args:
        program: takes a context first, then arguments; returns a pytree of refs and
            data. It calls functions; it does not fetch, call programs or objects, or
            attach hooks.
        cluster: where it runs.
        optimizer: None, or what steps its leaves in each step, by the gradients of the
            first result: of a tuple the first element, else all. If that has several
            refs, of their sum; it has no tuples in it.
        exact: compute as a context does, call by call, with the bits of that; else
            results differ in the last bits, as compiled code may.

    Returns:
        A function of the arguments after the context: a `CompiledStep`.

    Raises:
        JdagError: these are no program, cluster and optimizer.
        ContextError: the optimizer is one of another cluster's leaves.
    """
    check_program("jdag.compile", program, cluster)
    if optimizer is not None:
        if not isinstance(optimizer, Optimizer):
            raise JdagError(
                f"jdag.compile takes a jdag.Optimizer, not {kind_of(optimizer)}"
            )
        optimizer.check_state(cluster.state)
    return CompiledStep(program, cluster, optimizer, exact)


class CompiledStep:
    """A program as steps of plans: `jdag.compile` gives it.

    Called with the arguments after the context it returns what the program returns,
    with arrays in the place of refs; then all leaves have been stepped, if there is an
    optimizer. A step that raises has stepped none.

    Raises, when called:
        JdagError: the program does what cannot be recorded: the error names the line
            and the remedy; or it does not do the same each time.
        RootError: its first result cannot be differentiated.
        RemoteError: a function raised; names the functions that were compiled together
            and their call sites, with `exact=True` the one.
        WorkerLost: a worker is gone.
        ContextError: the cluster is closed, or another program's; or a ref among the
            arguments is no leaf of it.
    """

    def __init__(
        self,
        program: Callable[..., Any],
        cluster: Cluster,
        optimizer: Optimizer | None,
        exact: bool,
    ) -> None:
        self._program = program
        self._cluster = cluster
        self._optimizer = optimizer
        self._exact = exact
        self._what = f"a step of {name_of(program)}"
        self._plans: dict[tuple[Any, ...], Plan] = {}
        self._known: dict[tuple[Any, ...], tuple[Plan, tuple[int, ...]]] = {}
        self._last: Plan | None = None

    def __repr__(self) -> str:
        return f"CompiledStep({name_of(self._program)}, {len(self._plans)} plans)"

    def __call__(self, *args: Any) -> Any:
        """Run a step; return what the program returns, fetched."""
        optimizer = self._optimizer
        try:
            plan, inputs = self._planned(args, False)
            value, _ = plan.run(inputs)
            recovery = self._cluster._assignments.recovery
            if recovery is not None and plan.staged:
                recovery.staged(plan.staged)
        except (RemoteError, WorkerLost) as error:
            if optimizer is not None:
                optimizer.refused(error)
            raise
        if optimizer is not None:
            if not plan.skipped:
                optimizer.counted(plan.stepped)
            self._cluster._reassigned()
        return value

    def value_and_grad(self, *args: Any, allow_int: bool = False) -> tuple[Any, Any]:
        """Return what a step returns, and gradients; no leaf is stepped.

        Gradients are those of the first result by the leaves in the first argument, in
        its structure, as `jdag.value_and_grad` gives them: zeros where the result does
        not depend on a leaf, None for statics and numbers; `allow_int` is as there.
        """
        plan, inputs = self._planned(args, True, allow_int)
        value, gradients = plan.run(inputs)
        leaves, form = plan.leaves
        found = [gradient_or_zeros(gradients.get(ref.key.name), ref) for ref in leaves]
        return value, unflatten(form, found)

    @property
    def plan(self) -> "Plan":
        """The plan of the last call.

        Raises:
            JdagError: there was none.
        """
        if self._last is None:
            raise JdagError(
                f"{self!r} was not called: a plan is made by its first call"
            )
        return self._last

    def _leaves(self, args: Sequence[Any], allow_int: bool) -> tuple[list[Ref], Any]:
        what = "argument 0 of value_and_grad"
        try:
            leaves, form = flatten_refs(args[0] if args else (), is_ref)
            if not leaves:
                raise no_arrays("it")
            for ref in leaves:
                check_leaf(ref, allow_int)
        except JdagError as error:
            raise type(error)(
                f"{what}: {error}; a plan differentiates by leaves, such as "
                "cluster.put gives"
            ) from None
        return leaves, form.bare

    def _planned(
        self, args: tuple[Any, ...], differentiated: bool, allow_int: bool = False
    ) -> tuple["Plan", list[Any]]:
        """Return the plan for these arguments, and its inputs among them.

        Where all are arrays, floats and leaves their types select it, without a look at
        each as `split` takes.
        """
        cluster = self._cluster
        state = cluster.state
        cluster._check(self._what)
        again = state.recovery and state.recovery.count
        now = (*state.driver.incarnations.items(), again)
        flat, treedef = jax.tree.flatten(args)
        types = list(map(_type_of, flat, repeat(state)))
        known = (treedef, *types, now, differentiated, allow_int)
        found = None if None in types else self._known.get(known)
        if found is not None:
            self._last, places = found
            return self._last, list(map(flat.__getitem__, places))
        first = self._leaves(args, allow_int) if differentiated else ([], None)
        given = split(args, {}, state.is_named)
        inputs, leaves = dict(given.constants), []
        for place, ref in given.refs:
            if not is_ref(ref):
                inputs[place] = ref
                continue
            if ref.holder is not state or ref.leaf is None or ref.leaf.dropped:
                cluster._assignments.leaf(ref)  # Says why not.
            leaves.append((place, ref.key, ref.tracked))
        avals = {place: given.aval(place, value) for place, value in inputs.items()}
        key = (given.template, *avals.items(), *leaves, now, differentiated)
        plan = self._plans.get(key)
        if plan is None:
            for old in [one for one in self._plans if one[-2] != now]:
                del self._plans[old]  # A worker of it is gone.
            self._known.clear()
            plan = self._recorded(given, avals, differentiated)
            plan.prepare()
            plan.leaves = first
            self._plans[key] = plan
        if None not in types and given.size == len(flat):
            if len(self._known) >= _KNOWN_MAX:
                self._known.clear()
            self._known[known] = plan, tuple(inputs)
        self._last = plan
        return plan, list(inputs.values())

    def _recorded(
        self, given: Split, avals: Mapping[int, Aval], differentiated: bool
    ) -> "Plan":
        cluster, program = self._cluster, self._program
        self._count()
        id, name = cluster._next_id(), name_of(program)
        both = [
            RecordingFrame(cluster.state, cluster._port.worker, id, name)
            for _ in range(2)
        ]
        first, second = [record(program, frame, given, avals) for frame in both]
        check_same(first, second)
        drawn = RecordedGraph(first)
        gradients: dict[LeafId, int] = {}
        if differentiated or self._optimizer is not None:
            gradients = drawn.graph.differentiate(
                roots_of(first, drawn, differentiated)
            )
        stepped: tuple[Ref, ...] = ()
        stages: list[tuple[LeafId, int]] = []
        scale: list[int] = []
        if self._optimizer is not None and not differentiated:
            stepped, stages, scale = _stepping(self._optimizer, drawn, first, gradients)
        wanted = gradients if differentiated else {}
        made = Plan(
            cluster, drawn, first, wanted, stages, scale=scale, exact=self._exact
        )
        made.stepped = stepped
        return made

    def _count(self) -> None:
        code = code_of(self._program)
        recordings = self._cluster.state.recordings
        recordings[code] += 1
        if recordings[code] == ANEW_MAX:
            site = call_site()
            warnings.warn_explicit(
                f"{name_of(self._program)} was recorded {ANEW_MAX} times: each call of "
                "jdag.compile, and each new shape, static or leaf among the arguments "
                "of a step records anew. Call jdag.compile once, outside of loops, and "
                "pass what changes as arrays of the same shapes",
                UserWarning,
                site.file,
                site.line,
            )


class Plan:
    """A recording of a program, as its workers run it; `print` shows it.

    Made by a `CompiledStep`, whose `plan` it is.
    """

    def __init__(
        self,
        cluster: Cluster,
        drawn: RecordedGraph,
        recording: Recording,
        gradients: Mapping[LeafId, int],
        stages: Sequence[tuple[LeafId, int]],
        *,
        scale: Sequence[int],
        exact: bool,
    ) -> None:
        self.skipped = False  # The last step, by an optimizer's `skip_not_finite`.
        self.stepped: tuple[Ref, ...] = ()  # Leaves, by an optimizer.
        self.leaves: tuple[list[Ref], Any] = ([], None)  # Of `value_and_grad`.
        self.staged = [leaf for leaf, _ in stages]  # These, and their states.
        self.name = recording.frame.program
        self._state, self._port = cluster.state, cluster._port
        self._id = recording.frame.id
        self._number = 0
        self._treedef = recording.treedef
        inputs = {value: index for index, value in enumerate(drawn.inputs)}
        # Of each result its place among the values of a step, or the data that it is.
        slots: dict[int, int] = {}
        self._results: list[tuple[str, Any]] = []
        for leaf in recording.leaves:
            if not is_ref(leaf):
                self._results.append(("data", leaf))
            elif (value := drawn.value(leaf.key, leaf.owner, leaf.aval)) in inputs:
                self._results.append(("input", inputs[value]))
            else:
                place = slots.setdefault(value, len(slots))
                self._results.append(("value", place))
        self._gradients = {
            leaf: slots.setdefault(value, len(slots))
            for leaf, value in gradients.items()
        }
        # Of an optimizer, which is NaN where a step is skipped.
        self._scale = [slots.setdefault(value, len(slots)) for value in scale]
        self._slots = tuple(slots)
        made = cut_graph(
            drawn.graph,
            plan=self._id,
            caller=self._port.worker,
            results=self._slots,
            stages=stages,
            exact=exact,
        )
        check_steps(self.name, cluster.state.schedule, made)
        self.cut: CutPlan = made
        self._inputs = made.inputs
        sent = dict.fromkeys([slot for _, of in made.inputs for slot in of])
        self._sent = [(slot, inputs[slot]) for slot in sent]
        used = {slot for _, part in made.parts for slot in part.constants}
        self._constants = [
            (SlotKey(self._id, 0, slot), value)
            for slot, value in drawn.constants.items()
            if slot in used
        ]
        loose = cluster._assignments.unplanned
        self._hold = Hold(loose, self._id, self._port.worker)  # type: ignore[arg-type]

    def prepare(self) -> None:
        """Send each worker its part, and wait until all segments are compiled."""
        port, parts = self._port, self.cut.parts
        port.tell(Planned(self._id, parts, self._slots), self._constants)
        total, seen = sum([len(part.segments) for _, part in parts]), 0
        with Bar(f"compiling {self.name}", total) as bar:
            while seen < total:
                waiter = port.waiter()
                port.tell(Compiled(waiter, self._id, seen))
                seen = _checked(port.wait(waiter))
                bar.show(seen)

    def run(self, inputs: Sequence[Any]) -> tuple[Any, Mapping[LeafId, Any]]:
        """Run a step; return the program's results, and gradients."""
        port, id, value_of = self._port, self._id, self._state.value
        self._number = number = self._number + 1
        stored: list[tuple[Key, Any]] = []
        for slot, index in self._sent:
            stored.append((SlotKey(id, number, slot), value_of(inputs[index])))
        waiter = port.waiter()
        port.tell(Stepping(waiter, id, number, self._inputs), stored)
        values = list(map(given, _checked(port.wait(waiter))))
        leaves: list[Any] = []
        for kind, one in self._results:
            of = values if kind == "value" else inputs
            leaves.append(one if kind == "data" else of[one])
        gradients = {}
        for leaf, place in self._gradients.items():
            gradients[leaf] = values[place]
        scale = [] if self._state.abstract else [values[at] for at in self._scale]
        self.skipped = any(map(np.isnan, scale))
        return unflatten(self._treedef, leaves), gradients

    def __str__(self) -> str:
        return table_of_plan(self.name, self.cut, self._port.worker)

    def graph(self) -> Graph:
        """Return its segments and the values between them; see `Graph.dot`."""
        return graph_of_plan(self.cut, str(self))


def _type_of(value: Any, state: Any) -> Any:
    """What of an argument selects a plan; None where more has to be looked at."""
    if isinstance(value, Ref):
        leaf = value.leaf if value.holder is state else None
        known = leaf is not None and not leaf.dropped
        return (leaf, value.tracked) if known else None
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype
    if is_array_type(value.__class__):
        aval = value.aval
        kind = aval.shape, aval.dtype, aval.weak_type
        return None if value.is_deleted() else kind
    return float if type(value) is float else None


def _checked(result: Any) -> Any:
    if isinstance(result, Failure):
        raise exception_of(result)
    return result


def _stepping(
    optimizer: Optimizer,
    drawn: RecordedGraph,
    recording: Recording,
    gradients: Mapping[LeafId, int],
) -> tuple[tuple[Ref, ...], list[tuple[LeafId, int]], list[int]]:
    """Add a step of an optimizer; return its leaves, and the value of each version.

    The last is the value that is NaN where the step is skipped, if it can be.
    """
    frame, graph = recording.frame, drawn.graph
    frame.phase, frame.completed = FramePhase.OPEN, True

    def named(value: int, owner: str, aval: Aval) -> Ref:
        key = SlotKey(frame.id, 1, value)
        drawn.name(key, value)
        return Ref(frame, key, owner, aval, False)

    def bring(scale: Ref, owner: str) -> Ref:
        drawn.take()
        value = drawn.value(scale.key, scale.owner, scale.aval)
        return named(value, owner, aval_of(1.0))  # Weak, as the number of a context's.

    refs: dict[Key, Ref] = {
        NewestKey(None, leaf, 0): named(value, leaf.worker, graph.aval(value))
        for leaf, value in gradients.items()
    }
    stepped, parts, scale = optimizer.planned(Context(frame), refs, bring)
    drawn.take()
    told = [] if scale is None else [drawn.value(scale.key, scale.owner, scale.aval)]
    stages: list[tuple[LeafId, int]] = []
    for part in parts:
        made: Any = part.function
        owner = part.worker
        arguments = zip(part.inputs, made.avals, strict=True)
        given = [drawn.value(key, owner, aval) for key, aval in arguments]
        of = [False] * len(given), made.name, part.call_site
        outputs = graph.call(owner, made, given, *of, update=True)
        stages += zip([key.name for key in part.outputs], outputs, strict=True)
    frame.phase = FramePhase.LEFT
    return stepped, stages, told
