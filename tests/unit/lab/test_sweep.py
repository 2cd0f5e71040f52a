"""A sweep: its product, its table, how it goes on, and what it refuses."""

import csv
import fcntl
from pathlib import Path
from typing import Any

import pytest

import jdag
from jdag.errors import ScenarioError
from jdag.lab.journal import RUNS
from jdag.lab.sweep import (
    RUNS_MAX,
    SWEEP_TABLE,
    _write_table,
    combinations,
    run_one,
    sweep,
)
from jdag.scenario import load
from jdag.scenario.run_scenario import run_scenario
from tests import ROOT
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import scenario_of, written

SCENARIOS = ROOT / "scenarios"
VALUES: dict[str, Any] = {
    "settings.length": [9, 2],
    "network.latency_ns": [0, 1_000, 5_000],
}


def table(folder: Path) -> list[dict[str, str]]:
    with (folder / SWEEP_TABLE).open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_product_has_the_last_key_fastest_and_joined_keys_change_together():
    assert combinations({"a": [1, 2], "b,c": ["x", "y"]}) == [
        {"a": 1, "b": "x", "c": "x"},
        {"a": 1, "b": "y", "c": "y"},
        {"a": 2, "b": "x", "c": "x"},
        {"a": 2, "b": "y", "c": "y"},
    ]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({}, r"keys = \[\]: expected at least one key"),
        (["seed"], r"keys = \[\]: expected at least one key"),
        ({"seed": 3}, "seed = 3: expected a list of different"),
        ({"seed": []}, r"seed = \[\]: expected a list of different"),
        ({"seed": [1, 2, 1]}, r"seed = \[1, 2, 1\]: expected .* different values"),
        ({"seed": [1], "a,seed": [2]}, "keys = .*: expected at least one key, all"),
        ({"a": range(1_000), "b": range(1_000)}, f"at most {RUNS_MAX:,}"),
    ],
)
def test_values_that_make_no_product_are_refused(values: Any, said: str):
    with pytest.raises(ScenarioError, match=said):
        combinations(values)


def test_a_text_of_several_lines_is_one_line_of_the_table(tmp_path: Path):
    rows = {n: {"seed": n, "error_message": "one\ntwo\r\nthree"} for n in range(3)}
    _write_table(tmp_path, rows)
    assert [row["error_message"] for row in table(tmp_path)] == ["one two three"] * 3
    assert (tmp_path / SWEEP_TABLE).read_bytes().count(b"\n") == 4


def test_a_run_is_that_of_the_changed_file_whoever_runs_it(tmp_path: Path):
    path = written(tmp_path, "[network]\nlatency_ns = 1_000", seed="seed = 3")
    wanted = run_scenario(load(path), lambda *_: None)
    plain = written(tmp_path)
    row = run_one(plain, {"network.latency_ns": 1_000, "seed": 3})
    assert row["digest"] == wanted.figures["digest"]
    assert row["digest"] != run_one(plain, {"network.latency_ns": 999})["digest"]
    assert (row["seed"], row["expectations"]) == (3, "met")
    for name in ("virtual_time_ns", "messages", "wire_bytes", "outcome"):
        assert row[name] == wanted.figures[name], name


def test_a_row_has_the_least_and_largest_of_workers_and_the_makespan():
    row = run_one(SCENARIOS / "zero_bubble.toml", {"schedule": "gpipe"})
    assert row["bubble_min"] == row["bubble_max"] == 3 / 11
    assert row["makespan_ns"] == row["virtual_time_ns"] == 33_000
    assert row["peak_activation_bytes_min"] < row["peak_activation_bytes_max"]
    assert "bubble" not in row and row["owed_functions"] is None
    assert row["expectations"] == "not met"  # It expects those of ZB-H1.
    apart = {"network.latency_ns": 1_000}
    row = run_one(SCENARIOS / "pipeline.toml", apart)
    assert 22_000 < row["makespan_ns"] < row["virtual_time_ns"]


