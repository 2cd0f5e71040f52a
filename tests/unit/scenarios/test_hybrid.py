"""Trainers with data-parallel dense layers and one embedding have the gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hybrid import (
    CLASSES,
    FIGURES,
    batches,
    descended,
    embedded,
    hybrid,
    loss,
)
from jdag.collectives.routes import HOW
from jdag.errors import ScenarioError
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import JITTER, Stage

WORKERS = ("main", "ps", "trainer0", "trainer1", "trainer2", "trainer3")
SMALL: dict[str, Any] = {
    "rows": 6,
    "epochs": 1,
    "batch": 3,
    "embeddings": 9,
    "width": 4,
}


def test_an_embedding_is_the_mean_of_its_bag_and_no_row_has_no_loss():
    table = jnp.arange(12.0).reshape(4, 3)
    bags = embedded(table, jnp.array([[0, 1, 2], [3, 3, 3]]))
    np.testing.assert_array_equal(bags, [[3, 4, 5], [9, 10, 11]])
    dense = {"w": jnp.zeros((3, CLASSES)), "b": jnp.zeros(CLASSES)}
    value = loss(dense, bags, jnp.array([1, 2]), jnp.float64(4))
    assert value == pytest.approx(2 * np.log(CLASSES) / 4)
    none = jnp.zeros((0, 3)), jnp.zeros(0, jnp.int32), jnp.float64(4)
    value, gradient = jax.value_and_grad(loss)(dense, *none)
    assert value == 0
    assert not np.any(gradient["w"])
    assert descended(jnp.float64(3), jnp.float64(2), jnp.float64(0.5)) == 2


def test_trainers_run_out_of_rows_at_different_times():
    sizes = [
        [len(one.labels) for one in batches(number, rows, 3, 4, 100)]
        for number, rows in enumerate((12, 6, 4, 3))
    ]
    assert sizes == [[4, 4, 4], [4, 2, 0], [4, 0, 0], [3, 0, 0]]


WAYS = [pytest.param(how, marks=[pytest.mark.second] * (how != HOW[0])) for how in HOW]


@pytest.mark.parametrize("how", WAYS)
def test_four_trainers_have_the_gradients_of_the_oracle_and_stay_equal(how):
    stage = Stage(WORKERS, network=JITTER, seeds=(0, 1))
    figures = hybrid(WORKERS, how=how, **SMALL).play(stage)
    assert {*figures, "wall_time_ns"} == set(FIGURES)
    assert figures["gradient_difference"] <= 1e-12
    assert figures["gradient_checks"] == figures["steps"] == 2
    assert figures["replicas_equal"] is True
    assert figures["rows"] == [6, 3, 2, 1]
    assert (figures["bit_patterns"], figures["arrival_orders"]) == (1, 2)
    assert figures["values_left"] == figures["live_contexts"] == 0
    drawn = {worker: len(of.nodes) for worker, of in stage.drawn.items() if of.nodes}
    assert drawn == {"ps": 4, **dict.fromkeys(WORKERS[2:], 1)}


def test_each_row_counts_alike_wherever_it_is():
    figures = hybrid(WORKERS, **SMALL).play(Stage(WORKERS))
    first = [
        batches(number, rows, 2, 3, 9)[0] for number, rows in enumerate((6, 3, 2, 1))
    ]
    one, other = jax.random.split(jax.random.key(4))
    table = jax.random.normal(one, (9, 4))
    scores = jnp.concatenate([embedded(table, of.indices) for of in first])
    scores = scores @ (0.3 * jax.random.normal(other, (4, CLASSES)))
    labels = np.concatenate([of.labels for of in first])
    assert len(labels) == 3 + 3 + 2 + 1
    each = jax.nn.logsumexp(scores, axis=1) - scores[np.arange(9), labels]
    assert figures["first_loss"] == pytest.approx(float(jnp.mean(each)), rel=1e-12)


def test_a_trainer_without_a_server_is_refused():
    with fails_with(ScenarioError, "scenarios.hybrid_needs_trainers"):
        hybrid(["a", "b"])
