"""Prediction: exactly the time of a simulation with the costs, by their file."""

from pathlib import Path
from typing import Any

import pytest

import jdag
from jdag.errors import ScenarioError
from jdag.lab.prediction import Prediction
from jdag.scenario.costs import written as costs_written
from jdag.schedules import Schedule, one_f_one_b
from jdag.sim import DeviceModel, LinkModel
from shapes import pipeline
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import scenario_of, written

LAYER, LAST = (1_000, 700, 300), (1_500, 900, 400)
COSTS: dict[str, dict[str, Any]] = {
    "measured": {},
    "network": {"latency_ns": 100},
    "devices": {
        "job_ns": 40,
        "call_ns": 90,
        "functions": {"shapes:layer": [*LAYER], "shapes:last_layer": [*LAST]},
    },
}

CRASH = "[[faults]]", 'kind = "crash"', 'worker = "b"', "at_ns = 3"


def costs_in(folder: Path, **network: Any) -> Path:
    path = folder / "measured.toml"
    path.write_text(costs_written({**COSTS, **network}), encoding="utf-8")
    return path


def pipeline_in(folder: Path, kind: str) -> Path:
    lines = "[schedule]", f'kind = "{kind}"', "stages = 2", "micro_batches = 4"
    own = "[settings]", "micro_batches = 4"
    program = 'program = "shapes:pipeline"'
    return written(folder, *lines, *own, program=program, x64="")


def makespan_ns(schedule: Schedule) -> int:
    devices = DeviceModel(
        job_ns=40, call_ns=90, functions={"layer": LAYER, "last_layer": LAST}
    )
    with jdag.simulate(
        ["a", "b"],
        seed=0,
        schedule=schedule,
        devices=devices,
        network=LinkModel(100),
    ) as cluster:
        case = pipeline(["a", "b"], micro_batches=4)
        refs = case.put(cluster)
        jdag.fetch([*refs.values()])
        for _ in range(2):
            began_ns = cluster.now_ns
            with cluster.context() as ctx:
                case.backward(ctx, case.roots(ctx, refs))
                ended_ns = cluster.now_ns
        return ended_ns - began_ns


def test_a_prediction_is_exactly_the_time_of_the_simulation(tmp_path: Path):
    found = jdag.predict(pipeline_in(tmp_path, "1f1b"), costs_in(tmp_path))
    schedule = one_f_one_b(stages=2, micro_batches=4, workers=["a", "b"])
    assert found.step_ns == makespan_ns(schedule)
    busy_ns = {"a": 4 * (2_000 + 2 * 40), "b": 4 * (2_800 + 2 * 40)}
    assert found.busy == {
        worker: pytest.approx(ns / found.step_ns) for worker, ns in busy_ns.items()
    }
    assert found.bubble == pytest.approx(1 - 4 * 4_960 / 2 / found.step_ns)


def test_activations_are_those_of_the_schedule(tmp_path: Path):
    costs = costs_in(tmp_path)
    held = {
        kind: jdag.predict(pipeline_in(tmp_path, kind), costs).peak_activations
        for kind in ("1f1b", "gpipe")
    }
    assert 2 * held["1f1b"]["a"] == held["gpipe"]["a"] > 0


@pytest.mark.parametrize(
    "program", ["shapes:back_to_the_caller", "tests.tools.scenario_cases:branches"]
)
def test_a_program_that_looks_at_values_is_predicted_with_values(
    tmp_path: Path, program: str
):
    line = f'program = "{program}"'
    path = written(tmp_path, "[devices]", "forward_ns = 5", program=line)
    assert jdag.predict(path).step_ns > 0


def test_costs_take_the_place_of_the_networks_and_devices_of_a_scenario(tmp_path: Path):
    path, costs = pipeline_in(tmp_path, "1f1b"), costs_in(tmp_path)
    wanted = jdag.predict(path, costs)
    own = "[network]", "latency_ns = 9", "[network.topology]", 'kind = "ring"'
    more = "[devices]", "job_ns = 1", "functions = { layer = [1, 1] }"
    path.write_text("\n".join([path.read_text(), *own, *more]), encoding="utf-8")
    assert jdag.predict(path, costs) == wanted


def test_a_ratio_is_that_to_the_median_of_measured_steps():
    found = Prediction(90, {"a": 0.5}, {"a": 1}, (80, 100, 1_000))
    assert found.ratio == 0.9
    assert Prediction(90, {"a": 0.5}, {"a": 1}).ratio is None


def test_costs_that_lack_a_function_are_one_line(tmp_path: Path):
    with fails_with(ScenarioError, "lab.with_a_cost_of_shapes"):
        jdag.predict(written(tmp_path), costs_in(tmp_path))
    with fails_with(ScenarioError, "lab.measure_1_allowed_is_an"):
        jdag.predict(written(tmp_path), measure=-1)


@pytest.mark.parametrize(
    ("program", "lines", "error"),
    [
        ("raises", (), "it raised AttributeError: .*scenario_cases.py:"),
        ("no_scalar", (), "mine.toml: "),
        ("tree", (), "costs = None: expected a file of costs, or None if links or"),
        ("tree", CRASH, r"faults\[0\].kind = 'crash': expected no faults"),
    ],
)
def test_a_scenario_without_a_prediction_is_one_line(
    tmp_path: Path, program: str, lines: tuple[str, ...], error: str
):
    with pytest.raises(ScenarioError, match=error) as raised:
        jdag.predict(scenario_of(tmp_path, program, *lines))
    assert "\n" not in str(raised.value)
