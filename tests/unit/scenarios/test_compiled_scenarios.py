"""Scenarios with `compile = true` run plans, or refuse it by its name."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from jdag.api.cluster import Cluster
from jdag.context.graph import Graph
from jdag.errors import ScenarioError
from jdag.report import read_drawings, render
from jdag.scenario import configured, load
from jdag.scenario.run_scenario import ScenarioResult, run_scenario
from shapes import diamond
from tests.tools.rpc_workers import kept
from tests.tools.scenario_cases import JITTER, Stage, tree
from tests.unit.scenario.test_driving import EXACT, Shared, missed, silent, small
from tests.unit.scenarios.test_scenarios import SCENARIOS

# By scenario what makes it short: in its text what, and in place of that.
SHORTER = {
    "digits": ("epochs = 12", "epochs = 1"),
    "hybrid": ("seeds = 5", "seeds = 2", "orders = 5", "orders = 2"),
    "parameter_server": ("seeds = 5", "seeds = 2", "orders = 5", "orders = 2"),
    "pipeline": (),
    "zero_bubble": (),  # Its makespan is that of ZB-H1.
}


def compiled(folder: Path, name: str) -> Path:
    text = (SCENARIOS / f"{name}.toml").read_text(encoding="utf-8")
    changes = ("\nname =", "\ncompile = true\nname =", *SHORTER.get(name, ()))
    for old, new in zip(changes[::2], changes[1::2], strict=True):
        assert old in text
        text = text.replace(old, new)
    path = folder / f"{name}.toml"
    path.write_text(text, encoding="utf-8")
    if not (data := folder / "data").exists():
        data.symlink_to(SCENARIOS / "data")
    return path


def steps_of(answer: ScenarioResult) -> list[str]:
    said = [one.named for one in answer.cluster.trace.of_kind("start")]
    return [one["job"] for one in said if one["context"]]


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.second if name in ("hybrid", "digits") else ()
        )
        for name in SHORTER
    ],
)
def test_with_compile_it_is_answered_as_without(name: str, tmp_path: Path):
    answer = run_scenario(load(compiled(tmp_path, name)), silent)
    wrong = [one.figure for one in answer.judged if not one.met]
    assert "runsegment" in steps_of(answer)
    if name in ("digits", "pipeline", "zero_bubble"):
        assert "vjp" not in steps_of(answer) and isinstance(answer.drawings, Graph)
    assert wrong == (["test_accuracy"] if name == "digits" else [])
    answer.cluster.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    settings = load(SCENARIOS / "chain.toml").settings  # With x64, as in `small`.
    with configured(settings, exact=True), kept(**EXACT).connect() as made:
        yield made


@pytest.mark.parametrize("name", ["pipeline", "parameter_server"])
def test_on_processes_it_is_right_too(name: str, cluster: Cluster):
    scenario = small(SCENARIOS / f"{name}.toml")
    settings = structs.replace(scenario.settings, compile=True)
    scenario = replace(scenario, settings=settings)
    answer = run_scenario(scenario, silent, Shared(settings, cluster))
    assert answer.figures["outcome"] == "finished"
    assert answer.figures["gradient_difference"] <= 1e-12
    if name == "parameter_server":  # It is short, and its links are good.
        assert answer.figures["updates"] == 3 * 3
    else:
        assert missed(answer) == []
    assert answer.figures["values_left"] == 0


@pytest.mark.parametrize(
    "name",
    ["shared_digits", "remote_embedding", "two_shards", "ddp_with_rpc", "cartpole"],
)
def test_programs_that_open_contexts_refuse_it(name: str, tmp_path: Path):
    with pytest.raises(ScenarioError) as caught:
        load(compiled(tmp_path, name))
    said = str(caught.value)
    assert f"{name}.toml: compile = True: expected false for this program" in said
    assert "sets the attribute `compiles = True`" in said


def test_a_case_that_cannot_be_recorded_names_setting_line_and_remedy(tmp_path: Path):
    with pytest.raises(ScenarioError) as caught:
        run_scenario(load(compiled(tmp_path, "three_hops")), silent)
    said = str(caught.value)
    assert "three_hops.toml: compile = True: expected false for this" in said
    assert "a call of a program, at shapes.py:" in said
    assert "call the other one as a Python function of this context" in said


def test_passes_of_a_plan_add_up_and_leave_nothing():
    stage = Stage(["a", "b"], compile=True)
    figures = tree(stage.workers).play(stage)
    assert figures["gradient_difference"] == 0.0
    assert figures["loss"] == tree(stage.workers).play(Stage(["a", "b"]))["loss"]
    assert figures["values_left"] == figures["live_contexts"] == 0


def test_hops_that_arrive_in_other_orders_are_counted_and_change_no_bit():
    workers = ["a", "b", "c", "d"]
    stage = Stage(workers, compile=True, seeds=range(4), network=JITTER)
    figures = diamond(workers).play(stage)
    assert figures["arrival_orders"] >= 2
    assert figures["bit_patterns"] == 1 and figures["same_bits_as_clean"] is True


def test_a_page_has_the_table_of_a_plan_also_when_it_is_written_again(tmp_path: Path):
    stage = Stage(["a", "b"], compile=True)
    figures = tree(stage.workers).play(stage)
    kept, window = stage.kept
    result: dict[str, Any] = dict.fromkeys(
        ("question", "answer", "outcome", "command", "digest"), ""
    )
    result |= {"name": "mine", "seed": 0, "workers": ["a", "b"], "figures": figures}
    result |= {"meaning": {}, "expect": [], "versions": {}}
    render(tmp_path, result, kept.trace, stage.drawn, window=window)
    page = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert "segment  worker" in page and "hops" in page
    again = read_drawings(tmp_path)
    assert again is not None and "each step: " in again.table
    assert again == stage.drawn
