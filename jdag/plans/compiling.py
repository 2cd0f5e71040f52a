"""Plans: a program is recorded once, and each step runs the recording.

A `CompiledStep` has one `Plan` for each set of abstract arguments. The workers prepare
a plan once. After that, each step needs one message to each worker that gets inputs or
reads leaves, and one for each transfer.
Invariants: the steps of a plan are numbered from 1, including failed steps. A plan
without references is dropped at the next use of the cluster.
"""

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jdag.api.cluster import Cluster
from jdag.api.value_and_grad import check_leaf, check_program, gradient_or_zeros
from jdag.compute.avals import Aval, aval_of
from jdag.compute.buffers import delivered
from jdag.compute.cutting import CutPlan, cut_graph
from jdag.compute.duals import JaxArray, is_array_type
from jdag.compute.pairs import ANEW_MAX
from jdag.compute.pytrees import Form, Split, flatten_refs, split, unflatten
from jdag.compute.refs import is_ref
from jdag.context.cluster_state import user_value
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
from jdag.errors import JdagError, RemoteError, WorkerLost, kind_of, no_arrays
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

_BY_TYPES_MAX = 256  # Maximum number of argument types with a cached plan.


def compile(
    program: Callable[..., Any],
    cluster: Cluster,
    optimizer: Optimizer | None = None,
    *,
    exact: bool = False,
) -> "CompiledStep":
    """Record a program once, and run steps from the recording.

    The first call with new arguments records the program on abstract values, as
    `jax.jit` does. The program runs twice, to check that both recordings are equal.
    After that, each step needs one message to each worker that gets inputs or reads
    leaves, and the calls of a worker between two transfers are compiled together. The
    shapes, dtypes, statics and leaves of the arguments select the recording. Arrays and
    Python numbers in the arguments are inputs of a step. Arrays that the program
    creates or closes over are constants.

    Args:
        program: a function of a context and the arguments that returns a pytree of refs
            and data. It may call functions. It must not fetch, call programs or
            objects, or attach hooks.
        cluster: the cluster on which the program runs.
        optimizer: an optimizer that updates its leaves in each step, with the gradients
            of the first result. The first result is the first element of a returned
            tuple, or else the whole result. It must not contain tuples. If it contains
            several refs, their sum is differentiated. With None, no leaf is updated.
        exact: with True, each call is computed separately, with the same bits as in a
            context. With False, calls are compiled together, and results may differ in
            the last bits.

    Returns:
        A `CompiledStep`: a function of the arguments after the context.

    Raises:
        JdagError: an argument is not a program, cluster or optimizer.
        ContextError: the optimizer has leaves of another cluster.
    """
    check_program("jdag.compile", program, cluster)
    if optimizer is not None:
        if not isinstance(optimizer, Optimizer):
            raise JdagError(
                f"optimizer of jdag.compile is {kind_of(optimizer)}: expected a "
                "jdag.Optimizer, or None"
            )
        optimizer.check_state(cluster.state)
    return CompiledStep(program, cluster, optimizer, exact)


