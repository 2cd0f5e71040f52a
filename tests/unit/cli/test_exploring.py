"""The commands `jdag explore` and `jdag replay` where a program or a file is wrong."""

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import jdag
from jdag.errors import ScenarioError
from jdag.scenario import Case
from tests.tools.error_texts import fails_with
from tests.unit.lab.test_campaign import command

RAISES = """
import jax.numpy as jnp
from jdag.scenario import Case

def made(workers):
    def program(ctx, params):
        raise {what}
    return Case(program, params={{"w": jnp.ones(3)}}, placement={{"w": workers[1]}})
"""
LOADED = (
    '# Is it right?\nname = "boom"\nprogram = "{}:made"\nworkers = ["a", "b"]\n'
    '[expect]\noutcome = "finished"\n'
)


def fine(cluster):
    cluster.put("b", jnp.ones(3)).fetch()


def raises(cluster):
    raise ValueError("mine")


def scenario(folder: Path, what: str) -> Path:
    (folder / f"{folder.name}.py").write_text(RAISES.format(what=what))
    path = folder / "boom.toml"
    path.write_text(LOADED.format(folder.name))
    return path


def saved(path: Path, **changes: Any) -> Path:
    report = jdag.explore(fine, [*"ab"], lambda run: False, runs=1)
    assert report.failure is not None
    report.failure.save(path)
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return path


@pytest.mark.parametrize("jobs", [1, pytest.param(2, marks=pytest.mark.second)])
@pytest.mark.parametrize(
    "what",
    [
        pytest.param("ValueError('no such')", marks=pytest.mark.second),
        "SystemExit('no such')",
    ],
)
def test_a_program_that_raises_in_every_order_is_one_line(tmp_path, what, jobs):
    path = scenario(tmp_path, what)
    code, said = command("explore", path, "--runs", 30, "--jobs", jobs)
    raised = f"{what.partition('(')[0]}: no such ({tmp_path.name}.py:7 in program)"
    assert code == 2 and said == (
        f"jdag: {path}: program = '{tmp_path.name}:made': expected one that does not "
        f"raise; it raised {raised}\n"
    )


def test_a_program_that_now_raises_in_every_order_is_repeated_in_one_line(tmp_path):
    bug = saved(tmp_path / "bug.json")
    code, said = command("replay", bug, f"{__name__}:raises")
    assert code == 2 and said.count("\n") == 1
    assert said.startswith(f"jdag: program = '{__name__}:raises': expected one that ")
    assert "it raised ValueError: mine (test_exploring.py:" in said


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("raises", "one that does not raise; it raised ValueError"),
        ("gone", "module:function"),
    ],
)
def test_a_property_that_raises_or_is_gone_is_told_in_one_line(tmp_path, name, said):
    bug = saved(tmp_path / "bug.json", property=f"{__name__}:{name}")
    code, told = command("replay", bug, f"{__name__}:fine")
    assert code == 2 and told.count("\n") == 1
    assert told.startswith(f"jdag: property = '{__name__}:{name}': expected {said}")


def test_what_is_given_to_a_failure_is_checked(tmp_path):
    failure = jdag.explore(fine, [*"ab"], lambda run: False, runs=1).failure
    assert failure is not None
    given: Any = 5
    runs: Any
    for runs in (0, "x", True):
        with fails_with(ScenarioError, "cli.runs_is_no_integer"):
            failure.shrink(runs)
    with fails_with(ScenarioError, "cli.folder_of_file_is_missing"):
        failure.save(tmp_path / "none" / "x.json")
    for use in (failure.save, lambda path: jdag.replay(path, fine)):
        with fails_with(ScenarioError, "cli.path_is_no_path"):
            use(given)


@pytest.mark.parametrize(
    "wrong",
    [
        {"choices": ["a"]},
        {"workers": [1]},
        {"values": "x"},
        {"faults": {"fire": 1}},
        {"held": [1]},
        {"steps": [1]},
    ],
)
def test_a_saved_run_that_is_broken_is_told_with_its_file_and_key(tmp_path, wrong):
    bug = saved(tmp_path / "bug.json", **wrong)
    code, said = command("replay", bug, f"{__name__}:fine")
    (key,) = wrong
    assert code == 2 and said.count("\n") == 1
    assert said.startswith(f"jdag: {bug} is not a run that jdag explore saved: {key}")


def test_a_scenario_that_is_not_here_is_to_be_given(tmp_path):
    bug = saved(tmp_path / "bug.json", scenario="none/boom.toml")
    code, said = command("replay", bug)
    assert code == 2 and said.startswith("jdag: none/boom.toml does not exist in ")
    assert said.endswith(f"or give the path: jdag replay {bug} FILE\n")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ((None, {"w": 2.0}, {"w": "a"}), "program = None: expected a function of"),
        ((fine, None, {}), "params = None: expected arrays by name"),
        ((fine, {"w": 2.0}, {}), "placement = {}: expected the worker of each of"),
        ((fine, {"w": 2.0}, "main"), "placement = 'main': expected the worker of"),
    ],
)
def test_a_case_that_is_unusable_is_one_line(given, said):
    with pytest.raises(ScenarioError, match=said):
        jdag.explore(Case(*given), ["a", "b"])


def test_a_property_that_returns_neither_a_bool_nor_none_is_told():
    with fails_with(ScenarioError, "cli.property_returns_a_number"):
        jdag.explore(fine, ["a", "b"], lambda run: 0, runs=5)
