"""One optimizer for several trainers: its state lives once, on the owners."""

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from tests.conformance.functions import FRAGILE, sum_of_product
from tests.conformance.trainers import (
    curved,
    drops,
    in_a_context,
    saves,
    steps,
    steps_by,
    steps_until_lost,
)
from tests.tools.error_texts import fails_with

OWN = "as an argument of its own"
ROWS = jnp.asarray([[1.0, 0.5, 2.0], [0.25, 4.0, 0.5]])


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(jdag.fetch(tree))]


@pytest.mark.parametrize("trainers", ["bc", "abc"])
def test_steps_of_trainers_at_once_all_count(driver: Any, cluster: Any, trainers: str):
    params = {"p": cluster.put("d", jnp.zeros(3)), "q": cluster.put("b", jnp.ones(3))}
    optimizer = jdag.Optimizer(optax.sgd(0.5), params)
    train = partial(steps, sum_of_product, params)
    programs = {
        name: partial(train, ROWS * 2.0**n, optimizer)
        for n, name in enumerate(trainers)
    }
    cluster.run(programs)
    by = 2.0 ** len(trainers) - 1
    count = len(ROWS) * len(trainers)
    wanted = [-0.5 * by * ROWS.sum(0), 1 - 0.5 * (by * ROWS.sum(0) + 0.25 * count)]
    np.testing.assert_array_equal(jdag.fetch(list(params.values())), wanted)


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_the_one_state_of_adam_has_counted_the_steps_of_all(
    cluster: Any, clip_norm: float | None
):
    params = {"p": cluster.put("d", jnp.zeros(3)), "q": cluster.put("b", jnp.ones(3))}
    optimizer = jdag.Optimizer(optax.adam(0.1), params, clip_norm=clip_norm)
    train = partial(steps, curved, params, ROWS, optimizer)
    cluster.run({"b": train, "c": train})
    train(cluster)
    for state in jdag.fetch(optimizer.states).values():
        assert state[0].count == 3 * len(ROWS)


TRANSFORMATIONS = {
    "adam": optax.adam(0.1),
    "labels": optax.multi_transform(
        {"one": optax.sgd(0.1, momentum=0.5), "two": optax.adamw(0.05)},
        {"p": "one", "q": "two", "r": "one", "s": "two"},
    ),
    "injected": optax.inject_hyperparams(optax.adam)(learning_rate=0.1),
}


def trained(cluster: Any, name: str, clip_norm: float | None, trainers: str) -> Any:
    params = {
        key: cluster.put(owner, jnp.linspace(0.3, 1.0 + n, 3).astype(dtype))
        for n, (key, owner, dtype) in enumerate(
            zip(
                "pqrs",
                "dbcd",
                ["float32", "float32", "float64", "float32"],
                strict=True,
            )
        )
    }
    optimizer = jdag.Optimizer(TRANSFORMATIONS[name], params, clip_norm=clip_norm)
    for trainer, row in zip(trainers, (*ROWS, ROWS[0]), strict=True):
        train = partial(steps, curved, params, [row], optimizer)
        if trainer == cluster.here:
            train(cluster)
        else:
            cluster.run({trainer: train})
    return bits([params, optimizer.states])


@pytest.mark.parametrize(
    ("name", "clip_norm"), [("adam", None), ("labels", 0.5), ("injected", 0.5)]
)
def test_the_bits_of_a_trainers_step_are_those_of_mains_on_any_driver(
    cluster: Any, name: str, clip_norm: float | None
):
    by_main = trained(cluster, name, clip_norm, "aaa")
    assert trained(cluster, name, clip_norm, "bca") == by_main
    with jdag.simulate(list("abcd"), seed=0) as simulated:
        assert trained(simulated, name, clip_norm, "cbc") == by_main


def test_a_trainer_gives_gradients_of_its_own(cluster: Any):
    params = {"p": cluster.put("d", jnp.ones(3)), "q": cluster.put("b", jnp.ones(2))}
    optimizer = jdag.Optimizer(optax.sgd(0.5), params)
    cluster.run({"c": partial(steps_by, jnp.square, params, optimizer)})
    for leaf in jdag.fetch(list(params.values())):
        np.testing.assert_array_equal(leaf, 0.5)


