"""Each shape of graph is what it says, and its gradient that of plain JAX."""

from fractions import Fraction

import numpy as np
import pytest

import shapes
from jdag.sim import DeviceModel
from tests.tools.scenario_cases import JITTER, Stage

WORKERS = ["a", "b", "c", "d"]
ALL = (
    shapes.chain,
    shapes.diamond,
    shapes.fan_out,
    shapes.three_hops,
    shapes.back_to_the_caller,
    shapes.several_roots,
    shapes.pipeline,
)


@pytest.mark.parametrize("workers", [2, 4])
@pytest.mark.parametrize("shape", ALL, ids=lambda shape: shape.__name__)
def test_a_shape_has_the_gradient_of_the_oracle(shape, workers):
    stage = Stage(WORKERS[:workers], network=JITTER)
    figures = shape(stage.workers).play(stage)
    assert figures["outcome"] == "finished"
    assert figures["gradient_difference"] <= 1e-12
    assert figures["same_bits_as_clean"] is True
    assert figures["values_left"] == figures["live_contexts"] == 0


def test_the_fan_out_is_the_sum_that_was_asked_for():
    case = shapes.fan_out(["a", "b", "c"], calls=24)
    figures = case.play(Stage(["a", "b", "c"]))
    t = np.asarray(case.params["t"])
    expected = sum(
        np.sum(np.sin(1.7 * (i + 1) * t) * (1 + 1.7 * (i + 1) / 1000))
        for i in range(24)
    )
    assert figures["loss"] == pytest.approx(expected, rel=1e-12)


def test_the_fan_out_calls_on_all_others_and_adds_at_home():
    stage = Stage(WORKERS)
    shapes.fan_out(stage.workers, calls=24).play(stage)
    nodes = {worker: len(drawn.nodes) for worker, drawn in stage.drawn.items()}
    assert nodes == {"a": 1, "b": 8, "c": 8, "d": 8}


def test_three_hops_end_where_they_began():
    stage = Stage(WORKERS)
    shapes.three_hops(stage.workers).play(stage)
    ends = {
        worker: ([e.peer for e in drawn.sends], [e.peer for e in drawn.recvs])
        for worker, drawn in stage.drawn.items()
    }
    assert ends["a"] == (["b", "c", "d"], ["b"])
    assert ends["d"] == (["c"], ["c", "a"])


def test_the_caller_is_called_back():
    stage = Stage(["a", "b"])
    shapes.back_to_the_caller(stage.workers).play(stage)
    spawned = [record.worker for record in stage.kept[0].trace.of_kind("spawn")]
    assert spawned == ["b", "a"]


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 5), (4, 8), (5, 3)])
def test_forward_first_has_the_bubble_of_gpipe_exactly(stages, micro_batches):
    workers = [f"s{number}" for number in range(stages)]
    device = DeviceModel(forward_ns=7, backward_ns=13)
    stage = Stage(workers, devices=device, policy="path")
    figures = shapes.pipeline(workers, micro_batches=micro_batches).play(stage)
    slots = micro_batches + stages - 1
    assert figures["virtual_time_ns"] == slots * (7 + 13)
    assert figures["bubble"] == dict.fromkeys(workers, Fraction(stages - 1, slots))


def test_backward_first_computes_the_same_bits_and_holds_less():
    def played(policy):
        device = DeviceModel(forward_ns=1_000, backward_ns=2_000)
        stage = Stage(WORKERS, devices=device, policy=policy)
        figures = shapes.pipeline(stage.workers, micro_batches=8).play(stage)
        last = stage.kept[0].info()["d"]
        return figures, last["bytes_peak"]

    forward_first, most = played("path")
    backward_first, least = played("backward_first")
    assert forward_first["loss"] == backward_first["loss"]
    assert forward_first["digest"] != backward_first["digest"]
    assert least < most
