"""A figure of many runs as a picture: lines over the values of one setting."""

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from jdag.report.formatting import formatted, shortened

NAMES_MAX = 24  # More lines have no names, which nobody could tell apart.
_NAME_MAX = 32
_DECADES = 30  # From so large a ratio of largest and least an axis is logarithmic.
# The colours of Okabe and Ito (2008), without the yellow, which is too light for lines.
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
    """Write the picture, a PNG.

    Args:
        path: the file.
        lines: by name the points of each, (value of x, value of y).
        failed: by outcome the points of runs that did not end: crosses without a line.
        title: of the picture.
        x: the name of the setting below; values that are no numbers stand side by side
            in the order in which they come.
        y: the name of the figure; its ending is its unit, as in tables.
        named: what the names of the lines are values of.

    Raises:
        OSError: the file cannot be written.
    """
    shown = [
        point for points in (*lines.values(), *failed.values()) for point in points
    ]
    places = [*dict.fromkeys([at for at, _ in shown])]
    has_numbers = all([type(at) in (int, float) for at in places])
    figure = Figure(figsize=(8.0, 4.5), layout="constrained")
    axes = figure.add_subplot()
    drawn = [(*of, _style(number)) for number, of in enumerate(lines.items())]
    crosses = zip(failed.items(), cycle("x+"), strict=False)
    drawn += [(*of, {**_CROSS, "marker": marker}) for of, marker in crosses]
    for name, points, style in drawn:
        ordered = sorted(points) if has_numbers else points
        axes.plot(
            [at if has_numbers else places.index(at) for at, _ in ordered],
            [value for _, value in ordered],
            label=shortened(name, _NAME_MAX),
            **style,
        )
    heights = [value for _, value in shown]
    if _is_wide(heights):
        axes.set_yscale("log")
    elif min(heights) >= 0:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda at, _: _tick(y, at)))
    if not has_numbers:
        names = [shortened(str(at), _NAME_MAX // 2) for at in places]
        axes.set_xticks(range(len(places)), names, parse_math=False)
    else:
        if _is_wide(places):
            axes.set_xscale("log")
        axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: _tick(x, at)))
    axes.set_xlabel(x, parse_math=False)
    axes.set_ylabel(y, parse_math=False)
    axes.set_title(title, loc="left", fontsize=11, pad=10, parse_math=False)
    axes.grid(color="#e3e6e9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    if (failed or len(lines) > 1) and len(lines) <= NAMES_MAX:
        legend = figure.legend(
            loc="outside right upper", title=named, frameon=False, fontsize=9
        )
        for text in (*legend.get_texts(), legend.get_title()):
            text.set_parse_math(False)
    figure.savefig(path, dpi=130, metadata={"Software": None})


def _style(number: int) -> dict[str, Any]:
    """The colour, style and marker of a line."""
    return {
        "color": _COLORS[number % len(_COLORS)],
        "linestyle": _STYLES[number // len(_COLORS) % len(_STYLES)],
        "marker": _MARKERS[number % len(_MARKERS)],
        "linewidth": 1.6,
        "markersize": 5,
    }


def _is_wide(values: Sequence[float]) -> bool:
    return min(values) > 0 and max(values) >= _DECADES * min(values)


def _tick(name: str, at: float) -> str:
    return formatted(name, int(at) if at == int(at) else float(at)).replace(
        ".00 %", " %"
    )
