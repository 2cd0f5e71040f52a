"""Digits: a classifier learns over several workers, and its gradients are true."""

from typing import Any

import jax
import numpy as np
import pytest

from digits import FIGURES, KEPT_ASIDE, digits, load
from jdag.errors import ScenarioError
from jdag.sim import DeviceModel, LinkModel, Network
from tests import ROOT
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import Stage

SCENARIOS = ROOT / "scenarios"
DATA = SCENARIOS / "data" / "digits.npz"
WORKERS = ["trainer", "ps0", "ps1", "ps2"]


@pytest.fixture(scope="module")
def trained():
    jax.config.update("jax_enable_x64", False)
    try:
        network = Network(LinkModel(20_000, 1_000_000_000))
        device = DeviceModel(forward_ns=50_000, backward_ns=100_000)
        stage = Stage(WORKERS, network=network, devices=device)
        small: dict[str, Any] = {
            "epochs": 3,
            "batch": 96,
            "hidden": 32,
            "learning_rate": 0.01,
        }
        player = digits(stage.workers, folder=SCENARIOS, checks=5, **small)
        return stage, player.play(stage)
    finally:
        jax.config.update("jax_enable_x64", True)


@pytest.mark.second
def test_it_gives_the_figures_that_it_announces(trained):
    real = ["wall_time_ns", "wall_time_per_step_ns"]  # Where time is not virtual.
    assert sorted([*trained[1], *real]) == sorted(FIGURES)


@pytest.mark.second
def test_each_step_is_one_context_and_one_pass_from_all_its_losses(trained):
    stage, figures = trained
    issued = [
        record.named
        for record in stage.kept[0].trace.of_kind("issue")
        if record.named["event"] in ("Opened", "Differentiated")
    ]
    contexts = [said["context"] for said in issued if said["event"] == "Opened"]
    passes = [said["context"] for said in issued if said["event"] == "Differentiated"]
    assert contexts == passes
    assert len(dict.fromkeys(contexts)) == figures["steps"] == 3 * (1437 // 96)


@pytest.mark.second
def test_progress_shows_loss_and_accuracy(trained):
    stage, figures = trained
    assert len(stage.shown) == figures["steps"]
    assert sorted(stage.shown[-1][2]) == ["accuracy", "loss"]
    assert stage.shown[0][2]["loss"] > stage.shown[-1][2]["loss"]


def test_images_kept_aside_are_360_of_all_kinds_and_none_trains():
    images = load(DATA)
    assert len(images.test_x) == KEPT_ASIDE == 360
    assert len(images.train_x) == 1797 - 360
    assert np.all(np.bincount(images.test_y, minlength=10) >= 20)
    rows = np.concatenate([images.train_x, images.test_x])
    with np.load(DATA) as data:
        shipped = data["images"].reshape(1797, 64) / 16.0
    as_sets = [sorted(map(bytes, part.astype(np.float32))) for part in (rows, shipped)]
    assert as_sets[0] == as_sets[1]


def test_data_that_is_not_there_is_refused(tmp_path):
    with fails_with(ScenarioError, "scenarios.not_a_file_of_digits"):
        digits(WORKERS, folder=tmp_path)
    (tmp_path / "data").mkdir()
    np.savez(tmp_path / "data" / "digits.npz", other=np.zeros(3))
    with fails_with(ScenarioError, "scenarios.not_a_file_of_digits"):
        digits(WORKERS, folder=tmp_path)


def test_a_trainer_alone_is_refused():
    with fails_with(ScenarioError, "scenarios.digits_need_an_owner"):
        digits(["trainer"], folder=SCENARIOS)