def test_the_table_has_a_row_for_each_run_in_the_order_of_the_product(tmp_path: Path):
    shown: list[Any] = []
    rows = jdag.sweep(
        written(tmp_path),
        {**VALUES, "seed": [4]},
        jobs=1,
        out=tmp_path / "out",
        show=lambda done, total, row: shown.append((done, total, row)),
    )
    found = table(tmp_path / "out")
    keys = [(row["settings.length"], row["network.latency_ns"]) for row in found]
    assert keys == [(size, ns) for size in ("9", "2") for ns in ("0", "1000", "5000")]
    assert list(found[0])[:3] == ["settings.length", "network.latency_ns", "seed"]
    assert list(found[0])[-3:] == ["jdag", "jax", "python"]
    assert len({row["digest"] for row in found}) == 6
    assert shown == [(n + 1, 6, row) for n, row in enumerate(rows)]
    assert [row["messages"] for row in found] == [str(row["messages"]) for row in rows]
    assert found[0]["error"] == "" and found[0]["seed"] == "4"


def test_a_killed_sweep_keeps_what_it_has_and_goes_on_with_what_is_missing(
    tmp_path: Path,
):
    path = written(tmp_path)
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    sweep(path, VALUES, jobs=1, out=whole)
    ran: list[int] = []

    def kill(done: int, total: int, row: Any) -> None:
        ran.append(row["network.latency_ns"])
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sweep(path, VALUES, jobs=1, out=killed, show=kill)
    assert len(table(killed)) == 2 and ran == [0, 1_000]
    sweep(path, VALUES, jobs=1, out=killed, show=kill)
    assert ran[2:] == [5_000, 0, 1_000, 5_000]
    assert (killed / SWEEP_TABLE).read_bytes() == (whole / SWEEP_TABLE).read_bytes()
    # Rows that are gone, in any order, one of them by half.
    about, *lines = (killed / RUNS).read_text().splitlines(keepends=True)
    (killed / RUNS).write_text("".join([about, lines[4], lines[1], lines[3][:-9]]))
    (killed / SWEEP_TABLE).unlink()
    sweep(path, VALUES, jobs=1, out=killed, show=lambda *at: ran.append(at[0]))
    assert ran[6:] == [3, 4, 5, 6]
    assert (killed / SWEEP_TABLE).read_bytes() == (whole / SWEEP_TABLE).read_bytes()
    before = (killed / RUNS).read_bytes()
    sweep(path, VALUES, jobs=1, out=killed, show=lambda *at: ran.append(-1))
    assert ran[-1] == 6 and (killed / RUNS).read_bytes() == before


COSTS: dict[str, Any] = {
    "network.latency_ns": [700],
    "schedule": ["1f1b", "zb_h1"],
    "network.bandwidth_bytes_per_s": [10**8, 10**9],
    "devices.functions.layer": [[900, 800, 700]],
}


def test_re_timed_rows_have_the_makespans_of_runs(tmp_path: Path):
    path = SCENARIOS / "zero_bubble.toml"
    ran = sweep(path, COSTS, jobs=1, out=tmp_path / "ran")
    found = sweep(path, COSTS, jobs=1, out=tmp_path / "found", retime=True)
    keys = [*COSTS, "seed", "makespan_ns"]
    assert [[row[key] for key in keys] for row in found] == [
        [row[key] for key in keys] for row in ran
    ]
    assert [row["expectations"] for row in found].count("re-timed") == 2
    firsts = [row for row in found if row["expectations"] != "re-timed"]
    assert firsts == [ran[0], ran[2]]
    # After an interruption the same run is the first one.
    about, *lines = (tmp_path / "found" / RUNS).read_text().splitlines(keepends=True)
    table = (tmp_path / "found" / SWEEP_TABLE).read_bytes()
    (tmp_path / "found" / RUNS).write_text("".join([about, lines[0], lines[3]]))
    sweep(path, COSTS, jobs=1, out=tmp_path / "found", retime=True)
    assert (tmp_path / "found" / SWEEP_TABLE).read_bytes() == table


def test_runs_without_a_fixed_order_are_run_though_re_timing_was_asked_for(tmp_path):
    path, values = written(tmp_path), {"network.latency_ns": [0, 1_000]}
    ran = sweep(path, values, jobs=1, out=tmp_path / "ran")
    assert sweep(path, values, jobs=1, out=tmp_path / "found", retime=True) == ran