def test_what_goes_by_name_is_stepped_by_name(cluster: Any):
    params = {"p": cluster.put("d", jnp.ones(3)), "q": cluster.put("c", jnp.ones(3))}
    optimizer = jdag.Optimizer(FRAGILE, params)
    cluster.run({"b": partial(steps, sum_of_product, params, [1.0, -0.125], optimizer)})
    np.testing.assert_array_equal(params["q"].fetch(), 1 - 0.5 * (1.25 + 0.125))
    said = r"failed on 'd'(.|\n)*stepping \['p'\](.|\n)*a gradient below zero"
    with pytest.raises(jdag.errors.RemoteError, match=said):
        params["p"].fetch()


def test_what_main_saves_afterwards_are_the_steps_of_all(cluster: Any, tmp_path: Path):
    params = {"p": cluster.put("d", jnp.zeros(3)), "q": cluster.put("b", jnp.ones(3))}
    optimizer = jdag.Optimizer(optax.adam(0.1), params)
    cluster.run(
        {name: partial(steps, curved, params, ROWS, optimizer) for name in "bc"}
    )
    cluster.save(tmp_path / "mains", optimizer=optimizer)
    cluster.run({"c": partial(saves, str(tmp_path / "trainers"), optimizer)})
    for folder in ("mains", "trainers"):
        other = jdag.Optimizer(optax.adam(0.1), params)
        cluster.load(tmp_path / folder, optimizer=other)
        assert bits(other.states) == bits(optimizer.states)


def test_a_trainers_step_with_an_owner_that_died_names_the_step(driver: Any):
    with driver.mortal("c") as cluster:
        params = [cluster.put("d", 1.0), cluster.put("c", 1.0)]
        optimizer = jdag.Optimizer(optax.sgd(0.5), params)
        with pytest.raises(jdag.errors.WorkerLost) as caught:
            cluster.run({"b": partial(steps_until_lost, "c", params, optimizer)})
        for said in ("'c'", "no leaf of Optimizer(2 leaves on 'd', 'c')", "by step 2"):
            assert said in str(caught.value), caught.value
        assert float(params[0].fetch()) == 0.5


def test_states_that_were_dropped_are_an_error_for_all_who_have_them(cluster: Any):
    params = {"p": cluster.put("d", jnp.ones(3))}
    optimizer = jdag.Optimizer(optax.adam(0.1), params)
    cluster.run({"b": partial(drops, optimizer)})
    train = partial(steps, sum_of_product, params, ROWS, optimizer)
    with fails_with(jdag.errors.ContextError, "conformance.dropped"):
        train(cluster)
        params["p"].fetch()
    optimizer.drop()
    with fails_with(jdag.errors.ContextError, "conformance.whose_states_were_dropped"):
        cluster.run({"b": train})


def test_where_no_optimizer_can_go_is_one_error_that_says_so(cluster: Any):
    params = {"p": cluster.put("d", jnp.ones(3))}
    optimizer = jdag.Optimizer(optax.adam(0.1), params)
    inside = partial(steps, sum_of_product, params, ROWS, partial(drops, optimizer))
    with cluster.context() as ctx:
        for use, begins, ends in (
            (
                lambda: cluster.run({"b": inside}),
                r"cluster\.run: what .*:steps on",
                OWN,
            ),
            (lambda: ctx.call("b", in_a_context, optimizer), "argument 0", "a cluster"),
            (
                lambda: ctx.call("b", in_a_context, jdag.static(optimizer)),
                "what .*:in_a_context on 'b' is given: Optimizer",
                OWN,
            ),
        ):
            said = f"^{begins}.*programs of cluster.run.* take it as an argument.*$"
            with pytest.raises(jdag.errors.JdagError, match=said) as caught:
                use()
            assert caught.type is jdag.errors.JdagError and ends in str(caught.value)
