"""Draws who computed what when: one row a worker, transfers in a thin lane below.

Many workers become one raster, where each pixel shows the share of its time that each
kind took, so that no short job is lost and none is drawn longer than it was.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import NDArray

from jdag.report.spans import COMPUTE, Mark, Span, Window, bubble
from jdag.shown import shown

# Okabe and Ito's colours (2008), which colour-blind readers tell apart.
COLOURS: Mapping[str, str] = {
    "forward": "#0072B2",
    "backward": "#E69F00",
    "sum": "#009E73",
    "transfer": "#CC79A7",
    "idle": "#ECEDEF",
    "mark": "#D00000",
}
LEGEND: Mapping[str, str] = {
    "forward": "forward",
    "backward": "backward",
    "sum": "sum",
    "transfer": "transfer arriving",
    "idle": "idle",
}
INK = "#22262B"
DPI = 150
ROWS_MAX = 40
UNITS = ((1_000_000_000, "s"), (1_000_000, "ms"), (1_000, "µs"), (1, "ns"))
NAME_MAX = 22

_WIDTH_IN = 12.0
_COLUMNS = 1600
_LABELS_MAX = 40
_TEXT_PT = 7.0
_LANES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(COMPUTE, (0.10, 0.66)),
    "transfer": (0.74, 0.90),
}


def shorten(text: str, length: int = NAME_MAX) -> str:
    """Return a text of at most `length` characters, its end cut where it is longer."""
    return text if len(text) <= length else text[: length - 1] + "…"


def time_unit(length_ns: int) -> tuple[int, str]:
    """Return the unit that suits a length of time: how many ns it has, its name."""
    fitting = (unit for unit in UNITS if length_ns >= 2 * unit[0])
    return next(fitting, UNITS[-1])


def draw_timeline(
    path: Path,
    spans: Sequence[Span],
    marks: Sequence[Mark],
    workers: Sequence[str],
    window: Window,
    *,
    title: str,
) -> None:
    """Draw the timeline of these workers in a window of nanoseconds into a PNG.

    Raises:
        OSError: the file cannot be written.
    """
    start_ns, end_ns = window
    seen = [s for s in spans if s.end_ns >= start_ns and s.start_ns <= end_ns]
    compact = len(workers) > ROWS_MAX
    row_in = 0.14 if compact else 0.46
    height_in = min(max(1.7 + row_in * len(workers), 2.6), 11.0)
    figure = Figure((_WIDTH_IN, height_in), DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    unit_ns, unit = time_unit(max(end_ns - start_ns, 1))
    scale = 1 / unit_ns
    length = (end_ns - start_ns) * scale or 1.0
    axes.set_xlim(0, length)
    axes.set_ylim(len(workers), 0)
    if compact:
        _draw_raster(axes, seen, workers, window, length)
    else:
        _draw_bars(axes, seen, workers, window, scale)
        _write_shares(axes, seen, workers, window)
    _draw_marks(axes, marks, workers, window, scale)
    _dress(axes, workers, compact)
    since = "" if not start_ns else f" after {shown('start_ns', start_ns)}"
    axes.set_xlabel(f"virtual time{since}, {unit}", color=INK)
    axes.set_title(
        shorten(title, 90), loc="left", color=INK, fontsize=13, parse_math=False
    )
    kinds = [kind for kind in LEGEND if not (compact and kind == "transfer")]
    _write_legend(figure, kinds, marks, timed=end_ns > start_ns)
    figure.savefig(path)


def _draw_bars(
    axes: Axes,
    spans: Sequence[Span],
    workers: Sequence[str],
    window: Window,
    scale: float,
) -> None:
    """One rectangle a span, on the light ground of an idle worker."""
    start_ns, end_ns = window
    rows = {worker: row for row, worker in enumerate(workers)}
    length = (end_ns - start_ns) * scale or 1.0
    ground = [_rectangle(0, length, row, COMPUTE[0]) for row in rows.values()]
    axes.add_collection(PolyCollection(ground, facecolors=COLOURS["idle"]))
    boxes: dict[str, list[list[tuple[float, float]]]] = {kind: [] for kind in _LANES}
    inches = _WIDTH_IN * 0.8 / length
    for span in spans:
        row = rows.get(span.worker)
        left = (max(span.start_ns, start_ns) - start_ns) * scale
        right = (min(span.end_ns, end_ns) - start_ns) * scale
        if row is None or right <= left:
            continue
        boxes[span.kind].append(_rectangle(left, right, row, span.kind))
        if span.kind != "transfer":
            _write_label(axes, span, (left, right), row, inches)
    for kind, found in boxes.items():
        edge = 0.4 if len(found) < 400 and kind != "transfer" else 0.0
        axes.add_collection(
            PolyCollection(
                found,
                facecolors=COLOURS[kind],
                edgecolors="white",
                linewidths=edge,
                alpha=0.55 if kind == "transfer" else None,
            )
        )


def _rectangle(
    left: float, right: float, row: int, kind: str
) -> list[tuple[float, float]]:
    top, bottom = (row + part for part in _LANES[kind])
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def _write_label(
    axes: Axes, span: Span, at: tuple[float, float], row: int, inches: float
) -> None:
    """Write a job's function into its rectangle, where there is room for it."""
    left, right = at
    room = (right - left) * inches * 72 / (0.68 * _TEXT_PT)
    if len(span.label) > room:
        return
    top, bottom = _LANES[span.kind]
    axes.text(
        (left + right) / 2,
        row + (top + bottom) / 2,
        span.label,
        ha="center",
        va="center",
        fontsize=_TEXT_PT,
        color=INK if span.kind == "backward" else "white",
        parse_math=False,
    )


