"""A training is played with each seed, and the first one is reported."""

from typing import Any

import jax.numpy as jnp
import numpy as np

import jdag
from jdag.scenario import Training
from tests.tools.scenario_cases import JITTER, Stage, square, times

OWN = {"loss": "the sum of the squares"}


def squared(run: Any, cluster: jdag.Cluster) -> Any:
    w = cluster.put("b", jnp.arange(3.0))
    with cluster.context() as ctx:
        loss = ctx.call("b", square, ctx.call("a", times, w, 2.0))
        ctx.backward(loss)
        gradient = ctx.gradient(w).fetch()
        return {"loss": float(loss.fetch())}, [(gradient, jnp.array([0.0, 8.0, 20.0]))]


def test_it_gives_the_figures_that_it_announces():
    stage = Stage(["a", "b"], seeds=(3, 4, 5), network=JITTER)
    training = Training(squared, OWN)
    figures = training.play(stage)
    assert {*figures, "wall_time_ns"} == set(training.figures)
    assert (figures["outcome"], figures["loss"]) == ("finished", 20.0)
    assert (figures["seeds"], figures["bit_patterns"]) == (3, 1)
    assert (figures["gradient_checks"], figures["gradient_difference"]) == (1, 0.2)
    assert figures["values_left"] == figures["live_contexts"] == 0
    cluster, (begun_ns, ended_ns) = stage.kept
    assert cluster.now_ns >= ended_ns > begun_ns == 0
    assert figures["virtual_time_ns"] == ended_ns


def test_gradients_that_a_seed_changes_are_counted():
    numbers = iter([1.0, 2.0, 1.0, -0.0, 0.0])

    def train(run: Any, cluster: jdag.Cluster) -> Any:
        return {}, [(jnp.float32(next(numbers)), jnp.float32(2.0))]

    figures = Training(train, {}).play(Stage(["a"], seeds=(0, 1, 2, 3, 4)))
    assert (figures["seeds"], figures["bit_patterns"]) == (5, 4)


def test_the_worst_leaf_of_all_checks_counts():
    truth = {"a": jnp.full(3, 2.0), "b": [jnp.ones(2), jnp.zeros(2)]}
    other = {"a": jnp.array([2.0, 2.0, 3.0]), "b": [jnp.ones(2), jnp.full(2, 0.25)]}
    none = {"a": jnp.full(3, jnp.nan), "b": truth["b"]}

    def difference(*gradients: Any) -> float:
        checks = [(one, truth) for one in gradients]
        training = Training(lambda run, cluster: ({}, checks), {})
        found = training.play(Stage(["a"]))
        assert found["gradient_checks"] == len(gradients)
        return float(found["gradient_difference"])

    assert difference() == difference(truth, truth) == 0
    assert difference(truth, other, truth) == 0.5
    assert np.isnan(difference(other, none))


def test_what_the_first_seed_keeps_and_draws_is_reported():
    made = []

    def train(run: Any, cluster: jdag.Cluster) -> Any:
        made.append(cluster)
        run.keep(cluster, (len(made), len(made)))
        run.draw({"a": len(made)})
        return {"loss": float(len(made))}, ()

    stage = Stage(["a"], seeds=(0, 1, 2))
    assert Training(train, OWN).play(stage)["loss"] == 1.0
    assert stage.kept == (made[0], (1, 1))
    assert stage.drawn == {"a": 1}
