"""Recording of a program: its calls become a dataflow graph, and none of them runs.

The program runs once as it is, in a context that keeps its calls. Arrays among its
arguments are tracers of JAX meanwhile, so that what it computes from them itself, as
`x[i]`, is recorded too: all of that is one call on the caller, before all others.

Invariants: a recording waits for nothing and sends nothing. Equal programs give equal
recordings, key by key, since both number their calls alike.
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

_EAGER = "a plan has no hooks; contexts and jdag.value_and_grad run such a program"
_NESTED = (
    "a plan has one program; call the other as a function, with this context first"
)
_STEPS = "jdag.compile(..., optimizer=opt) and .value_and_grad differentiate a program"
_OUTSIDE = "do that outside of the program, and pass what it gives as an argument"
_TRACED = "ctx.call in what jax.vmap, grad or jit traces"
# By the beginning of what is refused.
_REMEDIES = {
    "a fetch": "return the ref, and the step fetches it; functions that are called "
    "branch on values, by jnp.where or jax.lax.cond",
    "ctx.on_": _EAGER,
    "ctx.start": _NESTED,
    "a call of a program": _NESTED,
    "a call of an unjitted": "mark it by @jdag.unjitted(shapes=fn), which says what it "
    "returns",
    "ctx.backward": _STEPS,
    "ctx.gradient": _STEPS,
    "ctx.graph": "step.plan.graph() draws a plan",
    _TRACED: "put these inside of the functions that are called",
}
_RECORDED = (
    *("ctx.call", "ctx.move", "ctx.replicate", "ctx.tag", "ctx.all_reduce"),
    *("ctx.all_gather", "ctx.reduce_scatter", "ctx.all_to_all"),
)


class _Tape:
    """In the place of a program's port: keeps the calls that it issues."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.calls: list[Issued] = []
        self.constants: dict[Key, Any] = {}

    def tell(self, event: Issued, values: Sequence[tuple[Key, Any]]) -> None:
        """Keep a call and its constants."""
        self.calls.append(event)
        self.constants.update(values)


class RecordingFrame(ProgramFrame):
    """A program that is recorded: its calls, and the arrays that it computes itself."""

    def __init__(
        self, state: ClusterState, worker: Worker, id: ContextId, program: str
    ) -> None:
        self.tape = _Tape(worker)
        super().__init__(state, self.tape, id, (), program)  # type: ignore[arg-type]
        self.phase = FramePhase.OPEN
        self.tracers: list[Any] = []  # Inputs, then what calls take or it returns.
        self._refs: dict[int, Ref] = {}  # Of these, by id.
        self.trace: Any = None  # Of JAX, while the program runs.
        self.completed = False  # Its program has run, and jdag adds to it.

    def check(self, what: str, ref: Ref | None = None) -> None:
        """Raise unless a plan can have this."""
        if self.phase is not FramePhase.OPEN:
            raise ContextError(f"{what} in {self.program}, which is recorded, and over")
        if what not in _RECORDED and not self.completed:
            raise self.refusal(what, ref)

    def refusal(self, what: str, ref: Ref | None = None) -> JdagError:
        """Return the error of what cannot be recorded: the line, and the remedy."""
        known = [text for key, text in _REMEDIES.items() if what.startswith(key)]
        remedy = known[0] if known else _OUTSIDE
        what = what if ref is None else f"{what} of {ref!r}"
        return ContextError(
            f"{what}, at {call_site()}, while {self.program} is recorded by "
            f"jdag.compile: {remedy}"
        )

    def start(self, worker: Worker, fn: Any, parts: Split, name: str = "") -> Any:
        """Raise: a plan has one program."""
        unjitted = "an unjitted function without shapes"
        what = f"a call of {unjitted if name else 'a program'}"
        error = self.refusal(what)
        raise type(error)(f"{name or name_of(fn)} on {worker!r}: {error}")

    def ref_of(self, tracer: Any) -> Ref:
        """Return a ref to an array that the program computes; the same for each."""
        if id(tracer) not in self._refs:
            key = SlotKey(self.id, 0, len(self.tracers))
            aval = aval_of(tracer)
            self._refs[id(tracer)] = Ref(self, key, self.tape.worker, aval, False)
            self.tracers.append(tracer)
        return self._refs[id(tracer)]

    def bound_tracers(self, tree: Any) -> Any:
        """Return a pytree with refs in the place of tracers."""
        leaves, treedef = flatten(tree)
        named = [self.ref_of(one) if _is_tracer(one) else one for one in leaves]
        return unflatten(treedef, named)

    def result(self, tree: Any) -> tuple[list[Any], Any]:
        """Return the leaves of what the program returned, refs or data; its treedef."""
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
                        f"{paths(tree)[index] or 'the top'}; a program that is "
                        "compiled returns pytrees of refs, arrays, numbers and statics"
                    ) from None
        return leaves, treedef


