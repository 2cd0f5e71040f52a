"""`jdag report`: the page of a run again, and one line for what is no run."""

import json
import os
from pathlib import Path

import pytest

from tests.tools.command_cases import command as jdag
from tests.tools.scenario_cases import written
from tests.unit.cli import test_commands as test_cli
from tests.unit.cli.test_commands import refused

place = test_cli.place


def test_a_report_of_no_run_is_one_line_and_2(place: Path):
    assert "expected a folder that `jdag run` wrote" in refused(place, "report", ".")
    (place / "result.json").write_text("{}")
    (place / "trace.jsonl").write_text("")
    assert "expected a folder that `jdag run` wrote" in refused(place, "report", ".")


def test_a_report_of_what_somebody_changed_is_one_line_and_2(place: Path):
    assert jdag("run", written(place.parent), "--out", "run")[0] == 0
    path = place / "run" / "result.json"
    result = json.loads(path.read_text())
    for key in ("name", "figures", "meaning", "exact", "versions", "expect"):
        path.write_text(json.dumps({**result, key: 3}))
        said = refused(place, "report", "run")
        assert f"wrote; {key} in result.json: expected `" in said
    for key in ("seed", "outcome"):
        path.write_text(json.dumps({k: v for k, v in result.items() if k != key}))
        said = refused(place, "report", "run")
        assert said.endswith(f"result.json: object missing required field `{key}`\n")
    expected = [{**one, "figure": 3, "got": 1} for one in result["expect"]]
    path.write_text(json.dumps({**result, "expect": expected}))
    said = refused(place, "report", "run")
    assert "expect[0].figure in result.json: expected `str`, got `int`" in said
    path.write_text(json.dumps({**result, "window_ns": [0]}))
    assert "window_ns in result.json: expected `array` of length >= 2" in refused(
        place, "report", "run"
    )
    path.write_text("[]")
    assert "result.json: expected `object`, got `array`" in refused(
        place, "report", "run"
    )
    path.write_text(json.dumps({**result, "question": "\udcff?"}))
    assert jdag("report", "run")[0] == 0
    assert "\\udcff?" in (place / "run" / "index.html").read_text()


def test_a_report_of_files_without_end_and_of_endless_times_is_one_line(place: Path):
    assert jdag("run", written(place.parent), "--out", "run")[0] == 0
    result, graph = place / "run" / "result.json", place / "run" / "graph.json"
    text = result.read_text()
    window = json.dumps({**json.loads(text), "window_ns": [0, 1]})
    result.write_text(window.replace("[0, 1]", f"[0, 1{'0' * 400}]"))
    assert "expected a folder that `jdag run` wrote; O" in refused(
        place, "report", "run"
    )
    result.write_text(text)
    graph.unlink()
    graph.symlink_to("/dev/zero")
    assert "graph.json: this is not a regular" in refused(place, "report", "run")
    os.truncate(result, 1 << 33)
    assert "result.json: this file has more than 268,435" in refused(
        place, "report", "run"
    )


@pytest.mark.parametrize("name", ["result.json", "graph.json", "trace.jsonl"])
def test_a_report_of_deeply_nested_files_is_one_line_and_2(place: Path, name: str):
    assert jdag("run", written(place.parent), "--out", "run")[0] == 0
    path = place / "run" / name
    for depth in (400, 100_000):
        path.write_text("[" * depth + "]" * depth)
        said = refused(place, "report", "run")
        assert "expected a folder that `jdag run` wrote; " in said
    assert jdag("run", written(place.parent), "--out", "run")[0] == 0


def test_a_report_writes_the_trace_for_other_tools(place: Path):
    assert jdag("run", written(place.parent), "--json")[0] == 0
    folder = place / "runs" / "mine"
    before = {path.name for path in folder.glob("[!.]*")}
    said = ""
    for formats in (["perfetto"], ["chakra", "goal"]):  # The first one stays.
        given = [f"--trace-format={name}" for name in formats]
        code, printed, _ = jdag("report", folder, *given)
        assert code == 0
        said += printed
    workers = json.loads((folder / "result.json").read_text())["workers"]
    files = {f"trace.{rank}.et" for rank in range(len(workers))}
    made = {path.name for path in folder.glob("[!.]*")}
    assert made == before | files | {"trace.pftrace", "trace.goal"}
    assert all([f"trace: {folder / name}\n" in said for name in made - before])
    allowed = "expected one of perfetto, chakra, goal"
    assert allowed in refused(place, "report", folder, "--trace-format", "vcd")
    said = refused(place, "report", folder, "--trace-format", "torch")
    why = "jdag: trace format 'torch': expected a run with a schedule, but this run"
    assert said.startswith(why)
    assert made == {path.name for path in folder.glob("[!.]*")}
    (folder / "trace.goal").unlink()
    given = [f"--trace-format={name}" for name in ("torch", "goal", "perfetto")]
    code, printed, said = jdag("report", folder, *given)
    assert code == 2 and said.startswith(why) and said.count("\n") == 1
    assert f"trace: {folder / 'trace.goal'}\n" in printed
    assert made == {path.name for path in folder.glob("[!.]*")}
