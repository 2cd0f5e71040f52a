"""Each scenario that is shipped is answered as it expects."""

from pathlib import Path

import pytest

from jdag.scenario import load
from jdag.scenario.run_scenario import run_scenario
from tests import ROOT

SCENARIOS = ROOT / "scenarios"
SHIPPED = sorted(SCENARIOS.glob("*.toml"))
# It needs several devices: tests/unit/parallel plays it, in a process that has them.
SINGLE = [path for path in SHIPPED if path.stem != "data_parallel_digits"]
QUICK = [path for path in SINGLE if path.stem != "digits"]
# `pipeline` with more micro-batches; what other tests play as well, or the like.
LATER = (
    *("pipeline_256", "hybrid", "replicas_on_workers", "fan_out_24", "cartpole"),
    *("parameter_server", "shared_digits"),
)
OF_TIERS = [
    pytest.param(path, marks=pytest.mark.second if path.stem in LATER else ())
    for path in QUICK
]


def test_all_scenarios_are_there():
    assert len(SHIPPED) == 26


@pytest.mark.parametrize("path", OF_TIERS, ids=lambda path: path.stem)
def test_a_shipped_scenario_is_answered_as_it_expects(path: Path):
    scenario = load(path)
    assert scenario.settings.name == path.stem and "?" in scenario.question
    answer = run_scenario(scenario, lambda done, total, numbers: None)
    assert [one for one in answer.judged if not one.met] == []
    assert len(answer.judged) >= 4
    answer.cluster.close()


@pytest.mark.second
def test_three_epochs_of_digits_are_right_in_all_but_perhaps_accuracy(tmp_path: Path):
    text = (SCENARIOS / "digits.toml").read_text(encoding="utf-8")
    data = SCENARIOS / "data" / "digits.npz"
    path = tmp_path / "digits.toml"
    shorter = text.replace("epochs = 12", "epochs = 3")
    path.write_text(shorter.replace("data/digits.npz", str(data)), encoding="utf-8")
    assert path.read_text() != text
    answer = run_scenario(load(path), lambda *_: None)
    missed = [one.figure for one in answer.judged if not one.met]
    assert missed in ([], ["test_accuracy"])
    assert answer.figures["steps"] == 3 * 22
    assert answer.figures["gradient_checks"] == 8
    assert answer.figures["test_accuracy"] > 0.8
    answer.cluster.close()
