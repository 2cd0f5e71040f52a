"""The command line: what it prints, what it leaves behind, and its exit codes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from jdag import cli
from tests.scenario_cases import GOOD, scenario_of, written
from tests.test_scenario import BAD

ROOT = Path(__file__).parent.parent
FILES = (
    *("result.json", "trace.jsonl", "timeline.png", "graph.png", "graph.dot"),
    *("index.html", "trace.perfetto.json"),
)
STUCK = "jdag.programs.shapes:dropped_reply"


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one; the scenario lies in another."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


def jdag(*arguments: object):
    """Run the command line in this process: (exit code, stdout, stderr)."""
    done = CliRunner().invoke(cli.app, [str(argument) for argument in arguments])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stdout, done.stderr


def fresh(*arguments: object, **settings: object):
    """Run the command line in a process of its own."""
    command = [sys.executable, "-m", "jdag.cli", *map(str, arguments)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "0"}
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        **settings,
    )  # type: ignore[call-overload]


# ------------------------------------------------------------------------------- run


def test_a_run_prints_its_seed_first_a_table_and_where_its_report_is(place: Path):
    code, out, err = jdag("run", written(place.parent), "--seed", 7)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "seed 7"
    assert "Is it so?" in out
    assert "gradient_difference" in out and "wire_bytes" in out
    assert "met outcome: finished" in out
    assert out.splitlines()[-1] == "report: runs/mine/index.html"


def test_a_run_leaves_everything_in_its_folder_and_nothing_beside_it(place: Path):
    assert jdag("run", written(place.parent))[0] == 0
    left = sorted(path.name for path in (place / "runs" / "mine").iterdir())
    assert left == sorted([*FILES, "graph.json"])
    assert [path.name for path in place.iterdir()] == ["runs"]
    assert [path.name for path in (place / "runs").iterdir()] == ["mine"]
    assert sorted(path.name for path in place.parent.iterdir()) == ["here", "mine.toml"]


def test_the_result_has_every_figure_of_the_table(place: Path):
    code, out, _ = jdag("run", written(place.parent), "--out", "kept")
    assert code == 0
    result = json.loads((place / "kept" / "result.json").read_text())
    for name in result["figures"]:
        assert result["meaning"][name]
        if result["figures"][name] not in (None, []):
            assert name in out
    assert result["gradient_difference"] == result["figures"]["gradient_difference"]
    assert result["seed"] == 0
    assert result["exact"]["bubble"].keys() == result["bubble"].keys() == {"a", "b"}
    assert result["answer"] == "met"
    assert "jax" in result["versions"]


def test_json_is_one_object_and_nothing_else(place: Path):
    code, out, err = jdag("run", written(place.parent), "--json")
    assert (code, err) == (0, "")
    assert out.count("\n") == 1
    assert json.loads(out) == json.loads(Path("runs/mine/result.json").read_text())


def test_a_run_replaces_an_earlier_one(place: Path):
    path = written(place.parent)
    jdag("run", path, "--json")
    (place / "runs" / "mine" / "stale").write_text("")
    assert jdag("run", path, "--json", "--seed", 3)[0] == 0
    assert not (place / "runs" / "mine" / "stale").exists()
    assert json.loads(Path("runs/mine/result.json").read_text())["seed"] == 3
    assert [path.name for path in (place / "runs").iterdir()] == ["mine"]


# ------------------------------------------------------------------------ exit codes


def test_stuck_where_stuck_is_expected_is_0(place: Path):
    program = f'program = "{STUCK}"'
    path = written(place.parent, program=program, outcome='outcome = "stuck"')
    code, out, _ = jdag("run", path)
    assert code == 0
    assert "dropped_reply" in out and "shapes.py" in out


def test_a_wrong_result_is_1_and_says_what_it_is_instead(place: Path):
    code, out, _ = jdag("run", written(place.parent, "messages = 1"))
    assert code == 1
    assert "met outcome: finished" in out
    line = next(line for line in out.splitlines() if line.startswith("not met"))
    assert line.startswith("not met messages: 1 ")
    assert line.rstrip() != "not met messages: 1"
    result = json.loads(Path("runs/mine/result.json").read_text())
    assert result["answer"] == "not met"


def test_stuck_where_it_is_not_expected_is_3(place: Path):
    path = written(place.parent, program=f'program = "{STUCK}"')
    assert jdag("run", path, "--json")[0] == 3
    path = written(
        place.parent, "owed_sends = 1", program=f'program = "{STUCK}"', outcome=""
    )
    assert jdag("run", path, "--json")[0] == 3
    path = scenario_of(place.parent, "player", "[settings]", 'end = "stuck"')
    assert jdag("run", path, "--json")[0] == 3


def test_a_crash_that_is_not_expected_is_1(place: Path):
    crash = '[[faults]]\nkind = "crash"\nworker = "b"\nat_ns = 0'
    assert jdag("run", written(place.parent, crash), "--json")[0] == 1


# ------------------------------------------------------------------------- bad input


def refused(place: Path, *arguments: object) -> str:
    """Run what is to be refused: one line, exit code 2, nothing left behind."""
    before = sorted(path for path in place.parent.rglob("*"))
    code, out, err = jdag(*arguments)
    assert code == 2
    assert err.startswith("jdag: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err + out
    assert sorted(path for path in place.parent.rglob("*")) == before
    return err


@pytest.mark.parametrize("case", BAD)
def test_a_scenario_that_cannot_be_is_one_line_and_2(case: str, place: Path):
    more, replaced, answer = BAD[case]
    path = written(place.parent, *more, **replaced)
    said = refused(place, "run", path)
    assert str(path) in said
    assert answer in said


def test_no_such_scenario_is_one_line_and_2(place: Path):
    assert "nothing.toml: No such file" in refused(place, "run", "nothing.toml")
    assert "nothing.toml: No such file" in refused(place, "check", "nothing.toml")


def test_a_loss_that_is_no_scalar_is_one_line_and_2(place: Path):
    said = refused(place, "run", scenario_of(place.parent, "no_scalar"), "--json")
    assert "of size 3; without a cotangent its size has to be 1" in said


def test_a_folder_that_cannot_be_written_is_one_line_and_2(place: Path):
    path = written(place.parent)
    (place / "file").write_text("")
    for folder in ("file", "file/below", "/proc/nothing/there"):
        said = refused(place, "run", path, "--out", folder)
        assert f"--out = '{folder}': allowed is a folder that can be written" in said


def test_a_folder_with_something_else_in_it_is_left_alone(place: Path):
    (place / "precious").write_text("mine")
    said = refused(place, "run", written(place.parent), "--out", place)
    assert "this one has something else in it" in said
    assert (place / "precious").read_text() == "mine"


def test_options_say_what_is_allowed(place: Path):
    path = written(place.parent)
    for option, value, allowed in (
        ("--driver", "rpc", "allowed is sim"),
        ("--device", "gpu", "allowed is cpu"),
        ("--seed", -1, "allowed is an integer >= 0"),
    ):
        said = refused(place, "run", path, option, value)
        assert f"{option} = " in said and allowed in said


@pytest.mark.parametrize(
    "arguments", [["run"], ["run", "x.toml", "--sed", "3"], ["walk"], ["--no-such"]]
)
def test_a_wrong_command_line_is_one_line_and_2(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    monkeypatch.setattr(sys, "argv", ["jdag", *arguments])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jdag: ") and err.count("\n") == 1


def test_what_is_written_half_is_not_kept(place: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cli, "render", full)
    assert "No space left on device" in refused(place, "run", written(place.parent))


# ------------------------------------------------------------------- check and report


def test_a_run_is_the_same_in_other_processes_under_other_hash_seeds(place: Path):
    done = fresh("check", written(place.parent, "[network]\njitter_ns = 1_000"))
    assert done.returncode == 0, done.stderr
    first, second, verdict = done.stdout.splitlines()
    assert first.split()[-1] == second.split()[-1]
    assert len(first.split()[-1]) == 64
    assert verdict == "the two runs are the same, event by event"
    assert list(place.iterdir()) == []


def test_two_runs_that_differ_are_1(place: Path):
    source = (
        "import os, jax.numpy as jnp\n"
        "from jdag.programs.shapes import chain\n"
        "def mine(workers):\n"
        "    return chain(workers, length=1 + int(os.environ['PYTHONHASHSEED']))\n"
    )
    (place.parent / "differs.py").write_text(source)
    path = written(place.parent, program='program = "differs:mine"')
    done = fresh("check", path)
    assert done.returncode == 1, done.stderr
    assert "differ" in done.stdout


def test_a_check_of_what_cannot_be_played_is_2(place: Path):
    done = fresh("check", scenario_of(place.parent, "no_scalar"))
    assert done.returncode == 2
    assert done.stderr.startswith("jdag: ") and done.stderr.count("\n") == 1


def test_a_report_is_made_again_the_same(place: Path):
    assert jdag("run", written(place.parent), "--json")[0] == 0
    folder = place / "runs" / "mine"
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    for name in ("index.html", "timeline.png", "graph.png", "graph.dot"):
        (folder / name).unlink()
    code, out, _ = jdag("report", folder)
    assert code == 0
    assert "gradient_difference" in out
    after = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert sorted(after) == sorted(before)
    assert [name for name in after if after[name] != before[name]] == []


def test_a_report_of_no_run_is_one_line_and_2(place: Path):
    assert "allowed is a folder that `jdag run` wrote" in refused(place, "report", ".")
    (place / "result.json").write_text("{}")
    (place / "trace.jsonl").write_text("")
    assert "allowed is a folder that `jdag run` wrote" in refused(place, "report", ".")


def test_a_users_own_program_runs_from_any_folder_in_a_process_of_its_own(place: Path):
    other = place.parent / "other"
    other.mkdir()
    (other / "my_programs.py").write_text(
        "import jax.numpy as jnp\n"
        "from jdag.programs import Case\n"
        "def energy(w):\n"
        "    return jnp.sum(w ** 2)\n"
        "def main(workers, *, size: int = 2):\n"
        "    def program(ctx, params):\n"
        "        return ctx.call(workers[1], energy, params['w'])\n"
        "    return Case(program, {'w': jnp.ones(size)}, {'w': workers[0]})\n"
    )
    text = GOOD.replace("jdag.programs.shapes:chain", "my_programs:main")
    (other / "my.toml").write_text(text)
    done = fresh("run", "../other/my.toml", "--json", cwd=place)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["gradient_difference"] == 0
    assert (place / "runs" / "mine" / "index.html").exists()
