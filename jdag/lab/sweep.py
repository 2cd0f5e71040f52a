"""A sweep: runs a scenario with each combination of some settings; makes one table.

The folder contains `runs.jsonl`, with the sweep's settings and a line for each finished
run, and `sweep.csv`, made from it: a row for each run, in the order of the product.
Invariant: the table depends neither on the order in which runs end, nor on
interruptions of the sweep.

With `retime`, runs that differ only in links and devices form a group. The first run of
a group is simulated. If its order of events is fixed, the others are re-timed from it
(`jdag.lab.retiming`).
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

Row = dict[str, Any]  # Numbers, strings, bools and None, by column.

SWEEP_TABLE = "sweep.csv"
RUNS_MAX = 100_000
_LAST = ("expectations", "digest", "jdag", "jax", "python")
RETIMED = "re-timed"  # The expectations of a re-timed run, which are not checked.
_COSTS = re.compile(
    r"network\.(links\[\d+\]\.)?(latency_ns|bandwidth_bytes_per_s|overhead_ns)"
    r"|devices\..+"
)
_WRITTEN_SHARE = 0.99  # The table is rewritten when it lacks more than 1% of rows.


def combinations(values: Mapping[str, Sequence[Any]]) -> list[Row]:
    """Return the changed settings of each run. The last key changes fastest.

    Keys joined by commas get the same value. Raises ScenarioError if a key or value
    occurs twice, if there are no values, or if there are more than `RUNS_MAX` runs.
    """
    is_usable = isinstance(values, Mapping) and all(
        [type(key) is str for key in values]
    )
    keys = [key for joined in values for key in joined.split(",")] if is_usable else []
    if not keys or len(dict.fromkeys(keys)) != len(keys):
        raise ScenarioError(unusable("keys", keys, "at least one key, all different"))
    for key, chosen in values.items():
        reprs = [repr(value) for value in chosen] if is_listed(chosen) else []
        if not reprs or len(dict.fromkeys(reprs)) != len(reprs):
            raise ScenarioError(unusable(key, chosen, "a list of different values"))
    if (count := prod(map(len, values.values()))) > RUNS_MAX:
        raise ScenarioError(unusable("runs", count, f"at most {RUNS_MAX:,}"))
    joined = [key.split(",") for key in values]
    return [
        {
            key: value
            for joined_keys, value in zip(joined, chosen, strict=True)
            for key in joined_keys
        }
        for chosen in product(*values.values())
    ]


def run_one(path: Path, changes: Mapping[str, Any]) -> Row:
    """Run a scenario with some settings changed, in virtual time. Return its row.

    A metric with a value for each worker becomes two columns, such as `bubble_min` and
    `bubble_max`. `makespan_ns` is the time from the start of the first job to the end
    of the last job; under a schedule only jobs of the schedule count. `expectations` is
    "met", "not met", or "stuck" if a pass was stuck unexpectedly.
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
def _base_run(path: Path, changes: str) -> tuple[Row, Retimed | None]:
    """Run once. Return the row, and a `Retimed` if the run can be re-timed."""
    row, trace, window_ns = _recorded(path, json.loads(changes))
    try:
        run = retime(trace, window_ns)
        return row, run if run.makespan() == row["makespan_ns"] else None
    except JdagError:
        return row, None


def _retimed(path: Path, changes: Row, first: Row) -> Row | None:
    """Return the row of a run that is re-timed from the first run of its group.

    The row has the first run's digest, and the makespan as its only metric. Returns
    None if the run cannot be re-timed and must be simulated.
    """
    row, run = _base_run(path, json.dumps(first))
    if changes == first or run is None:
        return row if changes == first else None
    settings = load(path, changes=changes).settings
    try:
        network, devices = network_of(settings, clean=False), devices_of(settings)
        makespan_ns = run.makespan(network, devices)
    except ScenarioError:
        return None
    copied = {key: row[key] for key in _LAST} | {"expectations": RETIMED}
    return {"seed": row["seed"], "makespan_ns": makespan_ns, **copied}


def _flat(figures: Mapping[str, Any]) -> Row:
    row: Row = {}
    for name, value in figures.items():
        of_workers = list(value.values()) if isinstance(value, Mapping) else []
        if of_workers and all([is_number(value) for value in of_workers]):
            row[f"{name}_min"] = _cell(min(of_workers))
            row[f"{name}_max"] = _cell(max(of_workers))
        else:
            row[name] = _cell(value)
    return row


