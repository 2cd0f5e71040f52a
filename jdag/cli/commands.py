"""The command line: run, check and report scenarios, sweep, explore; workers."""

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

from jdag.cli import exploring, hosting, predicting, retiming, sweeping
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
from jdag.gone import GONE_SETTINGS
from jdag.processes.launch import signals
from jdag.report import (
    FORMATS,
    PAGE,
    WRITTEN,
    read_drawings,
    render,
    write_traces,
)
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
_NARROW = 72  # Below so many columns a table leaves out descriptions.
_INTERRUPTED = 130  # What a shell makes of Ctrl-C.


app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object alone.")]
Seed = Annotated[
    str | None, typer.Option(metavar="N", help="In place of the scenario's.")
]
_Out = Annotated[
    Path | None,
    typer.Option(help="Folder of the report.  [default: runs/NAME]"),
]
ShowGraph = Annotated[
    bool, typer.Option("--graph", help="Print and draw the graph of one context.")
]
_Driver = Annotated[
    str, typer.Option(help="What runs it: sim (virtual time) or rpc (processes).")
]
_Device = Annotated[
    str | None,
    typer.Option(help="With rpc, where workers compute: cpu, gpu or gpu:1."),
]


def _programs_are_silent(is_so: bool) -> AbstractContextManager[Any]:
    return redirect_stdout(sys.stderr) if is_so else nullcontext()


@app.command()
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
    """Run a scenario, compare it with what it expects, and report.

    Exit codes: 0 all expectations met; 1 one is not met; 2 bad input; 3 a pass was
    unexpectedly stuck; 130 Ctrl-C; 143 SIGTERM.
    """
    with errors_in_one_line(), _programs_are_silent(as_json):
        scenario = load(file, seed=None if seed is None else natural("--seed", seed))
        with wrong(scenario.path):
            driving = driver_of(scenario.settings, driver, device=device)
        folder = out or Path("runs") / scenario.settings.name
        with closing(driving), _staged(folder) as made:
            console = Console(quiet=as_json)
            console.print(f"seed {scenario.settings.seed}", highlight=False)
            console.print(Text(scenario.question, style="italic"))
            answer = _played(scenario, console, driving)
            result = _result(scenario, answer, driver)
            _write(made, result, answer)
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
    """Yield a folder whose content replaces the run in `folder` at the end.

    It is made before a long run, so that a folder that cannot be written is known then.

    Raises:
        ScenarioError: the folder cannot be written, or holds something that is no run.
    """
    try:
        with replacing(folder, _files_of(folder)) as made:
            yield made
    except OSError as error:
        said = "a folder that can be written: a new one, an empty one or that of a run"
        said += f"; {reason(error)}"
        raise ScenarioError(unusable("--out", str(folder), said)) from error


def _files_of(folder: Path) -> list[str]:
    """Return the names of what `jdag run` and `jdag report` write, and have written."""
    traces = [path.name for path in folder.glob("trace.*")]
    return [*_WRITTEN, *[name for name in traces if _FORMATTED.fullmatch(name)]]


def _played(
    scenario: Scenario, console: Console, driving: CaseDriver
) -> ScenarioResult:
    """Run, with a progress bar."""
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
            said = "  ".join(f"{name} {value:.3f}" for name, value in numbers.items())
            bar.update(task, completed=done, total=total, numbers=said)

        return run_scenario(scenario, show, driving)


