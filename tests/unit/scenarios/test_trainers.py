"""Trainers and a parameter server: what each gradient, update and round comes to."""

import jax.numpy as jnp
import numpy as np

from jdag.errors import ScenarioError
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import Stage
from trainers import FIGURES, descended, loss, trainers


def test_a_server_alone_has_no_trainers():
    with fails_with(ScenarioError, "scenarios.trainers_need_a_server"):
        trainers(["a"])


def test_the_loss_is_half_the_mean_square_and_a_step_goes_down():
    x, y = jnp.eye(3), jnp.array([1.0, 2.0, 3.0])
    assert loss(jnp.zeros(3), x, 3 * y) == 21
    np.testing.assert_array_equal(
        descended(y, jnp.ones(3), jnp.float32(0.5)), [0.5, 1.5, 2.5]
    )


def test_four_trainers_get_their_own_gradients_and_all_updates_count():
    player = trainers(["ps", "a", "b", "c", "d"], steps=3, width=2, rows=4)
    figures = player.play(Stage(player.workers, seeds=(0, 1)))
    real = "wall_time_ns"  # Where time is not virtual.
    assert {*figures, real} == set(FIGURES)
    assert figures["gradients"] == [[1.0], [2.0], [3.0], [4.0]]
    assert (figures["updates"], figures["rounds"]) == (12, 3)
    assert figures["gradient_difference"] <= 1e-12
    assert figures["live_contexts"] == figures["values_left"] == 0
