"""Segments: the forward and backward calls of one worker as one compiled function.

The nodes of a segment (`jdag.engine.segments`) call the compiled parts of their pairs
inside one jit: nothing is traced twice, and functions that came as StableHLO are like
others. Outputs that are inputs are passed on, since jit would copy them. Arrays that
an incoming bundle alone holds are donated where an output can use their memory.

Segments that are `exact`, or with unjitted functions or named devices, run node by
node: the jobs of `jdag.compute.machine`, with their bits and devices.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import chain, compress
from operator import attrgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from jdag.compute.avals import Aval, aval_of
from jdag.compute.bundles import Bundle, Layout, Packing, Places, bundled, layout
from jdag.compute.configuration import configuration
from jdag.compute.halves import Stash, halves
from jdag.compute.jaxprs import has_callback
from jdag.compute.pairs import refuse_deleted, stays
from jdag.compute.segment_types import Carried, held, types_of
from jdag.compute.sums import add, filled, fold
from jdag.compute.tracing import Residuals, strong, weakened
from jdag.engine.functions import name_on
from jdag.engine.segments import NodeKind, SegmentNode

FUSED_MAX = 512  # Segments whose executables are kept.
READY_MAX = 64  # Executables of one: for each layout of its bundles.
SHOWN_NAMES, SHOWN_SITES = 2, 4
_CALL, _NODE = "__jdag_call__", "__jdag_node__"  # Attributes of errors.
_BACKWARD = (NodeKind.VJP, NodeKind.INPUTS, NodeKind.WEIGHTS)


@partial(jtu.register_dataclass, data_fields=("arrays",), meta_fields=("plan",))
@dataclass(eq=False, slots=True)
class _Made:
    """What jit returns: arrays, and the places of outputs and of bundles' arrays.

    Places count what was given, then these arrays.
    """

    arrays: tuple[Any, ...]
    plan: tuple[Places, tuple[tuple[Layout, Places], ...]]


class _Ready(NamedTuple):
    """A traced segment, and layout and types of the bundles that it makes."""

    call: Callable[..., _Made]
    trace: Any
    may_raise: bool
    bundles: tuple[tuple[Layout, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class _Fused:
    """The nodes of equal segments as jitted functions."""

    pairs: tuple[Any, ...]
    avals: tuple[Aval, ...]
    nodes: tuple[SegmentNode, ...]
    outputs: Places
    carries: tuple[Places, ...]
    configured: Any
    ready: dict[tuple[Layout, ...], _Ready] = field(default_factory=dict, compare=False)

    def prepared(self, layouts: tuple[Layout, ...], given: Sequence[Any]) -> _Ready:
        """Trace it for bundles with these layouts and, for each, types of arrays."""
        structs = [aval_of(one).struct() for one in chain(self.avals, *given)]
        bounds = [len(self.avals)]
        for one in given:
            bounds.append(bounds[-1] + len(one))

        def segment(*given: Any) -> _Made:
            return self._body(layouts, bounds, given)

        call = jax.jit(segment)
        trace = call.trace(*structs)
        donated = _donated(layouts, bounds, structs, trace.out_info)
        if donated:
            call = jax.jit(segment, donate_argnums=donated)
            trace = call.trace(*structs)
        values = (*structs, *trace.out_info.arrays)
        bundles = [
            (one, tuple([values[place] for place in places]))
            for one, places in trace.out_info.plan[1]
        ]
        if len(self.ready) >= READY_MAX:
            self.ready.clear()
        ready = _Ready(call, trace, has_callback(trace.jaxpr), tuple(bundles))
        self.ready[layouts] = ready
        return ready

    def _body(
        self, layouts: Sequence[Layout], bounds: Sequence[int], given: Sequence[Any]
    ) -> _Made:
        values = list(given[: bounds[0]])
        for one, start, end in zip(layouts, bounds, bounds[1:], strict=False):
            values += one.unpacked(given[start:end])
        _compute(self.nodes, self.pairs, values)
        packing = Packing(given)
        outputs = tuple([packing.place(strong(values[one])) for one in self.outputs])
        packed = [packing.packed([values[n] for n in one]) for one in self.carries]
        often = Counter(chain(outputs, *[places for *_, places in packed]))
        bundles = []
        for where, types, places in packed:
            own = [place >= len(given) and often[place] == 1 for place in places]
            alone = tuple(compress(range(len(own)), own))
            bundles.append((layout(where, types, alone), places))
        return _Made(tuple(packing.made), (outputs, tuple(bundles)))


def _compute(
    nodes: Sequence[SegmentNode],
    pairs: Sequence[Any],
    values: list[Any],
    known: Sequence[Any] | None = None,
) -> None:
    """Add what nodes make to the values: one by one if their types are `known`.

    Else they are traced within one jit, where all addends of a cotangent are folded.
    """
    for number, node in enumerate(nodes):
        try:
            values += _computed(node, pairs, values, known)
        except Exception as error:
            setattr(error, _NODE, number)
            raise


def _computed(
    node: SegmentNode,
    pairs: Sequence[Any],
    values: Sequence[Any],
    known: Sequence[Any] | None,
) -> Sequence[Any]:
    first, *others = [tuple([values[n] for n in at]) for at in node.inputs]
    pair: Any = pairs[node.pair] if pairs else None
    if known is None:
        others = [(fold(one),) if one else () for one in others]
    match node.kind:
        case NodeKind.FORWARD:
            forward = partial(_forward, pair) if known is None else pair.forward
            outputs, held = forward(weakened(first, pair.avals))
            return (*outputs, held) if node.keeps else outputs
        case NodeKind.VJP if known is None:
            cotangents: Any = first[0].traced.backward(*first[0].held, tuple(others))
            return cotangents
        case NodeKind.VJP:
            return pair.vjp(first[0], others)
        case NodeKind.INPUTS:  # A bundle has the stash as residuals.
            found, stash = halves(pair, node.weights).input_half(first[0], others)
            made: Any = stash.halves  # As their trace.
            return (*found, Residuals(made, (), (), stash.keeps, False))
        case NodeKind.WEIGHTS:
            stash = Stash(first[0].rest, 0, first[0].traced)
            return halves(pair, node.weights).weight_half(stash)
        case NodeKind.SUM:
            return (fold(first) if known is None else add(first),)
        case NodeKind.FILL:
            like = known[node.inputs[0][0]] if known else aval_of(first[0])
            return (filled(like, int(node.keeps)),)


def _forward(pair: Any, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Residuals]:
    if pair.passes is not None:  # Out of a jit they would be other tracers.
        outputs = tuple([args[index] for index in pair.passes])
        return outputs, Residuals(pair.traced, (), (), (), False)
    made = pair.compiled(*args)
    return tuple(made.outputs), made.residuals(args)


def _donated(
    layouts: Sequence[Layout], bounds: Sequence[int], structs: Sequence[Any], made: Any
) -> Places:
    """The inputs that only their bundle holds, and whose memory an output can use."""
    free = Counter([(one.shape, one.dtype) for one in made.arrays])
    outputs, bundles = made.plan
    passed = {*outputs, *chain.from_iterable([places for _, places in bundles])}
    donated = []
    for one, start in zip(layouts, bounds, strict=False):
        for place in [start + index for index in one.alone]:
            kind = (structs[place].shape, structs[place].dtype)
            if free[kind] and place not in passed:
                free[kind] -= 1
                donated.append(place)
    return tuple(donated)


_fused = lru_cache(maxsize=FUSED_MAX)(_Fused)


@dataclass(eq=False, repr=False)
class SegmentFunction:
    """What one segment of a plan computes.

    Attributes:
        pairs: the distinct pairs of its nodes: `Pair`, `Placed`, or from a message.
        avals: the types of its arrays.
        bundles: for each bundle that it takes after these, its number of residuals.
        nodes: as in `jdag.engine.segments`.
        outputs: the numbers of the arrays that it returns.
        carries: for each bundle that it returns after these, those of the residuals.
        calls: function name and call site of each node, for errors.
        exact: whether to run node by node.
        feeds: for each bundle, the segment that makes it and its place there (`link`).
        out_avals: the types of its outputs, with their devices.

    Raises:
        ValueError: a node takes what does not exist or does not fit.
    """

    pairs: tuple[Any, ...]
    avals: tuple[Aval, ...]
    bundles: tuple[int, ...]
    nodes: tuple[SegmentNode, ...]
    outputs: tuple[int, ...]
    carries: tuple[tuple[int, ...], ...]
    calls: tuple[tuple[str, str], ...]
    exact: bool
    feeds: tuple[tuple["SegmentFunction", int], ...] = field(default=(), init=False)
    out_avals: tuple[Aval, ...] = field(init=False)

    def __post_init__(self) -> None:
        known: list[Any] = [*self.avals, *[None] * sum(self.bundles)]
        keepers: dict[int, SegmentNode] = {}  # By number of what they keep.
        try:
            for node in self.nodes:
                known += types_of(node, self.pairs, known)
                if known[-1] is None:
                    keepers[len(known) - 1] = node
            self.out_avals = tuple([known[one].strong for one in self.outputs])
            held = [known[one] for one in chain(*self.carries)]
        except (LookupError, AttributeError, TypeError) as error:
            raise ValueError(f"a segment uses what it has not: {error}") from error
        if any(held) or len(self.calls) != len(self.nodes):
            raise ValueError("a segment keeps arrays as residuals, or misses calls")
        self._known, self._keepers = known, keepers
        names = [name for name, _ in self.calls]
        self.name = _some(names, SHOWN_NAMES)

    @cached_property
    def costs(self) -> tuple[tuple[str, str], ...]:
        """Function name and kind of each node: "forward", "vjp", "sum" or "fill"."""
        return tuple([(_named(one, self.pairs), one.kind.value) for one in self.nodes])

    @cached_property
    def carried(self) -> list[Carried]:
        """What each bundle that it makes holds, at least."""
        about = self.pairs, len(self.avals), self.exact
        found = []
        for few in self.carries:
            nbytes, most, inputs = zip(
                *[held(self._keepers[one], *about) for one in few], strict=True
            )
            found.append(Carried(sum(nbytes), sum(most), tuple(chain(*inputs))))
        return found

    @property
    def may_raise(self) -> bool:
        """Whether a function in it may raise; if not yet traced, as its pairs say."""
        fused: _Fused | None = vars(self).get("_fused")
        traced = fused.ready.values() if fused else ()
        return any([one.may_raise for one in traced or self.pairs])

    @cached_property
    def _by_nodes(self) -> bool:
        """Whether it runs node by node, which needs its pairs."""
        away = [aval.device for aval in self._known if aval is not None]
        moved = [one.in_devices or one.out_devices for one in self.pairs]
        return (
            self.exact
            or any([*away, *moved])
            or any([one.pair.source.unjitted for one in self.pairs])
        )

    @cached_property
    def _fused(self) -> _Fused:
        pairs = tuple([one.pair for one in self.pairs])
        where = self.outputs, self.carries
        return _fused(pairs, self.avals, self.nodes, *where, configuration())

    def _prepared(self) -> _Ready | None:
        """Trace it with the bundles that feed it; None if these are not known."""
        if len(self.feeds) != len(self.bundles) or self._by_nodes:
            return None
        taken = []
        for source, index in self.feeds:
            ready = source._prepared()
            if ready is None:
                return None
            taken.append(ready.bundles[index])
        fused, layouts = self._fused, tuple([one for one, _ in taken])
        try:
            return fused.ready.get(layouts) or fused.prepared(
                layouts, [arrays for _, arrays in taken]
            )
        except Exception as error:
            self._blame(error)
            raise

    def _blame(self, error: Exception) -> None:
        """Note which call an error is of: of one node, or of all if it is not known."""
        number = getattr(error, _NODE, None)
        name, site = self.name, _some([one for _, one in self.calls], SHOWN_SITES)
        if number is not None:
            name, site = self.calls[number]
            if self.nodes[number].kind in _BACKWARD:
                name = f"the backward of {name}"
        setattr(error, _CALL, (name, site))

    def compile(self) -> None:
        """Compile what the first `run` would, if its bundles are known (`link`).

        Node by node that is the pairs on the default device, without sums and fills.
        """
        ready = self._prepared()
        if ready is not None:
            ready.trace.lower().compile()  # A later call uses the same executable.
        elif self._by_nodes:
            for number, node in enumerate(self.nodes):
                if node.kind not in (NodeKind.FORWARD, NodeKind.VJP):
                    continue
                try:
                    _compile_pair(self.pairs[node.pair], node)
                except Exception as error:
                    setattr(error, _NODE, number)
                    self._blame(error)
                    raise

    def run(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        """Return arrays, then bundles, of arrays, then bundles, which are used up.

        Raises:
            Exception: what a function raised; `failed_call` tells which.
        """
        count = len(self.avals)
        arrays, bundles = inputs[:count], inputs[count:]
        try:
            if self._by_nodes:
                return self._run_nodes(arrays, bundles)
            given = tuple(inputs)
            if bundles:
                given = (*arrays, *chain.from_iterable([one.keeps for one in bundles]))
            made = self._made(given, bundles)
        except Exception as error:
            self._blame(error)
            raise
        outputs, packed = made.plan
        values = (*given, *made.arrays)
        found = list(map(values.__getitem__, outputs))
        for index, place in enumerate(outputs):
            if place < len(given) and not stays(found[index], self.out_avals[index]):
                found[index] = jnp.array(found[index])
        for one, places in packed:
            found.append(Bundle(one, tuple([values[place] for place in places])))
        return tuple(found)

    def _made(self, given: tuple[Any, ...], bundles: Sequence[Bundle]) -> _Made:
        layouts = tuple(map(attrgetter("layout"), bundles))
        fused = self._fused
        ready = fused.ready.get(layouts)
        if ready is None:
            ready = fused.prepared(layouts, [one.keeps for one in bundles])
        try:
            made = ready.call(*given)
            return jax.block_until_ready(made) if ready.may_raise else made
        except (RuntimeError, ValueError, TypeError) as error:
            # Arrays that only a bundle holds are donated, so they are not the cause.
            held = [
                array
                for one in bundles
                for place, array in enumerate(one.keeps)
                if place not in one.layout.alone
            ]
            held = [*given[: len(self.avals)], *held]
            refuse_deleted(self.name, "array {}".format, held, error)
            raise

    def _run_nodes(
        self, arrays: Sequence[Any], bundles: Sequence[Bundle]
    ) -> tuple[Any, ...]:
        values = list(arrays)
        for bundle in bundles:
            values += bundle.residuals()
        _compute(self.nodes, self.pairs, values, self._known)
        kept = [bundled([values[one] for one in carried]) for carried in self.carries]
        return (*[values[one] for one in self.outputs], *kept)


def link(segments: Sequence[Any]) -> None:
    """Tell the functions of a worker's segments which bundles feed them.

    Args:
        segments: `jdag.engine.messages.Segment`s, in order; a bundle has one slot.
    """
    made: dict[int, tuple[SegmentFunction, int]] = {}
    for one in segments:
        function = one.function
        needed = one.needs[len(function.avals) :]
        function.feeds = tuple([made[slot] for slot in needed if slot in made])
        for index, slot in enumerate(one.makes[len(function.outputs) :]):
            made[slot] = (function, index)


def failed_call(error: BaseException) -> tuple[str, str] | None:
    """Function and call site of an error that `SegmentFunction.run` raised, or None."""
    found: tuple[str, str] | None = getattr(error, _CALL, None)
    return found


def _compile_pair(pair: Any, node: SegmentNode) -> None:
    if pair.in_devices or pair.out_devices or pair.pair.source.unjitted:
        return
    is_forward = node.kind is NodeKind.FORWARD
    counts = None if is_forward else list(map(len, node.inputs[1:]))
    pair.pair.lowered(counts).compile()


def _named(node: SegmentNode, pairs: Sequence[Any]) -> str:
    has_pair = node.kind not in (NodeKind.SUM, NodeKind.FILL)
    return name_on(pairs[node.pair]) if has_pair else node.kind.value


def _some(texts: Sequence[str], count: int) -> str:
    """The first distinct texts, and how many more there are."""
    found = list(dict.fromkeys(filter(None, texts)))
    more = len(found) - count
    last = [f"{more} more"] if more > 0 else found[-1:]
    shown = ", ".join(found[:count] if more > 0 else found[:-1])
    return " and ".join(filter(None, [shown, *last]))
