"""The commands `jdag explore` and `jdag replay`, which vary the order of events."""

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
    pick_text,
    read_failure,
    replayed,
    run_failure,
)
from jdag.lab.places import check_is_here, object_at
from jdag.lab.strategies import FAULTS
from jdag.lab.subject import RunResult, Subject
from jdag.plans.progress import Bar
from jdag.runtime.journal import check_journals
from jdag.scenario import configured, load
from jdag.scenario.program import raising_nothing

BUG = "bug.json"

Runs = Annotated[str, typer.Option(metavar="N", help="Maximum number of runs.")]
StrategyName = Annotated[
    str,
    typer.Option(
        help="Search strategy: random[:SEED], pct[:DEPTH] or exhaustive[:MAX_RUNS]."
    ),
]
_Values = Annotated[
    str | None,
    typer.Option(help="Values: real or abstract.  [default: from the scenario]"),
]
_Faults = Annotated[
    list[str] | None,
    typer.Option(
        "--fault",
        metavar="KIND=N",
        help="Allow at most N faults of a kind in each run. Kinds: crash, rejoin, "
        "drop, duplicate. Repeatable. Delays need no fault: any frame may be late.",
    ),
]
_Out = Annotated[Path, typer.Option(help="File in which a wrong run is saved.")]
_Jobs = Annotated[
    str,
    typer.Option(
        metavar="J", help="Number of processes. It does not change the report."
    ),
]
_Resume = Annotated[
    Path | None,
    typer.Option(
        help="Folder that stores finished runs. Repeat the command to continue."
    ),
]
Coverage = Annotated[
    bool,
    typer.Option(
        "--coverage",
        help="Print the protocol events that occurred in no run, by role and phase of "
        "a context. Some may be impossible in this program.",
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
    """Run a scenario in many orders of its events, until a run is wrong.

    A run is right if its gradients equal those of a reference on one device, if they
    have the same bits in every order, and if no contexts, passes or values remain.

    Exit codes: 0 all runs are right; 1 a run is wrong; 2 invalid input; 130 Ctrl-C.
    """
    with errors_in_one_line():
        most, processes = natural("--runs", runs, 1), natural("--jobs", jobs, 1)
        faults = dict(map(_fault, fault or ()))
        check_one_of("--values", values, "real", "abstract")
        check_one_of("--on", on, "ray")
        options = {"values": values, "strategy": strategy, "faults": faults}
        target = out if out.is_file() else f"{out.parent}/"
        if out.is_dir() or not os.access(target, os.W_OK):  # Checked early.
            allowed = "the path of a file in an existing, writable folder"
            raise ScenarioError(unusable("--out", str(out), allowed))
        scenario = load(file)
        with Bar(scenario.settings.name, most) as bar:
            more: dict[str, Any] = {"jobs": processes, "on": on, "folder": resume}
            report = campaign(file, options, runs=most, show=bar.show, **more)
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
    first, *rest = report.coverage()
    if coverage:
        yield from (first, *rest)
    else:
        yield f"{first.removesuffix(', but not:')} (--coverage names the others)"
    failure = report.failure
    yield "all runs are right" if failure is None else f"wrong: {failure}"


Bug = Annotated[
    Path,
    typer.Argument(
        metavar="BUG|FOLDER",
        help=f"File written by jdag explore, such as {BUG}, or a folder of journals.",
    ),
]
What = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="FILE|MODULE:NAME|-- COMMAND...",
        help="Another scenario or program. For journals: the command to run.",
    ),
]
TraceOut = Annotated[
    Path | None, typer.Option("--trace", help="File for the trace of the run.")
]


def _run_again(folder: Path, command: list[str], trace: Path | None) -> int:
    with errors_in_one_line(), NamedTemporaryFile() as report:
        if trace is not None:
            allowed = "no trace file, since a replay of journals has no trace"
            raise ScenarioError(unusable("--trace", str(trace), allowed))
        # `launch` writes to REPLAYED when it has replayed the journals.
        paths = {REPLAY: str(folder.absolute()), REPLAYED: report.name}
        check_journals(folder)
        if not command:
            allowed = "a command after --, such as python script.py"
            raise ScenarioError(unusable("COMMAND", "", allowed))
        try:
            env = {**os.environ, **paths}
            code = subprocess.run(command, env=env, check=False).returncode
        except OSError as error:
            allowed = f"an executable command: {reason(error)}"
            raise ScenarioError(unusable("COMMAND", command[0], allowed)) from error
        if code == 0 and not report.read():
            allowed = "a command that launches the cluster of these journals and closes"
            allowed += f" it; the run in {folder} was not repeated to its end"
            raise ScenarioError(unusable("COMMAND", shlex.join(command), allowed))
    return code if code >= 0 else 1


