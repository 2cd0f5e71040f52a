"""The command line: what it prints, what it leaves behind, and its exit codes."""

import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from jdag.cli import commands as cli
from jdag.cli import running
from tests import ROOT
from tests.tools.command_cases import command as jdag
from tests.tools.scenario_cases import scenario_of, written

FILES = (
    *("result.json", "trace.jsonl", "timeline.png", "graph.png", "graph.dot"),
    *("index.html", "trace.pftrace"),
)
STUCK = "shapes:dropped_reply"
FAST = '[settings]\nmode = "fast"'


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, which is the current one; the scenario lies in another."""
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


PATHS = os.pathsep.join([str(ROOT), str(ROOT / "scenarios")])
FRESH = {**os.environ, "PYTHONPATH": PATHS, "PYTHONHASHSEED": "0"}


def fresh(*arguments: object, **settings: object):
    """Run the command line in a new process."""
    command = [sys.executable, "-m", "jdag", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        env=FRESH,
        check=False,
        **settings,
    )  # type: ignore[call-overload]


# ------------------------------------------------------------------------------- run


def test_a_run_prints_a_summary_and_leaves_files_in_its_folder_alone(place: Path):
    code, out, err = jdag("run", written(place.parent), "--seed", 7)
    assert (code, err) == (0, "")
    assert out.splitlines()[0] == "seed 7"
    assert "Is it so?" in out
    assert "gradient_difference" in out and "wire_bytes" in out
    assert "met outcome: finished" in out
    assert out.splitlines()[-1] == "report: runs/mine/index.html"
    files = sorted(path.name for path in (place / "runs" / "mine").iterdir())
    assert files == sorted([".jdag", *FILES, "graph.json"])
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


def test_functions_are_named_as_tables_of_costs_have_them(place: Path):
    more = ("[devices.functions]", "scale = [5, 6]", "[settings]", "length = 2")
    code, out, err = jdag("run", written(place.parent, *more), "--functions")
    assert (code, err) == (0, "")
    _, _, rows = out.partition("cost in ns")
    lines = [
        line for line in rows.splitlines() if "[5, 6]" in line or "none: 0" in line
    ]
    assert ["shapes:scale(" in line for line in lines] == [True, False]


def test_a_run_replaces_an_earlier_one_but_nothing_that_others_put_there(place: Path):
    path = written(place.parent)
    jdag("run", path, "--json")
    folder = place / "runs" / "mine"
    (folder / "notes.txt").write_text("mine")
    # A run that draws no graph leaves none behind of the one before.
    path = scenario_of(place.parent, "player")
    assert jdag("run", path, "--json", "--seed", 3)[0] == 0
    assert json.loads((folder / "result.json").read_text())["seed"] == 3
    assert (folder / "notes.txt").read_text() == "mine"
    assert not (folder / "graph.png").exists()
    assert os.listdir(folder / ".jdag") == ["lock"]
    assert [path.name for path in (place / "runs").iterdir()] == ["mine"]


def test_a_figure_may_have_the_name_of_what_every_result_says(place: Path):
    path = scenario_of(place.parent, "player", "answer = 42")
    result = json.loads(jdag("run", path, "--json")[1])
    assert result["answer"] == "met"
    assert result["figures"]["answer"] == 42
    # It gives no digest of its own.
    assert len(result["digest"]) == 64


def test_json_is_one_object_without_what_a_program_prints(place: Path):
    (place.parent / "says.py").write_text(
        "from shapes import chain\n"
        "print('imported')\n"
        "def mine(workers):\n"
        "    print('called')\n"
        "    return chain(workers)\n"
    )
    path = written(place.parent, program='program = "says:mine"')
    code, out, err = jdag("run", path, "--json")
    assert (code, err) == (0, "imported\ncalled\n")
    assert out.count("\n") == 1
    assert json.loads(out) == json.loads(Path("runs/mine/result.json").read_text())


def test_a_narrow_table_leaves_out_what_figures_mean(
    place: Path, monkeypatch: pytest.MonkeyPatch
):
    for columns, is_there in (("60", False), ("100", True)):
        monkeypatch.setenv("COLUMNS", columns)
        _, out, _ = jdag("run", written(place.parent), "--out", f"at{columns}")
        assert ("description" in out) is is_there
        assert "gradient_difference" in out
        digest = next(line for line in out.splitlines() if line.startswith("digest: "))
        assert len(digest.split()[1]) == 64


# ------------------------------------------------------------------------ exit codes


def test_stuck_where_stuck_is_expected_is_0(place: Path):
    program = f'program = "{STUCK}"'
    path = written(place.parent, FAST, program=program, outcome='outcome = "stuck"')
    code, out, _ = jdag("run", path)
    assert code == 0
    assert "dropped_reply" in out and "shapes.py" in out


def test_a_wrong_result_is_1_and_says_what_it_is_instead(place: Path):
    more = "messages = 1", 'bubble_min = "1/3"'
    code, out, _ = jdag("run", written(place.parent, *more))
    assert code == 1
    assert "met outcome: finished" in out
    result = json.loads(Path("runs/mine/result.json").read_text())
    assert result["answer"] == "not met"
    assert f"not met messages: 1 (it is {result['messages']})" in out.splitlines()
    assert f"not met bubble_min: 1/3 (it is {result['exact']['bubble_min']})" in out


def test_stuck_where_it_is_not_expected_is_3(place: Path):
    path = written(place.parent, FAST, program=f'program = "{STUCK}"')
    assert jdag("run", path, "--json")[0] == 3
    path = written(
        place.parent,
        "owed_sends = 1",
        FAST,
        program=f'program = "{STUCK}"',
        outcome="",
    )
    assert jdag("run", path, "--json")[0] == 3
    path = scenario_of(place.parent, "player", "[settings]", 'end = "stuck"')
    assert jdag("run", path, "--json")[0] == 3


# ------------------------------------------------------------------------- bad input


def files_below(folder: Path) -> list[Path]:
    paths = sorted(folder.rglob("*"))
    return [path for path in paths if "__pycache__" not in path.parts]


def refused(place: Path, *arguments: object) -> str:
    before = files_below(place.parent)
    code, out, err = jdag(*arguments)
    assert code == 2
    assert err.startswith("jdag: ")
    assert err.count("\n") == 1
    assert "Traceback" not in err + out
    assert files_below(place.parent) == before
    return err


def test_a_scenario_that_cannot_be_is_one_line_and_2(place: Path):
    path = written(place.parent, '[[faults]]\nkind = "crash"\nworker = "a"\nat_ns = 3')
    message = refused(place, "run", path)
    assert f"{path}: faults[0].worker = 'a': expected a worker other" in message


def test_a_scenario_may_begin_with_a_byte_order_mark(place: Path):
    path = written(place.parent)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    code, out, err = jdag("run", path)
    assert (code, err) == (0, "")
    assert "Is it so?" in out


def test_a_folder_that_cannot_be_written_is_one_line_and_2(place: Path):
    path = written(place.parent)
    (place / "file").write_text("")
    (place / "loop").symlink_to("loop")
    odd = ("loop", "a" * 300)
    for folder in ("file", "file/below", "/proc/nothing/there", *odd):
        said = refused(place, "run", path, "--out", folder)
        assert f"--out = {folder!r}: expected a writable folder" in said


def test_options_say_what_is_allowed(place: Path):
    path = written(place.parent)
    for option, value, allowed in (
        ("--driver", "mpi", "expected one of sim, rpc"),
        ("--device", "gpu", "expected cpu; with --driver rpc also gpu, gpu:1"),
        ("--seed", -1, "expected an integer >= 0"),
        ("--seed", "two", "expected an integer >= 0"),
        ("--seed", "9" * 5000, "expected an integer >= 0 with at most 1000 digits"),
    ):
        said = refused(place, "run", path, option, value)
        assert f"{option} = " in said and allowed in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("run", "Missing argument 'file'; see jdag run --help"),
        ("run x.toml --sed 3", "see jdag run --help"),
        ("run x.toml --carrier grpc", "leave it out; sockets carry all"),
        ("walk", "see jdag --help"),
        ("--no-such", "see jdag --help"),
    ],
)
def test_a_wrong_command_line_is_one_line_and_2(
    arguments: str,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture,
):
    monkeypatch.setattr(sys, "argv", ["jdag", *arguments.split()])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jdag: ") and err.count("\n") == 1
    assert message in err


def test_no_command_is_answered_by_help(capsys: pytest.CaptureFixture):
    code, out, err = jdag()
    assert (code, err) == (2, "")
    for command in ("run", "check", "report"):
        line = next(
            line for line in out.splitlines() if line.strip().startswith(command)
        )
        assert line.endswith(".") and not line.endswith("...")


@pytest.mark.parametrize("path", cli.COMMANDS)
def test_help_has_the_first_line_of_each_command(path: str):
    module, name = path.split(".")
    function = getattr(import_module(f"jdag.cli.{module}"), name)
    assert cli.COMMANDS[path] == (inspect.getdoc(function) or "").partition("\n")[0]
    code, out, err = jdag(name.replace("_", "-"), "--help")
    assert (code, err) == (0, "")
    assert cli.COMMANDS[path] in " ".join(out.split())


def test_the_version_can_be_asked_for():
    code, out, _ = jdag("--version")
    assert code == 0
    assert out.startswith("jdag ") and "JAX " in out


def test_an_interrupted_run_leaves_nothing(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "run_scenario", interrupted)
    monkeypatch.setattr(sys, "argv", ["jdag", "run", str(written(place.parent))])
    with pytest.raises(KeyboardInterrupt):
        cli.main()
    assert capsys.readouterr().err == ""
    assert list(place.iterdir()) == []


def test_what_is_written_half_is_not_kept(place: Path, monkeypatch: pytest.MonkeyPatch):
    def full(*args: object, **options: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(running, "render", full)
    assert "No space left on device" in refused(place, "run", written(place.parent))


# ------------------------------------------------------------------- check and report


@pytest.mark.second
def test_a_run_is_the_same_in_other_processes_under_other_hash_seeds(place: Path):
    done = fresh("check", written(place.parent, "[network]\njitter_ns = 1_000"))
    assert done.returncode == 0, done.stderr
    first, second, verdict = done.stdout.splitlines()
    assert first.split()[-1] == second.split()[-1]
    assert len(first.split()[-1]) == 64
    assert verdict == "the two runs are the same, event by event"
    assert list(place.iterdir()) == []


@pytest.mark.second
def test_two_runs_that_differ_by_the_order_of_a_set_are_1(place: Path):
    (place.parent / "unordered.py").write_text(
        "import jax.numpy as jnp\n"
        "from jdag.scenario import Case\n"
        "from shapes import scale, total\n"
        "def mine(workers):\n"
        "    def program(ctx, params):\n"
        "        value = params['w']\n"
        "        for worker in set(workers):\n"
        "            value = ctx.call(worker, scale, params['w'], value)\n"
        "        return ctx.call(workers[0], total, value)\n"
        "    print('a program may print')\n"
        "    return Case(program, {'w': jnp.ones(3)}, {'w': workers[0]})\n"
    )
    names = ", ".join(f'"worker{number}"' for number in range(6))
    path = written(
        place.parent,
        program='program = "unordered:mine"',
        workers=f"workers = [{names}]",
    )
    done = fresh("check", path)
    assert done.returncode == 1, done.stderr
    first, second, verdict = done.stdout.splitlines()
    assert first.split()[-1] != second.split()[-1]
    assert verdict == "the two runs differ"


def test_a_file_may_have_any_name(place: Path):
    path = Path(os.fsdecode(b"a\xff.toml"))
    path.write_bytes(written(place.parent).read_bytes())
    code, _, err = jdag("run", path, "--out", "run")
    assert (code, err) == (0, "")
    code, out, err = jdag("run", path, "--out", os.fsdecode(b"r\xff"), "--graph")
    assert (code, err) == (0, "")
    assert "report: 'r\\udcff/index.html'" in out
    result = json.loads((place / "run" / "result.json").read_text())
    assert result["command"] == r"jdag run 'a\udcff.toml' --seed 0"
