"""A case is played for each seed, held against the oracle, and counted."""

from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jdag.scenario import Case
from jdag.scenario.player import FIGURES, difference, worst
from jdag.sim import DeviceModel, LinkModel, Network
from tests.tools.scenario_cases import JITTER, Stage, one_leaf, tree


def test_all_figures_are_given_and_none_that_is_not_announced():
    stage = Stage(["a", "b"])
    figures = one_leaf(stage.workers).play(stage)
    real = ["wall_time_ns"]  # Where time is not virtual.
    assert sorted([*figures, *real]) == sorted(FIGURES)


def test_what_a_pass_says_is_counted():
    device = DeviceModel(forward_ns=10, backward_ns=30)
    stage = Stage(["a", "b"], network=Network(LinkModel(100)), devices=device)
    figures = one_leaf(stage.workers).play(stage)
    assert figures["outcome"] == "finished"
    assert figures["loss"] == 3.0
    assert figures["gradient_difference"] == 0.0
    # The leaf goes to b and its cotangent comes back; the loss is fetched later.
    assert stage.kept[1] == (0, figures["virtual_time_ns"])
    # 40 ns of work on b, and nothing on a.
    taken_ns = figures["virtual_time_ns"]
    assert figures["bubble"]["a"] == 1
    assert figures["bubble"]["b"] == Fraction(taken_ns - 40, taken_ns)
    assert figures["bubble_min"] == figures["bubble"]["b"]
    # There and back three float64 each, and the loss.
    assert figures["payload_bytes"] == 3 * 8 + 3 * 8 + 8
    assert figures["wire_bytes"] > figures["payload_bytes"]
    assert figures["values_left"] == figures["live_contexts"] == 0


def test_a_wrong_gradient_is_found():
    good = one_leaf(["a", "b"])
    calls = []

    def lies(ctx, params):
        # The oracle, which comes later, is told another program.
        calls.append(ctx)
        loss = good.program(ctx, params)
        return ctx.call("a", jnp.add, loss, loss) if len(calls) > 1 else loss

    figures = Case(lies, good.params, good.placement).play(Stage(["a", "b"]))
    assert figures["gradient_difference"] == pytest.approx(0.5)


def test_parameters_may_be_pytrees_and_passes_repeated():
    figures = tree(["a", "b"]).play(stage := Stage(["a", "b"]))
    assert figures["gradient_difference"] == 0.0
    assert figures["values_left"] == 0
    assert len(stage.drawn["a"].leaves) == 2


def test_other_bits_on_a_clean_network_are_found(monkeypatch):
    stage = Stage(["a", "b"], network=JITTER)
    make = stage.cluster

    def unlike(seed, *, clean=False):
        cluster = make(seed, clean=clean)
        if clean:
            put = cluster.put
            monkeypatch.setattr(cluster, "put", lambda w, v: put(w, v * (1 + 2**-52)))
        return cluster

    monkeypatch.setattr(stage, "cluster", unlike)
    assert one_leaf(stage.workers).play(stage)["same_bits_as_clean"] is False


def test_the_digest_stands_for_all_seeds():
    def digest(*seeds):
        stage = Stage(["a", "b"], seeds=seeds, network=JITTER)
        return one_leaf(stage.workers).play(stage)["digest"]

    one = Stage(["a", "b"], network=JITTER)
    assert one_leaf(one.workers).play(one)["digest"] == one.kept[0].trace.digest
    assert digest(0, 1, 2) == digest(0, 1, 2)
    assert digest(0, 1, 2) != digest(0, 1, 3)


def test_abstract_values_need_no_array():
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    case = one_leaf(["a", "b"])
    stage = Stage(["a", "b"], values="abstract")
    figures = Case(case.program, {"w": shape}, case.placement).play(stage)
    assert figures["outcome"] == "finished"
    assert figures["gradient_difference"] is figures["loss"] is None
    assert figures["bit_patterns"] == 0


def test_difference_is_relative_to_the_largest_of_the_truth():
    truth = np.array([1.0, -4.0, 2.0])
    assert difference(truth + np.array([0.0, 0.0, 0.4]), truth) == pytest.approx(0.1)
    assert difference(None, truth) == 1.0
    assert difference(np.array([0.5]), np.array([0.0])) == 0.5
    assert difference(np.zeros(0), np.zeros(0)) == 0.0


def test_the_worst_of_differences_is_nan_if_one_is():
    assert worst([0.1, 0.3, 0.2]) == 0.3
    assert np.isnan(worst([0.1, float("nan"), 0.2]))
    assert worst([]) == 0.0