class CompiledStep:
    """A compiled program, returned by `jdag.compile`.

    A call takes the program's arguments without the context, and returns the program's
    result with arrays in place of refs. With an optimizer, all leaves have been updated
    when the call returns. A call that raises an error updates no leaf.

    Raises, when called:
        JdagError: the program cannot be recorded (the message names the line and a
            remedy), or its two recordings differ.
        RootError: the first result cannot be differentiated.
        RemoteError: a function raised an error. The message names all functions that
            were compiled together, and their call sites. With `exact=True` it names
            only the function that raised the error.
        WorkerLost: a worker has ended or does not answer.
        ContextError: the cluster is closed or used by another program, or a ref in the
            arguments is not a leaf of this cluster.
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
        self._by_types: dict[tuple[Any, ...], tuple[Plan, tuple[int, ...]]] = {}
        self._recent: tuple[Any, Any, Any] = None, None, ()  # One item of `_by_types`.
        self._last: Plan | None = None

    def __repr__(self) -> str:
        return f"CompiledStep({name_of(self._program)}, {len(self._plans)} plans)"

    def __call__(self, *args: Any) -> Any:
        """Run a step; return the program's result with arrays in place of refs."""
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
        """Run a step; return its result and its gradients. No leaf is updated.

        The first result is differentiated with respect to the leaves in the first
        argument. The gradients have the structure of the first argument, with zeros for
        a leaf on which the result does not depend, and None for statics and numbers.
        `allow_int` has the same meaning as in `jdag.value_and_grad`.
        """
        plan, inputs = self._planned(args, True, allow_int)
        value, gradients = plan.run(inputs)
        leaves, form = plan.leaves
        ordered = [gradient_or_zeros(gradients.get(r.key.name), r) for r in leaves]
        return value, unflatten(form, ordered)

    @property
    def plan(self) -> "Plan":
        """The plan of the last call.

        Raises:
            JdagError: the step was not called yet.
        """
        if self._last is None:
            raise JdagError(f"{self!r} has no plan yet: its first call creates a plan")
        return self._last

    def _leaves(self, args: Sequence[Any], allow_int: bool) -> tuple[list[Ref], Any]:
        try:
            leaves, form = flatten_refs(args[0] if args else (), is_ref)
            if not leaves:
                raise no_arrays("it")
            for ref in leaves:
                check_leaf(ref, allow_int)
        except JdagError as error:
            raise type(error)(
                f"argument 0 of value_and_grad: {error}; expected leaves, such as refs "
                "returned by cluster.put"
            ) from None
        return leaves, form.bare

    def _planned(
        self, args: tuple[Any, ...], differentiated: bool, allow_int: bool = False
    ) -> tuple["Plan", list[Any]]:
        cluster = self._cluster
        state = cluster.state
        cluster._check(self._what)
        recoveries = state.recovery and state.recovery.count
        epoch = (*state.driver.incarnations.items(), recoveries)
        flat, treedef = jax.tree_util.default_registry.flatten(args)
        types = [
            value.aval
            if value.__class__ is JaxArray and not value.is_deleted()
            else _type_of(value, state)
            for value in flat
        ]
        # Fast path: for arrays, floats and leaves, the types select the plan.
        fast_key = (treedef, *types, epoch, differentiated, allow_int)
        if fast_key != self._recent[0]:
            cached = None if None in types else self._by_types.get(fast_key)
            self._recent = (fast_key, *cached) if cached else (None, None, ())
        if self._recent[0] is not None:
            _, self._last, places = self._recent
            return self._last, [flat[place] for place in places]
        first = self._leaves(args, allow_int) if differentiated else ([], None)
        parts = split(args, {}, state.is_named)
        inputs, leaves = dict(parts.constants), []
        for place, ref in parts.refs:
            if not is_ref(ref):
                inputs[place] = ref
                continue
            if ref.holder is not state or ref.leaf is None or ref.leaf.dropped:
                cluster._assignments.leaf(ref)  # Raises an error with the reason.
            leaves.append((place, ref.key, ref.tracked))
        avals = {place: parts.aval(place, value) for place, value in inputs.items()}
        key = (parts.template, *avals.items(), *leaves, epoch, differentiated)
        plan = self._plans.get(key)
        if plan is None:
            for old in [key for key in self._plans if key[-2] != epoch]:
                del self._plans[old]  # The plan uses a lost worker.
            self._by_types.clear()
            plan = self._recorded(parts, avals, differentiated)
            plan.prepare()
            plan.leaves = first
            self._plans[key] = plan
        if None not in types and parts.size == len(flat):
            if len(self._by_types) >= _BY_TYPES_MAX:
                self._by_types.clear()
            self._by_types[fast_key] = plan, tuple(inputs)
        self._last = plan
        return plan, list(inputs.values())

    def _recorded(
        self, arguments: Split, avals: Mapping[int, Aval], differentiated: bool
    ) -> "Plan":
        cluster, program = self._cluster, self._program
        self._count()
        id, name = cluster._next_id(), name_of(program)
        worker = cluster._port.worker
        frames = [RecordingFrame(cluster.state, worker, id, name) for _ in range(2)]
        first, second = [record(program, frame, arguments, avals) for frame in frames]
        check_same(first, second)
        recorded = RecordedGraph(first)
        gradients: dict[LeafId, int] = {}
        if differentiated or self._optimizer is not None:
            roots = roots_of(first, recorded, differentiated)
            gradients = recorded.graph.differentiate(roots)
        stepped: tuple[Ref, ...] = ()
        stages: list[tuple[LeafId, int]] = []
        scale: list[int] = []
        if self._optimizer is not None and not differentiated:
            stepped, stages, scale = _stepping(
                self._optimizer, recorded, first, gradients
            )
        results = gradients if differentiated else {}
        plan = Plan(
            cluster, recorded, first, results, stages, scale=scale, exact=self._exact
        )
        plan.stepped = stepped
        return plan

    def _count(self) -> None:
        code = code_of(self._program)
        recordings = self._cluster.state.recordings
        recordings[code] += 1
        if recordings[code] == ANEW_MAX:
            site = call_site()
            warnings.warn_explicit(
                f"{name_of(self._program)} was recorded {ANEW_MAX} times: each call of "
                "jdag.compile, and each new shape, static or leaf in the arguments of "
                "a step, needs a recording. Call jdag.compile once, outside of loops, "
                "and pass changing values as arrays of the same shapes",
                UserWarning,
                site.file,
                site.line,
            )


