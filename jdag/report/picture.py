"""The graph of a context as a picture, with a column for each worker.

Within a column, vertices are in program order from top to bottom, and every edge points
down. A leaf is on the left side of its column, next to the vertex that uses it first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, Rectangle
from msgspec.structs import replace

from jdag.context.graph import Edge, Graph, Vertex, labelled
from jdag.engine.graph_snapshot import Need
from jdag.report.formatting import shortened

HEIGHTS_MAX = 40
ABOVE_MAX = 16  # Number of leaves that fit above the first call.

_COLUMN_INCHES = 2.7
_HEIGHT_INCHES = 0.31
_BOX = (0.62, 0.70)  # (width, height), as fractions of a column and of a row.
_NAME_MAX = 25  # Number of characters that fit into a box.
_BOX_OFFSET, _LEAF_OFFSET = 0.10, -0.37  # Offsets from the center of the column.
_LEAF_HEIGHT = 0.88
_ORDER = {"send": 0, "recv": 1, "node": 2}
_FILL = {"leaf": "#f3e3b8", "node": "#dbe6f4", "send": "#e6dcee", "recv": "#d9ecec"}
_EDGE = {"leaf": "#b8912f", "node": "#3d6fb4", "send": "#7d5a91", "recv": "#3f8590"}
_OWED_FILL, _OWED_EDGE = "#ffdfe0", "#c00018"
_UNNEEDED, _FAINT = Need.UNNEEDED.value, "#9aa0a6"
_COLUMN, _INSIDE, _ACROSS, _FROM_LEAF = "#f6f7f8", "#55606b", "#7d5a91", "#cdb673"


@dataclass(frozen=True, slots=True)
class _Layout:
    workers: tuple[str, ...]
    places: Mapping[str, tuple[float, float]]  # (x, y) by id; y grows downwards.
    top: float  # Negative if leaves are above the first call.
    height: int


def draw_graph(path: Path, graph: Graph, title: str) -> None:
    layout = _laid_out(graph)
    columns = len(layout.workers)
    size = (
        max(6.0, _COLUMN_INCHES * columns + 0.4),
        _HEIGHT_INCHES * (layout.height - layout.top + 1.4) + 0.7,
    )
    figure = Figure(figsize=size, dpi=110, layout="constrained")
    axes = figure.add_subplot()
    axes.set_xlim(-0.5, columns - 0.5)
    axes.set_ylim(layout.height - 0.3, layout.top - 1.6)
    axes.axis("off")
    for x, worker in enumerate(layout.workers):
        low, high = layout.height - 0.35, layout.top - 1.5
        axes.add_patch(Rectangle((x - 0.47, high), 0.94, low - high, color=_COLUMN))
        axes.text(
            x, layout.top - 1.0, shortened(worker, _NAME_MAX),
            ha="center", va="center", weight="bold", parse_math=False,
        )  # fmt: skip
    vertices = {vertex.id: vertex for vertex in graph.vertices}
    for edge in graph.edges:
        if edge.source in layout.places and edge.target in layout.places:
            _draw_edge(axes, edge, vertices, layout)
    for id, place in layout.places.items():
        _draw_vertex(axes, vertices[id], place)
    title += _left_out(graph, layout)
    axes.set_title(title, loc="left", fontsize=11, parse_math=False)
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def _left_out(graph: Graph, layout: _Layout) -> str:
    """Return a suffix of the title that says which part of the graph is drawn."""
    drawn, total = len(layout.places), len(graph.vertices)
    parts = []
    if drawn < total:
        parts.append(f"its first {drawn:,} of {total:,} vertices")
    if graph.left_out:
        columns = len(graph.workers)
        parts.append(f"on {columns:,} of {columns + graph.left_out:,} workers")
    return f": {' '.join(parts)}" if parts else ""


def _laid_out(graph: Graph) -> _Layout:
    present = {vertex.worker for vertex in graph.vertices}
    workers = tuple(w for w in graph.workers if w in present)
    places = {
        id: (workers.index(worker) + _BOX_OFFSET, float(height))
        for id, (worker, height) in _heights(graph).items()
        if height < HEIGHTS_MAX
    }
    places.update(_leaf_places(graph, places, workers))
    heights = [height for _, height in places.values()]
    top, low = min(heights, default=0.0), int(max(heights, default=0.0))
    return _Layout(workers, places, top, low + 1)


def _heights(graph: Graph) -> dict[str, tuple[str, int]]:
    """Return the (worker, row) of each vertex. In these rows, all edges point down."""
    sources: dict[str, list[str]] = {}
    for edge in graph.edges:
        sources.setdefault(edge.target, []).append(edge.source)
    rows: dict[str, tuple[str, int]] = {}
    free: dict[str, int] = {}  # The first free row of each worker.
    calls = [vertex for vertex in graph.vertices if vertex.kind != "leaf"]
    for vertex in sorted(calls, key=lambda call: (call.path, _ORDER[call.kind])):
        above = [rows[id][1] for id in sources.get(vertex.id, ()) if id in rows]
        row = max([free.get(vertex.worker, 0), *(source + 1 for source in above)])
        rows[vertex.id] = vertex.worker, row
        free[vertex.worker] = row + 1
    return rows


def _leaf_places(
    graph: Graph,
    places: Mapping[str, tuple[float, float]],
    workers: tuple[str, ...],
) -> dict[str, tuple[float, float]]:
    """Return the (x, y) of each leaf.

    A leaf is next to the vertex that uses it first, or at the next free place above.
    Leaves that no drawn vertex uses, or without a free place, are left out.
    """
    occupied: set[tuple[float, float]] = set()
    leaf_places: dict[str, tuple[float, float]] = {}
    for leaf in graph.vertices:
        if leaf.kind != "leaf":
            continue
        uses = [places[e.target][1] for e in graph.edges
                if e.source == leaf.id and e.target in places]  # fmt: skip
        if not uses:
            continue
        x, y = workers.index(leaf.worker) + _LEAF_OFFSET, min(uses)
        while (x, y) in occupied:  # Bounded by the number of occupied places.
            y -= _LEAF_HEIGHT
        if y > -_LEAF_HEIGHT * (ABOVE_MAX + 0.5):
            occupied.add((x, y))
            leaf_places[leaf.id] = (x, y)
    return leaf_places


def _draw_vertex(axes: Axes, vertex: Vertex, place: tuple[float, float]) -> None:
    x, y = place
    is_owed, is_unneeded = vertex.need == Need.OWED.value, vertex.need == _UNNEEDED
    fill, edge, text = _FILL[vertex.kind], _EDGE[vertex.kind], "black"
    if is_owed:
        fill, edge, text = _OWED_FILL, _OWED_EDGE, _OWED_EDGE
    elif is_unneeded:
        fill, edge, text = _COLUMN, _FAINT, _FAINT
    width, height = (0.19, 0.74) if vertex.kind == "leaf" else _BOX
    axes.add_patch(
        Rectangle(
            (x - width / 2, y - height / 2), width, height, zorder=3,
            facecolor=fill, edgecolor=edge, linewidth=1.8 if is_owed else 0.8,
            linestyle=":" if is_unneeded else "-",
        )
    )  # fmt: skip
    name = shortened(vertex.label, 9 if vertex.kind == "leaf" else _NAME_MAX)
    label = labelled(replace(vertex, label=name))
    if vertex.kind == "leaf":
        label = label.replace(" [", "\n[")
    axes.text(
        x, y, label, ha="center", va="center",
        fontsize=6.4 if vertex.kind == "leaf" else 7.5, zorder=4, color=text,
        parse_math=False, linespacing=1.05,
    )  # fmt: skip


def _draw_edge(
    axes: Axes, edge: Edge, vertices: Mapping[str, Vertex], layout: _Layout
) -> None:
    source, target = vertices[edge.source], vertices[edge.target]
    (x, y), (to_x, to_y) = layout.places[edge.source], layout.places[edge.target]
    half_width, half_height = _BOX[0] / 2, _BOX[1] / 2
    if source.kind == "leaf":
        # Each leaf has a vertical line, which separates the edges of different leaves.
        number = source.label.rpartition(" ")[2]
        trunk_x = x + 0.03 * ((int(number) if number.isdigit() else 0) % 5 - 2)
        axes.plot([trunk_x, trunk_x], [y, to_y], color=_FROM_LEAF, lw=0.9, zorder=1)
        _arrow(axes, (trunk_x, to_y), (to_x - half_width, to_y), _FROM_LEAF)
    elif source.worker != target.worker:
        side = half_width if to_x > x else -half_width
        _arrow(axes, (x + side, y), (to_x - side, to_y), _ACROSS, "--")
    elif to_y - y < 1.5:
        _arrow(axes, (x, y + half_height), (to_x, to_y - half_height), _INSIDE)
    else:
        # Draw the edge on the right of the column, around the boxes in between.
        right = x + half_width
        trunk_x = right + 0.02 + 0.012 * (int(y) % 4)
        xs, ys = [right, trunk_x, trunk_x], [y, y, to_y - 0.12]
        axes.plot(xs, ys, color=_INSIDE, lw=0.9, zorder=1)
        _arrow(axes, (trunk_x, to_y - 0.12), (right, to_y - 0.12), _INSIDE)


def _arrow(
    axes: Axes,
    start: tuple[float, float],
    end: tuple[float, float],
    color: str,
    style: str = "-",
) -> None:
    axes.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=7, linewidth=0.9, color=color,
            linestyle=style, shrinkA=0, shrinkB=0, zorder=2,
        )
    )  # fmt: skip
