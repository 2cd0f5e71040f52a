"""The commands `jdag explore` and `jdag replay`: a scenario in many orders."""

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from jdag.api.progress import Bar
from jdag.cli.cli_errors import errors_in_one_line
from jdag.errors import ScenarioError, reason, unusable
from jdag.lab.exploration import Report, exploration, sound
from jdag.lab.failures import read_failure, replay
from jdag.lab.strategies import parsed
from jdag.lab.subject import Subject
from jdag.scenario import Scenario, configured, load
from jdag.scenario.case import Case

BUG = "bug.json"

File = Annotated[Path, typer.Argument(help="The scenario, a TOML file.")]
Runs = Annotated[str, typer.Option(metavar="N", help="At most so many.")]
StrategyName = Annotated[
    str,
    typer.Option(help="random[:SEED], pct[:DEPTH] or exhaustive[:MAX_RUNS]."),
]
Values = Annotated[
    str | None, typer.Option(help="real or abstract.  [default: the scenario's]")
]
Faults = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="KIND=N",
        help="At most N of crash, rejoin, drop or duplicate in a run; repeat.",
    ),
]
Out = Annotated[Path, typer.Option(help="Where a run that fails is written.")]


def explore(
    file: File,
    *,
    runs: Runs = "1000",
    strategy: StrategyName = "random",
    values: Values = None,
    fault: Faults = None,
    out: Out = Path(BUG),
) -> None:
    """Run a scenario's case in many orders of its events, until one is wrong.

    Right is what the oracle says, with the same bits in every order, and nothing left.

    Exit codes: 0 all runs are right; 1 one is not; 2 bad input; 130 Ctrl-C.
    """
    with errors_in_one_line():
        most = _natural("--runs", runs, 1)
        scenario = load(file)
        subject = _subject(scenario, values, dict(map(_fault, fault or ())))
        chosen = parsed(strategy)
        console = Console()
        with Bar(scenario.settings.name, most) as bar, configured(scenario.settings):
            report = exploration(
                *(subject, sound, most, chosen), lambda report: bar.show(report.runs)
            )
            if report.failure is not None:
                report.failure = report.failure.shrink()
                try:
                    report.failure.save(out)
                except OSError as error:
                    raise ScenarioError(f"{out}: {reason(error)}") from error
        counts = f"{report.runs:,} runs, {report.orders:,} orders"
        console.print(counts, highlight=False)
        _say(console, report, file, out)
    raise typer.Exit(1 if report.failure else 0)


def _say(console: Console, report: Report, file: Path, out: Path) -> None:
    if report.bound:
        console.print(report.bound, highlight=False, soft_wrap=True)
    if report.failure is None:
        console.print("all of them are right")
        return
    console.print(f"wrong: {report.failure}", highlight=False, soft_wrap=True)
    console.print(
        f"repeat it: jdag replay {out} {file}", highlight=False, soft_wrap=True
    )


Bug = Annotated[Path, typer.Argument(help=f"What jdag explore wrote, such as {BUG}.")]


def replay_file(bug: Bug, file: File) -> None:
    """Repeat a run that `jdag explore` found wrong, step by step.

    Exit codes: 0 it is right now; 1 it is wrong as before; 2 bad input, or the run is
    another one than was saved.
    """
    with errors_in_one_line():
        scenario = load(file)
        held = read_failure(bug)
        case = _case(scenario)
        with configured(scenario.settings):
            run, steps = replay(bug, case)
        console = Console()
        width = len(str(len(steps)))
        choices = [*held["choices"], *[0] * (len(steps) - len(held["choices"]))]
        for number, (step, choice) in enumerate(zip(steps, choices, strict=True)):
            mark = ">" if choice else " "
            console.print(f"{mark} {number:{width}} {step}", highlight=False)
        try:
            sound(run)
        except AssertionError as error:
            console.print(f"wrong: {error}", highlight=False, soft_wrap=True)
            raise typer.Exit(1) from None
        console.print("it is right")


def _case(scenario: Scenario) -> Case:
    case: Any = scenario.player
    if not isinstance(case, Case):
        raise scenario.settings.refused("one that returns a jdag.scenario.Case")
    return case


def _subject(scenario: Scenario, values: str | None, faults: dict[str, int]) -> Subject:
    settings = scenario.settings
    return Subject(_case(scenario), settings.names, values or settings.values, faults)


def _fault(text: str) -> tuple[str, int]:
    kind, _, number = text.partition("=")
    return kind, _natural(f"--fault {kind}", number, 0)


def _natural(key: str, text: str, least: int) -> int:
    if not (text.isascii() and text.isdigit() and int(text) >= least):
        raise ScenarioError(unusable(key, text, f"an integer >= {least}"))
    return int(text)