class Plan:
    """A recorded program, split into segments for its workers.

    `CompiledStep.plan` is the plan of the last call. `print(plan)` prints its segments
    and messages.
    """

    def __init__(
        self,
        cluster: Cluster,
        recorded: RecordedGraph,
        recording: Recording,
        gradients: Mapping[LeafId, int],
        stages: Sequence[tuple[LeafId, int]],
        *,
        scale: Sequence[int],
        exact: bool,
    ) -> None:
        self.skipped = False  # Whether `skip_not_finite` skipped the last step.
        self.stepped: tuple[Ref, ...] = ()  # The leaves that the optimizer updates.
        self.leaves: tuple[list[Ref], Any] = ([], None)  # Used by `value_and_grad`.
        self.staged = [leaf for leaf, _ in stages]  # Updated leaves and their states.
        self.name = recording.frame.program
        self._state, self._port = cluster.state, cluster._port
        self._id = recording.frame.id
        self._number = 0
        form = recording.treedef
        self._rebuild = form.rebuild if isinstance(form, Form) else form.unflatten
        inputs = {value: index for index, value in enumerate(recorded.inputs)}
        # For each result: its index in the values or inputs of a step, or its data.
        slots: dict[int, int] = {}
        self._results: list[tuple[str, Any]] = []
        for leaf in recording.leaves:
            if not is_ref(leaf):
                self._results.append(("data", leaf))
            elif (value := recorded.value(leaf.key, leaf.owner, leaf.aval)) in inputs:
                self._results.append(("input", inputs[value]))
            else:
                place = slots.setdefault(value, len(slots))
                self._results.append(("value", place))
        self._gradients = {
            leaf: slots.setdefault(value, len(slots))
            for leaf, value in gradients.items()
        }
        # The optimizer's scaling factor, which is NaN in a skipped step.
        self._scale = [slots.setdefault(value, len(slots)) for value in scale]
        self._slots = tuple(slots)
        self.cut: CutPlan = cut_graph(
            recorded.graph,
            plan=self._id,
            caller=self._port.worker,
            results=self._slots,
            stages=stages,
            exact=exact,
        )
        check_steps(self.name, cluster.state.schedule, self.cut)
        sent = dict.fromkeys([slot for _, sent in self.cut.inputs for slot in sent])
        self._sent = [(slot, inputs[slot]) for slot in sent]
        used = {slot for _, part in self.cut.parts for slot in part.constants}
        self._constants = [
            (SlotKey(self._id, 0, slot), value)
            for slot, value in recorded.constants.items()
            if slot in used
        ]
        loose = cluster._assignments.unplanned
        self._hold = Hold(loose, self._id, self._port.worker)  # type: ignore[arg-type]

    def prepare(self) -> None:
        port, parts = self._port, self.cut.parts
        slots = tuple([slot for slot, _ in self._sent])
        planned = Planned(self._id, parts, self._slots, slots, self.cut.inputs)
        port.tell(planned, self._constants)
        total, done = sum([len(part.segments) for _, part in parts]), 0
        with Bar(f"compiling {self.name}", total) as bar:
            while done < total:
                waiter = port.waiter()
                port.tell(Compiled(waiter, self._id, done))
                done = port.wait(waiter)
                if isinstance(done, Failure):
                    raise exception_of(done)
                bar.show(done)

    def run(self, inputs: Sequence[Any]) -> tuple[Any, Mapping[LeafId, Any]]:
        port, state = self._port, self._state
        self._number = number = self._number + 1
        sent = [inputs[index] for _, index in self._sent]
        plain = [v.__class__ is JaxArray and not v.committed for v in sent]
        if state.abstract or not all(plain):
            sent = list(map(state.value, sent))
        waiter = port.waiter()
        port.tell(Stepping(waiter, self._id, number, sent))
        result = port.wait(waiter)
        if isinstance(result, Failure):
            raise exception_of(result)
        convert = user_value if state.abstract else delivered
        values = list(map(convert, result))
        leaves: list[Any] = []
        for kind, item in self._results:
            source = values if kind == "value" else inputs
            leaves.append(item if kind == "data" else source[item])
        gradients = {leaf: values[index] for leaf, index in self._gradients.items()}
        scale = [] if self._state.abstract else [values[index] for index in self._scale]
        self.skipped = any(map(np.isnan, scale))
        return self._rebuild(leaves), gradients

    def __str__(self) -> str:
        return table_of_plan(self.name, self.cut, self._port.worker)

    def graph(self) -> Graph:
        """Return the graph of the segments and of the leaves that they read."""
        return graph_of_plan(self.cut, str(self))


