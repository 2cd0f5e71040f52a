"""A scenario is played as it says; what its program lets pass is its outcome."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jdag.errors import ScenarioError
from jdag.scenario import load
from jdag.scenario.run_scenario import run_scenario
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import Player, scenario_of, written


def played(path: Path):
    return run_scenario(load(path), lambda *_: None)


def test_a_good_scenario_is_met_and_is_reported_on(tmp_path: Path):
    answer = played(written(tmp_path))
    assert answer.met
    assert answer.figures["gradient_difference"] < 1e-12
    assert len(answer.cluster.trace) > 0
    assert answer.window == (0, answer.figures["virtual_time_ns"])
    assert answer.drawings["a"].nodes


def test_progress_is_shown_seed_by_seed(tmp_path: Path):
    seen = []
    scenario = load(written(tmp_path, seeds="seeds = 3"))
    run_scenario(scenario, lambda done, total, numbers: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]


def test_what_is_checked_is_computed_at_the_highest_precision(tmp_path: Path):
    """By all threads, and only meanwhile: a GPU may round float32 to TF32 otherwise."""
    seen: list[str] = []

    def product(x: Any) -> Any:
        return x @ x

    class Looks(Player):
        def play(self, run: Any) -> Any:
            with ThreadPoolExecutor(1) as pool:
                made = pool.submit(jax.make_jaxpr(product), jnp.ones((3, 3)))
                seen.append(str(made.result()))
            return super().play(run)

    scenario = load(scenario_of(tmp_path, "player"))
    played_by = replace(scenario, player=Looks(("a", "b"), "good"))
    run_scenario(played_by, lambda *_: None).cluster.close()
    assert "HIGHEST" in seen[0]
    assert "HIGHEST" not in str(jax.make_jaxpr(product)(jnp.ones((3, 3))))


def test_what_a_player_lets_pass_is_the_outcome(tmp_path: Path):
    more = ("answer = 42", "[settings]", 'end = "stuck"')
    answer = played(scenario_of(tmp_path, "player", *more))
    assert answer.figures["outcome"] == "stuck"
    assert answer.figures["error"] == "UnusedSendError"
    assert "scenario_cases:times" in answer.figures["error_message"]
    assert [one.met for one in answer.judged] == [False, False]
    assert len(answer.cluster.trace) > 0


@pytest.mark.parametrize(
    ("end", "said"),
    [
        ("nothing", "result of play.run. = None: expected a mapping from"),
        ("an object", "figure answer = <object.*: expected a number, a string"),
        ("a number for a name", "name of a figure = 3: expected a string"),
        ("keeps a word", "run.keep: cluster = 'word': expected a cluster"),
        ("lost", "program = .*: expected a program that selects a cluster to report"),
        ("window", r"run.keep: window = \(3, 2\): expected two integers of nanos"),
        ("drawn", "run.draw: drawings = 3: expected the result of ctx.graph.. or"),
    ],
)
def test_what_a_player_gives_has_to_be_usable(end: str, said: str, tmp_path: Path):
    with pytest.raises(ScenarioError, match=f"mine.toml: {said}"):
        played(scenario_of(tmp_path, "player", "[settings]", f'end = "{end}"'))


def test_arrays_among_figures_are_numbers(tmp_path: Path):
    more = ("answer = 42", "[settings]", 'end = "arrays"')
    answer = played(scenario_of(tmp_path, "player", *more))
    assert answer.met
    assert answer.figures["all"] == [0, 1, 2]
    assert type(answer.figures["answer"]) is float


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("no_scalar", r"mine.toml: .*float64\[3\], of size 3; .* must be 1"),
        ("raises", r"raised AttributeError.*\(scenario_cases.py:\d+ in program\)"),
    ],
)
def test_a_program_without_roots_or_that_raises_is_refused(
    program: str, message: str, tmp_path: Path
):
    with pytest.raises(ScenarioError, match=message):
        played(scenario_of(tmp_path, program))


def test_a_program_whose_error_has_no_text_is_a_play_that_failed(tmp_path: Path):
    answer = played(scenario_of(tmp_path, "raises_later_without_text"))
    assert answer.figures["outcome"] == "failed"
    assert answer.figures["error_message"] == "its __str__ raises ValueError"


@pytest.mark.parametrize("where", ["factory", "program"])
def test_a_program_that_ends_by_sys_exit_is_refused(where: str, tmp_path: Path):
    settings = f'[settings]\nwhere = "{where}"'
    with fails_with(ScenarioError, "scenario.program_exits"):
        played(scenario_of(tmp_path, "exits", settings))


@pytest.mark.parametrize("where", ["hook", "a program of a worker"])
def test_what_ends_by_sys_exit_on_a_worker_has_failed(where: str, tmp_path: Path):
    settings = f'[settings]\nwhere = "{where}"'
    answer = played(scenario_of(tmp_path, "exits", settings))
    assert answer.figures["outcome"] == "failed" and not answer.met
    assert answer.figures["error"] == "RemoteError"
    assert "leave failed on " in answer.figures["error_message"]
    assert "SystemExit: 0" in answer.figures["error_message"]
