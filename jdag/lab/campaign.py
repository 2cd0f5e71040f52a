"""A campaign: the exploration of a scenario in chunks, over processes, resumable.

Inputs:  a scenario's file, what `Explored` runs are made of, how many; a folder.
Outputs: the `Report` of all chunks up to the first failure.

Invariants: a chunk is a function of its numbers and, where runs follow from each other,
of what the one before has learned; so the report depends neither on the number of
processes, nor on how often the campaign was interrupted.
"""

import json
from collections import Counter
from collections.abc import Callable, Generator, Mapping
from contextlib import closing, nullcontext
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta

from jdag.engine.phases import TRIPLES
from jdag.errors import ScenarioError, unusable
from jdag.lab.exploration import Report, exploration, sound
from jdag.lab.failures import FORMAT, run_again, run_failure
from jdag.lab.journal import identity, journal
from jdag.lab.strategies import Exhaustive, Strategy, parsed_strategy
from jdag.lab.subject import Subject
from jdag.lab.sweep_pool import check_on, replies
from jdag.scenario import Scenario, configured, load
from jdag.scenario.program import raising_nothing
from jdag.settings.toml_files import wrong
from jdag.settings.validation import converted

_RUNS_MAX = 10_000_000  # Of one call; another seed gives others.
_CHUNK = 25  # Runs that are lost if a process dies, and that one request asks for.


@lru_cache(maxsize=1)
def _loaded(path: Path, said: str) -> tuple[Scenario, Subject, Strategy]:
    scenario, wanted = load(path), json.loads(said)
    settings, values = scenario.settings, wanted["values"] or scenario.settings.values
    subject = Subject(scenario.case, settings.names, values, wanted["faults"])
    return scenario, subject, parsed_strategy(wanted["strategy"])


def attempt(path: Path, request: Any) -> dict[str, Any]:
    """Run a chunk, (settings as JSON, first run, last run); return its report."""
    try:
        scenario, subject, strategy = _loaded(path, request[0])
        settings = scenario.settings
        with (
            wrong(path),
            configured(settings, exact=True),
            raising_nothing(settings.program),
        ):
            found = exploration(subject, sound, range(*request[1:]), strategy)
    except ScenarioError as error:
        return {"error": str(error)}
    failure = found.failure
    return {
        "counts": [found.runs, found.redundant, found.picks, found.lost],
        "seen": [order.hex() for order in found.seen],
        "reached": [found.reached[triple] for triple in TRIPLES],
        "failure": failure and [failure.run, [*failure.choices]],
        "learned": [*strategy.learned],
    }


def campaign(
    path: Path,
    wanted: Mapping[str, Any],
    *,
    runs: int,
    jobs: int = 1,
    on: str | None = None,
    folder: Path | None = None,
    show: Callable[[int], object] = lambda runs: None,
) -> Report:
    """Explore a scenario.

    Args:
        path: the scenario's file.
        wanted: its "values", None for the scenario's own, "strategy" and "faults".
        runs: how many at most, up to `_RUNS_MAX`.
        jobs: how many processes run at once.
        on: "ray": on the nodes of Ray, which see the file at the same path.
        folder: keeps what was run; another call with it goes on. None: nothing is kept.
        show: called with the number of runs so far.

    Raises:
        ScenarioError: a setting that is unusable: names it, its value, what is allowed.
    """
    converted(Annotated[int, Meta(ge=1, le=_RUNS_MAX)], runs, "--runs")
    said = json.dumps(wanted)
    _loaded.cache_clear()
    scenario, subject, strategy = _loaded(path, said)
    if (jobs > 1 or on is not None) and isinstance(strategy, Exhaustive):
        key, value = ("--jobs", jobs) if on is None else ("--on", on)
        allowed = "one process with exhaustive, where runs follow from those before"
        raise ScenarioError(unusable(key, value, allowed))
    check_on(on)
    starts = range(0, runs, _CHUNK)
    chunks = [(said, start, min(start + _CHUNK, runs)) for start in starts]
    about = {**identity(path, scenario), **wanted, "runs": runs, "format": FORMAT}
    kept: Any = nullcontext((None, {}))
    if folder is not None:
        kept = journal("--resume", folder, about)
    report, number = Report(), 0
    waiting: dict[int, Any] = {}
    with kept as (file, done), closing(_played(path, chunks, done, jobs, on)) as played:
        for at, reply in played:
            if "error" in reply:
                raise ScenarioError(reply["error"])
            if file is not None and at not in done:
                file.write(f"{json.dumps([at, reply])}\n")
                file.flush()
            waiting[at] = reply
            while number in waiting:
                report.add(_read(waiting.pop(number), subject, strategy, scenario))
                number += 1
                show(report.runs)
            if report.failure is not None or getattr(strategy, "complete", False):
                break
    report.bound = strategy.bound()
    return report


def _played(
    path: Path, chunks: list[Any], done: Mapping[int, Any], jobs: int, on: str | None
) -> Generator[tuple[int, Any]]:
    """Yield chunks with their numbers: those that are done, and others as they end."""
    yield from sorted(done.items())
    missing = {at: chunk for at, chunk in enumerate(chunks) if at not in done}
    yield from replies(attempt, path, missing, jobs, on)


def _read(
    reply: Mapping[str, Any], subject: Subject, strategy: Strategy, scenario: Scenario
) -> Report:
    strategy.learn(reply["learned"])
    reached = zip(TRIPLES, reply["reached"], strict=True)
    runs, redundant, picks, lost = reply["counts"]
    report = Report(
        *(runs, redundant, picks, lost),
        seen=dict.fromkeys(map(bytes.fromhex, reply["seen"])),
        reached=Counter({triple: count for triple, count in reached if count}),
    )
    if reply["failure"] is not None:
        run, choices = reply["failure"]
        with configured(scenario.settings, exact=True):
            subject.first()
            played = run_again(subject, choices)
            report.failure = run_failure(subject, played, sound, run)
    return report
