"""Recording of a program: its calls become a dataflow graph, without being run.

The program runs once in a context that stores its calls. Arrays in its arguments are
JAX tracers, so that operations of the program itself, such as `x[i]`, are recorded too.
All of these operations together become one call on the caller, before all other calls.

Invariants: a recording neither waits nor sends messages. Two recordings of a
deterministic program are equal, including their keys.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import jax
import numpy as np
from jax._src.config import eager_constant_folding
from jax._src.core import eval_context, trace_ctx
from jax.extend.core import jaxpr_as_fun

from jdag.compute.avals import Aval, aval_of
from jdag.compute.dataflow import DataflowGraph
from jdag.compute.pairs import pair
from jdag.compute.pytrees import (
    NUMBERS,
    Split,
    flatten,
    is_static,
    paths,
    split,
    unflatten,
)
from jdag.compute.refs import is_ref
from jdag.context.cluster_state import ClusterState
from jdag.context.context import Context
from jdag.context.program_frame import FramePhase, ProgramFrame
from jdag.context.refs import Ref
from jdag.context.roots import checked_roots
from jdag.engine.functions import call_site, name_of
from jdag.engine.protocol import (
    LEAF_KINDS,
    ContextId,
    Issued,
    Key,
    LeafId,
    OutputKey,
    SlotKey,
    Worker,
)
from jdag.errors import ContextError, JdagError, RootError, kind_of
from jdag.runtime.failures import user_traceback

_EAGER = (
    "a plan cannot have hooks; run the program in a context or by jdag.value_and_grad"
)
_NESTED = (
    "a plan has one program; call the other one as a Python function of this context"
)
_STEPS = "use jdag.compile(..., optimizer=opt) or .value_and_grad for gradients"
_OUTSIDE = "move this outside of the program, and pass the result as an argument"
_TRACED = "ctx.call in a function that jax.vmap, grad or jit traces"
# Remedies by the start of the name of the refused operation.
_REMEDIES = {
    "a fetch": "return the ref, which the step then fetches; to branch on a value, use "
    "jnp.where or jax.lax.cond in a called function",
    "ctx.on_": _EAGER,
    "ctx.start": _NESTED,
    "a call of a program": _NESTED,
    "a call of an unjitted": "mark it with @jdag.unjitted(shapes=fn), which declares "
    "the shapes of its results",
    "ctx.backward": _STEPS,
    "ctx.gradient": _STEPS,
    "ctx.graph": "use step.plan.graph(), which returns the graph of a plan",
    _TRACED: "apply these transformations inside of the called functions",
}
_RECORDED = (
    *("ctx.call", "ctx.move", "ctx.replicate", "ctx.tag", "ctx.all_reduce"),
    *("ctx.all_gather", "ctx.reduce_scatter", "ctx.all_to_all"),
)


class _Tape:
    """Stands in for a program's port, and stores the calls that the program issues."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.calls: list[Issued] = []
        self.constants: dict[Key, Any] = {}

    def tell(self, event: Issued, values: Sequence[tuple[Key, Any]]) -> None:
        self.calls.append(event)
        self.constants.update(values)


class RecordingFrame(ProgramFrame):
    """The frame of a recorded program: its calls, and the arrays that it computes."""

    def __init__(
        self, state: ClusterState, worker: Worker, id: ContextId, program: str
    ) -> None:
        self.tape = _Tape(worker)
        super().__init__(state, self.tape, id, (), program)  # type: ignore[arg-type]
        self.phase = FramePhase.OPEN
        self.tracers: list[Any] = []  # Inputs, then arguments of calls and results.
        self._refs: dict[int, Ref] = {}  # The refs of the tracers, by id(tracer).
        self.trace: Any = None  # JAX's trace, while the program runs.
        self.completed = False  # The program has ended; an optimizer may add calls.

    def check(self, operation: str, ref: Ref | None = None) -> None:
        if self.phase is not FramePhase.OPEN:
            raise ContextError(
                f"{operation} in {self.program}, but the recording of this program has "
                "ended: expected operations before the program returns"
            )
        if operation not in _RECORDED and not self.completed:
            raise self.refusal(operation, ref)

    def refusal(self, operation: str, ref: Ref | None = None) -> JdagError:
        texts = (text for k, text in _REMEDIES.items() if operation.startswith(k))
        remedy = next(texts, _OUTSIDE)
        operation = operation if ref is None else f"{operation} of {ref!r}"
        return ContextError(
            f"{operation}, at {call_site()}, cannot be recorded by jdag.compile in "
            f"{self.program}: {remedy}"
        )

    def start(self, worker: Worker, fn: Any, parts: Split, name: str = "") -> Any:
        callee = "an unjitted function without shapes" if name else "a program"
        error = self.refusal(f"a call of {callee}")
        raise type(error)(f"{name or name_of(fn)} on {worker!r}: {error}")

    def ref_of(self, tracer: Any) -> Ref:
        if id(tracer) not in self._refs:
            key = SlotKey(self.id, 0, len(self.tracers))
            aval = aval_of(tracer)
            self._refs[id(tracer)] = Ref(self, key, self.tape.worker, aval, False)
            self.tracers.append(tracer)
        return self._refs[id(tracer)]

    def bound_tracers(self, tree: Any) -> Any:
        leaves, treedef = flatten(tree)
        bound = [self.ref_of(leaf) if _is_tracer(leaf) else leaf for leaf in leaves]
        return unflatten(treedef, bound)

    def result(self, tree: Any) -> tuple[list[Any], Any]:
        leaves, treedef = flatten(tree, what=f"what {self.program} returned")
        for index, leaf in enumerate(leaves):
            if is_ref(leaf):
                self.admit(leaf)
            elif _is_tracer(leaf):
                leaves[index] = self.ref_of(leaf)
            elif not (is_static(leaf) or isinstance(leaf, NUMBERS)):
                try:
                    aval_of(leaf)
                except JdagError:
                    raise JdagError(
                        f"{self.program} returned {kind_of(leaf)} at "
                        f"{paths(tree)[index] or 'the top'}; expected a pytree of "
                        "refs, arrays, numbers and statics"
                    ) from None
        return leaves, treedef


