"""A campaign explores a scenario in chunks, over processes. It can be continued.

Inputs:  a scenario's file, settings of the exploration, a number of runs, a folder.
Outputs: the `Report` of all chunks up to the first failure.

Invariants: the result of a chunk depends only on its run numbers and, under
`Exhaustive`, on the chunk before it. So the report depends neither on the number of
processes, nor on interruptions of the campaign.
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

_RUNS_MAX = 10_000_000  # Limit of one call; another seed gives other runs.
_CHUNK = 25  # Runs of one request. If a process dies, the runs of its request are lost.


@lru_cache(maxsize=1)
def _loaded(path: Path, text: str) -> tuple[Scenario, Subject, Strategy]:
    scenario, wanted = load(path), json.loads(text)
    settings = scenario.settings
    values = wanted["values"] or settings.values
    subject = Subject(scenario.case, settings.names, values, wanted["faults"])
    return scenario, subject, parsed_strategy(wanted["strategy"])


def attempt(path: Path, request: Any) -> dict[str, Any]:
    """Run a chunk: `request` is (settings, first run, end). Return JSON data."""
    try:
        scenario, subject, strategy = _loaded(path, request[0])
        settings = scenario.settings
        with (
            wrong(path),
            configured(settings, exact=True),
            raising_nothing(settings.program),
        ):
            report = exploration(subject, sound, range(*request[1:]), strategy)
    except ScenarioError as error:
        return {"error": str(error)}
    failure = report.failure
    return {
        "counts": [report.runs, report.redundant, report.picks, report.lost],
        "seen": [order.hex() for order in report.seen],
        "reached": [report.reached[triple] for triple in TRIPLES],
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
    """Explore a scenario in chunks.

    `wanted` has the keys "values" (None: the scenario's), "strategy" and "faults".
    `on="ray"` runs chunks on the nodes of Ray, which must have the file at the same
    path. Finished chunks are kept in `folder`, and another call continues from them.
    `show` is called with the number of runs so far. Raises ScenarioError if a setting
    is unusable.
    """
    converted(Annotated[int, Meta(ge=1, le=_RUNS_MAX)], runs, "--runs")
    text = json.dumps(wanted)
    _loaded.cache_clear()
    scenario, subject, strategy = _loaded(path, text)
    if (jobs > 1 or on is not None) and isinstance(strategy, Exhaustive):
        key, value = ("--jobs", jobs) if on is None else ("--on", on)
        allowed = "one process with exhaustive, where each run depends on the last"
        raise ScenarioError(unusable(key, value, allowed))
    check_on(on)
    starts = range(0, runs, _CHUNK)
    chunks = [(text, start, min(start + _CHUNK, runs)) for start in starts]
    about = {**identity(path, scenario), **wanted, "runs": runs, "format": FORMAT}
    chunk_journal: Any = nullcontext((None, {}))
    if folder is not None:
        chunk_journal = journal("--resume", folder, about)
    report, number = Report(), 0
    waiting: dict[int, Any] = {}
    with (
        chunk_journal as (file, done),
        closing(_played(path, chunks, done, jobs, on)) as replies_by_chunk,
    ):
        for chunk, reply in replies_by_chunk:
            if "error" in reply:
                raise ScenarioError(reply["error"])
            if file is not None and chunk not in done:
                file.write(f"{json.dumps([chunk, reply])}\n")
                file.flush()
            waiting[chunk] = reply
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
    """Yield (number, reply) of each chunk: first finished chunks, then new chunks."""
    yield from sorted(done.items())
    missing = {n: chunk for n, chunk in enumerate(chunks) if n not in done}
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
            result = run_again(subject, choices)
            report.failure = run_failure(subject, result, sound, run)
    return report
