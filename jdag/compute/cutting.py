"""The graph of a plan is cut at transfers into segments: jobs of one worker.

The level of a node is the highest of its inputs and its forward, plus 1 for an input
from another worker; sources have level 0. Of the nodes of one worker and level, those
that depend on each other are in one segment, so forward and backward are if nothing
crosses between them. With them are those that wait for the same segments of other
workers, and for which the same nodes wait there: what fans out and comes together is
one segment, and micro-batches of a pipeline are several. Sums of gradients join one of
these only if all addends come from it; a call that reads one, as norms do, is a level
above. Updates have segments of their own, so has what runs as Python, with levels of
its own, and long segments are split in program order.
Under a schedule each action is a segment, with levels of its own too: a call or (half
of) its vjp, and the sums and seeds that nothing else reads. So what depends on actions
is not merged over micro-batches, which would have an action wait for a later one.

Segments are convex. Levels never fall along a path, so on a path between two nodes of a
segment they are all equal: nothing crosses on it, it stays on the worker, and in the
part whose nodes depend on each other. It passes no update and no sum, since nothing
there reads what one makes. Places in the program rise along a path, so it stays in one
part of a split. For the same reasons a segment depends only on earlier ones.
"""

from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

from jdag.compute.dataflow import DataflowGraph
from jdag.compute.segments import SegmentFunction, link
from jdag.engine.messages import Outgoing, Prepare, Segment, Slotted
from jdag.engine.names import ContextId, LeafId, Worker
from jdag.engine.segments import NodeKind, SegmentNode, Slots

NODES_MAX = 256  # Of a segment, which bounds the time to compile it.
PYTHON = (-1,)
# Of nodes: update, level, worker, and what they are apart for: an action of a schedule
# (stage, micro-batch, kind), PYTHON, or nothing.
_Group = tuple[bool, int, Worker, tuple[int, ...]]
Wanted = dict[int, dict[Worker, None]]  # By value, the workers that read it.


@dataclass(eq=False)
class Piece:
    """A segment; `nodes` are places in the graph. Without nodes it sends leaves.

    It reads values and residuals of others; `taken` and `given` are its bundles of
    residuals, by slot.
    """

    worker: Worker
    level: int
    update: bool
    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    taken: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    given: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    segment: Segment = field(init=False)


class _Edge(NamedTuple):
    """Slots that one segment, by index, makes or sends for another."""

    source: int
    target: int
    slots: Slots


class CutPlan(NamedTuple):
    """The parts of a plan, ready for `jdag.engine.protocol.Planned`, and all segments.

    Of `inputs`, each worker gets these slots with a step. Each of `pieces` depends on
    earlier ones alone. `nbytes` are those of each slot: of residuals the bytes that are
    no arguments or outputs of calls.
    """

    parts: tuple[tuple[Worker, Prepare], ...]
    inputs: tuple[tuple[Worker, Slots], ...]
    pieces: tuple[Piece, ...]
    edges: tuple[_Edge, ...]
    nbytes: tuple[int, ...]


def cut_graph(
    graph: DataflowGraph,
    *,
    plan: ContextId,
    caller: Worker,
    results: Sequence[int],
    stages: Sequence[tuple[LeafId, int]],
    exact: bool,
    nodes_max: int = NODES_MAX,
) -> CutPlan:
    """Cut a graph into segments.

    Args:
        graph: calls, and what differentiation added; it is not changed.
        plan: the plan's id.
        caller: the worker that has the inputs and gets the results.
        results: the values that a step returns.
        stages: leaves that a step updates, and the values, made by updates there.
        exact: whether segments run node by node.
        nodes_max: the most nodes of a segment.
    """
    pieces = _pieces(graph, nodes_max, exact)
    wanted: Wanted = {}
    ends = [(piece.worker, piece.reads) for piece in pieces]
    for worker, reads in (*ends, (caller, results)):
        for value in reads:
            wanted.setdefault(value, {})[worker] = None
    held: dict[tuple[Worker, str], list[int]] = defaultdict(list)
    leaving: dict[Worker, list[int]] = defaultdict(list)
    for value in sorted([value for value in wanted if value >= 0]):
        home, _, _, source, _ = graph.values[value]
        if source == "leaf" and [*wanted[value]] != [home]:
            leaving[home].append(value)
        for worker in (home,) if source == "leaf" else wanted[value] if source else ():
            held[worker, source].append(value)
    pieces[:0] = [Piece(at, 0, False, (), tuple(few)) for at, few in leaving.items()]
    _bundle(graph, pieces)
    made = dict.fromkeys([*wanted, *[value for _, value in stages]])
    for piece in pieces:
        piece.segment = _segment(graph, piece, made, wanted, exact)
    parts = []
    workers = [*[piece.worker for piece in pieces], *[worker for worker, _ in held]]
    for worker in dict.fromkeys(workers):
        mine = [piece for piece in pieces if piece.worker == worker]
        staged = [Slotted(*one) for one in stages if one[0].worker == worker]
        leaves = [(graph.values[v].leaf, v) for v in held.get((worker, "leaf"), ())]
        part = Prepare(
            plan,
            0,
            tuple([piece.segment for piece in mine]),
            tuple(held.get((worker, "constant"), ())),
            tuple([Slotted(leaf, value) for leaf, value in leaves if leaf]),
            tuple(staged),
            tuple([index for index, piece in enumerate(mine) if piece.update]),
            bool(staged) or not all([_is_awaited(piece, wanted) for piece in mine]),
        )
        link(part.segments)
        parts.append((worker, part))
    inputs = [(to, tuple(few)) for (to, kind), few in held.items() if kind == "input"]
    nbytes = [value.aval.nbytes for value in graph.values]
    for _, names in sorted([one for piece in pieces for one in piece.given.items()]):
        nbytes.append(sum([graph.nodes[~name].pair.residual_bytes for name in names]))
    edges = _edges(pieces)
    return CutPlan(tuple(parts), tuple(inputs), tuple(pieces), edges, tuple(nbytes))