def _result(scenario: Scenario, answer: ScenarioResult, driver: str) -> dict[str, Any]:
    figures = {name: _plain(value) for name, value in answer.figures.items()}
    meanings = {name: text for name, (_, text) in BY_WORKER.items()}
    meanings |= scenario.player.figures
    digest = None
    if driver == "sim":
        digest = answer.figures.get("digest") or answer.cluster.trace.digest
    own = {
        "name": scenario.settings.name,
        "question": scenario.question,
        "answer": "met" if answer.met else "not met",
        "outcome": answer.figures.get("outcome"),
        "seed": scenario.settings.seed,
        "workers": list(scenario.settings.names),
        "expect": [{**one._asdict(), "got": _plain(one.got)} for one in answer.judged],
        "figures": figures,
        # Figures that are fractions, exactly.
        "exact": {k: one for k, v in answer.figures.items() if (one := _exact(v))},
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
    # Figures also stand at the top, for readers of the file.
    return {**figures, **own}


def _plain(value: Any) -> Any:
    """Return a figure for JSON: fractions as floats, nan and inf as text."""
    match value:
        case Mapping():
            return {key: _plain(one) for key, one in value.items()}
        case list() | tuple():
            return [_plain(one) for one in value]
        case Fraction():
            return float(value)
        case float() if not math.isfinite(value):
            return str(value)
        case _:
            return value


def _exact(value: Any) -> Any:
    """Return the exact fractions in a figure as text, such as 3/11."""
    if isinstance(value, Mapping):
        return {k: str(one) for k, one in value.items() if isinstance(one, Fraction)}
    return str(value) if isinstance(value, Fraction) else None


def _write(made: Path, result: dict[str, Any], answer: ScenarioResult) -> None:
    text = json.dumps(result, indent=2, allow_nan=False)
    (made / RESULT).write_text(f"{text}\n", encoding="utf-8")
    trace = answer.cluster.trace
    if trace is not None:
        trace.write(made / TRACE)
        write_traces(made, trace, result["workers"], ["perfetto"])
    render(made, result, trace, answer.drawings, window=answer.window)


def _print(console: Console, result: Mapping[str, Any], page: Path) -> None:
    """Print the summary table, the expectations, and the path of the page."""
    table = Table(title=result["name"], title_justify="left", title_style="bold")
    table.add_column("figure", no_wrap=True)
    table.add_column("value", overflow="fold")
    if is_wide := console.width >= _NARROW:
        table.add_column("what it is", style="dim")
    apart = [one for one in tables_of(result)[0] if one["by"] != WORKER]
    shown = [name for one in apart for name in (one["by"], *one["names"])]
    for name, value in result["figures"].items():
        if value is None or value == [] or name in ("digest", *shown):
            continue
        meaning = [result["meaning"].get(name, "")] if is_wide else []
        table.add_row(name, Text(formatted(name, value)), *meaning)
    console.print(table)
    for one in apart:
        _print_table(console, one)
    for one in result["expect"]:
        mark = "[green]met[/]" if one["met"] else "[red]not met[/]"
        # Unrounded: a rounded value might look as if it were met.
        got = result["exact"].get(one["figure"], one["got"])
        said = f"{one['figure']}: {one['wanted']}"
        said += "" if one["met"] else f" (it is {got})"
        console.print(mark, Text(said), highlight=False, soft_wrap=True)
    if result["digest"] is None:
        said = "run on processes: time, network and devices are those of this host"
        if result["not_asked"]:
            said += f"; not asked of it: {', '.join(result['not_asked'])}"
        say(console, said)
    digest = [f"digest: {result['digest']}"] * (result["digest"] is not None)
    for line in (*digest, f"report: {spelled(page)}"):
        say(console, line)


def _print_table(console: Console, of: Mapping[str, Any]) -> None:
    """Print the figures that have a value for each element of a list."""
    table = Table(title=f"by {of['by']}", title_justify="left", title_style="bold")
    for head in of["heads"]:
        table.add_column(head, overflow="fold")
    for name, values, what in of["rows"]:
        table.add_row(name, *map(Text, values), *([] if what is None else [what]))
    console.print(table)
    for names, what in of["said"]:
        console.print(Text(f"{names}: {what}", style="dim"))


def _code(answer: ScenarioResult) -> Exit:
    if answer.met:
        return Exit.MET
    expected = {one.figure: one.wanted for one in answer.judged}
    if answer.figures.get("outcome") == "stuck" and expected.get("outcome") != "stuck":
        return Exit.STUCK
    return Exit.WRONG


@app.command()
def check(file: File, seed: Seed = None) -> None:
    """Run a scenario twice in fresh processes and compare the digests.

    Exit codes: 0 the two runs are the same; 1 they differ; 2 bad input.
    """
    with errors_in_one_line(), _programs_are_silent(True):
        load(file, seed=None if seed is None else natural("--seed", seed))
    console = Console()
    digests = []
    for number, hash_seed in enumerate(("1", "2")):
        digests.append(_digest(file, seed, hash_seed))
        said = f"run {number + 1}: {digests[-1]}"
        console.print(said, highlight=False, soft_wrap=True)
    if digests[0] != digests[1]:
        console.print("[red]the two runs differ[/]")
        raise typer.Exit(Exit.WRONG)
    console.print("[green]the two runs are the same, event by event[/]")


def _digest(file: Path, seed: str | None, hash_seed: str) -> str:
    """Run in a fresh process and return the digest; pass on its error output."""
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


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="What `jdag run` wrote.")],
    trace_format: Annotated[
        list[str] | None,
        typer.Option(help=f"Write the trace so, too: {', '.join(FORMATS)}."),
    ] = None,
) -> None:
    """Make the page of a run again, and print its table.

    Exit codes: 0; 2 bad input, or a format not for this run: others are written.
    """
    formats = trace_format or []
    with errors_in_one_line():
        for name in formats:
            check_one_of("--trace-format", name, *FORMATS)
        try:
            # Other formats that were asked for before are of the same trace.
            with replacing(folder, WRITTEN) as made:
                result = read_result(folder)
                is_traced = result["digest"] is not None or (folder / TRACE).exists()
                trace = read_trace(folder / TRACE) if is_traced else None
                drawings = read_drawings(folder)
                window = tuple(result["window_ns"])
                render(made, result, trace, drawings, window=window)
                if formats and trace is None:
                    said = f"{spelled(folder)}: this run has no trace to write"
                    raise ScenarioError(said)
                written, refused = list[str](), list[str]()
                if trace is not None:
                    of = made, trace, result["workers"]
                    written, refused = write_traces(*of, ["perfetto", *formats])
        except ScenarioError:
            raise
        except Exception as error:  # Other programs may have edited the files.
            raise no_run(folder, error) from error
    console = Console()
    _print(console, result, folder / PAGE)
    for name in written:
        say(console, f"trace: {spelled(folder / name)}")
    if refused:
        with errors_in_one_line():
            raise ScenarioError("; ".join(refused))