def _is_tracer(value: object) -> bool:
    return isinstance(value, jax.core.Tracer)


class RecordingContext(Context):
    """The context that a program gets while it is recorded."""

    def call(
        self, worker: str, fn: Callable[..., Any], /, *args: Any, **kwargs: Any
    ) -> Any:
        """Record a call; see `Context.call`."""
        frame: Any = self._frame
        if frame.phase is FramePhase.OPEN and trace_ctx.trace is not frame.trace:
            raise frame.refusal(_TRACED)
        # Left meanwhile, so that functions are traced as they are without a plan.
        with eval_context(), eager_constant_folding(False):
            fn, args, kwargs = frame.bound_tracers((fn, args, kwargs))
            return super().call(worker, fn, *args, **kwargs)


class Recording(NamedTuple):
    """One run of a program: its calls, what it computed itself, what it returned."""

    frame: RecordingFrame
    inputs: tuple[Aval, ...]
    own: Any  # The closed jaxpr of what it computed from its inputs.
    leaves: list[Any]
    treedef: Any


def record(
    program: Callable[..., Any],
    frame: RecordingFrame,
    given: Split,
    avals: Mapping[int, Aval],
) -> Recording:
    """Run a program on tracers in place of its inputs, whose avals are by position.

    Raises:
        JdagError: it does what cannot be recorded; names the line and the remedy.
    """
    found: list[Any] = []
    leaves = [(place, ref) for place, ref in given.refs if is_ref(ref)]

    def body(*tracers: Any) -> list[Any]:
        frame.trace = trace_ctx.trace
        for tracer in tracers:
            frame.ref_of(tracer)
        filled = [*leaves, *zip(avals, tracers, strict=True)]
        args, _ = given.filled(filled)
        frame.state.recording = frame.refusal
        try:
            # What depends on no input is computed at once, as without a plan.
            with jax.ensure_compile_time_eval():
                result = program(RecordingContext(frame), *args)
            found.extend(frame.result(result))
        finally:
            frame.state.recording = None
            frame.phase = FramePhase.LEFT
            # Not kept, or jax.checking_leaks finds them.
            made, frame.tracers, frame.trace = frame.tracers, [], None
        return made[len(tracers) :]

    try:
        own = jax.make_jaxpr(body)(*[aval.struct() for aval in avals.values()])
    except jax.errors.JAXTypeError as error:
        raise JdagError(
            f"{frame.program} cannot be recorded by jdag.compile, since it takes the "
            "value of an input, to branch on it or to convert it, or keeps a tracer: "
            "use jnp.where or jax.lax.cond, pass what Python needs as "
            f"jdag.static(value), or fetch it from a step\n\n{user_traceback(error)}"
        ) from error
    return Recording(frame, tuple(avals.values()), own, *found)


def check_same(one: Recording, other: Recording) -> None:
    """Raise JdagError unless a program did the same when it was recorded again."""
    calls = zip_longest(one.frame.tape.calls, other.frame.tape.calls)
    for number, (first, second) in enumerate(calls, 1):
        if first is None or second is None or _told(first) != _told(second):
            both = [
                "none" if c is None else f"{c.name} on {c.worker!r} at {c.call_site}"
                for c in (first, second)
            ]
            raise _differs(one, f"call {number} was {both[0]}, and then {both[1]}")
    constants = other.frame.tape.constants
    for key, value in one.frame.tape.constants.items():
        if not _equal(value, constants[key]):
            raise _differs(one, f"argument {key.index} of call {key.name[0]} differs")
    same = str(one.own) == str(other.own) and _results(one) == _results(other)
    if not (same and all(map(_equal, one.own.consts, other.own.consts))):
        raise _differs(one, "what it computed itself, or returned, differs")


def _told(call: Issued) -> Any:
    made = call.function
    places = (made.device, made.in_devices, made.out_devices)
    return call.worker, made.pair, places, call.arguments, call.call_site, call.tag


def _equal(one: Any, other: Any) -> bool:
    if one is other or isinstance(one, Aval):
        return True
    both = []
    for value in (one, other):
        is_key = not isinstance(aval_of(value).dtype, np.dtype)
        both.append(np.asarray(jax.random.key_data(value) if is_key else value))
    return both[0].tobytes() == both[1].tobytes()


