"""The commands `jdag run`, `check` and `report`."""

import json
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import (
    AbstractContextManager,
    closing,
    contextmanager,
    nullcontext,
    redirect_stdout,
)
from fractions import Fraction
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from rich.text import Text

from jdag.cli.cli_errors import (
    Exit,
    File,
    check_one_of,
    errors_in_one_line,
    natural,
    no_run,
    say,
)
from jdag.cli.printing import Functions, print_functions, print_graph
from jdag.cli.run_folder import replacing
from jdag.errors import ScenarioError, reason, spelled, unusable
from jdag.processes.launch import signals
from jdag.report import FORMATS, PAGE, WRITTEN, read_drawings, render, write_traces
from jdag.report.formatting import formatted
from jdag.report.page import WORKER, tables_of
from jdag.report.result import RESULT, TRACE, read_result
from jdag.runtime.trace import read_trace
from jdag.runtime.versions import version_of
from jdag.scenario import Scenario, load
from jdag.scenario.driving import BY_WORKER, CaseDriver, driver_of
from jdag.scenario.run_scenario import ScenarioResult, run_scenario
from jdag.settings.toml_files import wrong

_WRITTEN = (RESULT, TRACE, *WRITTEN)
_FORMATTED = re.compile(r"trace\.(pftrace|csv|goal|\d+\.et)")
_NARROW = 72  # On narrower consoles, tables have no descriptions.

Json = Annotated[
    bool, typer.Option("--json", help="Print the result as one JSON object.")
]
Seed = Annotated[
    str | None, typer.Option(metavar="N", help="Override the seed of the scenario.")
]
_Out = Annotated[
    Path | None,
    typer.Option(help="Folder for the report.  [default: runs/NAME]"),
]
ShowGraph = Annotated[
    bool, typer.Option("--graph", help="Print the graph's size and its picture's path.")
]
_Driver = Annotated[
    str, typer.Option(help="Where to run: sim (virtual time) or rpc (processes).")
]
_Device = Annotated[
    str | None,
    typer.Option(help="With --driver rpc, the workers' device: cpu, gpu or gpu:1."),
]


def _quiet(is_quiet: bool) -> AbstractContextManager[Any]:
    return redirect_stdout(sys.stderr) if is_quiet else nullcontext()


def run(
    file: File,
    *,
    as_json: Json = False,
    seed: Seed = None,
    out: _Out = None,
    show_graph: ShowGraph = False,
    functions: Functions = False,
    driver: _Driver = "sim",
    device: _Device = None,
) -> None:
    """Run a scenario, check its expectations, and write a report.

    Exit codes: 0 all expectations are met; 1 an expectation is not met; 2 invalid
    input; 3 a pass was unexpectedly stuck; 130 Ctrl-C; 143 SIGTERM.
    """
    with errors_in_one_line(), _quiet(as_json):
        scenario = load(file, seed=None if seed is None else natural("--seed", seed))
        with wrong(scenario.path):
            driving = driver_of(scenario.settings, driver, device=device)
        folder = out or Path("runs") / scenario.settings.name
        with closing(driving), _staged(folder) as staging:
            console = Console(quiet=as_json)
            console.print(f"seed {scenario.settings.seed}", highlight=False)
            console.print(Text(scenario.question, style="italic"))
            answer = _run(scenario, console, driving)
            result = _result(scenario, answer, driver)
            _write(staging, result, answer)
            signals.finish()
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
    else:
        _print(console, result, folder / PAGE)
        if show_graph:
            print_graph(console, answer.drawings, folder)
        if functions:
            print_functions(console, scenario, answer.cluster)
    raise typer.Exit(_code(answer))


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """Yield an empty folder. At exit, its files replace the run in `folder`.

    If `folder` is not writable, or has other files and no run, an error is raised at
    entry, before a long run.
    """
    try:
        traces = [path.name for path in folder.glob("trace.*")]
        old = [name for name in traces if _FORMATTED.fullmatch(name)]
        with replacing(folder, [*_WRITTEN, *old]) as staging:
            yield staging
    except OSError as error:
        allowed = "a writable folder that is new, empty or contains a run"
        allowed += f"; {reason(error)}"
        raise ScenarioError(unusable("--out", str(folder), allowed)) from error


