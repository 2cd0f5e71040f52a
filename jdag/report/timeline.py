"""The timeline of a run as a picture: one row per worker, with its jobs and transfers.

The upper part of a row is the worker's device (forward, backward, sums, idle), with the
paths of its calls; the thin strip below shows the arrays that it is sending. For more
than `ROWS_MAX` workers a raster shows only the devices.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from jdag.api.graph import dotted
from jdag.report.formatting import formatted, shortened
from jdag.report.gantt import ACTIONS
from jdag.report.raster import mixed
from jdag.report.spans import Job, Spans, Transfer, bubble

ROWS_MAX = 40
_WIDTH_INCHES = 12.0
_ROW_INCHES = 0.58
_ROWS_INCHES = 15.0  # All rows together, at most; of a raster half of it.
_RASTER_ROW_INCHES = 0.13
_NAMES_MAX = 40
_NAME_MAX = 24
_FRAME_INCHES = 1.75  # Title, axis and legend.
_EDGE_SHARE = 0.004  # One that is wider than this one has a white edge.
_LABEL_SHARE = 0.022  # A bar that is wider than this share of the axis has a label.
_CHARACTERS = 180  # Of a label, on the whole axis.

# The colours of Okabe and Ito (2008), which colour-blind readers tell apart.
_IDLE = "#eef0f2"
_KINDS = {
    "forward": (ACTIONS["F"][1], "forward"),
    "backward": (ACTIONS["B"][1], "backward"),
    "input_grad": (ACTIONS["I"][1], ACTIONS["I"][0]),
    "weight_grad": (ACTIONS["W"][1], ACTIONS["W"][0]),
    "sum": ("#8a8a5c", "sums, zeros and ones"),
    "hook": ("#e69f00", "hooks"),
    "update": ("#f0e442", "updates of leaves"),
    "segment": ("#332288", "segments of plans"),
}
_ALWAYS = ("forward", "backward")  # In the legend, whether there are any or not.
_PRIMALS, _COTANGENTS, _HOPS = "#56b4e9", "#cc79a7", "#8577d0"
_OF_MESSAGES = {"Cotangent": _COTANGENTS, "Hop": _HOPS}
_MARK = "#22272c"
_MARKS = (("drop", "x", "a frame was dropped"), ("crash", "X", "it crashed"))
_UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))

# The device's bar and the strip of transfers, in units of a row, from its middle.
_DEVICE = (-0.38, 0.56)
_STRIP = (0.25, 0.13)


def draw_timeline(
    path: Path,
    spans: Spans,
    workers: Sequence[str],
    window_ns: tuple[int, int],
    title: str,
    clock: str = "virtual time",
) -> None:
    """Write the picture, a PNG, of what happened in a window of time.

    Raises:
        OSError: the file cannot be written.
    """
    inside = spans.within(window_ns)
    is_raster = len(workers) > ROWS_MAX
    rows_inches = _ROW_INCHES * len(workers)
    if is_raster:
        rows_inches = min(_RASTER_ROW_INCHES * len(workers), _ROWS_INCHES / 2)
    size = (_WIDTH_INCHES, _FRAME_INCHES + min(rows_inches, _ROWS_INCHES))
    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    length_ns = window_ns[1] - window_ns[0]
    unit_ns, unit = _unit(length_ns)
    view = _View(axes, *window_ns, unit_ns)
    if is_raster:
        colors = {kind: color for kind, (color, _) in _KINDS.items()}
        picture = mixed(inside.jobs, workers, window_ns, colors, _IDLE)
        extent = (0, view.length or 1, len(workers) - 0.5, -0.5)
        axes.imshow(picture, extent=extent, aspect="auto", interpolation="nearest")
    else:
        _draw_rows(view, workers, inside)
    _draw_marks(view, workers, inside)
    since = formatted("start_ns", window_ns[0]) if window_ns[0] else "its beginning"
    _frame(axes, workers, view.length, f"{clock} since {since}, in {unit}")
    if is_raster:
        axes.grid(visible=False)
    axes.set_title(title, loc="left", fontsize=11, pad=10, parse_math=False)
    _legend(figure, inside, is_raster)
    if length_ns == 0:
        axes.text(0.5, 0.5, "nothing took any time", ha="center", va="center",
                  transform=axes.transAxes, color="#555555")  # fmt: skip
    # No date and no version in the file: the same run gives the same bytes.
    figure.savefig(path, dpi=130, metadata={"Software": None})


@dataclass(frozen=True, slots=True)
class _View:
    """The axes, and the window of time that they show, in some unit."""

    axes: Axes
    first_ns: int
    last_ns: int
    unit_ns: int

    @property
    def length(self) -> float:
        return (self.last_ns - self.first_ns) / self.unit_ns

    def bar(self, span: Job | Transfer) -> tuple[float, float]:
        """Return start and width, cut at the window."""
        start_ns = max(span.start_ns, self.first_ns)
        end_ns = min(span.end_ns, self.last_ns)
        width = (end_ns - start_ns) / self.unit_ns
        return (start_ns - self.first_ns) / self.unit_ns, width


def _draw_rows(view: _View, workers: Sequence[str], spans: Spans) -> None:
    axes, length = view.axes, view.length
    idle = bubble(spans.jobs, workers, (view.first_ns, view.last_ns))
    for place, worker in enumerate(workers):
        axes.barh(place, length, height=0.86, color=_IDLE, zorder=0)
        _draw_jobs(view, place, [job for job in spans.jobs if job.worker == worker])
        sent = [one for one in spans.transfers if one.worker == worker]
        for color in (_PRIMALS, _COTANGENTS, _HOPS):
            bars = [
                view.bar(one)
                for one in sent
                if one.payload_bytes
                and _OF_MESSAGES.get(one.message, _PRIMALS) == color
            ]
            where = (place + _STRIP[0], _STRIP[1])
            axes.broken_barh(bars, where, facecolors=color, alpha=0.75, zorder=2)
        if length:
            axes.text(
                length * 1.008, place, f"{float(1 - idle[worker]):.0%} busy",
                va="center", fontsize=8, color="#555555",
            )  # fmt: skip


def _unit(length_ns: int) -> tuple[int, str]:
    """Return the largest unit of which the length is at least two."""
    for size_ns, name in _UNITS:
        if length_ns >= 2 * size_ns:
            return size_ns, name
    return _UNITS[-1]


def _draw_jobs(view: _View, place: int, jobs: Sequence[Job]) -> None:
    for kind, (color, _) in _KINDS.items():
        mine = [j for j in jobs if j.drawn_as == kind and j.end_ns > j.start_ns]
        bars = [view.bar(job) for job in mine]
        # A thin bar has no edge, which would hide it.
        thin = _EDGE_SHARE * view.length
        view.axes.broken_barh(
            bars, (place + _DEVICE[0], _DEVICE[1]), facecolors=color,
            edgecolors="white",
            linewidth=[0.5 if width > thin else 0.0 for _, width in bars] or 0.0,
            zorder=2,
        )  # fmt: skip
        narrow = _LABEL_SHARE * view.length
        for job, (start, width) in zip(mine, bars, strict=True):
            if width < narrow or not job.context:
                continue
            text = re.sub(r"^\d+[FIWB]", "", job.action) or dotted(job.path)
            if kind == "segment":
                name = job.function.partition(":")[2].rstrip(")")
                text = shortened(name, int(_CHARACTERS * width / view.length))
            view.axes.text(
                start + width / 2, place + _DEVICE[0] + _DEVICE[1] / 2,
                text, parse_math=False, ha="center", va="center", fontsize=7,
                color="white", zorder=3, clip_on=True,
            )  # fmt: skip


def _draw_marks(view: _View, rows: Sequence[str], spans: Spans) -> None:
    for kind, symbol, _ in _MARKS:
        marks = [m for m in spans.marks if m.kind == kind and m.worker in rows]
        if marks:
            view.axes.scatter(
                [(mark.at_ns - view.first_ns) / view.unit_ns for mark in marks],
                [rows.index(mark.worker) + _STRIP[0] + 0.06 for mark in marks],
                marker=symbol, s=16 if kind == "drop" else 80, color=_MARK, zorder=4,
                linewidths=1.0, clip_on=False,
            )  # fmt: skip


def _frame(axes: Axes, rows: Sequence[str], span: float, label: str) -> None:
    axes.set_xlim(0, span or 1)
    axes.set_ylim(len(rows) - 0.45, -0.55)
    every = -(-len(rows) // _NAMES_MAX)
    named = range(0, len(rows), every)
    names = [shortened(rows[place], _NAME_MAX) for place in named]
    axes.set_yticks(named, names, fontsize=7 if len(rows) > ROWS_MAX else 10)
    for name in axes.get_yticklabels():
        name.set_parse_math(False)
    axes.set_xlabel(label)
    axes.tick_params(length=0, axis="y")
    axes.tick_params(color="#999999", axis="x")
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color("#999999")
    axes.grid(axis="x", color="white", linewidth=0.8)
    axes.set_axisbelow(True)  # Lines above idle, below all that is done.


def _legend(figure: Figure, spans: Spans, is_raster: bool) -> None:
    kinds = [job.drawn_as for job in spans.jobs if job.end_ns > job.start_ns]
    marks = [mark.kind for mark in spans.marks]
    handles: list[Patch | Line2D] = [
        Patch(color=color, label=label)
        for kind, (color, label) in _KINDS.items()
        if kind in _ALWAYS or kind in kinds
    ]
    if not is_raster:
        handles.append(Patch(color=_PRIMALS, label="primals on their way"))
        handles.append(Patch(color=_COTANGENTS, label="cotangents on their way"))
        if any([one.message == "Hop" for one in spans.transfers]):
            handles.append(Patch(color=_HOPS, label="hops of plans"))
    handles.append(Patch(facecolor=_IDLE, edgecolor="#cccccc", label="idle"))
    for kind, symbol, label in _MARKS:
        if kind in marks:
            mark = Line2D([], [], color=_MARK, marker=symbol, linestyle="", label=label)
            handles.append(mark)
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False,
        fontsize=9, handlelength=1.2, columnspacing=1.6,
    )  # fmt: skip