def _pieces(graph: DataflowGraph, nodes_max: int, exact: bool) -> list[Piece]:
    """The segments with nodes, in order, without their bundles."""
    levels: dict[int, tuple[int, tuple[int, ...], NodeKind | None]] = {}
    groups: dict[_Group, list[int]] = defaultdict(list)
    apart = _apart(graph, exact)
    # The nodes of each action that come before the call or vjp, which has its level.
    before: dict[tuple[int, ...], list[int]] = {of: [] for of in apart if len(of) > 1}
    after = NodeKind.SUM, NodeKind.FORWARD
    for place, node in enumerate(graph.nodes):
        own, level = apart[place], 0
        for name in chain(*node.inputs):
            at, of, kind = levels.get(name, (0, own, None))
            rises = (name >= 0 and graph.crosses(name, node.worker)) or own != of
            after_sum = kind is NodeKind.SUM and node.kind in after and not node.update
            rises = rises or own == PYTHON or after_sum
            level = max(level, at + rises)
        known = level, own, node.kind
        levels.update(dict.fromkeys((~place, *node.outputs), known))
        if own in before and not node.action:
            before[own].append(place)
            continue
        groups[node.update, level, node.worker, own] += [*before.get(own, ()), place]
    pieces = []
    for (update, level, worker, _), places in _sets(graph, groups):
        for start in range(0, len(places), nodes_max):
            part = tuple(places[start : start + nodes_max])
            made = {name for at in part for name in (~at, *graph.nodes[at].outputs)}
            read = chain(*[few for at in part for few in graph.nodes[at].inputs])
            reads = tuple([name for name in dict.fromkeys(read) if name not in made])
            pieces.append(Piece(worker, level, update, part, reads))
    return pieces


def _apart(graph: DataflowGraph, exact: bool) -> list[tuple[int, ...]]:
    """Of each node what it is apart for."""
    found: list[tuple[int, ...]] = [()] * len(graph.nodes)
    readers: dict[int, dict[tuple[Worker, tuple[int, ...]], None]] = defaultdict(dict)
    for place, node in reversed([*enumerate(graph.nodes)]):
        if node.tag is not None:
            kind = "FBIW".index(node.action)
            found[place] = (node.tag.stage, node.tag.micro_batch, kind)
        elif node.kind in (NodeKind.SUM, NodeKind.FILL):
            few = readers[node.outputs[0]]
            if len(few) == 1 and (only := next(iter(few)))[0] == node.worker:
                found[place] = only[1] if len(only[1]) > 1 else ()
        # What runs as Python would make its segment run node by node.
        elif not exact and node.pair is not None and node.pair.pair.source.unjitted:
            found[place] = PYTHON
        for name in chain(*node.inputs):
            readers[name][node.worker, found[place]] = None
    return found