def _cell(value: Any) -> Any:
    """Convert a value to a cell: fractions become floats, lists and tables JSON."""
    if isinstance(value, Mapping | list | tuple):
        return json.dumps(value, default=str) if value else None
    return float(value) if isinstance(value, Fraction) else value


def _attempt(path: Path, request: Sequence[Any]) -> dict[str, Any]:
    """Make a run and return its row.

    `request` has the run's changes and, to re-time it, the changes of its group's first
    run (otherwise None).
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

    Finished runs of an earlier call in the same folder are not repeated. The folder is
    refused after a change of the file, the values or the program's module. Changes of
    modules that the program imports are not detected.

    Args:
        file: the scenario's TOML file.
        values: values of each key of the file: `{"network.latency_ns": [0, 1_000]}`;
            with `{"seed,settings.size": [1, 2]}` both keys get the same value.
            `schedule` is short for `schedule.kind`; keys such as
            `faults[0].probability` are allowed.
        jobs: number of processes; None: one for each core; 1: this process. With
            `on="ray"`, the largest number of runs at the same time; None: as many as
            Ray has CPUs.
        on: "ray": run on the nodes of Ray, which must have the file at the same path.
        out: the folder of the table; None: runs/NAME-sweep.
        retime: of runs that differ only in links and devices, simulate the first and
            re-time the others, if its order of events is fixed. The rows of re-timed
            runs contain only `makespan_ns`, the first run's digest, and "re-timed" as
            expectations.
        show: called after each run with the number of finished runs, the number of all
            runs, and the run's row.

    Raises:
        ScenarioError: before any run, if a key or value is unusable, or if the folder
            cannot be written or contains other files. Later, if a run raised an error
            other than a JdagError. Finished runs are kept.
    """
    path, runs = Path(file), combinations(values)
    if jobs is None:  # Ray limits the runs at once to its CPUs.
        jobs = len(os.sched_getaffinity(0) if on is None else runs)
    converted(COUNT, jobs, "jobs")
    check_on(on)
    scenario, *_ = [load(path, changes=changes) for changes in runs]
    folder = Path(out or f"runs/{scenario.settings.name}-sweep")
    listed = {key: list(each) for key, each in values.items()}
    about = {**identity(path, scenario), "set of values": (listed, retime)}
    _base_run.cache_clear()  # The file may have changed.
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
    firsts: dict[str, Row] = {}  # By all settings other than costs.

    def first(run: Row) -> Row:
        others = {key: run[key] for key in run if not _COSTS.fullmatch(key)}
        return firsts.setdefault(json.dumps(others), run)

    return [(run, first(run) if retime else None) for run in runs]


def _played(
    path: Path,
    requests: Sequence[tuple[Row, Row | None]],
    done: Mapping[int, Row],
    jobs: int,
    on: str | None,
) -> Iterator[tuple[int, Row]]:
    missing = {n: request for n, request in enumerate(requests) if n not in done}
    # Runs that are re-timed from the same run are adjacent.
    grouped = dict(sorted(missing.items(), key=lambda run: json.dumps(run[1][1])))
    with closing(replies(_attempt, path, grouped, jobs, on)) as results:
        for number, reply in results:
            changes, _ = requests[number]
            if "error" in reply:
                texts = [f"{k} = {repr_of(v)}" for k, v in changes.items()]
                raise ScenarioError(f"{reply['error']} (with {', '.join(texts)})")
            cells = {key: _cell(value) for key, value in changes.items()}
            yield number, {**cells, **reply["row"]}


def _written(cell: Any) -> Any:
    if isinstance(cell, bool):
        return str(cell).lower()
    return " ".join(cell.splitlines()) if isinstance(cell, str) else cell


def _write_table(folder: Path, done: Mapping[int, Row]) -> None:
    rows = [done[number] for number in sorted(done)]
    columns = dict.fromkeys([key for row in rows for key in row if key not in _LAST])
    new_table = folder / f".{SWEEP_TABLE}"
    with new_table.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow([*columns, *_LAST])
        for row in rows:
            writer.writerow([_written(row.get(key)) for key in (*columns, *_LAST)])
    os.replace(new_table, folder / SWEEP_TABLE)
