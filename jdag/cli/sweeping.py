"""The command `jdag sweep`: runs of a scenario with all combinations of settings."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from math import isfinite
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from jdag.cli.cli_errors import Exit, File, check_one_of, errors_in_one_line, say
from jdag.errors import ScenarioError, meant, reason, spelled, unusable
from jdag.lab.parquet import need_pyarrow, write_parquet
from jdag.lab.sweep import RETIMED, SWEEP_TABLE, Row, combinations
from jdag.lab.sweep import sweep as run_sweep
from jdag.report.lines import draw_lines
from jdag.scenario import Scenario, load
from jdag.settings.toml_files import value_in

PARQUET = "sweep.parquet"
FAILED = ("stuck", "failed")  # Outcomes of runs that ended with an error.

Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE,...",
        help="Values of a setting in the file; repeatable.",
    ),
]
_Jobs = Annotated[
    int | None,
    typer.Option(min=1, help="Number of processes.  [default: number of cores]"),
]
On = Annotated[
    str | None,
    typer.Option(metavar="ray", help="Run on the nodes of Ray; needs jdag[ray]."),
]
_Out = Annotated[
    Path | None, typer.Option(help="Folder for the table.  [default: runs/NAME-sweep]")
]
Parquet = Annotated[
    bool, typer.Option("--parquet", help=f"Also write {PARQUET}; needs jdag[sweep].")
]
Retime = Annotated[
    bool,
    typer.Option(
        "--retime",
        help="Compute the times of runs that differ only in links and devices.",
    ),
]
Plot = Annotated[
    list[str] | None,
    typer.Option(help="Plot this metric over the first setting; repeatable."),
]


def sweep(
    file: File,
    *,
    settings: Set,
    jobs: _Jobs = None,
    on: On = None,
    out: _Out = None,
    parquet: Parquet = False,
    plot: Plot = None,
    retime: Retime = False,
) -> None:
    """Run a scenario with all combinations of values, and write a table of the runs.

    A repeated call with the same folder, file and values runs only the combinations
    that are missing.

    Exit codes: 0 all expectations of all runs are met; 1 an expectation is not met; 2
    invalid input; 3 a pass was unexpectedly stuck; 130 Ctrl-C; 143 SIGTERM.
    """
    console = Console(file=sys.stdout)
    with errors_in_one_line(), redirect_stdout(sys.stderr):
        values = _values_of(settings)
        check_one_of("--on", on, "ray")
        scenario = load(file, changes=combinations(values)[0])
        if parquet:
            need_pyarrow("--parquet")
        for name in plot or ():
            _refuse_unknown(name, scenario)
        folder = out or Path("runs") / f"{scenario.settings.name}-sweep"
        columns = (*Progress.get_default_columns(), MofNCompleteColumn())
        with Progress(*columns, console=console) as bar:
            task = bar.add_task(scenario.settings.name, total=None)

            def show(done: int, total: int, row: Row) -> None:
                bar.update(task, completed=done, total=total)

            rows = run_sweep(
                file, values, jobs=jobs, on=on, out=folder, retime=retime, show=show
            )
            bar.update(task, completed=len(rows), total=len(rows))
        written = [folder / SWEEP_TABLE]
        try:
            if parquet:
                written.append(folder / PARQUET)
                write_parquet(written[-1], rows)
            for name in plot or ():
                written.append(folder / f"{name}.png")
                _draw(written[-1], name, values, rows, scenario.settings.name)
        except OSError as error:
            allowed = f"a writable folder; {reason(error)}"
            raise ScenarioError(unusable("--out", str(folder), allowed)) from error
    kinds = Counter([row["expectations"] for row in rows])
    counts = [f"{count} {kind}" for kind, count in sorted(kinds.items())]
    for line in (f"{len(rows)} runs: {', '.join(counts)}", *map(spelled, written)):
        say(console, line)
    failed = Exit.STUCK if kinds["stuck"] else Exit.WRONG
    met = kinds["met"] + kinds[RETIMED]
    raise typer.Exit(Exit.MET if met == len(rows) else failed)


def _values_of(settings: Sequence[str]) -> dict[str, list[Any]]:
    """Parse options such as `seed=1,2`; return the values of each key."""
    values: dict[str, list[Any]] = {}
    for text in settings:
        key, _, listed = text.partition("=")
        parts = _parts_of(listed)
        if key in values or not all(parts):
            allowed = "a key with its values, such as seed=1,2, and each key only once"
            raise ScenarioError(unusable("--set", text, allowed))
        values[key] = [value_of(part) for part in parts]
    return values


def _parts_of(text: str) -> list[str]:
    """Split a text at commas that are neither in brackets nor in quotes."""
    parts: list[str] = []
    for piece in text.split(","):
        last = parts[-1] if parts else ""
        is_open = any([last.count(a) > last.count(b) for a, b in ("[]", "{}")])
        if is_open or last.count('"') % 2:
            parts[-1] += f",{piece}"
        else:
            parts.append(piece)
    return parts


def value_of(text: str) -> Any:
    """Parse a TOML value. Strings may lack quotes, and 1e3 is an integer."""
    try:
        value = value_in(text)
    except ValueError:
        return text
    if isinstance(value, float) and "e" in text.lower() and value.is_integer():
        return int(value)
    return value


def _refuse_unknown(name: str, scenario: Scenario) -> None:
    figures = [*scenario.player.figures, "peak_activation_bytes", "makespan_ns"]
    if not {name, name.removesuffix("_min"), name.removesuffix("_max")} & {*figures}:
        allowed = f"one of the metrics {', '.join(figures)}{meant(name, figures)}"
        raise ScenarioError(unusable("--plot", name, allowed))


def _draw(
    path: Path,
    figure: str,
    values: Mapping[str, Sequence[Any]],
    rows: Sequence[Row],
    name: str,
) -> None:
    several = [key.split(",")[0] for key, each in values.items() if len(each) > 1]
    x, *line_keys = several or [key.split(",")[0] for key in values][:1]
    lines: dict[str, list[tuple[Any, float]]] = {}
    failed: dict[str, list[tuple[Any, float]]] = {}
    for row in rows:
        value: Any = row.get(figure)
        if type(value) in (int, float) and isfinite(value):
            label, points = ", ".join([str(row[key]) for key in line_keys]), lines
            if row["expectations"] != "met" and row.get("outcome") in FAILED:
                label, points = row["outcome"], failed
            points.setdefault(label, []).append((row[x], value))
    if not lines and not failed:
        allowed = "a metric that is a number in at least one run"
        raise ScenarioError(unusable("--plot", figure, allowed))
    title, legend = f"{name}: {figure}", ",\n".join(line_keys)
    draw_lines(path, lines, failed, title=title, x=x, y=figure, named=legend)
