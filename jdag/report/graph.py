"""The graph of one context over all workers: joined from its fragments, and as DOT.

A vertex is a leaf, a node, or an end of a transfer. Edges go forward, from where a
value is made to where it is used, and from a send to its recv.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import networkx as nx

from jdag.engine.drawing import Drawing, DrawnEnd
from jdag.engine.vocabulary import Key
from jdag.report.spans import dotted, short_name

Path = tuple[int, ...]


class Vertex(NamedTuple):
    """A place in the graph.

    `kind` is leaf, node, send or recv; `label` a function, "leaf 0" or a peer; a leaf
    has the path () and no call site, and so has an end.
    """

    worker: str
    kind: str
    path: Path
    label: str
    call_site: str = ""

    @property
    def id(self) -> str:
        """What tells it from all others."""
        of = f" {dotted(self.path)}" if self.path else ""
        return f"{self.worker}: {self.kind}{of} {self.label}"


def graph_of(drawings: Mapping[str, Drawing]) -> "nx.DiGraph[Vertex]":
    """Join the fragments that `ctx.graph()` gives, `drawings` by worker.

    Vertices stand in program order: by path, what was sent for a call before the call.
    Edges from a send to a recv have the attribute `crosses`.
    """
    graph: nx.DiGraph[Vertex] = nx.DiGraph()
    vertices = [v for worker, one in drawings.items() for v in _vertices(worker, one)]
    order = {"leaf": 0, "send": 1, "recv": 2, "node": 3}
    graph.add_nodes_from(sorted(vertices, key=lambda v: (v.path, order[v.kind])))
    for worker, drawing in drawings.items():
        made = _made(worker, drawing)
        for target, keys in _used(worker, drawing):
            found = (made[key] for key in keys if key in made)
            graph.add_edges_from(
                (source, target, {"crosses": False}) for source in found
            )
        for send in drawing.sends:
            recv = Vertex(send.peer, "recv", send.path, worker)
            if recv in graph:
                graph.add_edge(_end(worker, "send", send), recv, crosses=True)
    return graph


def _end(worker: str, kind: str, end: DrawnEnd) -> Vertex:
    return Vertex(worker, kind, end.path, end.peer)


def _vertices(worker: str, drawing: Drawing) -> Iterator[Vertex]:
    for leaf in drawing.leaves:
        yield Vertex(worker, "leaf", (), f"leaf {leaf.leaf.number}")
    for node in drawing.nodes:
        name = short_name(node.function)
        yield Vertex(worker, "node", node.path, name, node.call_site)
    for send in drawing.sends:
        yield _end(worker, "send", send)
    for recv in drawing.recvs:
        yield _end(worker, "recv", recv)


def _made(worker: str, drawing: Drawing) -> dict[Key, Vertex]:
    """Which vertex of a fragment makes each value."""
    made = {}
    for node in drawing.nodes:
        name = short_name(node.function)
        vertex = Vertex(worker, "node", node.path, name, node.call_site)
        made.update(dict.fromkeys(node.outputs, vertex))
    for recv in drawing.recvs:
        made.update(dict.fromkeys(recv.values, _end(worker, "recv", recv)))
    for leaf in drawing.leaves:
        vertex = Vertex(worker, "leaf", (), f"leaf {leaf.leaf.number}")
        made.update(dict.fromkeys(leaf.versions, vertex))
    return made


def _used(worker: str, drawing: Drawing) -> Iterator[tuple[Vertex, tuple[Key, ...]]]:
    """Each vertex of a fragment that uses values, and those values."""
    for node in drawing.nodes:
        name = short_name(node.function)
        yield Vertex(worker, "node", node.path, name, node.call_site), node.inputs
    for send in drawing.sends:
        yield _end(worker, "send", send), send.values


# --------------------------------------------------------------------- sends owed


def owed_in(
    graph: "nx.DiGraph[Vertex]", figures: Mapping[str, Any]
) -> tuple[Vertex, ...]:
    """Return the sends of a graph that a stuck pass names as owed.

    Args:
        graph: the graph of its context.
        figures: those of the run. `owed` lists them, each a dict with path (dotted) and
            worker, or a line of the error's text; or else `owed_workers` and
            `owed_call_sites` say, side by side, where each send is and which call it
            was made for.
    """
    listed = figures.get("owed")
    if listed is not None:
        return tuple(v for v in _sends(graph) if any(_names(one, v) for one in listed))
    workers, sites = figures.get("owed_workers"), figures.get("owed_call_sites")
    named = list(zip(workers or (), sites or (), strict=True))
    return tuple(v for v in _sends(graph) if (v.worker, _site(graph, v)) in named)


def _sends(graph: "nx.DiGraph[Vertex]") -> Iterator[Vertex]:
    return (vertex for vertex in graph if vertex.kind == "send")


def _names(said: Any, send: Vertex) -> bool:
    path = dotted(send.path)
    if isinstance(said, str):
        return f"call {path}: {send.worker} -> {send.label}," in said
    place = said["path"]
    here = place if isinstance(place, str) else dotted(tuple(place))
    return bool(here == path and said["worker"] == send.worker)


def _site(graph: "nx.DiGraph[Vertex]", send: Vertex) -> str:
    """Where the call was written for which something was sent."""
    for recv in graph.successors(send):
        for user in graph.successors(recv):
            if user.path == send.path:
                return user.call_site
    return ""


# ------------------------------------------------------------------------------- DOT

_SHAPES = {"leaf": "ellipse", "node": "box", "send": "cds", "recv": "cds"}
_WORDS = {"leaf": "", "node": "", "send": "to ", "recv": "from "}


def label_of(vertex: Vertex) -> str:
    """Return what is written on a vertex: its function, its peer, or its leaf."""
    return f"{_WORDS[vertex.kind]}{vertex.label}"


def dot_of(
    graph: "nx.DiGraph[Vertex]", name: str, owed: tuple[Vertex, ...] = ()
) -> str:
    """Return the graph in the language of Graphviz, a cluster a worker."""
    lines = [
        f"digraph {_quoted(name)} {{",
        '  graph [rankdir=TB, fontname="Helvetica"];',
        '  node [fontname="Helvetica", fontsize=10];',
    ]
    fragments: dict[str, list[Vertex]] = {}
    for vertex in graph:
        fragments.setdefault(vertex.worker, []).append(vertex)
    for place, (worker, vertices) in enumerate(fragments.items()):
        lines.append(f"  subgraph cluster_{place} {{")
        lines.append(f"    label={_quoted(worker)};")
        lines += [_dot_vertex(vertex, vertex in owed) for vertex in vertices]
        lines.append("  }")
    for source, target, crosses in graph.edges(data="crosses"):
        style = " [style=dashed]" if crosses else ""
        lines.append(f"  {_quoted(source.id)} -> {_quoted(target.id)}{style};")
    return "\n".join([*lines, "}", ""])


def _dot_vertex(vertex: Vertex, is_owed: bool) -> str:
    path = f"\n{dotted(vertex.path)}" if vertex.kind == "node" else ""
    said = {
        "label": label_of(vertex) + path,
        "shape": _SHAPES[vertex.kind],
        **({"tooltip": vertex.call_site} if vertex.call_site else {}),
        **({"color": "red", "fontcolor": "red"} if is_owed else {}),
    }
    listed = ", ".join(f"{name}={_quoted(text)}" for name, text in said.items())
    return f"    {_quoted(vertex.id)} [{listed}];"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
