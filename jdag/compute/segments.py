"""Segments: the forward and backward calls of one worker as one compiled function.

The nodes of a segment (`jdag.engine.segments`) call the compiled parts of their pairs
inside one jit, so no function is traced twice, including functions received as
StableHLO. Outputs that are inputs are returned unchanged, since jit would copy them.
Arrays held only by an incoming bundle are donated if an output can use their memory.

Segments that are `exact`, or have unjitted functions or named devices, run node by
node, with the jobs, bits and devices of `jdag.compute.machine`.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache, partial
from itertools import chain, compress
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jdag.compute.avals import Aval, aval_of
from jdag.compute.bundles import Bundle, Layout, Packing, Places, bundled, layout
from jdag.compute.configuration import configuration
from jdag.compute.halves import Stash, halves
from jdag.compute.jaxprs import has_callback
from jdag.compute.pairs import is_reusable, refuse_deleted
from jdag.compute.segment_types import Carried, carried_by, types_of
from jdag.compute.sums import add, filled, fold
from jdag.compute.tracing import Residuals, strong, weakened
from jdag.engine.functions import name_on
from jdag.engine.segments import NodeKind, SegmentNode

FUSED_MAX = 512  # Number of cached segments.
READY_MAX = 64  # Cached executables of a segment, one for each layout of its bundles.
SHOWN_NAMES, SHOWN_SITES = 2, 4
_CALL, _NODE = "__jdag_call__", "__jdag_node__"  # Attributes of errors.
_BACKWARD = (NodeKind.VJP, NodeKind.INPUTS, NodeKind.WEIGHTS)


# Positions of outputs and bundles: they count the arguments, then the computed arrays.
_ResultPlan = tuple[Places, tuple[tuple[Layout, Places], ...]]


class _Ready(NamedTuple):
    call: Callable[..., tuple[Any, ...]]
    trace: Any
    may_raise: bool
    bundles: tuple[tuple[Layout, tuple[Any, ...]], ...]
    plan: _ResultPlan
    is_plain: bool  # Whether the outputs are the computed arrays, in this order.


@dataclass(frozen=True)
class _Fused:
    pairs: tuple[Any, ...]
    avals: tuple[Aval, ...]
    nodes: tuple[SegmentNode, ...]
    outputs: Places
    carries: tuple[Places, ...]
    configured: Any
    ready: dict[tuple[Layout, ...], _Ready] = field(default_factory=dict, compare=False)

    def prepared(
        self, layouts: tuple[Layout, ...], bundle_types: Sequence[Any]
    ) -> _Ready:
        structs = [aval_of(a).struct() for a in chain(self.avals, *bundle_types)]
        bounds = [len(self.avals)]
        for types in bundle_types:
            bounds.append(bounds[-1] + len(types))

        plans: list[_ResultPlan] = []

        def segment(*inputs: Any) -> tuple[Any, ...]:
            arrays, plan = self._body(layouts, bounds, inputs)
            plans.append(plan)
            return arrays

        call = jax.jit(segment)
        trace = call.trace(*structs)
        outputs, packed = plan = plans[0]
        donated = _donated(layouts, bounds, structs, trace.out_info, plan)
        if donated:
            call = jax.jit(segment, donate_argnums=donated)
            trace = call.trace(*structs)
        values = (*structs, *trace.out_info)
        bundles = [
            (bundle_layout, tuple([values[place] for place in places]))
            for bundle_layout, places in packed
        ]
        if len(self.ready) >= READY_MAX:
            self.ready.clear()
        computed = tuple(range(len(structs), len(values)))
        is_plain = not packed and outputs == computed
        may_raise = has_callback(trace.jaxpr)
        ready = _Ready(call, trace, may_raise, tuple(bundles), plan, is_plain)
        self.ready[layouts] = ready
        return ready

    def _body(
        self, layouts: Sequence[Layout], bounds: Sequence[int], inputs: Sequence[Any]
    ) -> tuple[tuple[Any, ...], _ResultPlan]:
        values = list(inputs[: bounds[0]])
        for bundle, start, end in zip(layouts, bounds, bounds[1:], strict=False):
            values += bundle.unpacked(inputs[start:end])
        _compute(self.nodes, self.pairs, values)
        packing = Packing(inputs)
        outputs = tuple([packing.place(strong(values[n])) for n in self.outputs])
        packed = [packing.packed([values[n] for n in few]) for few in self.carries]
        uses = Counter(chain(outputs, *[places for *_, places in packed]))
        bundles = []
        for locations, types, places in packed:
            is_alone = [place >= len(inputs) and uses[place] == 1 for place in places]
            alone = tuple(compress(range(len(is_alone)), is_alone))
            bundles.append((layout(locations, types, alone), places))
        return tuple(packing.leaving), (outputs, tuple(bundles))


def _compute(
    nodes: Sequence[SegmentNode],
    pairs: Sequence[Any],
    values: list[Any],
    types: Sequence[Any] | None = None,
) -> None:
    """Compute nodes, and append their results to the values.

    If `types` are given, the nodes run one by one. Otherwise they are traced within one
    jit, where all addends of a cotangent are folded.
    """
    for number, node in enumerate(nodes):
        try:
            values += _computed(node, pairs, values, types)
        except Exception as error:
            setattr(error, _NODE, number)
            raise


def _computed(
    node: SegmentNode,
    pairs: Sequence[Any],
    values: Sequence[Any],
    types: Sequence[Any] | None,
) -> Sequence[Any]:
    first, *others = [tuple([values[n] for n in slots]) for slots in node.inputs]
    pair: Any = pairs[node.pair] if pairs else None
    if types is None:
        others = [(fold(addends),) if addends else () for addends in others]
    match node.kind:
        case NodeKind.FORWARD:
            forward = partial(_forward, pair) if types is None else pair.forward
            outputs, residuals = forward(weakened(first, pair.avals))
            return (*outputs, residuals) if node.keeps else outputs
        case NodeKind.VJP if types is None:
            cotangents: Any = first[0].traced.backward(*first[0].held, tuple(others))
            return cotangents
        case NodeKind.VJP:
            return pair.vjp(first[0], others)
        case NodeKind.INPUTS:  # Bundles store a stash as residuals.
            results, stash = halves(pair, node.weights).input_half(first[0], others)
            trace: Any = stash.halves  # WEIGHTS reads it back as `traced`.
            return (*results, Residuals(trace, (), (), stash.keeps, False))
        case NodeKind.WEIGHTS:
            stash = Stash(first[0].rest, 0, first[0].traced)
            return halves(pair, node.weights).weight_half(stash)
        case NodeKind.SUM:
            return (fold(first) if types is None else add(first),)
        case NodeKind.FILL:
            like = types[node.inputs[0][0]] if types else aval_of(first[0])
            return (filled(like, int(node.keeps)),)


def _forward(pair: Any, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Residuals]:
    if pair.passes is not None:  # A jit would return other tracers.
        outputs = tuple([args[index] for index in pair.passes])
        return outputs, Residuals(pair.traced, (), (), (), False)
    result = pair.compiled(*args)
    return tuple(result.outputs), result.residuals(args)


def _donated(
    layouts: Sequence[Layout],
    bounds: Sequence[int],
    structs: Sequence[Any],
    arrays: Sequence[Any],
    plan: _ResultPlan,
) -> Places:
    """Return the inputs that only a bundle holds and whose memory an output can use."""
    free = Counter([(array.shape, array.dtype) for array in arrays])
    outputs, bundles = plan
    passed = {*outputs, *chain.from_iterable([places for _, places in bundles])}
    donated = []
    for bundle, start in zip(layouts, bounds, strict=False):
        for place in [start + index for index in bundle.alone]:
            kind = (structs[place].shape, structs[place].dtype)
            if free[kind] and place not in passed:
                free[kind] -= 1
                donated.append(place)
    return tuple(donated)


_fused = lru_cache(maxsize=FUSED_MAX)(_Fused)


@dataclass(eq=False, repr=False)
class SegmentFunction:
    """The computation of one segment of a plan.

    Attributes:
        pairs: the distinct pairs of its nodes: `Pair`, `Placed`, or decoded pairs.
        avals: the types of its input arrays.
        bundles: the number of residuals of each input bundle. Bundles follow the
            arrays.
        nodes: its nodes, as in `jdag.engine.segments`.
        outputs: the numbers of the arrays that it returns.
        carries: for each bundle that it returns after the arrays, the numbers of the
            bundle's residuals.
        calls: function name and call site of each node, for errors.
        exact: whether it runs node by node.
        feeds: for each input bundle, the segment that returns it, and its position
            among that segment's bundles. `link` sets them.
        out_avals: the types of its outputs, with their devices.

    Raises:
        ValueError: a node reads a value that is missing or of a wrong type.
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
        types: list[Any] = [*self.avals, *[None] * sum(self.bundles)]
        carriers: dict[int, SegmentNode] = {}  # By the index of residuals in `types`.
        try:
            for node in self.nodes:
                types += types_of(node, self.pairs, types)
                if types[-1] is None:
                    carriers[len(types) - 1] = node
            self.out_avals = tuple([types[number].strong for number in self.outputs])
            carried_types = [types[number] for number in chain(*self.carries)]
        except (LookupError, AttributeError, TypeError) as error:
            raise ValueError(
                f"a segment's node reads a missing value: {error}"
            ) from error
        if any(carried_types) or len(self.calls) != len(self.nodes):
            raise ValueError(
                "a segment passes arrays as residuals, or lacks the call of a node"
            )
        self._types, self._carriers = types, carriers
        names = [name for name, _ in self.calls]
        self.name = _some(names, SHOWN_NAMES)

    @cached_property
    def costs(self) -> tuple[tuple[str, str], ...]:
        return tuple([(_named(n, self.pairs), n.kind.value) for n in self.nodes])

    @cached_property
    def carried(self) -> list[Carried]:
        about = self.pairs, len(self.avals), self.exact
        sizes = []
        for numbers in self.carries:
            nbytes, nbytes_most, inputs = zip(
                *[carried_by(self._carriers[number], *about) for number in numbers],
                strict=True,
            )
            sizes.append(Carried(sum(nbytes), sum(nbytes_most), tuple(chain(*inputs))))
        return sizes

    @property
    def may_raise(self) -> bool:
        """Whether the segment may raise; until it is traced, whether its pairs may."""
        fused: _Fused | None = vars(self).get("_fused")
        traced = fused.ready.values() if fused else ()
        return any([part.may_raise for part in traced or self.pairs])

    @cached_property
    def _by_nodes(self) -> bool:
        devices = [aval.device for aval in self._types if aval is not None]
        transfers = [pair.in_devices or pair.out_devices for pair in self.pairs]
        return (
            self.exact
            or any([*devices, *transfers])
            or any([pair.pair.source.unjitted for pair in self.pairs])
        )

    @cached_property
    def _fused(self) -> _Fused:
        pairs = tuple([pair.pair for pair in self.pairs])
        results = self.outputs, self.carries
        return _fused(pairs, self.avals, self.nodes, *results, configuration())

    def _prepared(self) -> _Ready | None:
        """Trace the segment for its input bundles. Return None if these are unknown."""
        if len(self.feeds) != len(self.bundles) or self._by_nodes:
            return None
        bundles = []
        for source, index in self.feeds:
            ready = source._prepared()
            if ready is None:
                return None
            bundles.append(ready.bundles[index])
        fused, layouts = self._fused, tuple([layout for layout, _ in bundles])
        try:
            return fused.ready.get(layouts) or fused.prepared(
                layouts, [arrays for _, arrays in bundles]
            )
        except Exception as error:
            self._blame(error)
            raise

    def _blame(self, error: Exception) -> None:
        number = getattr(error, _NODE, None)
        name = self.name
        site = _some([call_site for _, call_site in self.calls], SHOWN_SITES)
        if number is not None:
            name, site = self.calls[number]
            if self.nodes[number].kind in _BACKWARD:
                name = f"the backward of {name}"
        setattr(error, _CALL, (name, site))

    def compile(self) -> None:
        """Compile the executable for `run`, if the input bundles are known (`link`).

        A segment that runs node by node compiles its pairs on the default device, but
        not sums and fills.
        """
        ready = self._prepared()
        if ready is not None:
            ready.trace.lower().compile()  # `run` uses the same executable.
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
        """Run the segment: take and return arrays, followed by bundles.

        Input bundles cannot be used again. Errors of functions are raised unchanged;
        `failed_call` returns the call of such an error.
        """
        count = len(self.avals)
        arrays, bundles = inputs[:count], inputs[count:]
        try:
            if self._by_nodes:
                return self._run_nodes(arrays, bundles)
            arguments = tuple(inputs)
            if bundles:
                arguments = (*arrays, *chain(*[bundle.keeps for bundle in bundles]))
            fused, layouts = self._fused, tuple([bundle.layout for bundle in bundles])
            ready = fused.ready.get(layouts)
            if ready is None:
                ready = fused.prepared(layouts, [bundle.keeps for bundle in bundles])
            try:
                computed = ready.call(*arguments)
                if ready.may_raise:
                    jax.block_until_ready(computed)
            except (RuntimeError, ValueError, TypeError) as error:
                self._refuse_deleted(arrays, bundles, error)
                raise
        except Exception as error:
            self._blame(error)
            raise
        if ready.is_plain:
            return computed
        outputs, packed = ready.plan
        values = (*arguments, *computed)
        results: list[Any] = []
        for place, aval in zip(outputs, self.out_avals, strict=True):
            value, is_input = values[place], place < len(arguments)
            copies = is_input and not is_reusable(value, aval)
            results.append(jnp.array(value) if copies else value)
        for bundle_layout, places in packed:
            bundle = Bundle(bundle_layout, tuple([values[place] for place in places]))
            results.append(bundle)
        return tuple(results)

    def _refuse_deleted(
        self, arrays: Sequence[Any], bundles: Sequence[Bundle], error: Exception
    ) -> None:
        # Leave out arrays that only a bundle holds: the failed call donated them.
        kept = [
            array
            for bundle in bundles
            for place, array in enumerate(bundle.keeps)
            if place not in bundle.layout.alone
        ]
        refuse_deleted(self.name, "array {}".format, [*arrays, *kept], error)

    def _run_nodes(
        self, arrays: Sequence[Any], bundles: Sequence[Bundle]
    ) -> tuple[Any, ...]:
        values = list(arrays)
        for bundle in bundles:
            values += bundle.residuals()
        _compute(self.nodes, self.pairs, values, self._types)
        packed = [bundled([values[n] for n in carried]) for carried in self.carries]
        return (*[values[number] for number in self.outputs], *packed)


def link(segments: Sequence[Any]) -> None:
    """Set `feeds` of the functions of all segments of a worker, which are in order."""
    sources: dict[int, tuple[SegmentFunction, int]] = {}
    for segment in segments:
        function = segment.function
        needed = segment.needs[len(function.avals) :]
        function.feeds = tuple([sources[slot] for slot in needed if slot in sources])
        for index, slot in enumerate(segment.makes[len(function.outputs) :]):
            sources[slot] = (function, index)


def failed_call(error: BaseException) -> tuple[str, str] | None:
    call: tuple[str, str] | None = getattr(error, _CALL, None)
    return call


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
    distinct = list(dict.fromkeys(filter(None, texts)))
    more = len(distinct) - count
    last = [f"{more} more"] if more > 0 else distinct[-1:]
    shown = ", ".join(distinct[:count] if more > 0 else distinct[:-1])
    return " and ".join(filter(None, [shown, *last]))
