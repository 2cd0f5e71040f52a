"""The graph of a context as a picture: a column a worker, transfers between columns.

Vertices are placed as jobs on machines are, in program order: each stands in the first
row below all that it uses where its column has room. So all arrows point down. A large
graph is drawn as far as it can be read, and the picture says what it leaves out.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import networkx as nx
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Ellipse, FancyArrowPatch, FancyBboxPatch, Patch

from jdag.report.graph import Vertex, label_of
from jdag.report.spans import dotted
from jdag.report.timeline import COLOURS, DPI, INK, shorten

VERTICES_MAX = 60
COLUMNS_MAX = 8

_SLOTS_MAX = 14  # Boxes side by side, over all columns.
_SLOT_IN, _ROW_IN = 1.16, 0.66  # Room for a box.
_HEIGHT_IN: Mapping[str, float] = {"leaf": 0.34, "node": 0.40, "send": 0.25, "recv": 0.25}
_WIDTH_IN: Mapping[str, float] = {"leaf": 0.86, "node": 1.02, "send": 0.98, "recv": 0.98}
_GAP_IN, _HEAD_IN, _FOOT_IN = 0.30, 0.42, 0.16
_TEXT_MAX = 15
_FILL: Mapping[str, str] = {
    "leaf": "#FBEFC9",
    "node": "#DCEAF5",
    "send": "#F6E3EE",
    "recv": "#F6E3EE",
}
_EDGE: Mapping[str, str] = {
    "leaf": "#B8860B",
    "node": COLOURS["forward"],
    "send": COLOURS["transfer"],
    "recv": COLOURS["transfer"],
}
_GROUND, _ARROW, _ARROW_LEAF = "#F5F6F7", "#5B6570", "#CDB673"


@dataclass(frozen=True, slots=True)
class _Layout:
    """Centres of boxes and edges of columns, in inches from the upper left corner."""

    places: Mapping[Vertex, tuple[float, float]]
    rows: Mapping[Vertex, int]
    columns: Mapping[str, tuple[float, float]]
    width_in: float
    height_in: float


def draw_graph(
    path: Path,
    graph: "nx.DiGraph[Vertex]",
    *,
    title: str,
    owed: Sequence[Vertex] = (),
) -> str:
    """Draw the graph of a context into a PNG, sends that are owed in red.

    Returns:
        What of it is left out, in words; "" where nothing is.

    Raises:
        OSError: the file cannot be written.
    """
    shown = _readable(graph, owed)
    left_out = _left_out(graph, shown)
    layout = _laid_out(shown)
    size = (max(layout.width_in, 7.2), layout.height_in + (1.1 if left_out else 0.9))
    figure = Figure(size, DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    margin = (size[0] - layout.width_in) / 2
    axes.set_xlim(-margin, layout.width_in + margin)
    axes.set_ylim(layout.height_in, 0)
    axes.axis("off")
    _draw_columns(axes, layout)
    for source, target in shown.edges:
        _draw_arrow(axes, source, target, layout, target.label)
    for vertex in shown:
        _draw_vertex(axes, vertex, layout.places[vertex], vertex in owed)
    axes.set_title(
        shorten(title, 70), loc="left", color=INK, fontsize=12, parse_math=False
    )
    _write_legend(figure, left_out, bool(owed))
    figure.savefig(path)
    return left_out


# ------------------------------------------------------------------- what is drawn


def _readable(
    graph: "nx.DiGraph[Vertex]", owed: Sequence[Vertex]
) -> "nx.DiGraph[Vertex]":
    """As many of the first workers and calls as can be read; all that is owed."""
    ends = [w for send in owed for w in (send.worker, send.label)]
    workers = list(dict.fromkeys([*ends, *(vertex.worker for vertex in graph)]))
    kept = workers[:COLUMNS_MAX]
    calls: dict[tuple[int, ...], list[Vertex]] = {send.path: [] for send in owed}
    for vertex in graph:
        if vertex.worker in kept and vertex.kind != "leaf":
            calls.setdefault(vertex.path, []).append(vertex)
    drawn: dict[Vertex, None] = {}
    for made in calls.values():
        leaves = [v for one in made for v in graph.predecessors(one) if not v.path]
        more = dict.fromkeys([*made, *leaves])
        if drawn and len(drawn | more) > VERTICES_MAX:
            break
        drawn |= more
    return nx.DiGraph(graph.subgraph(drawn))


def _left_out(graph: "nx.DiGraph[Vertex]", shown: "nx.DiGraph[Vertex]") -> str:
    if len(shown) == len(graph):
        return ""
    said = [f"{len(shown):,} of {len(graph):,} vertices"]
    workers, drawn = ({v.worker for v in one} for one in (graph, shown))
    if len(drawn) < len(workers):
        said.append(f"{len(drawn):,} of {len(workers):,} workers")
    return f"drawn: {' on '.join(said)}, the first in program order; all: graph.dot"


# ---------------------------------------------------------------------- where it is


def _laid_out(graph: "nx.DiGraph[Vertex]") -> _Layout:
    workers = list(dict.fromkeys(vertex.worker for vertex in graph))
    most = max(2, _SLOTS_MAX // max(len(workers), 1))
    rows, held = _rows(graph, most)
    columns: dict[str, tuple[float, float]] = {}
    left = 0.0
    for worker in workers:
        slots = max(len(row) for (whose, _), row in held.items() if whose == worker)
        right = left + slots * _SLOT_IN + _GAP_IN
        columns[worker] = (left, right)
        left = right + _GAP_IN
    places = {}
    for (worker, row), vertices in held.items():
        middle = sum(columns[worker]) / 2
        for slot, vertex in enumerate(vertices):
            x = middle + (slot - (len(vertices) - 1) / 2) * _SLOT_IN
            places[vertex] = (x, _HEAD_IN + (row + 0.5) * _ROW_IN)
    height = _HEAD_IN + (max(rows.values(), default=0) + 1) * _ROW_IN + _FOOT_IN
    return _Layout(places, rows, columns, max(left - _GAP_IN, 1.0), height)


def _rows(
    graph: "nx.DiGraph[Vertex]", most: int
) -> tuple[dict[Vertex, int], dict[tuple[str, int], list[Vertex]]]:
    """The row of each vertex, and the vertices of each row of each column."""
    place = {vertex: number for number, vertex in enumerate(graph)}
    order = nx.lexicographical_topological_sort(
        graph, key=lambda v: (v.path, place[v])
    )
    rows: dict[Vertex, int] = {}
    held: dict[tuple[str, int], list[Vertex]] = {}
    for vertex in order:
        row = max((rows[one] + 1 for one in graph.predecessors(vertex)), default=0)
        row = row if vertex.kind == "leaf" else max(row, 1)
        while len(held.get((vertex.worker, row), ())) >= most:
            row += 1
        rows[vertex] = row
        held.setdefault((vertex.worker, row), []).append(vertex)
    return rows, held


# ------------------------------------------------------------------------- drawing


def _draw_columns(axes: Axes, layout: _Layout) -> None:
    for worker, (left, right) in layout.columns.items():
        axes.add_patch(
            FancyBboxPatch(
                (left, 0.0),
                right - left,
                layout.height_in,
                boxstyle="round,pad=0,rounding_size=0.08",
                facecolor=_GROUND,
                edgecolor="none",
            )
        )
        room = int((right - left) / 0.11)
        axes.text(
            (left + right) / 2,
            _HEAD_IN / 2 + 0.04,
            shorten(worker, room),
            ha="center",
            va="center",
            weight="bold",
            fontsize=9,
            color=INK,
            parse_math=False,
        )


def _draw_vertex(
    axes: Axes, vertex: Vertex, at: tuple[float, float], is_owed: bool
) -> None:
    x, y = at
    kind = vertex.kind
    width, height = _WIDTH_IN[kind], _HEIGHT_IN[kind]
    edge = COLOURS["mark"] if is_owed else _EDGE[kind]
    how = {
        "facecolor": "#FFE1E1" if is_owed else _FILL[kind],
        "edgecolor": edge,
        "linewidth": 1.6 if is_owed else 0.9,
        "zorder": 3,
    }
    if kind == "leaf":
        axes.add_patch(Ellipse((x, y), width, height, **how))  # type: ignore[arg-type]
    else:
        corner = height / 2 if kind != "node" else 0.05
        axes.add_patch(
            FancyBboxPatch(
                (x - width / 2, y - height / 2),
                width,
                height,
                boxstyle=f"round,pad=0,rounding_size={corner}",
                **how,  # type: ignore[arg-type]
            )
        )
    label = shorten(label_of(vertex), _TEXT_MAX)
    path = f"\n{shorten(dotted(vertex.path))}" if kind == "node" else ""
    axes.text(
        x,
        y,
        label + path,
        ha="center",
        va="center",
        fontsize=6.6,
        linespacing=1.25,
        color=COLOURS["mark"] if is_owed else INK,
        zorder=4,
        parse_math=False,
    )


def _draw_arrow(
    axes: Axes, source: Vertex, target: Vertex, layout: _Layout, peer: str
) -> None:
    """From the foot of one box to the head of another; far ones bend aside."""
    (x, y), (to_x, to_y) = layout.places[source], layout.places[target]
    crosses = source.worker != target.worker
    far = layout.rows[target] - layout.rows[source] > 1
    if crosses:
        colour, style = COLOURS["transfer"], (0, (4, 2))
    else:
        colour = _ARROW_LEAF if source.kind == "leaf" else _ARROW
        style = (0, ())
    bend = 0.0 if not far else (0.12 if to_x <= x else -0.12)
    axes.add_patch(
        FancyArrowPatch(
            (x, y + _HEIGHT_IN[source.kind] / 2),
            (to_x, to_y - _HEIGHT_IN[target.kind] / 2),
            arrowstyle="-|>",
            mutation_scale=7,
            linewidth=0.9,
            color=colour,
            linestyle=style,
            connectionstyle=f"arc3,rad={bend}",
            shrinkA=0,
            shrinkB=0,
            zorder=1 if source.kind == "leaf" else 2,
        )
    )


def _write_legend(figure: Figure, left_out: str, owed: bool) -> None:
    drawn: list[Patch | Line2D] = [
        Patch(facecolor=_FILL[kind], edgecolor=_EDGE[kind], label=label)
        for kind, label in (
            ("leaf", "leaf"),
            ("node", "node: function, path"),
            ("send", "send, recv"),
        )
    ]
    line = Line2D([], [], color=COLOURS["transfer"], linestyle=(0, (4, 2)))
    line.set_label("transfer")
    drawn.append(line)
    if owed:
        red = COLOURS["mark"]
        drawn.append(Patch(facecolor="#FFE1E1", edgecolor=red, label="owed send"))
    figure.legend(
        handles=drawn,
        loc="outside lower center",
        ncols=len(drawn),
        frameon=False,
        fontsize=8,
        title=left_out or None,
        title_fontsize=8,
    )
