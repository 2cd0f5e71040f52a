"""The commands `jdag explore` and `jdag replay`: a scenario in many orders."""

import os
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Annotated, Any

import typer

from jdag.api.drivers import REPLAY, REPLAYED
from jdag.cli.cli_errors import File, check_one_of, errors_in_one_line, natural
from jdag.cli.sweeping import On
from jdag.engine.protocol import named
from jdag.errors import ScenarioError, reason, unusable
from jdag.lab.campaign import campaign
from jdag.lab.exploration import Report
from jdag.lab.failures import (
    OTHER_BITS,
    has_other_bits,
    read_failure,
    replayed,
    run_failure,
    said_of,
)
from jdag.lab.places import at, check_is_here
from jdag.lab.strategies import FAULTS
from jdag.lab.subject import RunResult, Subject
from jdag.plans.progress import Bar
from jdag.runtime.journal import check_journals
from jdag.scenario import configured, load
from jdag.scenario.program import raising_nothing

BUG = "bug.json"

Runs = Annotated[str, typer.Option(metavar="N", help="At most so many.")]
StrategyName = Annotated[
    str,
    typer.Option(help="random[:SEED], pct[:DEPTH] or exhaustive[:MAX_RUNS]."),
]
_Values = Annotated[
    str | None, typer.Option(help="real or abstract.  [default: the scenario's]")
]
_Faults = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="KIND=N",
        help="At most N of crash, rejoin, drop or duplicate in a run; repeat. "
        "A delay is no fault: each frame may be late.",
    ),
]
_Out = Annotated[Path, typer.Option(help="Where a run that fails is written.")]
_Jobs = Annotated[
    str, typer.Option(metavar="J", help="Processes at once; the report is the same.")
]
_Resume = Annotated[
    Path | None,
    typer.Option(help="Folder that keeps the runs; the same call again goes on."),
]
Coverage = Annotated[
    bool,
    typer.Option(
        "--coverage",
        help="Print which events came in no run, by role and phase of a context. "
        "Some cannot come in this program.",
    ),
]


def explore(  # noqa: PLR0913 - options of a command.
    file: File,
    *,
    runs: Runs = "1000",
    strategy: StrategyName = "random",
    values: _Values = None,
    fault: _Faults = None,
    jobs: _Jobs = "1",
    on: On = None,
    resume: _Resume = None,
    coverage: Coverage = False,
    out: _Out = Path(BUG),
) -> None:
    """Run a scenario's case in many orders of its events, until one is wrong.

    Right is what the oracle says, with the same bits in every order, and nothing left.

    Exit codes: 0 all runs are right; 1 one is not; 2 bad input; 130 Ctrl-C.
    """
    with errors_in_one_line():
        most, processes = natural("--runs", runs, 1), natural("--jobs", jobs, 1)
        faults = dict(map(_fault, fault or ()))
        check_one_of("--values", values, "real", "abstract")
        check_one_of("--on", on, "ray")
        wanted = {"values": values, "strategy": strategy, "faults": faults}
        place = out if out.is_file() else f"{out.parent}/"
        if out.is_dir() or not os.access(place, os.W_OK):  # Known before the first run.
            allowed = "a file in a folder that is there and can be written"
            raise ScenarioError(unusable("--out", str(out), allowed))
        scenario = load(file)
        with Bar(scenario.settings.name, most) as bar:
            at: dict[str, Any] = {"jobs": processes, "on": on, "folder": resume}
            report = campaign(file, wanted, runs=most, show=bar.show, **at)
        if report.failure is not None:
            with configured(scenario.settings, exact=True):
                report.failure = report.failure.shrink()
        for line in _lines(report, coverage):
            typer.echo(line)
        if report.failure is not None:
            with configured(scenario.settings, exact=True):
                report.failure.save(out, str(file))
            typer.echo(f"repeat it: jdag replay {out}")
    raise typer.Exit(1 if report.failure else 0)


def _lines(report: Report, coverage: bool) -> Iterator[str]:
    yield from filter(None, [report.counts, report.bound])
    first, *others = report.coverage()
    if coverage:
        yield from (first, *others)
    else:
        yield f"{first.removesuffix(', but not:')} (--coverage names the others)"
    found = report.failure
    yield "all runs are right" if found is None else f"wrong: {found}"


Bug = Annotated[
    Path,
    typer.Argument(
        metavar="BUG|FOLDER",
        help=f"What jdag explore wrote, such as {BUG}; or the folder of a journal.",
    ),
]
What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE|MODULE:NAME|-- COMMAND...",
        help="The scenario or program, if not that explored; the journal's command.",
    ),
]
TraceOut = Annotated[
    Path | None, typer.Option("--trace", help="Write the trace of the run here.")
]


