"""A plan's graph is cut into segments at transfers: one job on one worker each.

The level of a node is that of its highest input, plus 1 if that crosses from another
worker; sources have level 0. The nodes of one worker and level are a segment, so a
forward and a backward between which nothing crosses are in one. Updates have segments
of their own, and long segments are split in program order.

Segments are convex. Along a path levels never fall, so on one between nodes of a
segment they are all the same; nothing crosses on it, then, and it stays on the worker.
No path leads through an update, since nothing reads what one makes. Places in the
program rise along a path, so it stays in one part of a split. For the same reasons
segments depend only on earlier ones in the order of (update, level, place).
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

from jdag.compute.avals import Aval
from jdag.compute.dataflow import SENT, Graph
from jdag.compute.segments import SegmentFunction
from jdag.engine.messages import Outgoing, Prepare, Segment, Slotted
from jdag.engine.names import ContextId, LeafId, Worker
from jdag.engine.segments import SegmentNode, Slots

NODES_MAX = 256  # Of a segment, which bounds the time to compile it.


class Piece(NamedTuple):
    """Where a segment runs, its level and the places of its nodes.

    Without nodes it sends leaves.
    """

    worker: Worker
    level: int
    update: bool
    nodes: tuple[int, ...]
    segment: Segment


class Edge(NamedTuple):
    """Slots that one segment, by index, makes for another.

    None instead of a segment is the caller: of a source its inputs and constants, of a
    target its results.
    """

    source: int | None
    target: int | None
    slots: Slots


class Cut(NamedTuple):
    """A plan for workers, of `jdag.engine.protocol.Planned`, and what a picture shows.

    Attributes:
        parts: the message for each worker that has a part, the caller too.
        inputs: the slots of the inputs that each worker reads; none for the others.
        pieces: all segments; each depends on earlier ones alone.
        edges: the values between them.
        nbytes: of each slot; of residuals what they hold beyond arrays of calls.
    """

    parts: tuple[tuple[Worker, Prepare], ...]
    inputs: tuple[tuple[Worker, Slots], ...]
    pieces: tuple[Piece, ...]
    edges: tuple[Edge, ...]
    nbytes: tuple[int, ...]


class _Draft(NamedTuple):
    """A segment to be: what it reads, and its bundles by slot: places of forwards."""

    worker: Worker
    level: int
    update: bool
    nodes: tuple[int, ...]
    reads: tuple[int, ...]
    taken: dict[int, list[int]]
    given: dict[int, list[int]]


def cut(
    graph: Graph,
    *,
    plan: ContextId,
    caller: Worker,
    results: Sequence[int],
    stages: Sequence[tuple[LeafId, int]],
    exact: bool,
    nodes_max: int = NODES_MAX,
) -> Cut:
    """Cut a graph into segments.

    Args:
        graph: calls, and what differentiation added; it is not changed.
        plan: the plan's id.
        caller: the worker that has the inputs and gets the results.
        results: values that a step returns.
        stages: the new version of each leaf that a step updates, made by updates.
        exact: segments run node by node.
        nodes_max: of one segment.
    """
    drafts = _drafts(graph, nodes_max)
    wanted: dict[int, dict[Worker, None]] = {}  # By value: the workers that read it.
    readers = [(draft.worker, draft.reads) for draft in drafts]
    for worker, reads in (*readers, (caller, results)):
        for value in reads:
            wanted.setdefault(value, {})[worker] = None
    leaving: dict[Worker, list[int]] = {}
    for value in sorted(wanted):
        home = graph.worker(value)
        if graph.values[value].leaf and [to for to in wanted[value] if to != home]:
            leaving.setdefault(home, []).append(value)
    sends = [_Draft(w, 0, False, (), tuple(of), {}, {}) for w, of in leaving.items()]
    drafts = sends + drafts
    nbytes = [value.aval.nbytes for value in graph.values]
    nbytes += _bundle(graph, drafts)
    staged = {value: leaf for leaf, value in stages}
    pieces = tuple([_piece(graph, d, wanted, staged, exact) for d in drafts])
    parts, inputs = _parts(graph, plan, pieces, wanted, stages)
    edges = _edges(graph, pieces, caller, results)
    return Cut(parts, inputs, pieces, edges, tuple(nbytes))


def _drafts(graph: Graph, nodes_max: int) -> list[_Draft]:
    """The segments with nodes, in order, without bundles."""
    levels = [0] * len(graph.values)
    by_node: list[int] = []
    groups: dict[tuple[bool, int, Worker], list[int]] = {}
    for place, node in enumerate(graph.nodes):
        level = 0 if node.forward is None else by_node[node.forward]
        for value in chain(*node.inputs):
            worker, _, _, source, _ = graph.values[value]
            crosses = worker != node.worker and source not in SENT
            level = max(level, levels[value] + crosses)
        by_node.append(level)
        for value in node.outputs:
            levels[value] = level
        groups.setdefault((node.update, level, node.worker), []).append(place)
    drafts = []
    for (update, level, worker), places in groups.items():
        for start in range(0, len(places), nodes_max):
            part = tuple(places[start : start + nodes_max])
            nodes = [graph.nodes[place] for place in part]
            made = dict.fromkeys([value for node in nodes for value in node.outputs])
            read = chain(*[slots for node in nodes for slots in node.inputs])
            reads = tuple(sorted(dict.fromkeys([v for v in read if v not in made])))
            drafts.append(_Draft(worker, level, update, part, reads, {}, {}))
    return sorted(drafts, key=lambda draft: (draft.update, draft.level, draft.nodes))


def _bundle(graph: Graph, drafts: Sequence[_Draft]) -> list[int]:
    """Give drafts their bundles, one for each two of them; return the bytes of each."""
    of = {place: index for index, draft in enumerate(drafts) for place in draft.nodes}
    bundles: dict[tuple[int, int], list[int]] = {}
    for target, draft in enumerate(drafts):
        for place in draft.nodes:
            forward = graph.nodes[place].forward
            if forward is not None and of[forward] != target:
                bundles.setdefault((of[forward], target), []).append(forward)
    for slot, (ends, forwards) in enumerate(bundles.items(), len(graph.values)):
        drafts[ends[0]].given[slot] = drafts[ends[1]].taken[slot] = forwards
    pairs = [[graph.nodes[f].pair for f in forwards] for forwards in bundles.values()]
    return [sum([pair.residual_bytes for pair in few]) for few in pairs]


def _piece(
    graph: Graph,
    draft: _Draft,
    wanted: dict[int, dict[Worker, None]],
    staged: dict[int, LeafId],
    exact: bool,
) -> Piece:
    worker, level, update, places, reads, taken, given = draft
    nodes = [graph.nodes[place] for place in places]
    kept = dict.fromkeys(
        [
            *[n.forward for n in nodes if n.forward is not None],
            *chain(*given.values()),
        ]
    )
    # Residuals are named by the complement of their forward's place.
    names = [*reads, *[~place for place in chain(*taken.values())]]
    for place, node in zip(places, nodes, strict=True):
        names += [*node.outputs, *[~place] * (place in kept)]
    number = {name: index for index, name in enumerate(names)}
    pairs = {id(node.pair): node.pair for node in nodes if node.pair is not None}
    index = {key: at for at, key in enumerate(pairs)}
    inner = []
    for place, node in zip(places, nodes, strict=True):
        slots = [tuple([number[value] for value in few]) for few in node.inputs]
        held = [] if node.forward is None else [(number[~node.forward],)]
        pair = index.get(id(node.pair), 0)
        keeps = node.keeps or place in kept
        inner.append(SegmentNode(node.kind, pair, (*held, *slots), keeps))
    made = [value for node in nodes for value in node.outputs]
    makes = [value for value in made if value in wanted or value in staged]
    hops: dict[Worker, list[int]] = {}
    for value in makes if places else reads:
        for to in wanted.get(value, ()):
            if to != worker:
                hops.setdefault(to, []).append(value)
    function = SegmentFunction(
        tuple(pairs.values()),
        tuple([_arrived(graph, value, worker) for value in reads]),
        tuple(map(len, taken.values())),
        tuple(inner),
        tuple([number[value] for value in makes]),
        tuple([tuple([number[~f] for f in few]) for few in given.values()]),
        tuple([(node.name or node.kind.value, node.site) for node in nodes]),
        exact,
    )
    going = tuple([Outgoing(to, tuple(slots)) for to, slots in hops.items()])
    segment = Segment(function, (*reads, *taken), (*makes, *given), going)
    return Piece(worker, level, update, places, segment)


def _arrived(graph: Graph, value: int, worker: Worker) -> Aval:
    """The abstract value of a value where it is read; hops go to default devices."""
    aval = graph.aval(value)
    return aval if graph.worker(value) == worker else aval.on(None)


def _parts(
    graph: Graph,
    plan: ContextId,
    pieces: Sequence[Piece],
    wanted: dict[int, dict[Worker, None]],
    stages: Sequence[tuple[LeafId, int]],
) -> tuple[tuple[tuple[Worker, Prepare], ...], tuple[tuple[Worker, Slots], ...]]:
    reads: dict[Worker, list[Slotted]] = {}
    sent: dict[str, dict[Worker, list[int]]] = {source: {} for source in SENT}
    staged: dict[Worker, list[Slotted]] = {}
    for value in sorted(wanted):
        home, _, _, source, leaf = graph.values[value]
        if leaf is not None:
            reads.setdefault(home, []).append(Slotted(leaf, value))
        elif source:
            for worker in wanted[value]:
                sent[source].setdefault(worker, []).append(value)
    for leaf, value in stages:
        assert graph.worker(value) == leaf.worker, leaf
        staged.setdefault(leaf.worker, []).append(Slotted(leaf, value))
    segments: dict[Worker, list[Piece]] = {}
    for piece in pieces:
        segments.setdefault(piece.worker, []).append(piece)
    parts = []
    for worker in dict.fromkeys((*segments, *reads, *sent["constant"], *sent["input"])):
        mine = segments.get(worker, [])
        part = Prepare(
            plan,
            0,
            tuple([piece.segment for piece in mine]),
            tuple(sent["constant"].get(worker, ())),
            tuple(reads.get(worker, ())),
            tuple(staged.get(worker, ())),
            tuple([index for index, piece in enumerate(mine) if piece.update]),
            worker in staged or not all([_is_awaited(one, wanted) for one in mine]),
        )
        parts.append((worker, part))
    return tuple(parts), tuple([(w, tuple(of)) for w, of in sent["input"].items()])


def _is_awaited(piece: Piece, wanted: dict[int, dict[Worker, None]]) -> bool:
    """Whether a segment or the caller waits for what this segment makes."""
    segment = piece.segment
    held = len(segment.makes) > len(segment.function.outputs)
    return held or bool(segment.hops) or any([slot in wanted for slot in segment.makes])


def _edges(
    graph: Graph, pieces: Sequence[Piece], caller: Worker, results: Sequence[int]
) -> tuple[Edge, ...]:
    source: dict[int, int] = {}  # By slot: the segment that makes it, or sends it.
    for index, piece in enumerate(pieces):
        slots = piece.segment.makes if piece.nodes else piece.segment.needs
        source.update(dict.fromkeys(slots, index))
    found: dict[tuple[int | None, int | None], dict[int, None]] = {}
    ends: list[tuple[int | None, Worker, Sequence[int]]] = [(None, caller, results)]
    for index, piece in enumerate(pieces):
        ends.append((index, piece.worker, piece.segment.needs))
    for target, worker, needs in ends:
        for slot in needs:
            value = graph.values[slot] if slot < len(graph.values) else None
            if value is None or value.leaf is None or value.worker != worker:
                found.setdefault((source.get(slot), target), {})[slot] = None
    return tuple([Edge(*both, tuple(slots)) for both, slots in found.items()])
