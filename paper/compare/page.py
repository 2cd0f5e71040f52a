"""Formats the comparison in Markdown: tables, explanations of misses, settings.

A ratio is marked if the difference between its rounds exceeds 15% of it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from paper.compare.bounds import bound
from paper.compare.costs import table as table_of_costs
from paper.compare.rows import EAGER, JUDGED, PEER, PLAN

MET = {True: "yes", False: "no", None: "-"}
UNSTEADY = "~"

Found = Mapping[str, Any]


def table(found: Sequence[Found]) -> str:
    """Return the result of `run.summary` as a table in Markdown."""
    others = [name for name in EAGER if name != JUDGED]
    lines = [
        f"| row | peer | {JUDGED} | ratio (rounds) | target | met | plan "
        f"| ratio (rounds) | target | met | {' | '.join(others)} |",
        f"| --- | ---: {'| ---: | ---: | ---: | --- ' * 2}|{' ---: |' * len(others)}",
    ]
    for row in found:
        name = row["row"]
        cells = [name, amount(name, row[PEER])]
        cells += [_cells(name, row.get(system)) for system in (JUDGED, PLAN)]
        cells += [
            _ratio(row[other]["ratio"]) if other in row else "-" for other in others
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(row: str, found: Found | None) -> str:
    if found is None:
        return "- | - | - | -"
    mark = f" {UNSTEADY}" if found["unsteady"] else ""
    least, most = _ratio(found["ratio_min"]), _ratio(found["ratio_max"])
    return (
        f"{amount(row, found['median'])} | **{_ratio(found['ratio'])}** "
        f"({least} to {most}){mark} | {found['target'] or '-'} | {MET[found['met']]}"
    )


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def amount(row: str, value: float | None) -> str:
    """Format bytes for rows of memory, otherwise seconds, with a unit."""
    if value is None:
        return "-"
    if "memory" in row:
        return f"{value / 1e6:.0f} MB"
    scale, unit = (
        (1e6, "us") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")
    )
    return f"{value * scale:.3g} {unit}"


def misses(found: Sequence[Found], costs: Found) -> str:
    """Return a section that explains the rows that miss their targets."""
    said: dict[str, list[str]] = {}
    for row in found:
        if JUDGED in row and row[JUDGED]["met"] is False:
            said.setdefault(bound(row["row"], costs), []).append(row["row"])
    lines = [f"- {'; '.join(names)}. {why}" for why, names in said.items()]
    return "\n".join(["## What bounds the rows that miss", "", *lines, ""])


def page(written: Found) -> str:
    """Return the contents of `compare.md`."""
    settings = ", ".join(f"{key} {value}" for key, value in written["settings"].items())
    where = ", ".join(f"{key} {value}" for key, value in written["machine"].items())
    gaps = "".join(f"- {one}\n" for one in written["missing"])
    missing = f"## What is missing\n\n{gaps}\n" if gaps else ""
    costs, no_costs = written["costs"].get("rows"), "It was not measured.\n"
    return (
        "# PyTorch's distributed autograd and jdag, side by side\n\n"
        "![The ratios of the rows apart.](compare.png)\n\n"
        "FAST and SMART are the modes of eager passes. FAST is the peer's mode, so it "
        "has the targets; SMART, jdag's default, first finds the part of the graph "
        "that a pass needs. A plan (`jdag.compile`) runs forward and backward at once, "
        "so it is compared with the sum of both. If a row ends in `one core`, caller "
        "and workers share a core; in other rows the caller has one core and the "
        "workers have the others. Rows dominated by arithmetic or memory are not "
        "measured on one core. Rows of graphs have only a forward, and are compared "
        "with Ray's "
        "Compiled Graph: an array is sent to a worker and back, or through so many "
        "calls on three workers.\n\n"
        f"{table(written['rows'])}\n"
        f"Medians of {written['rounds']} rounds in turn, of p50s in each; the ratio is "
        f"jdag / peer, its range that of the rounds, and {UNSTEADY} marks one whose "
        "rounds spread by more than 15%. `paper/compare/rows.py` has what each row "
        "does.\n\n"
        f"Machine: {where}. Load average before each round: "
        f"{', '.join(f'{load:.1f}' for load in written['loads'])}.\n\n"
        f"Settings of both: {settings}.\n\n"
        f"{missing}"
        f"{misses(written['rows'], written['costs'])}\n"
        "## What one of each costs our side\n\n"
        "After the rounds, the least of 5; calls and shares by a profile, which itself "
        "takes about as long again; `paper/compare/costs.py` has what is counted.\n\n"
        f"{table_of_costs(costs) if costs else no_costs}"
    )
