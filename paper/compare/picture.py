"""Draws the comparison: a bar for each row, from 1 (the peer) to jdag's ratio."""

from collections.abc import Mapping
from io import BytesIO
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, StrMethodFormatter

from paper.compare.page import UNSTEADY, amount
from paper.compare.rows import JUDGED, ON_ONE, PEER, PLAN

# The style of each system's bars, in drawing order. Colours also differ in grey.
STYLES: dict[str, dict[str, Any]] = {
    JUDGED: {"color": "#3b5b7d", "label": "eager calls, FAST"},
    PLAN: {"color": "#f2c879", "label": "plan", "edgecolor": "#22272c"},
}
THICK = 0.38  # The thickness of a bar, as a fraction of the height of a row.
TICKS = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


def picture(written: Mapping[str, Any]) -> Figure:
    """Draw the rows on separate cores. `written` is the contents of `compare.json`."""
    shown = [
        (row, [name for name in STYLES if name in row])
        for row in written["rows"]
        if not row["row"].endswith(ON_ONE)
    ]
    figure = Figure(figsize=(9, 1.5 + 0.3 * len(shown)), layout="constrained")
    axes = figure.add_subplot(xscale="log")
    ratios = [1.0]
    for name, style in STYLES.items():
        bars = [
            (place + THICK * (names.index(name) - (len(names) - 1) / 2), row[name])
            for place, (row, names) in enumerate(shown)
            if name in names and row[name]["ratio"]
        ]
        lengths = [bar["ratio"] - 1 for _, bar in bars]
        axes.barh(
            [at for at, _ in bars], lengths, THICK, left=1, linewidth=0.6, **style
        )
        for at, bar in bars:
            ratio, mark = bar["ratio"], UNSTEADY if bar["unsteady"] else ""
            ratios.append(ratio)
            axes.annotate(
                f"{ratio:.2f}{mark}",
                (1, at),
                xycoords=("axes fraction", "data"),
                xytext=(4, 0),
                textcoords="offset points",
                verticalalignment="center",
                fontsize=7,
            )
            if bar["target"]:
                ratios.append(bar["target"])
                ends = (bar["target"], at - THICK / 2, at + THICK / 2)
                axes.vlines(*ends, "white", lw=5)
                axes.vlines(*ends, "black", lw=2)
    axes.plot([], [], color="black", lw=3, label="target")
    axes.axvline(1, color="black", lw=0.8, label="the peer; Ray for graphs")
    names = [f"{row['row']}  ({amount(row['row'], row[PEER])})" for row, _ in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.set_ylim(len(shown) - 0.4, -0.6)
    axes.set_xticks(TICKS)
    axes.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_xlim(min(ratios) / 1.5, max(ratios) * 1.5)
    axes.grid(axis="x", color="#dddddd", lw=0.6)
    axes.set_axisbelow(True)
    axes.set_title(
        "jdag beside PyTorch RPC and Ray, the caller on a core of its own", fontsize=11
    )
    axes.set_xlabel(
        "jdag / peer, of times (of bytes for memory), log scale: left of 1 jdag needs "
        f"less\nin brackets the peer's own; {UNSTEADY}: rounds spread by more than 15%",
        fontsize=9,
    )
    figure.legend(loc="outside upper center", ncols=4, fontsize=8, frameon=False)
    return figure


def draw(written: Mapping[str, Any]) -> bytes:
    """Return the picture as PNG."""
    out = BytesIO()
    picture(written).savefig(out, format="png", dpi=130)
    return out.getvalue()