def _is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


class RecordingContext(Context):
    def call(
        self, worker: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        frame: Any = self._frame
        if frame.phase is FramePhase.OPEN and trace_ctx.trace is not frame.trace:
            raise frame.refusal(_TRACED)
        # Leave the outer trace, so that functions are traced in the same way as
        # without a plan.
        with eval_context(), eager_constant_folding(False):
            fn, args, kwargs = frame.bound_tracers((fn, args, kwargs))
            return super().call(worker, fn, *args, **kwargs)


class Recording(NamedTuple):
    """A recorded run of a program: its calls, its own operations, and its result."""

    frame: RecordingFrame
    inputs: tuple[Aval, ...]
    own: Any  # The closed jaxpr of the program's own operations.
    leaves: list[Any]
    treedef: Any


def record(
    program: Callable[..., Any],
    frame: RecordingFrame,
    parts: Split,
    avals: Mapping[int, Aval],
) -> Recording:
    """Run a program with tracers as inputs. `avals` has their types by position.

    Raises:
        JdagError: the program cannot be recorded. The message names the line and a
            remedy.
    """
    result: list[Any] = []
    leaves = [(place, ref) for place, ref in parts.refs if is_ref(ref)]

    def body(*tracers: Any) -> list[Any]:
        frame.trace = trace_ctx.trace
        for tracer in tracers:
            frame.ref_of(tracer)
        args, _ = parts.filled([*leaves, *zip(avals, tracers, strict=True)])
        frame.state.recording = frame.refusal
        try:
            # Operations that do not depend on inputs are computed now, in the same way
            # as without a plan.
            with jax.ensure_compile_time_eval():
                returned = program(RecordingContext(frame), *args)
            result.extend(frame.result(returned))
        finally:
            frame.state.recording = None
            frame.phase = FramePhase.LEFT
            # Release the tracers, since jax.checking_leaks would report them.
            traced, frame.tracers, frame.trace = frame.tracers, [], None
        return traced[len(tracers) :]

    try:
        own = jax.make_jaxpr(body)(*[aval.struct() for aval in avals.values()])
    except jax.errors.JAXTypeError as error:
        raise JdagError(
            f"{frame.program} cannot be recorded by jdag.compile, because it uses the "
            "value of an input (to branch or to convert it) or stores a tracer: use "
            "jnp.where or jax.lax.cond, pass values that Python needs as "
            f"jdag.static(value), or fetch them from a step\n\n{user_traceback(error)}"
        ) from error
    return Recording(frame, tuple(avals.values()), own, *result)


def check_same(recording: Recording, repeated: Recording) -> None:
    tape, repeated_tape = recording.frame.tape, repeated.frame.tape
    calls = zip_longest(tape.calls, repeated_tape.calls)
    for number, (first, second) in enumerate(calls, 1):
        if first is None or second is None or _facts(first) != _facts(second):
            both = [
                "missing" if c is None else f"{c.name} on {c.worker!r} at {c.call_site}"
                for c in (first, second)
            ]
            difference = f"call {number} was first {both[0]}, and then {both[1]}"
            raise _differs(recording, difference)
    for key, value in tape.constants.items():
        if not _equal(value, repeated_tape.constants[key]):
            difference = f"argument {key.index} of call {key.name[0]} differs"
            raise _differs(recording, difference)
    own, repeated_own = recording.own, repeated.own
    is_same = (str(own), _results(recording)) == (str(repeated_own), _results(repeated))
    if not (is_same and all(map(_equal, own.consts, repeated_own.consts))):
        raise _differs(recording, "the program's own operations or results differ")


def _facts(call: Issued) -> Any:
    fn = call.function
    places = (fn.device, fn.in_devices, fn.out_devices)
    return call.worker, fn.pair, places, call.arguments, call.call_site, call.tag


def _equal(first: Any, second: Any) -> bool:
    if first is second or isinstance(first, Aval):
        return True
    arrays = []
    for value in (first, second):
        is_key = not isinstance(aval_of(value).dtype, np.dtype)
        arrays.append(np.asarray(jax.random.key_data(value) if is_key else value))
    return arrays[0].tobytes() == arrays[1].tobytes()


def _results(recording: Recording) -> Any:
    keys = [leaf.key if is_ref(leaf) else None for leaf in recording.leaves]
    return recording.treedef, keys


def _differs(recording: Recording, difference: str) -> JdagError:
    return JdagError(
        f"two recordings of {recording.frame.program} differ: {difference}. A plan "
        "repeats one recording, so a compiled program must be deterministic: pass "
        "changing values as arguments, and define functions outside of the program"
    )


class RecordedGraph:
    """The dataflow graph of a recording. Later calls of the frame can be added."""

    def __init__(self, recording: Recording) -> None:
        frame = recording.frame
        self.graph = DataflowGraph()
        self._state = frame.state
        self._tape = frame.tape
        caller = self._tape.worker
        inputs = recording.inputs
        self.inputs = [self.graph.source("input", caller, aval) for aval in inputs]
        self.constants: dict[int, Any] = {}
        self._numbers: dict[Key, int] = {}
        values = list(self.inputs)
        if recording.own.out_avals:
            own = _own_pair(recording)
            values += self.graph.call(caller, own, values, own.tracked, own.name, "")
        for index, value in enumerate(values):
            self.name(SlotKey(frame.id, 0, index), value)
        self._added = 0
        self.add_calls()

    def name(self, key: Key, value: int) -> None:
        self._numbers[key] = value

    def value(self, key: Key, owner: Worker, aval: Aval) -> int:
        """Return a key's value number. A new leaf or constant is added to the graph."""
        number = self._numbers.get(key)
        if number is None:
            if key.kind in LEAF_KINDS:
                leaf: LeafId = key.name
                aval = self._state.record(leaf, aval).aval  # Includes the device.
                tracked = aval.inexact and not leaf.untracked
                number = self.graph.source(
                    "leaf", owner, aval, leaf=leaf, tracked=tracked
                )
            else:
                number = self.graph.source("constant", self._tape.worker, aval)
                self.constants[number] = self._tape.constants[key]
            self._numbers[key] = number
        return number

    def add_calls(self) -> None:
        calls = self._tape.calls[self._added :]
        self._added += len(calls)
        for call in calls:
            sources = zip(call.arguments, call.function.avals, strict=True)
            inputs = [self.value(arg.key, arg.owner, aval) for arg, aval in sources]
            outputs = self.graph.call(
                call.worker,
                call.function,
                inputs,
                [arg.tracked for arg in call.arguments],
                call.name,
                call.call_site,
                tag=call.tag if call.tag is not None and call.tag.listed else None,
            )
            for index, output in enumerate(outputs):
                self.name(OutputKey(call.context, call.path, index), output)


def _own_pair(recording: Recording) -> Any:
    """Return the pair of the operations that the program itself makes between calls."""
    own = jaxpr_as_fun(recording.own)

    def between(*inputs: Any) -> list[Any]:
        return list(own(*inputs))

    program = recording.frame.program.rpartition(":")[2]
    between.__qualname__ = f"{program}, between calls"
    structs = tuple([aval.struct() for aval in recording.inputs])
    template = split(structs, {}, lambda _: True).template
    return pair(between, template, recording.inputs, (False,) * len(structs))


def roots_of(recording: Recording, graph: RecordedGraph, of_loss: bool) -> list[int]:
    """Return the values of the first result, which a step differentiates.

    Raises:
        RootError: the first result is empty, or part of it cannot be differentiated.
    """
    result = unflatten(recording.treedef, recording.leaves)
    first = result[0] if isinstance(result, tuple) and result else result
    # Refuse plain tuples, such as (loss, metrics) of a micro-batch, not named tuples.
    for root in jax.tree.leaves(first, is_leaf=lambda value: type(value) is tuple):
        if type(root) is tuple:
            raise RootError(
                f"the first result of {recording.frame.program} contains a tuple of "
                f"{len(root)} elements, and all would be differentiated: return the "
                "losses first and other values after them, such as (losses, metrics)"
            )
    roots = tuple(flatten(first)[0])
    if not roots:
        raise RootError(
            f"the first result of {recording.frame.program} is {first!r}: expected a "
            "loss, that is, a ref returned by ctx.call"
        )
    checked_roots(roots, None, of_loss=of_loss)
    tracked = [root for root in roots if root.tracked]
    return [graph.value(root.key, root.owner, root.aval) for root in tracked]
