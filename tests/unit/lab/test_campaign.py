"""The command `jdag explore`: over processes, interrupted; failures repeated."""

import re
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import pytest
from typer.testing import CliRunner

from jdag.cli import exploring
from jdag.cli.commands import app
from jdag.engine import worker_pass
from jdag.lab import campaign as campaigns
from jdag.lab.campaign import campaign
from jdag.runtime.trace import read_trace

CHAIN = "scenarios/chain.toml"


def command(*words):
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exception is None or isinstance(done.exception, SystemExit)
    return done.exit_code, done.output


def test_the_command_explores_a_scenario():
    code, said = command("explore", CHAIN, "--runs", 5, "--strategy", "pct:2")
    counts, bound, covered, verdict = said.splitlines()
    assert code == 0 and verdict == "all runs are right"
    assert re.fullmatch("5 runs, 5 orders, [0-9,]+ choice points", counts)
    said = (
        r"each run finds a bug of depth 2 with probability at least 1/[0-9,]+ \(\d+ c"
    )
    assert re.match(said, bound) and covered.endswith(
        " reached (--coverage names the others)"
    )
    code, said = command("explore", CHAIN, "--runs", 1, "--coverage")
    assert "1 run, 1 order, " in said and " reached, but not:\n  owner, open: " in said


def test_the_command_writes_a_run_that_is_wrong_and_repeats_it(tmp_path):
    bug, file = tmp_path / "bug.json", fan_out(tmp_path)
    x64 = not jax.config.jax_enable_x64  # type: ignore[attr-defined]
    file.write_text(f"x64 = {str(x64).lower()}\n{file.read_text()}")
    with mock.patch.object(worker_pass, "sorted", list, create=True):
        options = "--runs", 100, "--out", bug
        code, said = command("explore", file, *options)
        assert code == 1 and "wrong: run" in said and f"jdag replay {bug}" in said
        code, said = command("replay", bug, "--trace", tmp_path / "trace.jsonl")
        assert len(read_trace(tmp_path / "trace.jsonl")) > 20
        assert code == 1 and "wrong: the result's bits differ" in said
        code, told = command("replay", bug, "--trace", tmp_path / "none" / "trace")
        assert code == 2 and told.startswith(
            said
        )  # What was run is printed all the same.
        assert "the digest differs" not in said
    code, said = command("replay", bug, file)
    assert code == 0 and "the digest differs" in said and "the run is right" in said
    assert any(line.startswith("> ") for line in said.splitlines())
    assert "delayed until no other event was possible" in said
    assert said.split("\n")[0].split() == ["w0", "w1", "w2", "w3", "w4", "w5"]


def test_where_a_wrong_run_is_to_be_written_is_checked_before_the_first_run(tmp_path):
    for out in (tmp_path / "none" / "bug.json", tmp_path, CHAIN + "/bug.json"):
        with mock.patch.object(exploring, "campaign") as ran:
            code, said = command("explore", CHAIN, "--out", out)
        assert code == 2 and not ran.called
        assert said.startswith(f"jdag: --out = '{out}': expected the path of a file")
        assert said.count("\n") == 1


def test_a_wrong_run_that_cannot_be_written_is_printed(tmp_path):
    bug, file = tmp_path / "bug.json", fan_out(tmp_path)
    full = OSError(28, "No space left on device")
    with (
        mock.patch.object(worker_pass, "sorted", list, create=True),
        mock.patch.object(Path, "write_text", side_effect=full),
    ):
        code, said = command("explore", file, "--out", bug)
    assert code == 2 and "wrong: run" in said
    assert said.endswith(f"jdag: {bug}: No space left on device\n")


WANTED = {"values": "abstract", "strategy": "pct:2", "faults": {"drop": 1}}


def shape(report):
    return str(report), [*report.seen], report.reached


@pytest.mark.second
def test_a_report_is_the_same_for_any_number_of_processes_and_after_an_end(tmp_path):
    whole = campaign(Path(CHAIN), WANTED, runs=60)
    spread = campaign(Path(CHAIN), WANTED, runs=60, jobs=3)
    assert shape(spread) == shape(whole) and whole.runs == 60

    def end(runs):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        campaign(Path(CHAIN), WANTED, runs=60, folder=tmp_path, show=end)
    shown: list[int] = []
    with mock.patch.object(campaigns, "attempt", wraps=campaigns.attempt) as attempt:
        after = campaign(
            Path(CHAIN), WANTED, runs=60, folder=tmp_path, show=shown.append
        )
    assert shape(after) == shape(whole)
    assert attempt.call_count == 2 and shown == [25, 50, 60]


