"""Several callers at once: contexts of their own, none mixed, none left behind."""

from functools import partial
from typing import Any

import jax.numpy as jnp
import numpy as np

import jdag
from tests.conformance.drivers import held, leaving_nothing
from tests.conformance.functions import (
    ONES,
    dies_with_a_context_open,
    open_twenty,
    total,
    train_once,
)
from tests.tools.error_texts import fails_with

LEAF = jnp.linspace(0.1, 0.9, 9).reshape(3, 3)


def test_ids_of_contexts_have_the_number_of_the_worker_that_opened_them(cluster: Any):
    w = cluster.put("b", LEAF)
    done = cluster.run({worker: partial(train_once, w, 1.0) for worker in "abcd"})
    assert [int(id) >> 48 for id, *_ in done.values()] == [0, 1, 2, 3]


def test_three_trainers_on_one_parameter_server_have_three_gradients_none_mixed(
    driver: Any, cluster: Any
):
    w = cluster.put("d", LEAF)
    with leaving_nothing(driver, cluster):
        trainers = {
            worker: partial(train_once, w, by)
            for worker, by in (("a", 1.0), ("b", -2.0), ("c", 5.0))
        }
        done = cluster.run(trainers)
    assert len({int(id) for id, *_ in done.values()}) == 3
    for worker, by in (("a", 1.0), ("b", -2.0), ("c", 5.0)):
        _, gradient, count = done[worker]
        np.testing.assert_allclose(gradient, 3 * by * np.cos(LEAF), rtol=1e-13)
        assert count == 1


def test_trainers_beside_each_other_have_the_bits_that_each_has_alone(cluster: Any):
    w = cluster.put("d", LEAF)
    trainers = {
        worker: partial(train_once, w, by)
        for worker, by in (("a", 0.3), ("b", 0.7), ("c", 1.1))
    }
    together = cluster.run(trainers)
    for worker, trainer in trainers.items():
        _, alone, _ = cluster.run({worker: trainer})[worker]
        assert np.asarray(alone).tobytes() == np.asarray(together[worker][1]).tobytes()


def test_60_contexts_of_concurrent_callers_give_126_and_13_and_27_each(
    driver: Any, cluster: Any
):
    t1, t2 = cluster.put("d", ONES), cluster.put("d", ONES)
    with leaving_nothing(driver, cluster):
        done = cluster.run({worker: partial(open_twenty, t1, t2) for worker in "abc"})
    found = [each for contexts in done.values() for each in contexts]
    assert len(found) == len({int(id) for id, *_ in found}) == 60
    for _, loss, first, second in found:
        assert loss == 126
        np.testing.assert_array_equal(first, 13 * ONES)
        np.testing.assert_array_equal(second, 27 * ONES)


def test_the_contexts_of_a_caller_that_died_go_from_every_worker(driver: Any):
    with driver.mortal("c") as cluster:
        w = cluster.put("b", ONES)
        with fails_with(jdag.errors.WorkerLost, "conformance.c"):
            cluster.run({"c": partial(dies_with_a_context_open, w)})
        driver.settle(cluster)
        assert all(each[:2] == (0, 0) for each in held(cluster).values())
        with cluster.context() as ctx:
            ctx.backward(ctx.call("d", total, w))
            np.testing.assert_array_equal(ctx.gradient(w).fetch(), ONES)
