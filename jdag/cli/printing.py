"""Output of the options `--functions` and `--graph` of `jdag run`."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jdag.cli.cli_errors import say
from jdag.context.graph import ContextGraph
from jdag.engine.graph_snapshot import Need
from jdag.errors import spelled
from jdag.report import GRAPH, GRAPH_DOT
from jdag.scenario import Scenario
from jdag.scenario.scenario_schema import devices_of
from jdag.sim.devices import FREE_DEVICE

Functions = Annotated[
    bool,
    typer.Option("--functions", help="Print the names and costs of all functions."),
]


def print_functions(console: Console, scenario: Scenario, cluster: Any) -> None:
    functions = getattr(cluster.driver, "functions", None)
    if functions is None:
        console.print("functions: only runs in virtual time have costs")
        return
    table = Table(title="functions", title_justify="left", title_style="bold")
    for column in ("function", "workers", "cost in ns"):
        table.add_column(column, overflow="fold")
    models = devices_of(scenario.settings) or {}
    rows: dict[tuple[str, str], list[str]] = {}
    for worker, name, typed in functions:
        model = models.get(worker, FREE_DEVICE)
        costs = [str([*model.functions[key]]) for key in model.entries(name, typed)]
        cost = costs[0] if costs else "none: 0" if model.is_free(name) else "default"
        rows.setdefault((typed, cost), []).append(worker)
    for (typed, cost), workers in rows.items():
        table.add_row(*map(Text, (typed, ", ".join(workers), cost)))
    console.print(table)


def print_graph(console: Console, drawings: Any, folder: Path) -> None:
    if drawings is None:
        console.print("graph: this program did not report its graph")
        return
    table = Table(title="graph", title_justify="left", title_style="bold")
    table.add_column("worker")
    counts = ContextGraph(drawings).counts()
    kinds = ("nodes", "sends", "recvs", "leaves", "edges")
    for kind in (*kinds, "unneeded", "owed"):
        table.add_column(kind, justify="right")
    for worker, drawing in drawings.items():
        needs = [send.need for send in drawing.sends]
        numbers = [counts[worker][kind] for kind in kinds]
        numbers += [needs.count(Need.UNNEEDED), needs.count(Need.OWED)]
        table.add_row(Text(worker), *map(str, numbers))
    console.print(table)
    for name in (GRAPH, GRAPH_DOT):
        if (folder / name).exists():
            say(console, f"graph: {spelled(folder / name)}")
