"""Calibration: fits give back what made the samples; every function has a cost."""

from pathlib import Path

import pytest

import jdag
from jdag.errors import ScenarioError
from jdag.lab import calibration
from jdag.lab.calibration import costs_of, fit_link
from jdag.scenario.costs import read_costs
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import scenario_of, written

SIZES = (1_000, 50_000, 1_000_000, 4_000_000)


@pytest.mark.parametrize(
    ("latency_ns", "rate"), [(0, 10**9), (350_000, 3_000_000_000), (12, 1_000)]
)
def test_a_fit_gives_back_the_link_that_made_the_samples(latency_ns: int, rate: int):
    hops = [latency_ns + nbytes * 1e9 / rate for nbytes in SIZES]
    assert fit_link(SIZES, hops) == (latency_ns, rate)


def test_hops_that_take_no_longer_for_more_bytes_have_no_bandwidth():
    assert fit_link(SIZES, [9.0, 8.0, 7.0, 6.0])[1] is None
    assert fit_link(SIZES, [5.0, 5.0, 5.0, 5.0]) == (5, None)


def test_costs_of_several_workers_and_types_are_means_by_how_often_they_ran():
    times = {
        "a": [("m:f(f[2])", "F", 3, 10), ("m:f(f[2])", "B", 3, 30), ("", "sum", 2, 4)],
        "b": [
            ("m:f(f[2])", "F", 1, 30),
            ("m:f(f[4])", "F", 4, 95),
            ("m:g()", "F", 1, 1),
            ("m:g()", "I", 1, 2),
            ("m:g()", "W", 1, 3),
        ],
    }
    assert costs_of(times) == {
        "sum_ns": 4,
        "functions": {
            "m:f": [55, 30],
            "m:f(f[2])": [15, 30],
            "m:f(f[4])": [95, 0],
            "m:g": [1, 2, 3],
        },
    }


def test_a_calibration_writes_a_cost_of_every_function_that_the_program_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(calibration, "_WIDTH", 4)
    monkeypatch.setattr(calibration, "LONG", 3)
    monkeypatch.setattr(calibration, "SIZES", (8, 4096))
    lines = "[schedule]", 'kind = "zb_h1"', "stages = 2", "micro_batches = 3"
    own = "[settings]", "micro_batches = 3"
    program = 'program = "shapes:pipeline"'
    path = written(tmp_path, *lines, *own, program=program, x64="")
    costs = tmp_path / "costs.toml"
    found = jdag.calibrate(path, costs, steps=3)
    assert read_costs(costs) == found
    least, middle, most = found["measured"]["step_ns"]
    assert 0 < least <= middle <= most
    assert {"job_ns", "call_ns", "sum_ns"} < {*found["devices"]}
    functions = found["devices"]["functions"]
    assert {name: len(each) for name, each in functions.items()} == {
        "shapes:last_layer": 3,
        "shapes:layer": 3,
    }
    assert all([ns > 0 for each in functions.values() for ns in each])
    predicted = jdag.predict(path, costs)
    assert predicted.step_ns > 3 * sum(functions["shapes:layer"])


def test_what_cannot_be_calibrated_is_one_line(tmp_path: Path):
    with fails_with(ScenarioError, "lab.steps_0_allowed_is_an"):
        jdag.calibrate(written(tmp_path), steps=0)


def test_a_program_with_contexts_of_its_own_is_refused(tmp_path: Path):
    path, out = scenario_of(tmp_path, "player"), tmp_path / "costs.toml"
    with fails_with(ScenarioError, "lab.allowed_is_one_that_returns"):
        jdag.calibrate(path, out)
    assert not out.exists()
