"""The command `jdag sweep`: values, exit codes, what it prints and writes."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from pyarrow.parquet import read_table

from jdag.cli import sweeping
from jdag.cli.sweeping import _values_of
from jdag.lab import parquet
from tests import ROOT
from tests.tools.command_cases import command
from tests.tools.scenario_cases import scenario_of, written


def sweep(path: Path, *arguments: object) -> tuple[int, str, str]:
    """Run the command in this process and in one job: exit code, stdout, stderr."""
    return command("sweep", path, "--jobs", 1, *arguments)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("network.latency_ns=1e3,2_000,3", [1_000, 2_000, 3]),
        ("a=1.5,1e-3,1.0", [1.5, 0.001, 1.0]),
        ("schedule=gpipe,1f1b,zb_h1", ["gpipe", "1f1b", "zb_h1"]),
        ("compile=true,false", [True, False]),
        ("a=[1, 2],[[3],[4, 5]]", [[1, 2], [[3], [4, 5]]]),
        ('a="x,y",{ b = 1, c = 2 },"3"', ["x,y", {"b": 1, "c": 2}, "3"]),
        ("a=2026-01-02,a = b", ["2026-01-02", "a = b"]),
    ],
)
def test_values_are_those_of_toml_and_names_need_no_quotes(text: str, values: Any):
    ((_, found),) = _values_of([text]).items()
    assert found == values
    assert [type(value) for value in found] == [type(value) for value in values]


@pytest.mark.parametrize("settings", [["seed"], ["seed="], ["seed=1,"], ["a=1", "a=2"]])
def test_a_setting_without_values_or_twice_is_one_line_and_2(
    settings: list[str], tmp_path: Path
):
    options = [part for text in settings for part in ("--set", text)]
    code, out, err = sweep(written(tmp_path), *options)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert "expected a key with its values" in err


def test_a_sweep_prints_its_counts_and_files_and_the_second_call_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    options = ("--set", "settings.length=2,3", "--set", "seed=1,2,3")
    code, out, err = sweep(written(tmp_path), *options)
    assert (code, err) == (0, "")
    assert "6/6" in out and "\x1b" not in out and "\r" not in out
    assert out.splitlines()[-2:] == ["6 runs: 6 met", "runs/mine-sweep/sweep.csv"]
    before = Path("runs/mine-sweep/sweep.csv").read_bytes()
    assert before.count(b"\n") == 7
    monkeypatch.setattr("jdag.lab.sweep._attempt", None)
    code, out, _ = sweep(written(tmp_path), *options)
    assert code == 0 and "6/6" in out
    assert Path("runs/mine-sweep/sweep.csv").read_bytes() == before


def test_exit_codes_are_those_of_a_run(tmp_path: Path):
    path = written(tmp_path, "messages = { max = 40 }")
    code, out, _ = sweep(path, "--set", "settings.length=2,20")
    assert code == 1 and "2 runs: 1 met, 1 not met" in out
    code, out, _ = sweep(
        scenario_of(tmp_path, "player"), "--set", "settings.end=good,stuck",
        "--out", "stuck",
    )  # fmt: skip
    assert code == 3 and "2 runs: 1 met, 1 stuck" in out
    code, out, err = sweep(path, "--set", "network.latency_nss=3")
    assert code == 2 and err.startswith(f"jdag: {path}: network.latency_nss = 3: ")
    assert out == "" and err.count("\n") == 1


def test_pictures_and_parquet_are_written_beside_the_table(tmp_path: Path):
    code, out, _ = sweep(
        written(tmp_path), "--set", "seed=5", "--set", "network.latency_ns=1,9",
        "--set", "settings.length=2,3", "--parquet", "--plot", "makespan_ns",
        "--plot", "bubble_max", "--out", "out",
    )  # fmt: skip
    assert code == 0
    files = ["sweep.csv", "sweep.parquet", "makespan_ns.png", "bubble_max.png"]
    assert out.splitlines()[-4:] == [f"out/{name}" for name in files]
    assert imread("out/makespan_ns.png").shape[1] == 1040
    rows = read_table("out/sweep.parquet").to_pylist()
    lines = Path("out/sweep.csv").read_text().splitlines()
    assert len(rows) == len(lines) - 1 == 4
    assert list(rows[0]) == lines[0].split(",")
    place = lines[0].split(",").index("digest")
    assert [row["digest"] for row in rows] == [
        line.split(",")[place] for line in lines[1:]
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--plot", "makespn_ns"), ", makespan_ns (did you mean makespan_ns?)"),
        (("--jobs", "0"), "Invalid value for '--jobs'"),
    ],
)
def test_a_wrong_option_is_one_line_and_2_before_anything_runs(
    options: tuple[str, ...], said: str, tmp_path: Path
):
    code, _, err = sweep(written(tmp_path), "--set", "seed=1", *options)
    assert code == 2 and said in err
    assert not Path("runs").exists()


def test_a_picture_has_a_line_for_each_combination_of_the_other_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[Any] = []

    def draw(path: Path, lines: Any, failed: Any, **said: str) -> None:
        assert failed == {}
        drawn.append((path.name, lines, said))

    monkeypatch.setattr(sweeping, "draw_lines", draw)
    options = ["--set", "seed=7", "--set", "settings.length,settings.size=2,3"]
    options += ["--set", "network.latency_ns=1_000_001,1_000_002"]
    code, *_ = sweep(written(tmp_path), *options, "--plot", "payload_bytes")
    ((name, lines, said),) = drawn
    assert (code, name) == (0, "payload_bytes.png")
    assert said == {
        "title": "mine: payload_bytes",
        "x": "settings.length",
        "y": "payload_bytes",
        "named": "network.latency_ns",
    }
    assert list(lines) == ["1000001", "1000002"]
    assert [[x for x, _ in points] for points in lines.values()] == [[2, 3], [2, 3]]
    few, many = (sent for _, sent in lines["1000001"])
    assert 0 < few < many


def test_a_run_that_failed_unexpectedly_is_drawn_apart_by_its_outcome(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    drawn: list[Any] = []
    monkeypatch.setattr(sweeping, "draw_lines", lambda *args, **_: drawn.append(args))
    for expected, apart in (("finished", ["stuck"]), ("stuck", [])):
        path = scenario_of(tmp_path, "player", outcome=f'outcome = "{expected}"')
        options = ("--set", "settings.end=good,stuck", "--out", expected)
        sweep(path, *options, "--plot", "makespan_ns")
        _, lines, failed = drawn.pop()
        assert [x for x, _ in lines[""]] == ["good", "stuck"][: 2 - len(apart)]
        assert [(name, [x for x, _ in of]) for name, of in failed.items()] == [
            (name, [name]) for name in apart
        ]


def test_a_figure_without_numbers_is_refused(tmp_path: Path):
    code, _, err = sweep(written(tmp_path), "--set", "seed=1", "--plot", "outcome")
    assert code == 2 and err.count("\n") == 1
    assert err.startswith("jdag: --plot = 'outcome': expected a metric that is a num")


def test_without_the_extra_parquet_is_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(parquet, "pyarrow", None)
    code, _, err = sweep(written(tmp_path), "--set", "seed=1", "--parquet")
    assert code == 2 and "pip install 'jdag[sweep]'" in err
    assert not Path("runs").exists()


def test_what_programs_print_is_kept_out_of_the_output(tmp_path: Path):
    (tmp_path / "tells.py").write_text(
        "from shapes import chain\n"
        "def mine(workers):\n"
        "    print('called')\n"
        "    return chain(workers)\n"
    )
    path = written(tmp_path, program='program = "tells:mine"')
    code, out, err = sweep(path, "--set", "seed=1,2")
    assert code == 0 and "called" not in out and "called" in err


@pytest.mark.second
def test_an_interrupt_ends_all_processes_and_keeps_the_rows(tmp_path: Path):
    path = written(tmp_path)
    words = [sys.executable, "-m", "jdag", "sweep", str(path), "--jobs", "2"]
    words += ["--set", "settings.length=2,400,401,402,403", "--out", "out"]
    paths = os.pathsep.join([str(ROOT), str(ROOT / "scenarios")])
    with subprocess.Popen(
        words, env={**os.environ, "PYTHONPATH": paths}, process_group=0,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as running:  # fmt: skip
        while not (Path("out") / "sweep.csv").exists():
            assert running.poll() is None
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text()
        os.killpg(running.pid, signal.SIGINT)  # As a terminal does.
        _, err = running.communicate(timeout=60)
    assert (running.returncode, err) == (130, "jdag: interrupted\n")
    assert len(children.split()) == 2
    assert not any([Path(f"/proc/{child}").exists() for child in children.split()])
    assert len(Path("out/sweep.csv").read_text().splitlines()) >= 2
