"""A line chart of a metric of many runs, over the values of one setting."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from jdag.report.formatting import formatted, shortened

NAMES_MAX = 24  # A chart with more lines has no legend.
_NAME_MAX = 32
_LOG_RATIO = 30  # An axis is logarithmic if largest / smallest value exceeds this.
# The colours of Okabe and Ito (2008), without yellow, which is too light for lines.
_COLORS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#22272c")
_CROSS = dict(color="black", linestyle="none", markersize=9, markeredgewidth=2)
_MARKERS, _STYLES = "osD^vPX*", ("-", "--", ":", "-.")

Points = Sequence[tuple[Any, float]]


def draw_lines(
    path: Path,
    lines: Mapping[str, Points],
    failed: Mapping[str, Points],
    *,
    title: str,
    x: str,
    y: str,
    named: str,
) -> None:
    """Write the chart as a PNG file.

    `lines` maps the name of each line to its points. `failed` maps outcomes to the
    points of failed runs, drawn as crosses. If a value of the setting `x` is not a
    number, the x-axis has one tick for each value. The suffix of `y` determines the
    unit, as in tables. `named` is the title of the legend.
    """
    shown = [
        point for points in (*lines.values(), *failed.values()) for point in points
    ]
    settings = [*dict.fromkeys([setting for setting, _ in shown])]
    has_numbers = all([type(setting) in (int, float) for setting in settings])
    figure = Figure(figsize=(8.0, 4.5), dpi=130, layout="constrained")
    axes = figure.add_subplot()
    drawn = [
        (name, points, _style(number))
        for number, (name, points) in enumerate(lines.items())
    ]
    for (outcome, points), marker in zip(failed.items(), cycle("x+"), strict=False):
        drawn.append((outcome, points, {**_CROSS, "marker": marker}))
    for name, points, style in drawn:
        ordered = sorted(points) if has_numbers else points
        axes.plot(
            [value if has_numbers else settings.index(value) for value, _ in ordered],
            [value for _, value in ordered],
            label=shortened(name, _NAME_MAX),
            **style,
        )
    heights = [value for _, value in shown]
    if _is_wide(heights):
        axes.set_yscale("log")
    elif min(heights) >= 0:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(y, value)))
    if not has_numbers:
        names = [shortened(str(setting), _NAME_MAX // 2) for setting in settings]
        axes.set_xticks(range(len(settings)), names, parse_math=False)
    else:
        if _is_wide(settings):
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _tick(x, value)))
    axes.set_xlabel(x, parse_math=False)
    axes.set_ylabel(y, parse_math=False)
    axes.set_title(title, loc="left", fontsize=11, pad=10, parse_math=False)
    axes.grid(color="#e3e6e9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if (failed or len(lines) > 1) and len(lines) <= NAMES_MAX:
        _add_legend(figure, named)
    FigureCanvasAgg(figure).print_png(path, metadata={"Software": None})


def _add_legend(figure: Figure, title: str) -> None:
    legend = figure.legend(
        loc="outside right upper", title=title, frameon=False, fontsize=9
    )
    for text in (*legend.get_texts(), legend.get_title()):
        text.set_parse_math(False)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": _COLORS[number % len(_COLORS)],
        "linestyle": _STYLES[number // len(_COLORS) % len(_STYLES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linewidth": 1.6,
        "markersize": 5,
    }


def _is_wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) >= _LOG_RATIO * min(values)


def _tick(name: str, value: float) -> str:
    number = int(value) if value == int(value) else float(value)
    return formatted(name, number).replace(".00 %", " %")
