"""The comparison as a page of Markdown: tables, what bounds the rows, and how it was.

A ratio whose rounds spread by more than 15% of it is marked.
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
    """The summary as a table in Markdown."""
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
    """A figure with its unit: bytes where the row is of memory, else a time."""
    if value is None:
        return "-"
    if "memory" in row:
        return f"{value / 1e6:.0f} MB"
    scale, unit = (
        (1e6, "us") if value < 1e-3 else (1e3, "ms") if value < 1 else (1, "s")
    )
    return f"{value * scale:.3g} {unit}"


def misses(found: Sequence[Found], costs: Found) -> str:
    """What bounds the rows that miss their targets, each said once."""
    said: dict[str, list[str]] = {}
    for row in found:
        if JUDGED in row and row[JUDGED]["met"] is False:
            said.setdefault(bound(row["row"], costs), []).append(row["row"])
    lines = [f"- {'; '.join(names)}. {why}" for why, names in said.items()]
    return "\n".join(["## What bounds the rows that miss", "", *lines, ""])


def page(written: Found) -> str:
    """The whole of `compare.md`."""
    settings = ", ".join(f"{key} {value}" for key, value in written["settings"].items())
    where = ", ".join(f"{key} {value}" for key, value in written["machine"].items())
    gaps = "".join(f"- {one}\n" for one in written["missing"])
    missing = f"## What is missing\n\n{gaps}\n" if gaps else ""
    costs, no_costs = written["costs"].get("rows"), "It was not measured.\n"
    return (
        "# PyTorch's distributed autograd and jdag, side by side\n\n"
        "![The ratios of the rows apart.](compare.png)\n\n"
        "FAST and SMART are the modes of eager passes: FAST is the peer's rule, so it "
        "has the targets; SMART, jdag's default, first finds what a pass needs. A plan "
        "(`jdag.compile`) runs forward and backward at once, so it stands beside both "
        "ways of the peer. Rows end in `one core` where caller and workers share one; "
        "in the others the caller has a core and the workers have the rest. Where "
        "arithmetic or memory is what counts there is no row on one core. Rows of "
        "graphs are forward alone, beside Ray's Compiled Graph: an array goes to a "
        "worker and back, or through so many calls by three workers in turn.\n\n"
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
