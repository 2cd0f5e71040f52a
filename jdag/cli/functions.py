"""The functions of a run, by the names that tables of costs have."""

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jdag.scenario import Scenario
from jdag.scenario.tables import devices_of
from jdag.sim.devices import FREE

Functions = Annotated[
    bool, typer.Option("--functions", help="Print names and costs of functions.")
]


def print_functions(console: Console, scenario: Scenario, cluster: Any) -> None:
    """Print what ran in virtual time: name, workers, and the cost that it had."""
    ran = getattr(cluster.driver, "functions", None)
    if ran is None:
        console.print("functions: a run on processes has no costs")
        return
    table = Table(title="functions", title_justify="left", title_style="bold")
    for column in ("function", "workers", "cost in ns"):
        table.add_column(column, overflow="fold")
    models = devices_of(scenario.settings) or {}
    rows: dict[tuple[str, str], list[str]] = {}
    for worker, name, typed in ran:
        model = models.get(worker, FREE)
        costs = [str([*model.functions[one]]) for one in model.entries(name, typed)]
        cost = costs[0] if costs else "none: 0" if model.is_free(name) else "default"
        rows.setdefault((typed, cost), []).append(worker)
    for (typed, cost), workers in rows.items():
        table.add_row(*map(Text, (typed, ", ".join(workers), cost)))
    console.print(table)
