"""A file of measured costs: scenarios read it, and a wrong one is refused in a line."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jdag.errors import ScenarioError
from jdag.scenario import load
from jdag.scenario.costs import read_costs, written
from jdag.scenario.run_scenario import run_scenario
from jdag.scenario.scenario_schema import devices_of, network_of
from jdag.settings.toml_files import read_toml
from jdag.sim import DeviceModel, LinkModel
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import written as scenario

COSTS: dict[str, dict[str, Any]] = {
    "measured": {"machine": 'a "fast" one', "cores": 2},
    "network": {"latency_ns": 300, "bandwidth_bytes_per_s": 1_000_000},
    "devices": {
        "job_ns": 5,
        "call_ns": 7,
        "functions": {"shapes:scale": [10, 20], "shapes:total": [1, 2, 3]},
    },
}
LINE = 'costs = "costs.toml"'


def file_of(folder: Path, text: str | None = None) -> Path:
    (folder / "costs.toml").write_text(written(COSTS) if text is None else text)
    return scenario(folder, costs=LINE)


def test_what_is_written_is_read_again(tmp_path: Path):
    file_of(tmp_path)
    assert read_costs(tmp_path / "costs.toml") == COSTS
    assert read_toml(tmp_path / "costs.toml", "")[1] == COSTS


def test_a_scenario_has_the_costs_of_its_file_and_its_own_go_before(tmp_path: Path):
    own = ["[network]", "latency_ns = 5", "[devices]", "call_ns = 1"]
    own.append("functions = { total = [4, 4], 'shapes:mean' = [6, 6] }")
    functions = COSTS["devices"]["functions"]
    typed = {"shapes:total(f[2])": [1, 2], "shapes:mean(f[2])": [3, 4]}
    with_types = {**COSTS["devices"], "functions": {**functions, **typed}}
    file_of(tmp_path, written({**COSTS, "devices": with_types}))
    settings = load(scenario(tmp_path, *own, costs=LINE)).settings
    assert network_of(settings, clean=True).default == LinkModel(5, 1_000_000)
    functions = {"shapes:scale": (10, 20), "total": (4, 4), "shapes:mean": (6, 6)}
    model = DeviceModel(job_ns=5, call_ns=1, functions=functions)
    assert devices_of(settings) == {"a": model, "b": model}


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (lambda text: "", "measured is missing"),
        (
            lambda text: text.replace("[10, 20]", "[-10, 20]"),
            "costs.toml: devices.functions.shapes:scale = [-10, 20]: expected two",
        ),
        (
            lambda text: text.replace("latency_ns = 300", "latency_ns = 0.5"),
            "costs.toml: network.latency_ns = 0.5: expected an integer >= 0",
        ),
        (
            lambda text: text.replace("shapes:scale", "shapes:scales"),
            "costs = costs.toml: expected a file with a cost of shapes:scale, which "
            "this program calls (did you mean shapes:scales?)",
        ),
    ],
)
def test_wrong_costs_are_one_line(
    tmp_path: Path, change: Callable[[str], str], error: str
):
    path = file_of(tmp_path, change(written(COSTS)))
    with pytest.raises(ScenarioError) as raised:
        run_scenario(load(path), lambda *_: None)
    assert error in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_of_costs_is_one_line(tmp_path: Path):
    with fails_with(ScenarioError, "scenario.costs_are_missing"):
        load(scenario(tmp_path, costs=LINE))
