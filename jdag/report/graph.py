"""The graph of one context: as plain data, as DOT, and as a picture.

A fragment is a column. A vertex is a leaf, a node, or an end of a transfer; all that
one call made stands at one height, so that the program runs from top to bottom and
transfers run across.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from jdag.engine.drawing import Drawing, DrawnEdge

WORKERS_MAX = 8

Path = tuple[int, ...]


class Vertex(NamedTuple):
    """A place in the graph; `kind` is leaf, node, send or recv, a leaf's path is ()."""

    id: str
    worker: str
    kind: str
    path: Path
    label: str
    call_site: str = ""  # Of a node: where the call was written.


class Edge(NamedTuple):
    """From where a value is made to where it is used, by the ids of the vertices."""

    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Graph:
    """The graph of a context, edges in forward direction.

    `left_out` says how many workers have fragments that are not in it.
    """

    workers: tuple[str, ...]
    vertices: tuple[Vertex, ...]
    edges: tuple[Edge, ...]
    left_out: int = 0

    def plain(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "workers": list(self.workers),
            "vertices": [vertex._asdict() for vertex in self.vertices],
            "edges": [edge._asdict() for edge in self.edges],
            "left_out": self.left_out,
        }


def graph_of_plain(plain: Mapping[str, Any]) -> Graph:
    """Return the graph that `Graph.plain` gave.

    Raises:
        KeyError: something is missing in it.
        TypeError: something else is in it.
    """
    vertices = [{**one, "path": tuple(one["path"])} for one in plain["vertices"]]
    return Graph(
        tuple(plain["workers"]),
        tuple(Vertex(**vertex) for vertex in vertices),
        tuple(Edge(**edge) for edge in plain["edges"]),
        plain["left_out"],
    )


def graph_of(drawings: Mapping[str, Drawing]) -> Graph:
    """Join the fragments that `ctx.graph()` gives, of many workers the first ones."""
    workers = tuple(drawings)[:WORKERS_MAX]
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


def owed_in(graph: Graph, figures: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the ids of the sends that a stuck pass names as owed.

    Args:
        graph: the graph of its context.
        figures: of the run: `owed_workers` and `owed_call_sites` say, side by side,
            where each send is and where the call was written that it was made for.
    """
    workers, sites = figures.get("owed_workers"), figures.get("owed_call_sites")
    named = list(zip(workers or (), sites or (), strict=True))
    vertices = {vertex.id: vertex for vertex in graph.vertices}
    after: dict[str, list[str]] = {}
    for edge in graph.edges:
        after.setdefault(edge.source, []).append(edge.target)

    def is_owed(send: Vertex) -> bool:
        users = [
            user for recv in after.get(send.id, ()) for user in after.get(recv, ())
        ]
        calls = [vertices[id] for id in users if vertices[id].path == send.path]
        return any((send.worker, one.call_site) in named for one in calls)

    return tuple(v.id for v in graph.vertices if v.kind == "send" and is_owed(v))


def dotted(path: Path) -> str:
    """A path as it is written: 3.1."""
    return ".".join(map(str, path))


def _vertices(worker: str, drawing: Drawing) -> Iterator[Vertex]:
    for leaf in drawing.leaves:
        number = leaf.leaf.number
        yield Vertex(_leaf(worker, number), worker, "leaf", (), f"leaf {number}")
    for node in drawing.nodes:
        name = node.function.rpartition(":")[2].rpartition(".")[2]
        id = _node(worker, node.path)
        label = f"{dotted(node.path)} {name}"
        yield Vertex(id, worker, "node", node.path, label, node.call_site)
    for send in drawing.sends:
        id = _send(worker, send.path)
        yield Vertex(id, worker, "send", send.path, f"send to {send.peer}")
    for recv in drawing.recvs:
        id = _recv(worker, recv.path, recv.peer)
        yield Vertex(id, worker, "recv", recv.path, f"recv from {recv.peer}")


def _edges(worker: str, drawing: Drawing) -> Iterator[Edge]:
    for edge in drawing.edges:
        yield Edge(_source(worker, edge), _target(worker, edge))
    for send in drawing.sends:
        yield Edge(_send(worker, send.path), _recv(send.peer, send.path, worker))


def _source(worker: str, edge: DrawnEdge) -> str:
    key = edge.value
    match key.kind:
        case "leaf":
            return _leaf(worker, key.name.number)
        case "received":
            path, source = key.name
            return _recv(worker, path, source)
        case _:
            return _node(worker, key.name)


def _target(worker: str, edge: DrawnEdge) -> str:
    kind, _, path = edge.consumer.partition(" ")
    numbers = tuple(int(part) for part in path.strip("()").split(",") if part.strip())
    return _send(worker, numbers) if kind == "send" else _node(worker, numbers)


def _leaf(worker: str, number: int) -> str:
    return f"{worker}/leaf {number}"


def _node(worker: str, path: Path) -> str:
    return f"{worker}/node {dotted(path)}"


def _send(worker: str, path: Path) -> str:
    return f"{worker}/send {dotted(path)}"


def _recv(worker: str, path: Path, source: str) -> str:
    return f"{worker}/recv {dotted(path)} from {source}"


# ------------------------------------------------------------------------------- DOT

_SHAPES = {"leaf": "ellipse", "node": "box", "send": "cds", "recv": "cds"}


def dot_of(graph: Graph, name: str, owed: Collection[str] = ()) -> str:
    """The graph in the language of Graphviz, a cluster a worker; `owed` in red."""
    lines = [
        f"digraph {_quoted(name)} {{",
        '  graph [rankdir=TB, fontname="Helvetica"];',
        '  node [fontname="Helvetica", fontsize=10];',
    ]
    for place, worker in enumerate(graph.workers):
        lines.append(f"  subgraph cluster_{place} {{")
        lines.append(f"    label={_quoted(worker)};")
        lines += [
            _dot_vertex(one, one.id in owed)
            for one in graph.vertices
            if one.worker == worker
        ]
        lines.append("  }")
    worker_of = {vertex.id: vertex.worker for vertex in graph.vertices}
    for edge in graph.edges:
        crosses = worker_of[edge.source] != worker_of[edge.target]
        style = " [style=dashed, constraint=true]" if crosses else ""
        lines.append(f"  {_quoted(edge.source)} -> {_quoted(edge.target)}{style};")
    return "\n".join([*lines, "}", ""])


def _dot_vertex(vertex: Vertex, is_owed: bool) -> str:
    said = [f"label={_quoted(vertex.label)}", f"shape={_SHAPES[vertex.kind]}"]
    if vertex.call_site:
        said.append(f"tooltip={_quoted(vertex.call_site)}")
    if is_owed:
        said.append("color=red, fontcolor=red")
    return f"    {_quoted(vertex.id)} [{', '.join(said)}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'
