"""Plans: what a program does step by step, on every driver."""

from dataclasses import replace
from functools import partial
from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from tests.conformance.drivers import WORKERS, leaving_nothing
from tests.tools import random_plans
from tests.tools.plan_cases import (
    batch,
    bits,
    close,
    eagerly,
    network,
    put,
    stepping,
    train,
)
from tests.tools.random_programs import draw
from tests.tools.random_source import source_of
from tests.tools.tiers import sized


@pytest.mark.parametrize("number", range(sized(3, 6)))
def test_random_programs_have_eagers_bits_and_fused_its_numbers(
    driver: Any, cluster: Any, number: int
):
    plan = replace(draw(Random(number), WORKERS), home="a")
    program = random_plans.loss_of(plan, source_of(plan))
    params = random_plans.put(cluster, plan)
    wanted = random_plans.eager(cluster, program, params)
    for exact in (True, False):
        found = jdag.compile(program, cluster, exact=exact).value_and_grad(params)
        close(found, wanted)
        if exact:
            assert bits(found) == bits(wanted)


TX = {"sgd": optax.sgd(0.1, momentum=0.5), "adam": optax.adam(0.05)}


@pytest.mark.parametrize("name", TX)
def test_ten_steps_have_eagers_bits_beside_contexts_updates_and_fetches(
    driver: Any, cluster: Any, name: str
):
    """Two plans in turn, and what is done beside them; versions are the newest."""
    wanted = None
    for exact in (None, True):
        params = put(cluster, "bcb")
        optimizer = jdag.Optimizer(TX[name], params, clip_norm=0.3)
        train = stepping(cluster, network, optimizer, exact)
        held_out = stepping(cluster, network, None, exact)
        found = []
        for number in range(10):
            found.append(train(params, *batch(number)))
            match number % 4:
                case 0:
                    found.append(held_out(params, *batch(99)))
                case 1:
                    found += jdag.fetch([params[0]["w"], params[1]["w"]])
                case 2:
                    cluster.update(partial(jax.tree.map, jnp.sin), params[number % 3])
                case _:
                    found.append(
                        eagerly(cluster, network, optimizer)(params, *batch(7))
                    )
        found += jdag.fetch([jax.tree.leaves(params), optimizer.states])
        wanted = wanted or bits(found)
        assert bits(found) == wanted, exact
        optimizer.drop()


@pytest.mark.parametrize("exact", [True, False])
def test_no_update_of_trainers_with_a_plan_each_is_lost(cluster: Any, exact: bool):
    params = [cluster.put(worker, np.zeros(3)) for worker in "cdc"]
    optimizer = jdag.Optimizer(optax.sgd(1.0), params)
    cluster.run(
        {w: partial(train, exact, params, optimizer, n) for n, w in enumerate("ab")}
    )
    for values in jdag.fetch(params):
        np.testing.assert_array_equal(values, np.full(3, -(2.0**8 - 1)))


def test_a_step_leaves_nothing_but_leaves_and_their_states(driver: Any, cluster: Any):
    params = put(cluster, "bcd")
    optimizer = jdag.Optimizer(optax.adam(0.1), params)
    params[0]["w"].fetch()
    with leaving_nothing(driver, cluster):
        step = jdag.compile(network, cluster, optimizer=optimizer)
        for number in range(3):
            step(params, *batch(number))
        step.value_and_grad(params, *batch(3))
        del step
        with cluster.context():
            pass  # The plan goes with the next use.


def doubled(x: Any) -> Any:
    return x + x


INPUTS = {
    "wide": [np.arange(3.0), jnp.arange(3.0), np.arange(3.0, dtype="f4")],
    "integers": [np.arange(3), jnp.arange(3), np.arange(3, dtype="i4")],
    "scalars": [np.float32(3), np.float64(4), jnp.float32(5)],
    "complex": [np.ones(2, "c16"), jnp.ones(2, "c8")],
    "strides": [jnp.arange(3.0), np.arange(6.0, dtype="f4")[::-2]],
}


@pytest.mark.parametrize("inputs", INPUTS.values(), ids=INPUTS)
def test_inputs_are_the_arrays_that_jax_takes_them_for(
    driver: Any, cluster: Any, inputs: list[Any]
):
    step = jdag.compile(lambda ctx, x: ctx.call("b", doubled, x), cluster)
    for value in inputs * 3:
        assert bits(step(value)) == bits(doubled(jnp.asarray(value)))
