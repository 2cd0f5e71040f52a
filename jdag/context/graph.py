"""The graph of a context or a plan as plain data and in Graphviz's language.

A vertex is a leaf, a node, or an end of a transfer: a send or a recv.
"""

from ast import literal_eval
from collections.abc import Iterator, Mapping

from msgspec import Struct

from jdag.engine.graph_snapshot import GraphSnapshot, Need
from jdag.engine.protocol import Key, Path

DRAWN_WORKERS_MAX = 8


class Vertex(Struct, frozen=True):
    """A vertex. `kind` is "leaf", "node", "send" or "recv"; a leaf has the path ()."""

    id: str
    worker: str
    kind: str
    path: Path
    label: str
    call_site: str = ""  # For a node: where the call was written.
    awaited: int = 0  # The number of cotangents that the last pass awaited here.
    need: str = ""  # For a send: the value of its `Need`.


class Edge(Struct, frozen=True):
    """An edge from a vertex to a vertex that uses its value, by the vertices' ids."""

    source: str
    target: str


class Graph(Struct, frozen=True):
    """The graph of a context or a plan. Edges have the direction of the forward.

    Attributes:
        left_out: the number of workers whose part of the graph is left out.
        table: the text of a plan; "" for a context.
    """

    workers: tuple[str, ...]
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    left_out: int = 0
    table: str = ""

    def dot(self, name: str = "plan") -> str:
        """Return the graph in Graphviz's language, with one cluster for each worker."""
        lines = [
            f"digraph {_quoted(name)} {{",
            '  graph [rankdir=TB, fontname="Helvetica"];',
            '  node [fontname="Helvetica", fontsize=10];',
        ]
        for index, worker in enumerate(self.workers):
            lines.append(f"  subgraph cluster_{index} {{")
            lines.append(f"    label={_quoted(worker)};")
            lines += [_dot_vertex(v) for v in self.vertices if v.worker == worker]
            lines.append("  }")
        worker_of = {vertex.id: vertex.worker for vertex in self.vertices}
        for edge in self.edges:
            crosses = worker_of[edge.source] != worker_of[edge.target]
            style = " [style=dashed, constraint=true]" if crosses else ""
            lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)}{style};")
        return "\n".join([*lines, "}", ""])


def graph_of(
    snapshots: Mapping[str, GraphSnapshot], workers_max: int | None = DRAWN_WORKERS_MAX
) -> Graph:
    workers = tuple(snapshots)[:workers_max]
    vertices: list[Vertex] = []
    edges: list[Edge] = []
    for worker in workers:
        vertices += _vertices(worker, snapshots[worker])
        edges += _edges(worker, snapshots[worker])
    ids = {vertex.id for vertex in vertices}
    complete = [edge for edge in edges if edge.source in ids and edge.target in ids]
    left_out = len(snapshots) - len(workers)
    return Graph(workers, tuple(vertices), tuple(dict.fromkeys(complete)), left_out)


class ContextGraph(dict[str, GraphSnapshot]):
    """The graph of a context by worker: `{worker: GraphSnapshot}`.

    A `GraphSnapshot` has `nodes`, `sends`, `recvs`, `leaves` and `edges`, in program
    order, and `last`: the number, mode and outcome of the worker's last pass.
    """

    def __repr__(self) -> str:
        return f"ContextGraph({self.counts()})"

    def counts(self) -> dict[str, dict[str, int]]:
        """Return each worker's numbers of nodes, sends, recvs, leaves and edges."""
        kinds = ("nodes", "sends", "recvs", "leaves", "edges")
        return {
            worker: {kind: len(getattr(snapshot, kind)) for kind in kinds}
            for worker, snapshot in self.items()
        }

    def dot(self, name: str = "context") -> str:
        """Return the graph in Graphviz's language, with one cluster for each worker.

        Numbers in brackets count the cotangents that the last pass awaited. Sends that
        the pass did not need are grey and dotted; sends without a cotangent are red.
        """
        return graph_of(self, None).dot(name)


def dotted(path: Path) -> str:
    """Return a path as text, such as 3.1."""
    return ".".join(map(str, path))


def _vertices(worker: str, snapshot: GraphSnapshot) -> Iterator[Vertex]:
    for leaf in snapshot.leaves:
        label = leaf.leaf.label
        id = f"{worker}/{label}"
        yield Vertex(id, worker, "leaf", (), label, awaited=leaf.awaited)
    for node in snapshot.nodes:
        name = node.function.rpartition(":")[2].rpartition(".")[2]
        id = _id(worker, "node", node.path)
        label = f"{dotted(node.path)} {name}"
        yield Vertex(id, worker, "node", node.path, label, node.call_site, node.awaited)
    for send in snapshot.sends:
        id, label = _id(worker, "send", send.path), f"send to {send.peer}"
        need = send.need.value
        yield Vertex(id, worker, "send", send.path, label, "", send.awaited, need)
    for recv in snapshot.recvs:
        id, label = _recv_id(worker, recv.path, recv.peer), f"recv from {recv.peer}"
        yield Vertex(id, worker, "recv", recv.path, label, awaited=recv.awaited)


def _edges(worker: str, snapshot: GraphSnapshot) -> Iterator[Edge]:
    for edge in snapshot.edges:
        kind, _, path = edge.consumer.partition(" ")
        target = _id(worker, kind, literal_eval(path))
        yield Edge(_source(worker, edge.value), target)
    for send in snapshot.sends:
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


_SHAPES = {"leaf": "ellipse", "node": "box", "send": "cds", "recv": "cds"}


def labelled(vertex: Vertex) -> str:
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
    options = [f"label={_quoted(labelled(vertex))}", f"shape={_SHAPES[vertex.kind]}"]
    if vertex.call_site:
        options.append(f"tooltip={_quoted(vertex.call_site)}")
    if vertex.need in _STYLES:
        options.append(_STYLES[vertex.need])
    return f"    {_quoted(vertex.id)} [{', '.join(options)}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
