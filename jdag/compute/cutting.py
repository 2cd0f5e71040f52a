"""Cutting a plan's graph at transfers into segments. Each is a job of one worker.

The level of a node is the maximum over its inputs, plus 1 for an input from another
worker; sources have level 0. Nodes of one worker and level form one segment if they
depend on each other, so a forward and its backward share a segment if no transfer lies
between them. A segment also collects independent nodes with the same segments of other
workers before and after them: a fan-out that is joined again is one segment, and the
micro-batches of a pipeline are several.

- A sum of gradients joins a segment only if all its addends come from it. A call that
  reads a sum, such as a norm, is one level higher.
- Updates have separate segments; unjitted functions have separate segments and levels.
- Long segments are split in program order.
- Under a schedule each action (a call, its vjp, or half of its vjp) is a segment on a
  separate level, with the sums and seeds that only this action reads. Actions are not
  merged over micro-batches, since an action would then wait for a later micro-batch.

Segments are convex. Levels never fall along a path, so a path between two nodes of a
segment stays on its level and worker. It contains no update and no sum, since no node
of this level reads their results; and program order rises along it, so a split cuts it
at most once. For the same reasons a segment depends only on earlier ones.
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

NODES_MAX = 256  # Nodes per segment. The maximum bounds the compile time.
PYTHON = (-1,)
# Update flag, level, worker and separation key of a node. The key is an action of a
# schedule (stage, micro-batch, kind), PYTHON, or empty.
_Group = tuple[bool, int, Worker, tuple[int, ...]]
Readers = dict[int, dict[Worker, None]]  # For each value, the workers that read it.


@dataclass(eq=False)
class Piece:
    """A segment. `nodes` are graph indices; a segment without nodes sends leaves.

    `reads` are the values and residuals that the nodes read. `bundles_in` and
    `bundles_out` list the residuals of each bundle, by slot.
    """

    worker: Worker
    level: int
    update: bool
    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    bundles_in: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    bundles_out: dict[int, list[int]] = field(default_factory=lambda: defaultdict(list))
    segment: Segment = field(init=False)


class _Edge(NamedTuple):
    source: int
    target: int
    slots: Slots


class CutPlan(NamedTuple):
    """The parts of a plan for `jdag.engine.protocol.Planned`, and all segments.

    `inputs` lists the slots that the caller of a step sends to each worker. `nbytes`
    gives the bytes of each slot; for a bundle, without arguments and outputs of calls.
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

    `caller` provides the inputs and receives the `results` of a step. `stages` are the
    leaves that a step updates, with their new values. If `exact`, segments run node by
    node.
    """
    pieces = _pieces(graph, nodes_max, exact)
    readers: Readers = {}
    all_reads = [(piece.worker, piece.reads) for piece in pieces]
    for worker, reads in (*all_reads, (caller, results)):
        for value in reads:
            readers.setdefault(value, {})[worker] = None
    sources, sent_leaves = _sources(graph, readers)
    pieces[:0] = sent_leaves
    _bundle(graph, pieces)
    used = dict.fromkeys([*readers, *[value for _, value in stages]])
    for piece in pieces:
        piece.segment = _segment(graph, piece, used, readers, exact)
    parts = []
    workers = [*[piece.worker for piece in pieces], *[worker for worker, _ in sources]]
    for worker in dict.fromkeys(workers):
        local = [piece for piece in pieces if piece.worker == worker]
        staged = [Slotted(leaf, slot) for leaf, slot in stages if leaf.worker == worker]
        slots = sources.get((worker, "leaf"), ())
        leaf_reads = [(graph.values[slot].leaf, slot) for slot in slots]
        part = Prepare(
            plan,
            0,
            tuple([piece.segment for piece in local]),
            tuple(sources.get((worker, "constant"), ())),
            tuple([Slotted(leaf, slot) for leaf, slot in leaf_reads if leaf]),
            tuple(staged),
            tuple([index for index, piece in enumerate(local) if piece.update]),
            bool(staged) or not all([_is_awaited(piece, readers) for piece in local]),
        )
        link(part.segments)
        parts.append((worker, part))
    inputs = [
        (worker, tuple(values))
        for (worker, source), values in sources.items()
        if source == "input"
    ]
    nbytes = [value.aval.nbytes for value in graph.values]
    bundles = chain(*[piece.bundles_out.items() for piece in pieces])
    for _, names in sorted(bundles):
        nbytes.append(sum([graph.nodes[~name].pair.residual_bytes for name in names]))
    edges = _edges(pieces)
    return CutPlan(tuple(parts), tuple(inputs), tuple(pieces), edges, tuple(nbytes))


def _sources(
    graph: DataflowGraph, readers: Readers
) -> tuple[dict[tuple[Worker, str], list[int]], list[Piece]]:
    sources: dict[tuple[Worker, str], list[int]] = defaultdict(list)
    sent: dict[Worker, list[int]] = defaultdict(list)
    for value in sorted([value for value in readers if value >= 0]):
        home, _, _, source, _ = graph.values[value]
        if source == "leaf" and [*readers[value]] != [home]:
            sent[home].append(value)
        for worker in (home,) if source == "leaf" else readers[value] if source else ():
            sources[worker, source].append(value)
    pieces = [Piece(worker, 0, False, (), tuple(few)) for worker, few in sent.items()]
    return sources, pieces


def _pieces(graph: DataflowGraph, nodes_max: int, exact: bool) -> list[Piece]:
    levels: dict[int, tuple[int, tuple[int, ...], NodeKind | None]] = {}
    groups: dict[_Group, list[int]] = defaultdict(list)
    separations = _separations(graph, exact)
    # Sums and seeds of each action; they join the group of its call or vjp.
    before: dict[tuple[int, ...], list[int]]
    before = {action: [] for action in separations if len(action) > 1}
    after = NodeKind.SUM, NodeKind.FORWARD
    for place, node in enumerate(graph.nodes):
        separation, level = separations[place], 0
        for name in chain(*node.inputs):
            source_level, source, kind = levels.get(name, (0, separation, None))
            rises = name >= 0 and graph.crosses(name, node.worker)
            rises = rises or separation != source or separation == PYTHON
            after_sum = kind is NodeKind.SUM and node.kind in after and not node.update
            level = max(level, source_level + (rises or after_sum))
        names = (~place, *node.outputs)
        levels.update(dict.fromkeys(names, (level, separation, node.kind)))
        if separation in before and not node.action:
            before[separation].append(place)
            continue
        group = groups[node.update, level, node.worker, separation]
        group += [*before.get(separation, ()), place]
    pieces = []
    for (update, level, worker, _), places in _node_sets(graph, groups):
        for start in range(0, len(places), nodes_max):
            part = tuple(places[start : start + nodes_max])
            nodes = [graph.nodes[place] for place in part]
            outputs = {*chain(*[node.outputs for node in nodes]), *[~n for n in part]}
            read = dict.fromkeys(chain(*[few for node in nodes for few in node.inputs]))
            reads = tuple([name for name in read if name not in outputs])
            pieces.append(Piece(worker, level, update, part, reads))
    return pieces


def _separations(graph: DataflowGraph, exact: bool) -> list[tuple[int, ...]]:
    """Return a key per node; nodes with different keys are in separate segments."""
    separations: list[tuple[int, ...]] = [()] * len(graph.nodes)
    readers: dict[int, dict[tuple[Worker, tuple[int, ...]], None]] = defaultdict(dict)
    for place, node in reversed([*enumerate(graph.nodes)]):
        if node.tag is not None:
            kind = "FBIW".index(node.action)
            separations[place] = (node.tag.stage, node.tag.micro_batch, kind)
        elif node.kind in (NodeKind.SUM, NodeKind.FILL):
            node_readers = readers[node.outputs[0]]
            if len(node_readers) == 1:
                ((worker, action),) = node_readers
                if worker == node.worker and len(action) > 1:
                    separations[place] = action
        # An unjitted function would make its whole segment run node by node.
        elif not exact and node.pair is not None and node.pair.pair.source.unjitted:
            separations[place] = PYTHON
        for name in chain(*node.inputs):
            readers[name][node.worker, separations[place]] = None
    return separations


def _node_sets(
    graph: DataflowGraph, groups: Mapping[_Group, list[int]]
) -> Iterator[tuple[_Group, list[int]]]:
    """Yield the nodes of each segment, in an order in which segments can run."""
    home = {name: n for n, node in enumerate(graph.nodes) for name in node.outputs}
    home.update({~place: place for place in range(len(graph.nodes))})
    reads = [[home[n] for n in chain(*o.inputs) if n in home] for o in graph.nodes]
    sums = [node.kind is NodeKind.SUM for node in graph.nodes]
    group_of = {place: key for key, places in groups.items() for place in places}
    parents = list(range(len(graph.nodes)))  # A union-find of dependent nodes.

    def root(place: int) -> int:
        while parents[place] != place:
            parents[place] = place = parents[parents[place]]
        return place

    def is_far(source: int, place: int) -> bool:
        *_, source_worker, source_key = group_of[source]
        *_, worker, key = group_of[place]
        has_action = len(source_key) > 1 or len(key) > 1
        return source_worker != worker or (has_action and source_key != key)

    after: dict[int, dict[int, None]] = defaultdict(dict)
    for place, inputs in enumerate(reads):
        joined = [n for n in inputs if group_of[n] == group_of[place]]
        for source in joined if not sums[place] else ():
            first, second = sorted((root(source), root(place)))
            parents[second] = first
    for place, inputs in enumerate(reads):
        for source in inputs:
            if is_far(source, place):
                after[root(source)][root(place)] = None
    set_of: dict[int, int] = {}  # By node, the number of its set.
    for key, places in sorted(groups.items()):
        if len(key[3]) > 1:
            set_of.update(dict.fromkeys(places, len(set_of)))
            yield key, places
            continue
        sets: dict[Any, list[int]] = defaultdict(list)
        before: dict[int, dict[int, None]] = defaultdict(dict)
        for place in places:
            far = [set_of[n] for n in reads[place] if is_far(n, place)]
            before[root(place)].update(dict.fromkeys(far))
        for place in [place for place in places if not sums[place]]:
            ends = before[root(place)], after[root(place)]
            sets[key[0] or tuple([tuple(sorted(end)) for end in ends])].append(place)
        for nodes in sets.values():
            set_of.update(dict.fromkeys(nodes, len(set_of)))
        numbers = {set_of[nodes[0]]: nodes for nodes in sets.values()}
        for place in [place for place in places if sums[place]]:
            sources = sorted({set_of[n] for n in reads[place]})
            local = [number for number in sources if number in numbers]
            nodes = numbers[local[0]] if len(local) == 1 else sets["sums", *sources]
            nodes.append(place)
        for nodes in sets.values():
            set_of.update(dict.fromkeys(nodes, set_of.get(nodes[0], len(set_of))))
            yield key, sorted(nodes)


def _bundle(graph: DataflowGraph, pieces: Sequence[Piece]) -> None:
    """Make a bundle for each pair of connected segments, in a slot after all values."""
    home = {~place: piece for piece in pieces for place in piece.nodes}
    slots: dict[tuple[int, int], int] = {}
    for reader in pieces:
        for name in [name for name in reader.reads if name < 0]:
            ends = (id(home[name]), id(reader))
            slot = slots.setdefault(ends, len(graph.values) + len(slots))
            home[name].bundles_out[slot].append(name)
            reader.bundles_in[slot].append(name)


def _segment(
    graph: DataflowGraph,
    piece: Piece,
    used: Container[int],
    readers: Readers,
    exact: bool,
) -> Segment:
    nodes = [graph.nodes[place] for place in piece.nodes]
    arrays = [name for name in piece.reads if name >= 0]
    names = [*arrays, *chain(*piece.bundles_in.values())]
    read = {*chain(*[inputs for node in nodes for inputs in node.inputs])}
    read.update(chain(*piece.bundles_out.values()))
    for place, node in zip(piece.nodes, nodes, strict=True):
        names += [*node.outputs, *[~place] * (~place in read)]
    number = {name: index for index, name in enumerate(names)}

    def numbers_of(names: Sequence[int]) -> tuple[int, ...]:
        return tuple([number[name] for name in names])

    pairs = {id(node.pair): node.pair for node in nodes if node.pair is not None}
    pair_index = {key: index for index, key in enumerate(pairs)}
    inner = []
    for place, node in zip(piece.nodes, nodes, strict=True):
        keeps = node.keeps or ~place in read
        inputs = tuple(map(numbers_of, node.inputs))
        pair = pair_index.get(id(node.pair), 0)
        inner.append(SegmentNode(node.kind, pair, inputs, keeps, node.weights))
    outputs = [value for node in nodes for value in node.outputs if value in used]
    hops: dict[Worker, list[int]] = defaultdict(list)
    for value in outputs if nodes else piece.reads:
        for worker in readers.get(value, ()):
            if worker != piece.worker:
                hops[worker].append(value)
    function = SegmentFunction(
        tuple(pairs.values()),
        tuple([graph.aval(value, piece.worker) for value in arrays]),
        tuple(map(len, piece.bundles_in.values())),
        tuple(inner),
        numbers_of(outputs),
        tuple(map(numbers_of, piece.bundles_out.values())),
        tuple([(node.name or node.kind.value, node.site) for node in nodes]),
        exact,
    )
    sends = tuple([Outgoing(worker, tuple(slots)) for worker, slots in hops.items()])
    actions: list[Any] = [(node.tag, node.action) for node in nodes if node.action]
    (action,) = actions or [(None, "")]  # A segment has at most one action.
    ends = (*arrays, *piece.bundles_in), (*outputs, *piece.bundles_out)
    return Segment(function, *ends, sends, *action)


def _is_awaited(piece: Piece, readers: Readers) -> bool:
    return bool(piece.segment.hops) or any([n in readers for n in piece.segment.makes])


def _edges(pieces: Sequence[Piece]) -> tuple[_Edge, ...]:
    home: dict[int, int] = {}
    for index, piece in enumerate(pieces):
        outputs = piece.segment.makes if piece.nodes else piece.reads
        home.update(dict.fromkeys(outputs, index))
    edges: dict[tuple[int, int], list[int]] = defaultdict(list)
    for target, piece in enumerate(pieces):
        for slot in piece.segment.needs:
            source = pieces[home[slot]] if slot in home else piece
            if source is not piece and (source.nodes or source.worker != piece.worker):
                edges[home[slot], target].append(slot)
    assert all([source < target for source, target in edges]), "an update is read"
    return tuple([_Edge(*ends, tuple(slots)) for ends, slots in edges.items()])
