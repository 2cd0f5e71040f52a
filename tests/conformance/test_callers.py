"""Several callers and programs at once: contexts of their own, none left behind."""

from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import jdag
from jdag.errors import RemoteError
from tests.conformance.drivers import Driver, held, leaving_nothing
from tests.conformance.functions import (
    ONES,
    dies_with_a_context_open,
    meet,
    nested_sine,
    open_twenty,
    raise_when_started,
    start_the_others,
    sum_of_sum,
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


def loss(ctx: Any, w: Any) -> Any:
    tasks = [ctx.start("d", start_the_others, w), ctx.start("b", nested_sine, w)]
    second, first = jdag.wait(tasks[::-1])
    return ctx.call("a", sum_of_sum, first, second)


def test_programs_at_once_have_the_gradients_of_the_oracle(
    cluster: Any, driver: Driver
):
    w = cluster.put("c", ONES)
    with leaving_nothing(driver, cluster):
        value, gradient = jdag.value_and_grad(loss, cluster)(w)
    expected = jdag.oracle(loss)(ONES)
    np.testing.assert_allclose(value, expected[0], rtol=1e-12)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-12)


def test_two_programs_that_were_started_run_at_the_same_time(
    cluster: Any, driver: Driver, tmp_path: Path
):
    if (
        driver.name == "sim"
    ):  # No user code there waits; see tests/unit/context/test_tasks.py.
        return
    with cluster.context() as ctx:
        tasks = [ctx.start(worker, meet, str(tmp_path)) for worker in "bcd"[:2]]
        assert jdag.wait(tasks) == ["b", "c"]


def test_errors_of_tasks_that_nobody_asked_for_are_raised_in_program_order(
    cluster: Any, driver: Driver
):
    with leaving_nothing(driver, cluster):
        said = fails_with(RemoteError, "conformance.valueerror_first")
        with said as caught, cluster.context() as ctx:
            for worker, text in (("b", "first"), ("c", "second"), ("d", "third")):
                ctx.start(worker, raise_when_started, text)
    notes = caught.value.__notes__
    assert ["second" in notes[0], "third" in notes[1], len(notes)] == [True, True, 2]
