"""Names by which `jdag replay` finds what was explored in Python."""

import os
import subprocess
import sys
from typing import Any

import jax.numpy as jnp
import pytest

import jdag
from jdag.errors import ScenarioError
from jdag.lab.exploration import sound
from jdag.lab.places import object_at, place_of
from jdag.scenario import Case
from tests import ROOT
from tests.unit.lab.test_campaign import command


def program(ctx, params):
    return ctx.call("b", jnp.sum, params["w"])


CASE = Case(program, {"w": jnp.ones(3)}, {"w": "b"})


def never(run):
    raise AssertionError("no run is [right]")


def saved(path, explored=CASE, property=never, change=("", "")):
    failure: Any = jdag.explore(explored, [*"ab"], property, runs=1).failure
    failure.save(path)
    path.write_text(path.read_text().replace(*change))
    return path


def test_what_a_module_has_at_top_level_is_found_by_its_name():
    for thing in (CASE, never, sound):
        place = place_of(thing)
        assert object_at(place) is thing and place.partition(":")[0] in sys.modules
    assert place_of(lambda run: False) == ""


def test_a_run_that_was_explored_in_python_is_repeated_by_the_command(tmp_path):
    bug = saved(tmp_path / "bug.json")
    code, said = command("replay", bug)
    assert code == 1 and "\nwrong: no run is [right]\n" in said
    assert (
        "the digest differs" not in said
        and "0 . * deliver a -> b (1: Assign 0.1)" in said
    )
    code, said = command("replay", saved(bug, property=lambda run: False))
    assert (
        code == 1 and "the program cannot be imported; it reported: <lambda> " in said
    )
    path = saved(bug, Case(program, CASE.params, CASE.placement), lambda run: False)
    assert (
        "does not contain the import path of tests.unit.lab.test_places:program"
        in command("replay", path)[1]
    )
    code, said = command("replay", path, "tests.unit.lab.test_places:CASE")
    assert code == 1 and "it reported: <lambda>" in said


def test_an_error_that_was_not_in_every_order_is_repeated(tmp_path):
    count: list[int] = []

    def third(cluster):
        count.append(1)
        cluster.put("b", jnp.ones(3))
        if len(count) == 3:
            raise KeyError("now")

    bug = tmp_path / "bug.json"
    failure: Any = jdag.explore(third, [*"ab"], runs=5).failure
    failure.save(bug)
    count.clear()
    count.append(1)
    run, _ = jdag.replay(bug, third)
    assert isinstance(run.error, KeyError)


SCRIPT = """
import jax, jax.numpy as jnp, jdag

def total(w):
    return jnp.sum(jnp.sin(w))

def train(cluster):
    w = cluster.put("b", jnp.ones(3))
    with cluster.context() as ctx:
        ctx.backward(ctx.call("b", total, w))
        return ctx.gradient(w)

def calm(run):
    return not any("total" in str(one.detail) for one in run.trace)

if __name__ == "__main__":
    jdag.explore(train, ["a", "b"], calm, runs=9).failure.save("bug.json")
"""


@pytest.mark.second
def test_what_a_script_has_above_its_guard_is_found_with_the_same_names(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    given: Any = {"cwd": tmp_path, "env": {**os.environ, "PYTHONPATH": str(ROOT)}}
    subprocess.run([sys.executable, "script.py"], check=True, **given)
    replay = [sys.executable, "-m", "jdag", "replay", "bug.json"]
    done = subprocess.run(replay, capture_output=True, text=True, check=False, **given)
    assert done.returncode == 1, done.stderr
    assert done.stdout.endswith("\nwrong: calm is False\n")
    assert "the digest differs" not in done.stdout
    (tmp_path / "other").mkdir()
    replay[-1] = str(tmp_path / "bug.json")
    given["cwd"] = tmp_path / "other"
    lost = subprocess.run(replay, capture_output=True, text=True, check=False, **given)
    assert lost.returncode == 2 and lost.stderr.count("\n") == 1
    named = f"jdag replay {replay[-1]} PATH:NAME"
    assert "script.py does not exist in " in lost.stderr and named in lost.stderr
    replay.append("../script.py:train")
    again = subprocess.run(replay, capture_output=True, text=True, check=False, **given)
    assert (again.returncode, again.stdout) == (1, done.stdout), again.stderr


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("nowhere:case", "program = 'nowhere:case': expected .*No module named"),
        (
            "tests.unit.lab.test_places:CAS",
            r"has no attribute 'CAS' \(did you mean CASE\?\)",
        ),
        (
            f"{__file__}:CASE",
            "test_places.py has no `if __name__ == ",
        ),
        ("nowhere.py:CASE", r"nowhere\.py does not exist in .*: run this com"),
    ],
)
def test_what_is_not_found_is_one_line(place, said):
    with pytest.raises(ScenarioError, match=said):
        object_at(place)


def test_a_run_of_a_drawn_program_is_for_pytest(tmp_path):
    place = place_of(CASE)
    bug = saved(tmp_path / "bug.json", change=(f'"{place}"', '"drawn:{}"'))
    code, said = command("replay", bug)
    assert code == 2 and f"command pytest TEST --jdag-replay {bug}" in said
