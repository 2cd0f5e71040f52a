"""The command line: run a scenario, check that it repeats, report on what was run."""

import json
import math
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from fractions import Fraction
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
from jdag.sim.network import unusable
from jdag.trace import read_trace

RESULT = "result.json"
_TAKEN = ("seed", "workers", "expect", "figures", "exact", "meaning", "versions")
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
        typer.echo(f"jdag: {' '.join(str(error).split())}", err=True)
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
        with _staged(folder) as made:
            console = Console(quiet=as_json)
            console.print(f"seed {scenario.settings.seed}", highlight=False)
            console.print(Text(scenario.question, style="italic"))
            answer = _played(scenario, console)
            result = _result(scenario, answer)
            _write(made, result, answer)
        answer.cluster.close()
    if as_json:
        typer.echo(json.dumps(result, allow_nan=False))
    else:
        _print(console, result)
        page = folder / "index.html"
        console.print(f"report: {page}", highlight=False, soft_wrap=True)
    raise typer.Exit(_code(answer))


def _refuse_options(driver: str, device: str, seed: int | None) -> None:
    for key, value, allowed in (("driver", driver, "sim"), ("device", device, "cpu")):
        if value != allowed:
            said = f"{allowed}; more is to come"
            raise ScenarioError(unusable(f"--{key}", value, said))
    if seed is not None and seed < 0:
        raise ScenarioError(unusable("--seed", seed, "an integer >= 0"))


@contextmanager
def _staged(folder: Path) -> Iterator[Path]:
    """A new folder to write in, which becomes `folder` at the end, at once or never.

    It is made before a long run, so that a folder that cannot be written is known then.

    Raises:
        ScenarioError: the folder cannot be written, or holds something that is no run.
    """
    allowed = "a folder that can be written: a new one, an empty one or that of a run"
    try:
        if folder.exists() and any(folder.iterdir()) and not (folder / RESULT).exists():
            said = f"{allowed}; this one has something else in it"
            raise ScenarioError(unusable("--out", str(folder), said))
        above = next(one for one in folder.absolute().parents if one.exists())
        made = Path(tempfile.mkdtemp(dir=above, prefix=".jdag-"))
        try:
            yield made
            made.chmod(0o755)
            folder.parent.mkdir(parents=True, exist_ok=True)
            if folder.exists():
                folder.rename(made / ".before")
            shutil.move(made, folder)
            shutil.rmtree(folder / ".before", ignore_errors=True)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    except OSError as error:
        said = f"{allowed}; {error.strerror or error}"
        raise ScenarioError(unusable("--out", str(folder), said)) from error


def _played(scenario: Scenario, console: Console) -> Answer:
    """Play, with a progress bar."""
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

        return play(scenario, show)


def _result(scenario: Scenario, answer: Answer) -> dict[str, Any]:
    """What `result.json` holds."""
    figures = {name: _plain(value) for name, value in answer.figures.items()}
    return {
        "name": scenario.settings.name,
        "question": scenario.question,
        "answer": "met" if answer.met else "not met",
        "outcome": answer.figures.get("outcome"),
        "seed": scenario.settings.seed,
        "workers": list(scenario.workers),
        "expect": [{**one._asdict(), "got": _plain(one.got)} for one in answer.judged],
        "figures": figures,
        # Figures that are fractions, exactly.
        "exact": {k: one for k, v in answer.figures.items() if (one := _exact(v))},
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
        **{k: v for k, v in figures.items() if k not in _TAKEN},
    }


def _plain(value: Any) -> Any:
    """A figure as JSON has it: fractions as floats, no number as text."""
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
    """The fractions in a figure as they are: 3/11."""
    if isinstance(value, Mapping):
        return {k: str(one) for k, one in value.items() if isinstance(one, Fraction)}
    return str(value) if isinstance(value, Fraction) else None


def _write(made: Path, result: dict[str, Any], answer: Answer) -> None:
    """Write everything there is to keep."""
    text = json.dumps(result, indent=2, allow_nan=False)
    (made / RESULT).write_text(f"{text}\n", encoding="utf-8")
    trace = answer.cluster.trace
    trace.write(made / TRACE)
    render(made, result, trace, answer.drawings, window=answer.window)


def _print(console: Console, result: Mapping[str, Any]) -> None:
    """The summary table, then what was expected."""
    table = Table(title=result["name"], title_justify="left")
    table.add_column("figure", min_width=max(map(len, result["figures"])))
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
            typer.echo(done.stderr.strip(), err=True)
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
            window = tuple(result["window_ns"])
            render(folder, result, trace, drawings, window=window)
        except (OSError, ValueError, KeyError, TypeError, JdagError) as error:
            said = f"a folder that `jdag run` wrote; {type(error).__name__}: {error}"
            raise ScenarioError(unusable("DIR", str(folder), said)) from error
    console = Console()
    _print(console, result)
    page = folder / "index.html"
    console.print(f"report: {page}", highlight=False, soft_wrap=True)


@app.callback()
def _main() -> None:
    """Distributed autograd for JAX: play scenarios in virtual time."""


def main() -> None:
    """The console script."""
    command = typer.main.get_command(app)
    try:
        code = command.main(standalone_mode=False)
    except Exception as error:
        # What the command line itself refuses is bad input as well, and one line.
        said = getattr(error, "format_message", None)
        if said is None:
            raise
        typer.echo(f"jdag: {' '.join(said().split())} See: jdag --help", err=True)
        code = Exit.BAD_INPUT
    sys.exit(code)


if __name__ == "__main__":
    main()
