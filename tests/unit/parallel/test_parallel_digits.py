"""The digits, data parallel over 1, 2 and 4 devices of one worker."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

from jdag.errors import ScenarioError
from jdag.scenario import Scenario, load
from jdag.scenario.driving import driver_of
from jdag.scenario.run_scenario import ScenarioResult, run_scenario
from tests import ROOT
from tests.tools.error_texts import fails_with

PATH = ROOT / "scenarios" / "data_parallel_digits.toml"


def short() -> Scenario:
    scenario = load(PATH)
    player: Any = scenario.player
    return replace(scenario, player=replace(player, epochs=1, checks=2))


def played(scenario: Scenario, driver: str) -> ScenarioResult:
    made = driver_of(scenario.settings, driver, device=None)
    with closing(made):
        return run_scenario(scenario, lambda done, total, numbers: None, made)


@pytest.mark.second
def test_gradients_of_1_2_and_4_replicas_are_alike_and_the_same_bits_on_processes():
    virtual, real = (played(short(), driver).figures for driver in ("sim", "rpc"))
    for figures in (virtual, real):
        assert figures["replicas"] == [1, 2, 4] and figures["gradient_checks"] == 2
        assert 0 < figures["replicas_difference"] < 1e-6
        assert figures["gradient_difference"] < 1e-6
        assert figures["final_loss"] < figures["first_loss"]
        assert figures["values_left"] == figures["live_contexts"] == 0
    assert virtual["gradient_bits"] == real["gradient_bits"]
    assert "rows_per_s" not in virtual
    assert list(real["rows_per_s"]) == ["1", "2", "4"]
    assert min(real["rows_per_s"].values()) > 0


@pytest.mark.parametrize("replicas", [[], [0], [1, 9]])
def test_replicas_that_no_worker_has_devices_for_are_refused(
    replicas: list[int], tmp_path: Path
):
    text = PATH.read_text().replace("data/digits", f"{PATH.parent}/data/digits")
    path = tmp_path / PATH.name
    path.write_text(text.replace("[1, 2, 4]", str(replicas)))
    with fails_with(ScenarioError, "parallel.settings_replicas_from_1_to"):
        load(path)


def test_more_host_devices_than_jax_has_begun_with_are_refused(tmp_path: Path):
    assert len(jax.devices("cpu")) == 8
    path = tmp_path / PATH.name
    path.write_text(PATH.read_text().replace("devices = 4", "devices = 9"))
    with fails_with(ScenarioError, "parallel.host_devices_9_allowed_is"):
        load(path)