app.command()(predicting.calibrate)
app.command()(predicting.predict)
app.command()(exploring.explore)
app.command("what-if")(retiming.what_if)
app.command("replay")(exploring.replay_file)
app.command()(sweeping.sweep)
app.command()(hosting.worker)
app.command()(hosting.up)


def _version(is_asked: bool) -> None:
    if is_asked:
        typer.echo(f"jdag {version_of('jdag')}, JAX {version_of('jax')}")
        raise typer.Exit


_Version = Annotated[
    bool,
    typer.Option(
        "--version", callback=_version, is_eager=True, help="Print the version."
    ),
]


@app.callback(invoke_without_command=True)
def _main(context: typer.Context, is_asked: _Version = False) -> None:
    """Distributed autograd for JAX: run scenarios in virtual time, start workers."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(Exit.BAD_INPUT)


def main() -> None:
    """Run the command that the arguments name; ends by SystemExit."""
    command = typer.main.get_command(app)
    try:
        code = command.main(prog_name="jdag", standalone_mode=False)
    except Exception as error:
        # Errors of the command line itself are one line, too.
        said = getattr(error, "format_message", None)
        if said is None:
            raise
        context = getattr(error, "ctx", None)
        command_path = context.command_path if context is not None else "jdag"
        line = " ".join(said().split()).rstrip(".")
        gone = GONE_SETTINGS.get(getattr(error, "option_name", "").removeprefix("--"))
        line = line if gone is None else f"{line}: {gone}"
        typer.echo(f"jdag: {line}; see {command_path} --help", err=True)
        code = Exit.BAD_INPUT
    if code == _INTERRUPTED:
        raise KeyboardInterrupt  # Typer has turned it into an exit code.
    sys.exit(code)