def test_an_exhaustive_search_goes_on_where_it_was_interrupted(tmp_path):
    wanted = {"values": "abstract", "strategy": "exhaustive", "faults": {}}
    whole = campaign(Path(CHAIN), wanted, runs=60)
    file = tmp_path / "runs.jsonl"
    campaign(Path(CHAIN), wanted, runs=60, folder=tmp_path)
    about, first, *_ = file.read_text().splitlines()
    file.write_text(f"{about}\n{first}\n")
    assert shape(campaign(Path(CHAIN), wanted, runs=60, folder=tmp_path)) == shape(
        whole
    )
    assert whole.orders == whole.runs


def test_an_exhaustive_search_that_stops_at_max_runs_does_not_say_that_it_is_over():
    wanted = {"values": "abstract", "strategy": "exhaustive:5", "faults": {}}
    report = campaign(Path(CHAIN), wanted, runs=60)
    assert report.runs + report.redundant == 5
    assert str(report.bound).startswith("orders remain")


def fan_out(folder):
    text = Path("scenarios/fan_out_24.toml").read_text()
    text = text.replace("workers = 25", "workers = 6").replace(
        "calls = 24", "calls = 5"
    )
    path = folder / "fan_out.toml"
    path.write_text(text)
    return path


def test_the_first_failure_is_that_of_the_lowest_run_in_whatever_order_chunks_end(
    tmp_path,
):
    def backwards(attempt, path, chunks, jobs, on):
        for at, chunk in reversed(chunks.items()):
            yield at, attempt(path, chunk)

    wanted: Any = {"values": None, "strategy": "random:1", "faults": {}}
    with (
        mock.patch.object(worker_pass, "sorted", list, create=True),
        mock.patch.object(campaigns, "_CHUNK", 2),
    ):
        first: Any = campaign(fan_out(tmp_path), wanted, runs=8)
        with mock.patch.object(campaigns, "replies", backwards):
            report: Any = campaign(fan_out(tmp_path), wanted, runs=8)
    assert first.failure.run + 1 == first.runs < 8
    assert shape(report) == shape(first)


def test_a_folder_of_another_exploration_is_refused(tmp_path):
    options = "--runs", 1, "--values", "abstract", "--resume", tmp_path
    code, _ = command("explore", CHAIN, *options)
    assert code == 0
    code, said = command("explore", CHAIN, *options, "--strategy", "pct")
    assert code == 2 and "this folder differs in: strategy" in said
    with mock.patch.object(campaigns, "FORMAT", 0):  # Of another version.
        code, other = command("explore", CHAIN, *options)
    assert code == 2 and "this folder differs in: format" in other
    assert said.startswith("jdag: --resume = ") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explore", CHAIN, "--jobs", "0"], "--jobs = '0': expected an integer >= 1"),
        (
            ["explore", CHAIN, "--jobs", "2", "--strategy", "exhaustive"],
            "--jobs = 2: expected one process with exhaustive",
        ),
        (["explore", CHAIN, "--runs", "0"], "--runs = '0': expected an integer >= 1"),
        (["explore", CHAIN, "--runs", "10000001"], "= 10000001: expected an integer"),
        (["explore", CHAIN, "--strategy", "pct:0"], "jdag: depth = 0: expected"),
        (["explore", CHAIN, "--fault", "fire=1"], "jdag: --fault = 'fire': expected"),
        (["explore", CHAIN, "--on", "slurm"], "jdag: --on = 'slurm': expected one o"),
        (
            ["sweep", CHAIN, "--set", "seed=1", "--on", "x"],
            "jdag: --on = 'x': expected",
        ),
        (
            ["explore", CHAIN, "--fault", "crash"],
            "--fault = 'crash': expected KIND=NUMBER",
        ),
        (["explore", CHAIN, "--values", "x"], "jdag: --values = 'x': expected"),
        (["explore", "scenarios/digits.toml"], "expected a program that returns"),
        (["explore", "nowhere.toml"], "nowhere.toml"),
        (["replay", "nowhere.json"], "nowhere.json: No such file"),
        (["replay", CHAIN, CHAIN], "chain.toml is not a run that jdag explore saved"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(words, said):
    code, output = command(*words)
    assert code == 2 and said in output and output.count("\n") == 1
