"""Functions that run as Python, leaves without gradients, and values that are kept."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.errors import JdagError, RemoteError
from tests.conformance.drivers import held
from tests.conformance.functions import total
from tests.conformance.trainers import (
    carries,
    cell,
    fails_as_python,
    in_order,
    largest,
)
from tests.tools.error_texts import fails_with

X = jnp.arange(12.0).reshape(4, 3) % 5 - 1
W = jnp.array([0.5, -1.0, 2.0])


def close(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("place", ["c", "c/cpu:0"])
def test_a_function_that_runs_as_python_sees_real_arrays(cluster: Any, place: str):
    w = cluster.put("b", W)
    with cluster.context() as ctx:
        x = jdag.stop_gradient(ctx.call("d", jnp.multiply, w, X))
        found = ctx.call(place, largest, x, at_least=3)
        rows = ctx.call(place, in_order, x, 1)
        assert rows.shape == X.shape and found["best"].place == rows.place == place
        count = int(found["count"].fetch())
        close(found["best"].fetch(), np.sort(np.ravel(W * X))[-count:])
        close(rows.fetch(), (W * X)[jnp.argsort((W * X)[:, 1])])
        ctx.backward(ctx.call("b", total, x, w, found["best"]))
        close(ctx.gradient(w).fetch(), jnp.ones(3))
        with fails_with(RemoteError, "conformance.tests_fails_as_python_failed"):
            ctx.call("d", fails_as_python, 7)
        with fails_with(JdagError, "conformance.largest_is_marked_by_stop"):
            ctx.call("c", largest, w)


def test_a_function_that_runs_as_python_and_has_no_name_is_refused_by_processes(
    driver: Any, cluster: Any
):
    there = jdag.unjitted(lambda x: x)
    with cluster.context() as ctx:
        if driver.name == "sim":
            close(ctx.call("b", there, W).fetch(), W)
        else:
            with fails_with(JdagError, "conformance.lambda_has_no_name_that"):
                ctx.call("b", there, W)


def test_untracked_leaves_and_kept_values_are_constants_everywhere(
    driver: Any, cluster: Any
):
    w, h = cluster.put("b", W), cluster.put("c", X[0], tracked=False)
    driver.settle(cluster)
    before = held(cluster)["d"][2]
    found = []
    for x in X:
        with cluster.context() as ctx:
            now = ctx.call("d", cell, w, h, x)
            ctx.backward(ctx.call("c", total, now))
            assert list(ctx.gradients()) == [w]
            found.append(ctx.gradient(w).fetch())
            h = cluster.keep(now)
    driver.settle(cluster)
    assert held(cluster)["d"][2] == before + 1
    last = X[0]
    for gradient, x in zip(found, X, strict=True):
        close(gradient, jax.grad(lambda *of: jnp.sum(cell(*of)))(W, last, x))
        last = cell(W, last, x)
    close(h.fetch(), last)
    cluster.drop(h)


def test_programs_of_a_run_keep_and_return_values(cluster: Any):
    w = cluster.put("b", W, tracked=False)
    kept = cluster.run({name: partial(carries, w, X) for name in "bc"})
    last = X[0]
    for x in X:
        last = cell(W, last, x)
    for name in "bc":
        assert not kept[name].tracked
        close(kept[name].fetch(), last)
    cluster.drop(kept)
