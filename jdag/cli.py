"""The command line: run a scenario, check that it repeats, report on what was run."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import contextmanager
from enum import IntEnum
from importlib.metadata import version
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

from jdag.errors import JdagError, ScenarioError
from jdag.expect import Judged
from jdag.playing import Answer, play
from jdag.report import read_drawings, render
from jdag.scenario import Scenario, load
from jdag.shown import shown
from jdag.trace import read_trace

RESULT = "result.json"
TRACE = "trace.jsonl"


class Exit(IntEnum):
    """Exit codes."""

    MET = 0
    WRONG = 1  # Something that was expected is not so.
    BAD_INPUT = 2
    STUCK = 3  # A pass was stuck, and nothing expected it.


app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Distributed autograd for JAX: play scenarios in virtual time.",
)

File = Annotated[Path, typer.Argument(help="The scenario, a TOML file.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object alone.")]
Seed = Annotated[int | None, typer.Option(help="In place of the scenario's.")]
Out = Annotated[Path | None, typer.Option(help="Folder of the report.")]
Driver = Annotated[str, typer.Option(help="What runs it: sim.")]
Device = Annotated[str, typer.Option(help="What computes: cpu.")]


@contextmanager
def _said_in_one_line() -> Any:
    """A mistake of the user's is one line and an exit code, never a traceback."""
    try:
        yield
    except ScenarioError as error:
        line = " ".join(str(error).split())
        Console(stderr=True, soft_wrap=True).print(f"jdag: {line}", markup=False)
        raise typer.Exit(Exit.BAD_INPUT) from None


@app.command()
def run(
    file: File,
    as_json: Json = False,
    seed: Seed = None,
    out: Out = None,
    driver: Driver = "sim",
    device: Device = "cpu",
) -> None:
    """Play a scenario; say whether what it expects is so, and write a report."""
    with _said_in_one_line():
        _refuse_options(driver, device, seed)
        scenario = load(file, seed=seed)
        folder = out or Path("runs") / scenario.settings.name
        _refuse_folder(folder)
        console = Console(quiet=as_json)
        console.print(f"seed {scenario.settings.seed}", highlight=False)
        console.print(Text(scenario.question, style="italic"))
        answer = _played(scenario, console)
        result = _result(scenario, answer)
        _report(folder, result, answer)
        answer.cluster.close()
    if as_json:
        typer.echo(json.dumps(result))
    else:
        _print(console, result)
        page = folder / "index.html"
        console.print(f"report: {page}", highlight=False, soft_wrap=True)
    raise typer.Exit(_code(answer))


def _refuse_options(driver: str, device: str, seed: int | None) -> None:
    if driver != "sim":
        raise ScenarioError(f"--driver = {driver!r}: there is only sim so far")
    if device != "cpu":
        raise ScenarioError(f"--device = {device!r}: there is only cpu so far")
    if seed is not None and seed < 0:
        raise ScenarioError(f"--seed = {seed}: it has to be 0 or more")


def _refuse_folder(folder: Path) -> None:
    """Before a long run, see that its report can be written."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        if folder.exists() and not folder.is_dir():
            raise NotADirectoryError(20, "it is a file")
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".jdag-"):
            pass
    except OSError as error:
        raise ScenarioError(
            f"--out = {str(folder)!r}: {error.strerror}; it has to be a folder that "
            "can be written"
        ) from error


def _played(scenario: Scenario, console: Console) -> Answer:
    """Play, with a progress bar."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=32),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, disable=console.quiet) as bar:
        task = bar.add_task(scenario.settings.name, total=None, numbers="")

        def show(done: int, total: int, numbers: Mapping[str, float]) -> None:
            said = "  ".join(f"{name} {value:.3f}" for name, value in numbers.items())
            bar.update(task, completed=done, total=total, numbers=said)

        return play(scenario, show)


