"""A sweep: a scenario run with each combination of some settings, as one tidy table.

Its folder has `runs.jsonl`: what is swept, and at once a line for each run that has
ended; and `sweep.csv`, made of it: a row for each run, in the order of the product.
Invariant: the table depends neither on the order in which runs end, nor on how often
the sweep was interrupted.

With `retime`, runs that differ in links and devices alone are re-timed from the first
of them, if its order is fixed (`jdag.lab.retiming`).
"""

import csv
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from fractions import Fraction
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

from jdag.errors import JdagError, ScenarioError, repr_of, unusable
from jdag.lab.journal import identity, journal
from jdag.lab.retiming import Retimed, retime
from jdag.lab.sweep_pool import check_on, replies
from jdag.report.spans import spans_of
from jdag.runtime.trace import Trace
from jdag.runtime.versions import version_of
from jdag.scenario import load
from jdag.scenario.driving import Virtual
from jdag.scenario.run_scenario import run_scenario
from jdag.scenario.scenario_schema import devices_of, network_of
from jdag.settings.validation import COUNT, converted, is_listed, is_number

Row = dict[str, Any]  # Numbers, texts, flags and None, by column.

SWEEP_TABLE = "sweep.csv"
RUNS_MAX = 100_000
_LAST = ("expectations", "digest", "jdag", "jax", "python")
RETIMED = "re-timed"  # In place of whether expectations are met.
_COSTS = re.compile(
    r"network\.(links\[\d+\]\.)?(latency_ns|bandwidth_bytes_per_s|overhead_ns)"
    r"|devices\..+"
)
_WRITTEN_SHARE = 0.99  # The table is written again when it has fewer of the rows.