def _sets(
    graph: DataflowGraph, groups: Mapping[_Group, list[int]]
) -> Iterator[tuple[_Group, list[int]]]:
    """Yield the nodes of each segment, in an order in which segments can run."""
    home = {name: at for at, node in enumerate(graph.nodes) for name in node.outputs}
    home.update({~at: at for at in range(len(graph.nodes))})
    reads = [[home[n] for n in chain(*o.inputs) if n in home] for o in graph.nodes]
    sums = [node.kind is NodeKind.SUM for node in graph.nodes]
    group_of = {place: key for key, places in groups.items() for place in places}
    above = list(range(len(graph.nodes)))  # Towards the first node of its part.

    def part(place: int) -> int:
        while above[place] != place:
            above[place] = place = above[above[place]]
        return place

    def is_far(at: int, place: int) -> bool:
        one, other = group_of[at], group_of[place]
        acts = len(one[3]) > 1 or len(other[3]) > 1
        return one[2] != other[2] or (acts and one[3] != other[3])

    after: dict[int, dict[int, None]] = defaultdict(dict)
    for place, near in enumerate(reads):
        joined = [at for at in near if group_of[at] == group_of[place]]
        for at in joined if not sums[place] else ():
            one, other = sorted((part(at), part(place)))
            above[other] = one
    for place, near in enumerate(reads):
        for at in near:
            if is_far(at, place):
                after[part(at)][part(place)] = None
    made: dict[int, int] = {}  # By node, the number of its set.
    for key, places in sorted(groups.items()):
        if len(key[3]) > 1:
            made.update(dict.fromkeys(places, len(made)))
            yield key, places
            continue
        sets: dict[Any, list[int]] = defaultdict(list)
        before: dict[int, dict[int, None]] = defaultdict(dict)
        for place in places:
            far = [made[at] for at in reads[place] if is_far(at, place)]
            before[part(place)].update(dict.fromkeys(far))
        for place in [place for place in places if not sums[place]]:
            ends = before[part(place)], after[part(place)]
            sets[key[0] or tuple([tuple(sorted(end)) for end in ends])].append(place)
        for few in sets.values():
            made.update(dict.fromkeys(few, len(made)))
        numbers = {made[few[0]]: few for few in sets.values()}
        for place in [place for place in places if sums[place]]:
            near = sorted({made[at] for at in reads[place]})
            here = [number for number in near if number in numbers]
            few = numbers[here[0]] if len(here) == 1 else sets["sums", *near]
            few.append(place)
        for few in sets.values():
            made.update(dict.fromkeys(few, made.get(few[0], len(made))))
            yield key, sorted(few)


def _bundle(graph: DataflowGraph, pieces: Sequence[Piece]) -> None:
    """Give pieces their bundles, one for each two of them; slots follow the values."""
    home = {~place: piece for piece in pieces for place in piece.nodes}
    slots: dict[tuple[int, int], int] = {}
    for taker in pieces:
        for name in [name for name in taker.reads if name < 0]:
            between = (id(home[name]), id(taker))
            slot = slots.setdefault(between, len(graph.values) + len(slots))
            home[name].given[slot].append(name)
            taker.taken[slot].append(name)


def _segment(
    graph: DataflowGraph,
    piece: Piece,
    made: Container[int],
    wanted: Wanted,
    exact: bool,
) -> Segment:
    nodes = [graph.nodes[place] for place in piece.nodes]
    arrays = [name for name in piece.reads if name >= 0]
    names = [*arrays, *chain(*piece.taken.values())]
    read = {*chain(*[few for node in nodes for few in node.inputs])}
    read.update(chain(*piece.given.values()))
    for place, node in zip(piece.nodes, nodes, strict=True):
        names += [*node.outputs, *[~place] * (~place in read)]
    number = {name: index for index, name in enumerate(names)}

    def at(few: Sequence[int]) -> tuple[int, ...]:
        return tuple([number[name] for name in few])

    pairs = {id(node.pair): node.pair for node in nodes if node.pair is not None}
    index = {key: at for at, key in enumerate(pairs)}
    inner = []
    for place, node in zip(piece.nodes, nodes, strict=True):
        inputs, keeps = tuple(map(at, node.inputs)), node.keeps or ~place in read
        of = index.get(id(node.pair), 0)
        inner.append(SegmentNode(node.kind, of, inputs, keeps, node.weights))
    makes = [value for node in nodes for value in node.outputs if value in made]
    hops: dict[Worker, list[int]] = defaultdict(list)
    for value in makes if nodes else piece.reads:
        for to in wanted.get(value, ()):
            if to != piece.worker:
                hops[to].append(value)
    function = SegmentFunction(
        tuple(pairs.values()),
        tuple([graph.aval(value, piece.worker) for value in arrays]),
        tuple(map(len, piece.taken.values())),
        tuple(inner),
        at(makes),
        tuple(map(at, piece.given.values())),
        tuple([(node.name or node.kind.value, node.site) for node in nodes]),
        exact,
    )
    going = tuple([Outgoing(to, tuple(few)) for to, few in hops.items()])
    acts: list[Any] = [(node.tag, node.action) for node in nodes if node.action]
    (act,) = acts or [(None, "")]  # A segment is one action at most.
    ends = (*arrays, *piece.taken), (*makes, *piece.given)
    return Segment(function, *ends, going, *act)


def _is_awaited(piece: Piece, wanted: Wanted) -> bool:
    """Whether a segment or the caller waits for what this segment makes."""
    used = [slot for slot in piece.segment.makes if slot in wanted]
    return bool(used or piece.segment.hops)


def _edges(pieces: Sequence[Piece]) -> tuple[_Edge, ...]:
    home: dict[int, int] = {}
    for index, piece in enumerate(pieces):
        made = piece.segment.makes if piece.nodes else piece.reads
        home.update(dict.fromkeys(made, index))
    found: dict[tuple[int, int], list[int]] = defaultdict(list)
    for target, piece in enumerate(pieces):
        for slot in piece.segment.needs:
            source = pieces[home[slot]] if slot in home else piece
            if source is not piece and (source.nodes or source.worker != piece.worker):
                found[home[slot], target].append(slot)
    assert all([source < target for source, target in found]), "an update is read"
    return tuple([_Edge(*ends, tuple(slots)) for ends, slots in found.items()])