def _results(one: Recording) -> Any:
    return one.treedef, [leaf.key if is_ref(leaf) else None for leaf in one.leaves]


def _differs(one: Recording, how: str) -> JdagError:
    return JdagError(
        f"{one.frame.program} did not do the same when it was recorded twice: {how}. A "
        "plan repeats one recording, so a program that is compiled does the same each "
        "time: pass what changes as arguments, and define functions outside of it"
    )


class RecordedGraph:
    """The graph of a recording; calls of its context after that can be added."""

    def __init__(self, recording: Recording) -> None:
        frame = recording.frame
        self.graph = DataflowGraph()
        self._state = frame.state
        self._tape = frame.tape
        here = self._tape.worker
        self.inputs = [
            self.graph.source("input", here, aval) for aval in recording.inputs
        ]
        self.constants: dict[int, Any] = {}
        self._numbers: dict[Key, int] = {}
        values = list(self.inputs)
        if recording.own.out_avals:
            made = _own_pair(recording)
            values += self.graph.call(here, made, values, made.tracked, made.name, "")
        for index, value in enumerate(values):
            self.name(SlotKey(frame.id, 0, index), value)
        self._taken = 0
        self.take()

    def name(self, key: Key, value: int) -> None:
        """Let a key, which a call may take, name a value."""
        self._numbers[key] = value

    def value(self, key: Key, owner: Worker, aval: Aval) -> int:
        """Return the value that a key names."""
        number = self._numbers.get(key)
        if number is None:
            if key.kind in LEAF_KINDS:
                leaf: LeafId = key.name
                aval = self._state.record(leaf, aval).aval  # Has its device.
                on = aval.inexact and not leaf.untracked
                number = self.graph.source("leaf", owner, aval, leaf=leaf, tracked=on)
            else:
                number = self.graph.source("constant", self._tape.worker, aval)
                self.constants[number] = self._tape.constants[key]
            self._numbers[key] = number
        return number

    def take(self) -> None:
        """Add the calls that the context has been given since, in order."""
        calls = self._tape.calls[self._taken :]
        self._taken += len(calls)
        for call in calls:
            made = call.function
            sources = zip(call.arguments, made.avals, strict=True)
            inputs = [self.value(one.key, one.owner, aval) for one, aval in sources]
            tracked = [one.tracked for one in call.arguments]
            said = call.name, call.call_site
            tag = call.tag if call.tag is not None and call.tag.listed else None
            outputs = self.graph.call(
                call.worker, made, inputs, tracked, *said, tag=tag
            )
            for index, output in enumerate(outputs):
                self.name(OutputKey(call.context, call.path, index), output)


def _own_pair(recording: Recording) -> Any:
    """The pair of what a program computed from its inputs between its calls."""
    own = jaxpr_as_fun(recording.own)

    def between(*inputs: Any) -> list[Any]:
        found: list[Any] = own(*inputs)
        return found

    program = recording.frame.program.rpartition(":")[2]
    between.__qualname__ = f"{program}, between calls"
    structs = tuple([aval.struct() for aval in recording.inputs])
    template = split(structs, {}, lambda _: True).template
    return pair(between, template, recording.inputs, (False,) * len(structs))


def roots_of(recording: Recording, drawn: RecordedGraph, of_loss: bool) -> list[int]:
    """Return the values of the first result that a step differentiates.

    Raises:
        RootError: something in it cannot be differentiated, or there is nothing in it.
    """
    result = unflatten(recording.treedef, recording.leaves)
    first = result[0] if isinstance(result, tuple) and result else result
    for root in jax.tree.leaves(first, is_leaf=is_tuple):
        if is_tuple(root):  # Such as (loss, metrics), of each micro-batch.
            raise RootError(
                f"the first result of {recording.frame.program} has a tuple in it, of "
                f"{len(root)}, and all in it would be differentiated: return the "
                "losses first, and what is not differentiated after them, such as "
                "(losses, metrics)"
            )
    roots = tuple(flatten(first)[0])
    if not roots:
        raise RootError(
            f"the first result of {recording.frame.program} is {first!r}, without a "
            "ref, as ctx.call gives: does the program return its loss?"
        )
    checked_roots(roots, None, of_loss=of_loss)
    tracked = [root for root in roots if root.tracked]
    return [drawn.value(root.key, root.owner, root.aval) for root in tracked]


def is_tuple(value: object) -> bool:
    """Whether it is a tuple, by itself, not one with names."""
    return type(value) is tuple