def combinations(values: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Return the settings of each run; the last one changes fastest.

    Args:
        values: those of each key. Keys that are joined by commas change together.

    Raises:
        ScenarioError: no values, a value or key twice, or more than `RUNS_MAX` runs.
    """
    is_usable = isinstance(values, Mapping) and all(
        [type(key) is str for key in values]
    )
    keys = [key for joined in values for key in joined.split(",")] if is_usable else []
    if not keys or len(dict.fromkeys(keys)) != len(keys):
        raise ScenarioError(unusable("keys", keys, "one key or more, none twice"))
    for key, each in values.items():
        said = [repr(value) for value in each] if is_listed(each) else []
        if not said or len(dict.fromkeys(said)) != len(said):
            raise ScenarioError(unusable(key, each, "a list of values, none twice"))
    if (count := prod(map(len, values.values()))) > RUNS_MAX:
        raise ScenarioError(unusable("runs", count, f"at most {RUNS_MAX:,}"))
    joined = [key.split(",") for key in values]
    return [
        {key: one for of, one in zip(joined, each, strict=True) for key in of}
        for each in product(*values.values())
    ]


def run_one(path: Path, changes: Mapping[str, Any]) -> Row:
    """Run a scenario with some settings changed, in virtual time; return its row.

    The row has figures: of those of each worker the least and the largest, such as
    `bubble_min` and `bubble_max`, and `makespan_ns`, from the beginning of the first
    job to the end of the last; under a schedule of those that it has. `expectations`
    are met, not met, or stuck: a pass was, and nothing expected that.

    Raises:
        ScenarioError: as `load` and `run_scenario`.
    """
    return _recorded(path, changes)[0]


def _recorded(
    path: Path, changes: Mapping[str, Any]
) -> tuple[Row, Trace, tuple[int, int]]:
    scenario = load(path, changes=changes)
    with closing(Virtual(scenario.settings)) as driver:
        answer = run_scenario(scenario, lambda done, total, numbers: None, driver)
        trace = answer.cluster.trace
        jobs = spans_of(trace).within(answer.window).jobs
    jobs = tuple([job for job in jobs if job.action]) or jobs
    figures = {**answer.figures}
    digest = figures.pop("digest", trace.digest)
    row = {"seed": scenario.settings.seed, **_flat(figures)}
    ends_ns = [job.end_ns for job in jobs]
    row["makespan_ns"] = max(ends_ns) - jobs[0].start_ns if jobs else 0
    is_stuck = row.get("outcome") == "stuck"
    is_stuck = is_stuck and scenario.settings.expect.get("outcome") != "stuck"
    row["expectations"] = "met" if answer.met else "stuck" if is_stuck else "not met"
    row |= {"digest": digest, "jdag": version_of("jdag"), "jax": version_of("jax")}
    row["python"] = ".".join(map(str, sys.version_info[:3]))
    return row, trace, answer.window


@lru_cache(maxsize=2)
def _known(path: Path, changes: str) -> tuple[Row, Retimed | None]:
    """The row of a run, and the run as a function, if it is one of its costs."""
    row, trace, window_ns = _recorded(path, json.loads(changes))
    try:
        run = retime(trace, window_ns)
        return row, run if run.makespan() == row["makespan_ns"] else None
    except JdagError:
        return row, None


def _retimed(path: Path, changes: Row, first: Row) -> Row | None:
    """The row of a run by the trace of the first one of its kind; None: run it.

    Its digest is that of the trace. It has no figures but the makespan.
    """
    row, run = _known(path, json.dumps(first))
    if changes == first or run is None:
        return row if changes == first else None
    settings = load(path, changes=changes).settings
    try:
        ns = run.makespan(network_of(settings, clean=False), devices_of(settings))
    except ScenarioError:
        return None
    kept = {key: row[key] for key in _LAST} | {"expectations": RETIMED}
    return {"seed": row["seed"], "makespan_ns": ns, **kept}


def _flat(figures: Mapping[str, Any]) -> Row:
    row: Row = {}
    for name, value in figures.items():
        of_workers = list(value.values()) if isinstance(value, Mapping) else []
        if of_workers and all([is_number(one) for one in of_workers]):
            row[f"{name}_min"] = _cell(min(of_workers))
            row[f"{name}_max"] = _cell(max(of_workers))
        else:
            row[name] = _cell(value)
    return row


def _cell(value: Any) -> Any:
    """Return one value of a row: a fraction as a float, lists and tables as JSON."""
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, default=str) if value else None
    return float(value) if isinstance(value, Fraction) else value


def _attempt(path: Path, request: Sequence[Any]) -> dict[str, Any]:
    """Return the row of a run, or the text of the error that refuses it.

    The request has the run's changes and, to re-time it, those of the first such run.
    """
    changes, first = request
    try:
        row = None if first is None else _retimed(path, changes, first)
        return {"row": run_one(path, changes) if row is None else row}
    except ScenarioError as error:
        return {"error": str(error)}


def sweep(
    file: str | os.PathLike[str],
    values: Mapping[str, Sequence[Any]],
    *,
    jobs: int | None = None,
    on: str | None = None,
    out: str | os.PathLike[str] | None = None,
    retime: bool = False,
    show: Callable[[int, int, Row], None] = lambda done, total, row: None,
) -> list[Row]:
    """Run a scenario with each combination of values; return a row for each run.

    Runs that the folder has from an earlier call are not repeated. It is refused after
    a change of the file, of the values or of the program's module; a change of what
    that module imports is not noticed.

    Args:
        file: the scenario's TOML file.
        values: those of each key of the file: `{"network.latency_ns": [0, 1_000]}`;
            `{"seed,settings.size": [1, 2]}` changes both together. `schedule` is short
            for `schedule.kind`, and `faults[0].probability` is a key, too.
        jobs: how many processes run at once; None: one for each core; 1: this one.
        on: "ray": on the nodes of Ray, which see the file at the same path; so many at
            once as `jobs` says, or as Ray has CPUs.
        out: the folder of the table; None: runs/NAME-sweep.
        retime: of runs that differ in links and devices alone run the first only, if
            its order is fixed. The rows of the others have `makespan_ns`, the digest of
            the first, "re-timed" as expectations, and no other figures.
        show: called after each run with the numbers done and wanted, and its row.

    Raises:
        ScenarioError: one line, before anything runs: a key or value is unusable, or
            the folder cannot be written or holds something else. Later: a run raised an
            error that is not jdag's; what has ended is kept.
    """
    path, runs = Path(file), combinations(values)
    if jobs is None:  # Ray itself runs no more at once than it has CPUs.
        jobs = len(os.sched_getaffinity(0) if on is None else runs)
    converted(COUNT, jobs, "jobs")
    check_on(on)
    scenario, *_ = [load(path, changes=changes) for changes in runs]
    folder = Path(out or f"runs/{scenario.settings.name}-sweep")
    listed = {key: list(each) for key, each in values.items()}
    about = {**identity(path, scenario), "set of values": (listed, retime)}
    _known.cache_clear()  # The file may be another.
    with journal("out", folder, about) as (file_of_runs, done):
        written = 0
        try:
            for number, row in _played(path, _requests(runs, retime), done, jobs, on):
                file_of_runs.write(f"{json.dumps([number, row])}\n")
                file_of_runs.flush()
                done[number] = row
                if written < _WRITTEN_SHARE * len(done):
                    written = len(done)
                    _write_table(folder, done)
                show(len(done), len(runs), row)
        finally:
            _write_table(folder, done)
    return [done[number] for number in range(len(runs))]


def _requests(runs: Sequence[Row], retime: bool) -> list[tuple[Row, Row | None]]:
    """Of each run its changes, and to re-time it those of the first one like it."""
    firsts: dict[str, Row] = {}  # By all settings that are no costs.

    def first(run: Row) -> Row:
        said = {key: run[key] for key in run if not _COSTS.fullmatch(key)}
        return firsts.setdefault(json.dumps(said), run)

    return [(run, first(run) if retime else None) for run in runs]


def _played(
    path: Path,
    requests: Sequence[tuple[Row, Row | None]],
    done: Mapping[int, Row],
    jobs: int,
    on: str | None,
) -> Iterator[tuple[int, Row]]:
    """Run what is missing; yield rows as they come, with the numbers of their runs."""
    missing = {at: each for at, each in enumerate(requests) if at not in done}
    # What is re-timed from one run is together.
    wanted = dict(sorted(missing.items(), key=lambda run: json.dumps(run[1][1])))
    with closing(replies(_attempt, path, wanted, jobs, on)) as played:
        for at, reply in played:
            changes, _ = requests[at]
            if "error" in reply:
                said = [f"{k} = {repr_of(v)}" for k, v in changes.items()]
                raise ScenarioError(f"{reply['error']} (with {', '.join(said)})")
            cells = {key: _cell(value) for key, value in changes.items()}
            yield at, {**cells, **reply["row"]}


def _written(cell: Any) -> Any:
    """A cell of the table: true, false, and texts in one line, for simple readers."""
    if isinstance(cell, bool):
        return str(cell).lower()
    return " ".join(cell.splitlines()) if isinstance(cell, str) else cell


def _write_table(folder: Path, done: Mapping[int, Row]) -> None:
    """Replace the table by one of these rows, in the order of their numbers."""
    rows = [done[number] for number in sorted(done)]
    columns = dict.fromkeys([key for row in rows for key in row if key not in _LAST])
    made = folder / f".{SWEEP_TABLE}"
    with made.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, *_LAST])
        for row in rows:
            writer.writerow([_written(row.get(key)) for key in (*columns, *_LAST)])
    os.replace(made, folder / SWEEP_TABLE)
