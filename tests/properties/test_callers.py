"""Many contexts of several callers: each has its own loss and gradients."""

import numpy as np

from callers import FIGURES, callers
from jdag.errors import ScenarioError
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import Stage


def test_a_server_alone_has_no_callers():
    with fails_with(ScenarioError, "properties.a_callers_needs_a_server"):
        callers(["a"])


def test_three_callers_with_contexts_of_their_own_never_mix():
    player = callers(["server", "a", "b", "c"], contexts=3, size=2)
    figures = player.play(Stage(player.workers, seeds=(0, 1)))
    real = "wall_time_ns"  # Where time is not virtual.
    assert {*figures, real} == set(FIGURES)
    assert (figures["contexts"], figures["own_ids"]) == (9, True)
    # t5 = 2 * 2 * 2 = 8 and t4 = 2, of four elements each.
    np.testing.assert_array_equal(figures["losses"], [40])
    np.testing.assert_array_equal(figures["d_t1"], [9])
    np.testing.assert_array_equal(figures["d_t2"], [19])
    assert figures["live_contexts"] == figures["values_left"] == 0