def _run_again(folder: Path, command: list[str], trace: Path | None) -> int:
    """Run a command from the journals in a folder; return its exit code."""
    with errors_in_one_line(), NamedTemporaryFile() as told:
        if trace is not None:
            allowed = "only of what jdag explore wrote; a replayed journal has no trace"
            raise ScenarioError(unusable("--trace", str(trace), allowed))
        paths = {REPLAY: str(folder.absolute()), REPLAYED: told.name}
        check_journals(folder)
        if not command:
            allowed = "a command after --, such as python script.py"
            raise ScenarioError(unusable("COMMAND", "", allowed))
        try:
            env = {**os.environ, **paths}
            code = subprocess.run(command, env=env, check=False).returncode
        except OSError as error:
            said = f"a command that can be run: {reason(error)}"
            raise ScenarioError(unusable("COMMAND", command[0], said)) from error
        if code == 0 and not told.read():
            said = "a command that launches a cluster as in these journals, and closes"
            said = f"{said} it; the run of {folder} was not repeated to its end"
            raise ScenarioError(unusable("COMMAND", shlex.join(command), said))
    return code if code >= 0 else 1


def replay_file(bug: Bug, what: What = None, trace: TraceOut = None) -> None:
    """Repeat a run that `jdag explore` found wrong, step by step, or one of processes.

    jdag replay FOLDER -- python script.py runs the script again, with what it launches
    in one process, in the order of the journals of `jdag.launch(..., journal=FOLDER)`.

    The file names the scenario, or the program by the module, or the script with a
    guard, that has it at top level; another one may be given.

    A line is a step, with a lane for each worker. Those that differ from the order of
    first choices are marked, and say what they come before.

    Exit codes: 0 it is right now; 1 it is wrong as before; 2 bad input, or the run is
    another one than was saved. Of a journal: that of the command, 1 if an event
    deviates, 0 if the journal ended before the run, at journal_bytes.
    """
    if bug.is_dir():
        raise typer.Exit(_run_again(bug, what or [], trace))
    with errors_in_one_line():
        if len(what or ()) > 1 and bug.exists():
            allowed = "one scenario or program; only after a journal's folder a command"
            raise ScenarioError(unusable("FILE", " ".join(what or ()), allowed))
        held = read_failure(bug)
        place = what[0] if what else held["scenario"]
        program, configuration = _explored(bug, held, place)
        own = held["property"] and _property(held, place)
        property = at(own, bug, "property") if own else None
        with configuration:
            subject = Subject(program, held["workers"], held["values"], held["faults"])
            with raising_nothing(place):
                played = replayed(held, bug, subject)
            run = played.explored
            assert run is not None
            is_other = has_other_bits(held, subject, run)
            with raising_nothing(own, "property"):
                found = property and run_failure(subject, played, property, held["run"])
        for line in _timeline(held, played):
            typer.echo(line)
        if is_other:
            typer.echo(OTHER_BITS)
        said = "it is right" if found is None else f"wrong: {found.why}"
        if property is None:
            said = f"its property is found by no name; it said then: {held['why']}"
        typer.echo(said)
        if trace is not None:
            try:
                run.trace.write(trace)
            except OSError as error:
                raise ScenarioError(f"{trace}: {reason(error)}") from error
    raise typer.Exit(int(found is not None or property is None))


def _explored(
    bug: Path, held: Mapping[str, Any], place: str
) -> tuple[Any, AbstractContextManager[None]]:
    """What was explored, and the configuration of JAX that it had."""
    if place.startswith("drawn:"):
        said = f"a program that a test has drawn: pytest TEST --jdag-replay {bug}"
        raise ScenarioError(f"{bug} is of {said}")
    if not place:
        raise ScenarioError(
            f"{bug} does not say where {held['program']} is: name it, as in "
            f"jdag replay {bug} MODULE:NAME, or SCRIPT.py:NAME; or use jdag.replay"
        )
    if ":" in place and not Path(place).exists():
        return at(place, bug), nullcontext()
    check_is_here(place, f"jdag replay {bug} FILE")
    scenario = load(Path(place))
    return scenario.case, configured(scenario.settings, exact=True)


def _property(held: Mapping[str, Any], place: str) -> str:
    """Where the property is: in the script that is named, if its own is not here."""
    script, (own, _, name) = place.rpartition(":")[0], held["property"].rpartition(":")
    is_there = script.endswith(".py") and own.endswith(".py") and not Path(own).exists()
    return f"{script}:{name}" if is_there else str(held["property"])


def _timeline(held: Mapping[str, Any], played: RunResult) -> Iterator[str]:
    """Yield a line for each step of a run, with a lane for each worker."""
    workers, waited = held["workers"], held["held"]
    width = len(str(len(played.steps)))
    yield f"  {'':{width}} {' '.join(workers)}"
    for number, step in enumerate(played.steps):
        lanes = [
            ("*" if name == named(step.worker) else ".").center(len(name))
            for name in workers
        ]
        is_off = played.choices[number] and not waited
        waits = str(step) in waited
        said = said_of(step, played.firsts[number]) if is_off else str(step)
        more = " (waited until nothing else could happen)" if waits else ""
        mark = ">" if is_off or waits else " "
        yield f"{mark} {number:{width}} {' '.join(lanes)} {said}{more}"


def _fault(text: str) -> tuple[str, int]:
    kind, equals, number = text.partition("=")
    if not equals:
        raise ScenarioError(unusable("--fault", text, "KIND=NUMBER, such as crash=1"))
    check_one_of("--fault", kind, *FAULTS)
    return kind, natural(f"--fault {kind}", number, 0)
