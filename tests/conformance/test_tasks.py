"""Programs that run at the same time, on every driver."""

from pathlib import Path
from typing import Any

import numpy as np

import jdag
from jdag.errors import RemoteError
from tests.conformance.drivers import Driver, leaving_nothing
from tests.conformance.functions import (
    ONES,
    meet,
    nested_sine,
    raise_when_started,
    start_the_others,
    sum_of_sum,
)
from tests.tools.error_texts import fails_with


def loss(ctx: Any, w: Any) -> Any:
    """Programs that run on three workers, one of which starts two more."""
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