def _result(scenario: Scenario, answer: Answer) -> dict[str, Any]:
    """What `result.json` holds."""
    return {
        "name": scenario.settings.name,
        "question": scenario.question,
        "answer": "met" if answer.met else "not met",
        "outcome": answer.figures.get("outcome"),
        "seed": scenario.settings.seed,
        "workers": list(scenario.workers),
        "expect": [one._asdict() for one in answer.judged],
        "figures": dict(answer.figures),
        "meaning": {
            name: text
            for name, text in scenario.player.figures.items()
            if name in answer.figures
        },
        "window_ns": list(answer.window),
        "digest": answer.figures.get("digest"),
        "command": f"jdag run {scenario.path.name} --seed {scenario.settings.seed}",
        "versions": {
            "jdag": version("jdag"),
            "jax": version("jax"),
            "jaxlib": version("jaxlib"),
            "python": ".".join(map(str, sys.version_info[:3])),
        },
        # The figures by their names alone, for whoever reads this file by hand.
        **{k: v for k, v in answer.figures.items() if isinstance(v, int | float)},
    }


def _report(folder: Path, result: dict[str, Any], answer: Answer) -> None:
    """Write everything beside its place, then put it there at once."""
    made = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".jdag-"))
    try:
        (made / RESULT).write_text(json.dumps(result, indent=2) + "\n")
        answer.cluster.trace.write(made / TRACE)
        render(
            made, result, answer.cluster.trace, answer.drawings, window=answer.window
        )
        made.chmod(0o755)
        if folder.exists():
            shutil.rmtree(folder)
        made.rename(folder)
    except OSError as error:
        raise ScenarioError(
            f"--out = {str(folder)!r}: {error.strerror or error}; it has to be a "
            "folder that can be written"
        ) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _print(console: Console, result: Mapping[str, Any]) -> None:
    """The summary table, then what was expected."""
    table = Table(title=result["name"], title_justify="left")
    table.add_column("figure")
    table.add_column("value", overflow="fold")
    table.add_column("what it is", style="dim")
    for name, value in result["figures"].items():
        if value is None or value == []:
            continue
        table.add_row(name, Text(shown(name, value)), result["meaning"].get(name, ""))
    console.print(table)
    for one in result["expect"]:
        judged = Judged(**one)
        mark = "[green]met[/]" if judged.met else "[red]not met[/]"
        got = Text(shown(judged.figure, judged.got)) if not judged.met else ""
        console.print(
            mark, Text(f"{judged.figure}: {judged.wanted}"), got, highlight=False
        )


def _code(answer: Answer) -> Exit:
    if answer.met:
        return Exit.MET
    expected = {one.figure: one.wanted for one in answer.judged}
    if answer.figures.get("outcome") == "stuck" and expected.get("outcome") != "stuck":
        return Exit.STUCK
    return Exit.WRONG


@app.command()
def check(file: File, seed: Seed = None) -> None:
    """Play a scenario twice, in fresh processes, and compare the digests."""
    with _said_in_one_line():
        load(file, seed=seed)
    console = Console()
    digests = []
    for number, hash_seed in enumerate(("1", "2")):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "jdag.cli", "run", str(file), "--json"]
            command += ["--out", str(Path(folder) / "run")]
            command += [] if seed is None else ["--seed", str(seed)]
            environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False
            )
        if not done.stdout.strip():
            Console(stderr=True).print(done.stderr.strip(), markup=False)
            raise typer.Exit(done.returncode or Exit.WRONG)
        digests.append(json.loads(done.stdout)["digest"])
        said = f"run {number + 1}: {digests[-1]}"
        console.print(said, highlight=False, soft_wrap=True)
    if digests[0] != digests[1]:
        console.print("[red]the two runs differ[/]")
        raise typer.Exit(Exit.WRONG)
    console.print("[green]the two runs are the same, event by event[/]")


@app.command()
def report(
    folder: Annotated[Path, typer.Argument(help="What `jdag run` wrote.")],
) -> None:
    """Make the page and the pictures of a run again, and print its table."""
    with _said_in_one_line():
        try:
            result = json.loads((folder / RESULT).read_text())
            trace = read_trace(folder / TRACE)
            drawings = read_drawings(folder)
        except (OSError, ValueError, JdagError) as error:
            raise ScenarioError(
                f"{folder}: {error}; it has to be a folder that `jdag run` wrote"
            ) from error
        render(folder, result, trace, drawings, window=tuple(result["window_ns"]))
    console = Console()
    _print(console, result)
    page = folder / "index.html"
    console.print(f"report: {page}", highlight=False, soft_wrap=True)


@app.callback()
def _main() -> None:
    """Distributed autograd for JAX: play scenarios in virtual time."""


def main() -> None:
    """The console script."""
    app()


if __name__ == "__main__":
    main()