def _run(scenario: Scenario, console: Console, driving: CaseDriver) -> ScenarioResult:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=console.quiet) as bar:
        task = bar.add_task(scenario.settings.name, total=None, numbers="")

        def show(done: int, total: int, numbers: Mapping[str, float]) -> None:
            text = "  ".join(f"{name} {value:.3f}" for name, value in numbers.items())
            bar.update(task, completed=done, total=total, numbers=text)

        return run_scenario(scenario, show, driving)


def _result(scenario: Scenario, answer: ScenarioResult, driver: str) -> dict[str, Any]:
    figures = {name: _plain(value) for name, value in answer.figures.items()}
    meanings = {name: text for name, (_, text) in BY_WORKER.items()}
    meanings |= scenario.player.figures
    digest = None
    if driver == "sim":
        digest = answer.figures.get("digest") or answer.cluster.trace.digest
    facts = {
        "name": scenario.settings.name,
        "question": scenario.question,
        "answer": "met" if answer.met else "not met",
        "outcome": answer.figures.get("outcome"),
        "seed": scenario.settings.seed,
        "workers": list(scenario.settings.names),
        "expect": [
            {**each._asdict(), "got": _plain(each.got)} for each in answer.judged
        ],
        "figures": figures,
        # Fractions are stored as exact strings.
        "exact": {k: exact for k, v in answer.figures.items() if (exact := _exact(v))},
        "not_asked": list(answer.not_asked),
        "meaning": {k: text for k, text in meanings.items() if k in figures},
        "driver": driver,
        "window_ns": list(answer.window),
        "digest": digest,
        "command": f"jdag run {spelled(scenario.path.name)}"
        + f" --seed {scenario.settings.seed}"
        + f" --driver {driver}" * (driver != "sim"),
        "versions": {
            "jdag": version_of("jdag"),
            "jax": version_of("jax"),
            "jaxlib": version_of("jaxlib"),
            "python": ".".join(map(str, sys.version_info[:3])),
        },
    }
    # Metrics are also top-level keys, so that users find the metrics easily.
    return {**figures, **facts}