@pytest.mark.second
def test_two_processes_write_the_same_bytes_as_one(tmp_path: Path):
    # The first run takes the longest, so that others end before it.
    path, values = written(tmp_path), {"settings.length": [200, 2, 3, 4]}
    ended: list[int] = []
    sweep(path, values, jobs=1, out=tmp_path / "one")
    sweep(
        path, values, jobs=2, out=tmp_path / "two",
        show=lambda done, total, row: ended.append(row["settings.length"]),
    )  # fmt: skip
    assert sorted(ended) == [2, 3, 4, 200]
    tables = [(tmp_path / name / SWEEP_TABLE).read_bytes() for name in ("one", "two")]
    assert tables[0] == tables[1]


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"network.latency_nss": [1]}, r"network\.latency_nss = 1: expected one of"),
        ({"network.latency_ns": [1, -1]}, r"network\.latency_ns = -1: expected an"),
        ({"settings.size": [3, "x"]}, r"settings\.size = 'x': expected an int"),
        ({"schedule": ["gpipe"]}, r"schedule\.stages is missing"),
        ({"faults[0].probability": [0.5]}, r"faults\[0\]\.probability = 0\.5: expec"),
        ({"workers.x": [1]}, r"workers\.x = 1: expected a key of the file"),
    ],
)
def test_a_wrong_key_or_value_is_one_line_before_anything_runs(
    values: Any, said: str, tmp_path: Path
):
    path = written(tmp_path)
    with pytest.raises(ScenarioError, match=said) as raised:
        sweep(path, values, out=tmp_path / "out")
    assert str(raised.value).startswith(f"{path}: ")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("jobs", [0, -1, "2", True])
def test_jobs_that_are_no_count_are_refused(jobs: Any, tmp_path: Path):
    with fails_with(ScenarioError, "lab.jobs_allowed_is_an_integer"):
        sweep(written(tmp_path), VALUES, jobs=jobs)


def test_a_folder_of_something_else_is_refused_and_left_alone(tmp_path: Path):
    (tmp_path / "own.py").write_text("from shapes import chain\n")
    path, out = written(tmp_path, program='program = "own:chain"'), tmp_path / "out"
    values = {"settings.length": [2]}

    def refused(said: str, values: Any = values) -> None:
        before = {file.name: file.read_bytes() for file in out.iterdir()}
        with pytest.raises(ScenarioError, match=f"out = '.*/out': expected .*{said}"):
            sweep(path, values, jobs=1, out=out)
        assert {file.name: file.read_bytes() for file in out.iterdir()} == before

    out.mkdir()
    (out / "letter.txt").write_text("dear")
    refused("this folder contains 'letter.txt'")
    (out / "letter.txt").unlink()
    sweep(path, values, jobs=1, out=out)
    refused("this folder differs in: set of values", {"settings.length": [2, 3]})
    with (out / RUNS).open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        refused("another process writes to it")
    (tmp_path / "own.py").write_text("from shapes import chain  # The other.\n")
    refused("this folder differs in: program")
    path.write_text(path.read_text() + "# More.\n")
    refused("this folder differs in: scenario, program")
    (out / RUNS).write_text("{not json\n")
    refused("runs.jsonl was changed: ")
    (out / RUNS).write_text('[1]\n{"a": 3}\n')
    refused("runs.jsonl was changed: ")


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with fails_with(ScenarioError, "lab.file_out_allowed_not_a"):
        sweep(written(tmp_path), {"seed": [1]}, jobs=1, out=tmp_path / "file" / "out")


def test_a_run_that_is_refused_names_its_settings_and_leaves_the_others(tmp_path: Path):
    path = scenario_of(tmp_path, "player")
    values = {"settings.end": ["good", "stuck", "nothing", "arrays"]}
    with pytest.raises(ScenarioError) as raised:
        sweep(path, values, jobs=1, out=tmp_path / "out")
    assert str(raised.value).startswith(f"{path}: result of play(run) = None: ")
    assert str(raised.value).endswith(" (with settings.end = 'nothing')")
    found = [
        (row["settings.end"], row["expectations"]) for row in table(tmp_path / "out")
    ]
    assert found == [("good", "met"), ("stuck", "stuck")]
