"""Plans where workers crash and functions raise: all is committed, or nothing."""

from typing import Any

import jax.numpy as jnp
import optax
import pytest

import jdag
from jdag import simulate
from jdag.errors import RemoteError
from tests.tools import random_runs
from tests.tools.error_texts import fails_with
from tests.tools.plan_cases import batch, bits, layer, mse, put
from tests.tools.random_functions import FUSE, fused
from tests.tools.tiers import sized

WORKERS = ("a", "b", "c")


def quiet(cluster: Any) -> list[tuple[int, ...]]:
    """For each worker: contexts, passes, values."""
    cluster.driver.settle()
    names = ("live_contexts", "live_passes", "values_held")
    return [tuple(held[name] for name in names) for held in cluster.info().values()]


def breaks(ctx, params, x, y):
    """As `network`, with a fuse after the layer on c."""
    for p in params:
        x = ctx.call(p["w"].worker, layer, p, x)
        x = ctx.call("c", fused, "forward", fused, "vjp", jnp.sin, x)
    return ctx.call("a", mse, x, y)


def broken(seed: int, when: str, exact: bool, *, breaks_at: int) -> list[Any]:
    """Bits after each of three steps; before one of them another fails."""
    found: list[Any] = []
    with simulate(WORKERS, **random_runs.settings(seed, WORKERS)) as cluster:
        params = put(cluster, "bcb")
        optimizer = jdag.Optimizer(optax.sgd(0.1, momentum=0.9), params)
        step = jdag.compile(breaks, cluster, optimizer=optimizer, exact=exact)
        for number in range(3):
            if number == breaks_at:
                before = bits([params, optimizer.states])
                FUSE.light(when, 1)
                with fails_with(RemoteError, "properties.the_fuse_for") as error:
                    step(params, *batch(7))
                text = str(error.value)
                assert "fused" in text and "test_plan_faults.py:" in text
                assert " failed on 'c'" in text and "no leaf of" in text
                of = "the backward of " if when == "vjp" else ""
                assert not exact or text.startswith(
                    f"{of}tests.tools.random_functions:fused"
                )
                assert FUSE.burnt[when] == 1
                assert bits([params, optimizer.states]) == before
            found.append(bits([step(params, *batch(number)), params]))
        found.append([bits(optimizer.states), quiet(cluster)])
    return found


@pytest.mark.parametrize("seed", range(sized(1, 20)))
@pytest.mark.parametrize("when", ["forward", "vjp"])
@pytest.mark.parametrize("exact", [True, False])
def test_a_segment_that_raises_names_its_calls_and_changes_no_other_step(
    when: str, exact: bool, seed: int
):
    wanted = broken(seed, when, exact, breaks_at=-1)
    for number in range(3):
        assert broken(seed, when, exact, breaks_at=number) == wanted
