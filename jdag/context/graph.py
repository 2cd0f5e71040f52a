"""The graph of one context: as plain data, as DOT, and as a picture.

A fragment is a column. A vertex is a leaf, a node, or an end of a transfer; all that
one call made stands at one height, so that the program runs from top to bottom and
transfers run across.
"""

from ast import literal_eval
from collections.abc import Iterator, Mapping

from msgspec import Struct

from jdag.engine.graph_snapshot import GraphSnapshot, Need
from jdag.engine.protocol import Key, Path

DRAWN_WORKERS_MAX = 8


class Vertex(Struct, frozen=True):
    """A place in the graph; `kind` is leaf, node, send or recv, a leaf's path is ()."""

    id: str
    worker: str
    kind: str
    path: Path
    label: str
    call_site: str = ""  # Of a node: where the call was written.
    awaited: int = 0  # Cotangents that the last pass awaited here.
    need: str = ""  # Of a send, the value of its `Need`.


class Edge(Struct, frozen=True):
    """An edge from producer to consumer, by the ids of the vertices."""

    source: str
    target: str


class Graph(Struct, frozen=True):
    """The graph of a context or a plan, edges in forward direction.

    `left_out` says how many workers have fragments that are not in it; `table` is the
    text of a plan, "" of a context.
    """

    workers: tuple[str, ...]
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    left_out: int = 0
    table: str = ""

    def dot(self, name: str = "plan") -> str:
        """Return the graph in the language of Graphviz, a cluster a worker."""
        lines = [
            f"digraph {_quoted(name)} {{",
            '  graph [rankdir=TB, fontname="Helvetica"];',
            '  node [fontname="Helvetica", fontsize=10];',
        ]
        for place, worker in enumerate(self.workers):
            lines.append(f"  subgraph cluster_{place} {{")
            lines.append(f"    label={_quoted(worker)};")
            lines += [_dot_vertex(one) for one in self.vertices if one.worker == worker]
            lines.append("  }")
        worker_of = {vertex.id: vertex.worker for vertex in self.vertices}
        for edge in self.edges:
            crosses = worker_of[edge.source] != worker_of[edge.target]
            style = " [style=dashed, constraint=true]" if crosses else ""
            lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)}{style};")
        return "\n".join([*lines, "}", ""])


def graph_of(
    drawings: Mapping[str, GraphSnapshot], workers_max: int | None = DRAWN_WORKERS_MAX
) -> Graph:
    """Join the fragments of `ctx.graph()`, of the first `workers_max` workers."""
    workers = tuple(drawings)[:workers_max]
    vertices: list[Vertex] = []
    edges: list[Edge] = []
    for worker in workers:
        drawing = drawings[worker]
        vertices += _vertices(worker, drawing)
        edges += _edges(worker, drawing)
    known = {vertex.id for vertex in vertices}
    used = [edge for edge in edges if edge.source in known and edge.target in known]
    left_out = len(drawings) - len(workers)
    return Graph(workers, tuple(vertices), tuple(dict.fromkeys(used)), left_out)


class ContextGraph(dict[str, GraphSnapshot]):
    """What each worker has of a context's graph: `{worker: GraphSnapshot}`.

    A `GraphSnapshot` has `nodes`, `sends`, `recvs`, `leaves` and `edges`, in program
    order, and `last`, the last pass that came by: its number, mode and outcome.
    """

    def __repr__(self) -> str:
        return f"ContextGraph({self.counts()})"

    def counts(self) -> dict[str, dict[str, int]]:
        """Return how many nodes, sends, recvs, leaves and edges each worker has."""
        kinds = ("nodes", "sends", "recvs", "leaves", "edges")
        return {
            worker: {kind: len(getattr(drawing, kind)) for kind in kinds}
            for worker, drawing in self.items()
        }

    def dot(self, name: str = "context") -> str:
        """Return the graph in the language of Graphviz, a cluster a worker.

        In brackets stands how many cotangents the last pass awaited. Sends that it did
        not need are grey and dotted; those that it is owed for are red.
        """
        return graph_of(self, None).dot(name)


def dotted(path: Path) -> str:
    """Return a path as text, such as 3.1."""
    return ".".join(map(str, path))


def _vertices(worker: str, drawing: GraphSnapshot) -> Iterator[Vertex]:
    for leaf in drawing.leaves:
        label = leaf.leaf.label
        id = f"{worker}/{label}"
        yield Vertex(id, worker, "leaf", (), label, awaited=leaf.awaited)
    for node in drawing.nodes:
        name = node.function.rpartition(":")[2].rpartition(".")[2]
        id = _id(worker, "node", node.path)
        label = f"{dotted(node.path)} {name}"
        yield Vertex(id, worker, "node", node.path, label, node.call_site, node.awaited)
    for send in drawing.sends:
        id, label = _id(worker, "send", send.path), f"send to {send.peer}"
        of = send.awaited, send.need.value
        yield Vertex(id, worker, "send", send.path, label, "", *of)
    for recv in drawing.recvs:
        id, label = _recv_id(worker, recv.path, recv.peer), f"recv from {recv.peer}"
        yield Vertex(id, worker, "recv", recv.path, label, awaited=recv.awaited)


def _edges(worker: str, drawing: GraphSnapshot) -> Iterator[Edge]:
    for edge in drawing.edges:
        kind, _, path = edge.consumer.partition(" ")
        target = _id(worker, kind, literal_eval(path))
        yield Edge(_source(worker, edge.value), target)
    for send in drawing.sends:
        target = _recv_id(send.peer, send.path, worker)
        yield Edge(_id(worker, "send", send.path), target)


def _source(worker: str, key: Key) -> str:
    match key.kind:
        case "leaf":
            return f"{worker}/{key.name.label}"
        case "received":
            return _recv_id(worker, *key.name)
        case _:
            return _id(worker, "node", key.name)


def _id(worker: str, kind: str, path: Path) -> str:
    return f"{worker}/{kind} {dotted(path)}"


def _recv_id(worker: str, path: Path, source: str) -> str:
    return f"{_id(worker, 'recv', path)} from {source}"


# ------------------------------------------------------------------------------- DOT

_SHAPES = {"leaf": "ellipse", "node": "box", "send": "cds", "recv": "cds"}


def labelled(vertex: Vertex) -> str:
    """Return the label of a vertex, with awaited cotangents or the need of a send."""
    match vertex.need:
        case Need.OWED.value:
            return f"{vertex.label}, owed"
        case Need.UNNEEDED.value:
            return f"{vertex.label}, unneeded"
        case _ if vertex.awaited and vertex.kind != "send":
            return f"{vertex.label} [{vertex.awaited}]"
        case _:
            return vertex.label


_STYLES = {
    Need.OWED.value: "color=red, fontcolor=red",
    Need.UNNEEDED.value: "color=gray, fontcolor=gray, style=dotted",
}


def _dot_vertex(vertex: Vertex) -> str:
    said = [f"label={_quoted(labelled(vertex))}", f"shape={_SHAPES[vertex.kind]}"]
    if vertex.call_site:
        said.append(f"tooltip={_quoted(vertex.call_site)}")
    if vertex.need in _STYLES:
        said.append(_STYLES[vertex.need])
    return f"    {_quoted(vertex.id)} [{', '.join(said)}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
