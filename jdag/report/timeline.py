"""The timeline of a run as a PNG picture, from the data of `jdag.report.gantt`."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from jdag.report.formatting import formatted, shortened

_WIDTH_INCHES = 12.0
_ROW_INCHES, _ROWS_INCHES = 0.5, 15.0  # Height of a row, and maximum for all rows.
_DENSE_INCHES = (0.13, 7.5)  # The same two heights for a dense chart.
_FRAME_INCHES = 1.75  # Height of title, axis and legend.
_NAMES_MAX, _NAME_MAX = 40, 24
_EDGE_SHARE = 0.001  # Wider bars, relative to the axis, have an edge.
_LABEL_SHARE = 0.006  # Width of a character of a label, as a share of the axis.
_LABELS_MAX = 3_000
_SYMBOLS = {"drop": ("x", 16), "crash": ("X", 80)}
_INK, _SOFT = "#22272c", "#68727c"


def draw_timeline(path: Path, gantt: Mapping[str, Any], title: str) -> None:
    rows, length_ns = gantt["rows"], gantt["length_ns"]
    row_inches, most = (_ROW_INCHES, _ROWS_INCHES)
    if gantt["is_dense"]:
        row_inches, most = _DENSE_INCHES
    size = (_WIDTH_INCHES, _FRAME_INCHES + min(row_inches * len(rows), most))
    figure = Figure(figsize=size, dpi=130, layout="constrained")
    axes = figure.add_subplot()
    _frame(axes, gantt)
    for kind, (_, color) in gantt["kinds"].items():
        _draw_bars(axes, gantt, kind, color)
    if not gantt["is_dense"]:
        _draw_texts(axes, gantt)
    for kind in gantt["marks"]:
        symbol, points = _SYMBOLS[kind]
        xys = [(time_ns, y + 0.8) for y, row in enumerate(rows)
               for time_ns, mark in row["marks"] if mark == kind]  # fmt: skip
        axes.scatter([x for x, _ in xys], [y for _, y in xys], s=points, marker=symbol,
                     color=_INK, linewidths=1.0, zorder=4, clip_on=False)  # fmt: skip
    if length_ns == 0:
        axes.text(0.5, 0.5, "no job took any time", ha="center", va="center",
                  transform=axes.transAxes, color=_SOFT)  # fmt: skip
    axes.set_title(title, loc="left", fontsize=11, pad=10, parse_math=False)
    _legend(figure, gantt)
    # The file contains no date or version, so that equal runs give equal bytes.
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def _draw_bars(axes: Axes, gantt: Mapping[str, Any], kind: str, color: str) -> None:
    lanes, length_ns = gantt["lanes"], gantt["length_ns"]
    bars = [
        (max(start, 0), min(end, length_ns), y + lanes[lane][0], lanes[lane][1])
        for y, row in enumerate(gantt["rows"])
        for start, end, bar_kind, lane, *_ in row["bars"]
        if bar_kind == kind
    ]
    start, end, top, height = np.array(bars, dtype=float).T
    xs, ys = [start, end, end, start], [top, top, top + height, top + height]
    corners: Any = np.stack([np.stack(xs, 1), np.stack(ys, 1)], 2)
    # White edges separate wide bars. In a dense chart, edges fill gaps between rows.
    is_wide = end - start > _EDGE_SHARE * length_ns
    edge = (color, 0.4) if gantt["is_dense"] else ("white", 0.5)
    polygons = PolyCollection(
        corners, facecolors=color, edgecolors=edge[0],
        linewidths=np.where(is_wide, edge[1], 0.0), snap=False, zorder=2,
    )  # fmt: skip
    axes.add_collection(polygons, autolim=False)


def _draw_texts(axes: Axes, gantt: Mapping[str, Any]) -> None:
    length_ns, lanes = gantt["length_ns"], gantt["lanes"]
    labels = 0
    for y, row in enumerate(gantt["rows"]):
        for start, end, _, lane, label, _ in row["bars"]:
            first, last = max(start, 0), min(end, length_ns)
            room = int((last - first) / (_LABEL_SHARE * length_ns))
            if not label or room < min(len(label) + 1, 5) or labels == _LABELS_MAX:
                continue
            labels += 1
            top, height = lanes[lane]
            axes.text(
                (first + last) / 2, y + top + height / 2, shortened(label, room),
                ha="center", va="center", fontsize=7, color="white", zorder=3,
                parse_math=False, clip_on=True,
            )  # fmt: skip
        if length_ns:
            top, height = lanes[0]
            axes.text(length_ns * 1.008, y + top + height / 2, row["busy"],
                      va="center", fontsize=8, color=_SOFT)  # fmt: skip


def _frame(axes: Axes, gantt: Mapping[str, Any]) -> None:
    rows, length = gantt["rows"], gantt["length_ns"] or 1
    axes.set_xlim(0, float(length))
    axes.set_ylim(len(rows), 0)
    idle, gap = gantt["idle"], 0.0 if gantt["is_dense"] else 0.05
    for y in range(len(rows)):
        axes.barh(y + gap, length, 1 - 2 * gap, align="edge", color=idle, zorder=0)
    named = range(0, len(rows), -(-len(rows) // _NAMES_MAX))
    names = [shortened(rows[y]["worker"], _NAME_MAX) for y in named]
    axes.set_yticks([y + 0.5 for y in named], names,
                    fontsize=7 if gantt["is_dense"] else 10)  # fmt: skip
    for name in axes.get_yticklabels():
        name.set_parse_math(False)
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.set_xlabel(gantt["axis"])
    axes.tick_params(length=0, axis="y")
    axes.tick_params(color="#999999", axis="x")
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color("#999999")


def _tick(at_ns: float, _: object) -> str:
    return formatted("_ns", int(at_ns))


def _legend(figure: Figure, gantt: Mapping[str, Any]) -> None:
    handles: list[Patch | Line2D] = [
        Patch(color=color, label=label) for label, color in gantt["kinds"].values()
    ]
    handles.append(Patch(facecolor=gantt["idle"], edgecolor="#cccccc", label="idle"))
    handles += [
        Line2D([], [], color=_INK, marker=_SYMBOLS[kind][0], linestyle="", label=label)
        for kind, label in gantt["marks"].items()
    ]
    lines = -(-len(handles) // 7)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=-(-len(handles) // lines),
        frameon=False, fontsize=9, handlelength=1.2, columnspacing=1.6,
    )  # fmt: skip