def _write_shares(
    axes: Axes, spans: Sequence[Span], workers: Sequence[str], window: Window
) -> None:
    """Write each worker's bubble to the right of its row."""
    if window[1] <= window[0]:
        return
    for row, share in enumerate(bubble(spans, workers, window).values()):
        axes.annotate(
            f"{float(share):.0%} idle",
            (1, row + 0.38),
            xycoords=("axes fraction", "data"),
            xytext=(8, 0),
            textcoords="offset points",
            va="center",
            fontsize=9,
            color=INK,
        )


def _coverage(
    spans: Sequence[Span], rows: Mapping[str, int], window: Window
) -> dict[str, NDArray[np.float64]]:
    """For each kind of job the share of each pixel's time that it took.

    Each edge of a span is a ramp over the pixel where it lies; their sum along a row,
    summed up from the left, is what the row's spans cover.
    """
    start_ns, end_ns = window
    per_ns = _COLUMNS / ((end_ns - start_ns) or 1)
    found = {}
    for kind in COMPUTE:
        own = [s for s in spans if s.kind == kind and s.worker in rows]
        row = np.array([rows[s.worker] for s in own], dtype=np.intp)
        steps = np.zeros((len(rows), _COLUMNS + 2))
        for sign, ends in ((1, [s.start_ns for s in own]), (-1, [s.end_ns for s in own])):
            at = (np.clip(np.array(ends, dtype=float), start_ns, end_ns) - start_ns)
            whole = np.floor(at * per_ns)
            part = at * per_ns - whole
            column = whole.astype(np.intp)
            np.add.at(steps, (row, column), sign * (1 - part))
            np.add.at(steps, (row, column + 1), sign * part)
        found[kind] = np.cumsum(steps, axis=1)[:, :_COLUMNS].clip(0, 1)
    return found


def _draw_raster(
    axes: Axes,
    spans: Sequence[Span],
    workers: Sequence[str],
    window: Window,
    length: float,
) -> None:
    """Mix each pixel's colour of what its worker did in its time."""
    rows = {worker: row for row, worker in enumerate(workers)}
    idle = np.array(to_rgb(COLOURS["idle"]))
    picture = np.tile(idle, (len(workers), _COLUMNS, 1))
    for kind, share in _coverage(spans, rows, window).items():
        picture += share[:, :, None] * (np.array(to_rgb(COLOURS[kind])) - idle)
    axes.imshow(
        picture.clip(0, 1),
        extent=(0, length, len(workers), 0),
        aspect="auto",
        interpolation="nearest",
    )


def _draw_marks(
    axes: Axes,
    marks: Sequence[Mark],
    workers: Sequence[str],
    window: Window,
    scale: float,
) -> None:
    """A cross where a worker crashed, small ones where frames were lost."""
    start_ns, end_ns = window
    rows = {worker: row for row, worker in enumerate(workers)}
    for kind, (height, size) in {"crash": (0.38, 9.0), "drop": (0.82, 4.0)}.items():
        own = [m for m in marks if m.kind == kind and start_ns <= m.time_ns <= end_ns]
        if not own:
            continue  # A line without points would still be given room.
        axes.plot(
            [(mark.time_ns - start_ns) * scale for mark in own],
            [rows[mark.worker] + height for mark in own],
            linestyle="none",
            marker="x",
            markersize=size,
            markeredgewidth=size / 4,
            color=COLOURS["mark"],
            clip_on=False,
            zorder=5,
        )


def _dress(axes: Axes, workers: Sequence[str], compact: bool) -> None:
    """Name the rows, every n-th where there are many, and take off what is not said."""
    every = -(-len(workers) // _LABELS_MAX)
    named = range(0, len(workers), every)
    height = 0.5 if compact else 0.38
    axes.set_yticks([row + height for row in named])
    axes.set_yticklabels(
        [shorten(workers[row]) for row in named], fontsize=7 if compact else 10
    )
    for label in axes.get_yticklabels():
        label.set_parse_math(False)
    axes.tick_params(axis="y", length=0, colors=INK)
    axes.tick_params(axis="x", colors=INK)
    for side in ("left", "top", "right"):
        axes.spines[side].set_visible(False)


def _write_legend(
    figure: Figure, kinds: Sequence[str], marks: Sequence[Mark], *, timed: bool
) -> None:
    """Below the plot, what each colour and cross means."""
    drawn: list[Patch | Line2D] = [
        Patch(facecolor=COLOURS[kind], label=LEGEND[kind]) for kind in kinds
    ]
    for kind, label in {"crash": "crash", "drop": "frame lost"}.items():
        if any(mark.kind == kind for mark in marks):
            size = 9 if kind == "crash" else 4
            line = Line2D([], [], color=COLOURS["mark"], marker="x", linestyle="none")
            line.set(markersize=size, markeredgewidth=size / 4, label=label)
            drawn.append(line)
    title = None if timed else "nothing took any virtual time"
    legend = figure.legend(
        handles=drawn,
        title=title,
        loc="outside lower center",
        ncols=len(drawn),
        frameon=False,
        fontsize=9,
    )
    for text in legend.get_texts():
        text.set_color(INK)
