"""A leaf that is used many times: few of its cotangents are held at once."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from jdag.api.drivers import simulate
from paper import many_uses
from paper.figures import RESULTS

WIDTH = 1000
COMMITTED = json.loads((RESULTS / "many_uses.json").read_text())["rows"]


def shifted(w: Any, x: Any) -> Any:
    return x + jnp.sum(w)


@pytest.mark.parametrize("values", ["real", "abstract"])
@pytest.mark.parametrize("home", ["a", "b"])
@pytest.mark.parametrize("mode", ["smart", "fast"])
def test_of_the_cotangents_of_a_leaf_with_many_uses_few_are_held(
    values: str, home: str, mode: Any
):
    """On the worker that computes them, with the leaf or with a copy of it."""
    with simulate(("a", "b"), seed=0, values=values) as cluster:
        w = cluster.put(home, jnp.ones(WIDTH))
        with cluster.context() as ctx:
            x = ctx.call("a", jnp.sum, w)
            for _ in range(599):
                x = ctx.call("a", shifted, w, x)
            ctx.backward(x, mode=mode)
            assert cluster.info()["a"]["bytes_peak"] < 30 * 8 * WIDTH
            if values == "real":
                np.testing.assert_array_equal(ctx.gradient(w).fetch(), [600] * WIDTH)


def test_what_is_committed_is_what_comes_out():
    uses = many_uses.USES[0]
    assert many_uses.measured(uses)[1] == COMMITTED[str(uses)]["waiting"] == 25
    assert [COMMITTED[str(uses)]["waiting"] for uses in many_uses.USES[1:]] == [30, 36]