def _type_of(value: Any, state: Any) -> Any:
    """Return the part of an argument that selects a plan; None if `split` is needed."""
    if isinstance(value, Ref):
        leaf = value.leaf if value.holder is state else None
        is_valid = leaf is not None and not leaf.dropped
        return (leaf, value.tracked) if is_valid else None
    if isinstance(value, np.ndarray):
        return value.shape, value.dtype
    if is_array_type(value.__class__):
        aval = value.aval
        kind = aval.shape, aval.dtype, aval.weak_type
        return None if value.is_deleted() else kind
    return float if type(value) is float else None


def _stepping(
    optimizer: Optimizer,
    recorded: RecordedGraph,
    recording: Recording,
    gradients: Mapping[LeafId, int],
) -> tuple[tuple[Ref, ...], list[tuple[LeafId, int]], list[int]]:
    """Add an optimizer's update to the graph.

    Returns:
        A tuple of the leaves, the new value of each leaf and state, and a list with the
        value that is NaN in a skipped step. The list is empty if steps are never
        skipped.
    """
    frame, graph = recording.frame, recorded.graph
    frame.phase, frame.completed = FramePhase.OPEN, True

    def named(value: int, owner: str, aval: Aval) -> Ref:
        key = SlotKey(frame.id, 1, value)
        recorded.name(key, value)
        return Ref(frame, key, owner, aval, False)

    def bring(scale: Ref, owner: str) -> Ref:
        recorded.add_calls()
        value = recorded.value(scale.key, scale.owner, scale.aval)
        return named(value, owner, aval_of(1.0))  # A weak type, like a Python number.

    refs: dict[Key, Ref] = {
        NewestKey(None, leaf, 0): named(value, leaf.worker, graph.aval(value))
        for leaf, value in gradients.items()
    }
    stepped, parts, scale = optimizer.planned(Context(frame), refs, bring)
    recorded.add_calls()
    checks = (
        [] if scale is None else [recorded.value(scale.key, scale.owner, scale.aval)]
    )
    stages: list[tuple[LeafId, int]] = []
    for part in parts:
        fn: Any = part.function
        owner, site = part.worker, part.call_site
        arguments = zip(part.inputs, fn.avals, strict=True)
        values = [recorded.value(key, owner, aval) for key, aval in arguments]
        tracked = [False] * len(values)
        outputs = graph.call(owner, fn, values, tracked, fn.name, site, update=True)
        stages += zip([key.name for key in part.outputs], outputs, strict=True)
    frame.phase = FramePhase.LEFT
    return stepped, stages, checks