def replay(bug: Bug, what: What = None, trace: TraceOut = None) -> None:
    """Repeat a wrong run of `jdag explore` step by step, or a run from its journals.

    `jdag replay BUG` repeats a wrong run. BUG contains the name of the scenario, or of
    the module or script of the program. FILE or MODULE:NAME overrides this name. Each
    line of the output is a step, with a column for each worker. A step that differs
    from the default order is marked, together with the step that it precedes.

    `jdag replay FOLDER -- python script.py` runs the script again in one process. Its
    workers handle events in the order of the journals that
    `jdag.launch(..., journal=FOLDER)` wrote.

    Exit codes: 0 the run is now right; 1 the run is still wrong; 2 invalid input, or
    the run differs from the saved run. For journals: the command's exit code; 1 if an
    event differs; 0 if a journal ended before the run because of journal_bytes.
    """
    if bug.is_dir():
        raise typer.Exit(_run_again(bug, what or [], trace))
    with errors_in_one_line():
        if len(what or ()) > 1 and bug.exists():
            allowed = "one scenario or program; a command needs a folder of journals"
            raise ScenarioError(unusable("FILE", " ".join(what or ()), allowed))
        saved = read_failure(bug)
        place = what[0] if what else saved["scenario"]
        program, configuration = _explored(bug, saved, place)
        name = saved["property"] and _property(saved, place)
        property = object_at(name, bug, "property") if name else None
        with configuration:
            limits = saved["values"], saved["faults"]
            subject = Subject(program, saved["workers"], *limits)
            with raising_nothing(place):
                played = replayed(saved, bug, subject)
            run = played.explored
            assert run is not None
            bits_differ = has_other_bits(saved, subject, run)
            with raising_nothing(name, "property"):
                failure = property and run_failure(
                    subject, played, property, saved["run"]
                )
        for line in _timeline(saved, played):
            typer.echo(line)
        if bits_differ:
            typer.echo(OTHER_BITS)
        verdict = "the run is right" if failure is None else f"wrong: {failure.why}"
        if property is None:
            verdict = "the property of the program cannot be imported; it reported: "
            verdict += saved["why"]
        typer.echo(verdict)
        if trace is not None:
            try:
                run.trace.write(trace)
            except OSError as error:
                raise ScenarioError(f"{trace}: {reason(error)}") from error
    raise typer.Exit(int(failure is not None or property is None))


def _explored(
    bug: Path, saved: Mapping[str, Any], place: str
) -> tuple[Any, AbstractContextManager[None]]:
    if place.startswith("drawn:"):
        raise ScenarioError(
            f"{bug} contains a program that a test generated: expected the command "
            f"pytest TEST --jdag-replay {bug}"
        )
    if not place:
        raise ScenarioError(
            f"{bug} does not contain the import path of {saved['program']}: expected "
            f"jdag replay {bug} MODULE:NAME or SCRIPT.py:NAME; or use jdag.replay"
        )
    if ":" in place and not Path(place).exists():
        return object_at(place, bug), nullcontext()
    check_is_here(place, f"jdag replay {bug} FILE")
    scenario = load(Path(place))
    return scenario.case, configured(scenario.settings, exact=True)


def _property(saved: Mapping[str, Any], place: str) -> str:
    """Return the property's path, with the script of `place` if its own is missing."""
    script = place.rpartition(":")[0]
    source, _, name = saved["property"].rpartition(":")
    is_script = script.endswith(".py") and source.endswith(".py")
    has_moved = is_script and not Path(source).exists()
    return f"{script}:{name}" if has_moved else str(saved["property"])


def _timeline(saved: Mapping[str, Any], played: RunResult) -> Iterator[str]:
    """Yield a line for each step of a run, with a column for each worker."""
    workers, waited = saved["workers"], saved["held"]
    width = len(str(len(played.steps)))
    yield f"  {'':{width}} {' '.join(workers)}"
    for number, step in enumerate(played.steps):
        lanes = [
            ("*" if name == named(step.worker) else ".").center(len(name))
            for name in workers
        ]
        differs = played.choices[number] and not waited
        has_waited = str(step) in waited
        text = pick_text(step, played.firsts[number]) if differs else str(step)
        more = " (delayed until no other event was possible)" if has_waited else ""
        mark = ">" if differs or has_waited else " "
        yield f"{mark} {number:{width}} {' '.join(lanes)} {text}{more}"


def _fault(text: str) -> tuple[str, int]:
    kind, equals, number = text.partition("=")
    if not equals:
        raise ScenarioError(unusable("--fault", text, "KIND=NUMBER, such as crash=1"))
    check_one_of("--fault", kind, *FAULTS)
    return kind, natural(f"--fault {kind}", number, 0)