def _plain(value: Any) -> Any:
    """Convert a metric to JSON data: fractions to floats, nan and inf to strings."""
    match value:
        case Mapping():
            return {key: _plain(item) for key, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case Fraction():
            return float(value)
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value


def _exact(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: str(v) for k, v in value.items() if isinstance(v, Fraction)}
    return str(value) if isinstance(value, Fraction) else None


def _write(folder: Path, result: dict[str, Any], answer: ScenarioResult) -> None:
    text = json.dumps(result, indent=2, allow_nan=False)
    (folder / RESULT).write_text(f"{text}\n", encoding="utf-8")
    trace = answer.cluster.trace
    if trace is not None:
        trace.write(folder / TRACE)
        write_traces(folder, trace, result["workers"], ["perfetto"])
    render(folder, result, trace, answer.drawings, window=answer.window)


def _print(console: Console, result: Mapping[str, Any], page: Path) -> None:
    table = Table(title=result["name"], title_justify="left", title_style="bold")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", overflow="fold")
    if is_wide := console.width >= _NARROW:
        table.add_column("description", style="dim")
    by_items = [each for each in tables_of(result)[0] if each["by"] != WORKER]
    in_tables = [name for each in by_items for name in (each["by"], *each["names"])]
    for name, value in result["figures"].items():
        if value is None or value == [] or name in ("digest", *in_tables):
            continue
        meaning = [result["meaning"].get(name, "")] if is_wide else []
        table.add_row(name, Text(formatted(name, value)), *meaning)
    console.print(table)
    for each in by_items:
        _print_table(console, each)
    for expectation in result["expect"]:
        figure, is_met = expectation["figure"], expectation["met"]
        mark = "[green]met[/]" if is_met else "[red]not met[/]"
        # The value is not rounded: a rounded value might seem to meet the expectation.
        got = result["exact"].get(figure, expectation["got"])
        text = f"{figure}: {expectation['wanted']}" + f" (it is {got})" * (not is_met)
        console.print(mark, Text(text), highlight=False, soft_wrap=True)
    if result["digest"] is None:
        text = "ran on processes, with the time, network and devices of this host"
        if result["not_asked"]:
            text += f"; not checked: {', '.join(result['not_asked'])}"
        say(console, text)
    digest = [f"digest: {result['digest']}"] * (result["digest"] is not None)
    for line in (*digest, f"report: {spelled(page)}"):
        say(console, line)


def _print_table(console: Console, data: Mapping[str, Any]) -> None:
    table = Table(title=f"by {data['by']}", title_justify="left", title_style="bold")
    for head in data["heads"]:
        table.add_column(head, overflow="fold")
    for name, values, text in data["rows"]:
        table.add_row(name, *map(Text, values), *([] if text is None else [text]))
    console.print(table)
    for names, text in data["captions"]:
        console.print(Text(f"{names}: {text}", style="dim"))


def _code(answer: ScenarioResult) -> Exit:
    if answer.met:
        return Exit.MET
    expected = {each.figure: each.wanted for each in answer.judged}
    if answer.figures.get("outcome") == "stuck" and expected.get("outcome") != "stuck":
        return Exit.STUCK
    return Exit.WRONG


def check(file: File, seed: Seed = None) -> None:
    """Run a scenario in two new processes and compare their digests.

    Exit codes: 0 the runs are equal; 1 the runs differ; 2 invalid input.
    """
    with errors_in_one_line(), _quiet(True):
        load(file, seed=None if seed is None else natural("--seed", seed))
    console = Console()
    digests = []
    for number, hash_seed in enumerate(("1", "2")):
        digests.append(_digest(file, seed, hash_seed))
        say(console, f"run {number + 1}: {digests[-1]}")
    if digests[0] != digests[1]:
        console.print("[red]the two runs differ[/]")
        raise typer.Exit(Exit.WRONG)
    console.print("[green]the two runs are the same, event by event[/]")


def _digest(file: Path, seed: str | None, hash_seed: str) -> str:
    command = [sys.executable, "-m", "jdag", "run", str(file), "--json"]
    command += [] if seed is None else ["--seed", seed]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        done = subprocess.run(
            [*command, "--out", str(out)],
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if not (out / RESULT).exists():
            typer.echo(done.stderr.strip(), err=True)
            raise typer.Exit(done.returncode or Exit.WRONG)
        result = json.loads((out / RESULT).read_text(encoding="utf-8"))
    return str(result["digest"])


def report(
    folder: Annotated[Path, typer.Argument(help="Folder written by `jdag run`.")],
    trace_format: Annotated[
        list[str] | None,
        typer.Option(help=f"Also write the trace as {', '.join(FORMATS)}; repeatable."),
    ] = None,
) -> None:
    """Write the page of a run again, and print its metrics.

    Exit codes: 0 success; 2 invalid input, or a trace format that cannot represent this
    run (the other formats are written).
    """
    formats = trace_format or []
    with errors_in_one_line():
        for name in formats:
            check_one_of("--trace-format", name, *FORMATS)
        try:
            # Keep existing traces in other formats, because they are of the same run.
            with replacing(folder, WRITTEN) as staging:
                result = read_result(folder)
                is_traced = result["digest"] is not None or (folder / TRACE).exists()
                trace = read_trace(folder / TRACE) if is_traced else None
                drawings = read_drawings(folder)
                window = tuple(result["window_ns"])
                render(staging, result, trace, drawings, window=window)
                if formats and trace is None:
                    raise ScenarioError(f"{spelled(folder)}: this run has no trace")
                written, refused = list[str](), list[str]()
                if trace is not None:
                    workers, formats = result["workers"], ["perfetto", *formats]
                    written, refused = write_traces(staging, trace, workers, formats)
        except ScenarioError:
            raise
        except Exception as error:  # The files may have been edited.
            raise no_run(folder, error) from error
    console = Console()
    _print(console, result, folder / PAGE)
    for name in written:
        say(console, f"trace: {spelled(folder / name)}")
    if refused:
        with errors_in_one_line():
            raise ScenarioError("; ".join(refused))
