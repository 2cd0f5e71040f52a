"""Plans where workers crash and functions raise: all is committed, or nothing."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jdag
from jdag import sim, simulate
from jdag.errors import RemoteError, WorkerLost
from tests import random_runs
from tests.plan_cases import batch, bits, eagerly, layer, mse, network, put
from tests.random_functions import FUSE, fused
from tests.tiers import sized

WORKERS = ("a", "b", "c")
STEP = sized(11, 1)
CALM: dict[str, Any] = {
    "seed": 3,
    "network": sim.LinkModel(latency_ns=500, jitter_ns=200),
    "devices": sim.DeviceModel(forward_ns=1_000, backward_ns=2_000),
}


def versions(steps: int) -> list[list[bytes]]:
    """The bits of all leaves after each number of eager steps, in order."""
    with simulate(WORKERS, **CALM) as cluster:
        params = put(cluster, "bc")
        optimizer = jdag.Optimizer(optax.adam(0.1), params)
        step, found = eagerly(cluster, network, optimizer), [bits(params)]
        for number in range(steps):
            step(params, *batch(number))
            found.append(bits(params))
        return found


def there(params: Any) -> list[bytes | None]:
    """The bits of each leaf, None of one that went with its worker."""
    found: list[bytes | None] = []
    for leaf in jax.tree.leaves(params):
        try:
            found += bits(leaf)
        except WorkerLost:
            found.append(None)
    return found


def quiet(cluster: Any) -> list[tuple[int, ...]]:
    """For each worker: contexts, passes, values."""
    cluster.driver.settle()
    names = ("live_contexts", "live_passes", "values_held")
    return [tuple(held[name] for name in names) for held in cluster.info().values()]


def crashed(crash: sim.Crash, truth: list[list[bytes]]) -> str:
    """Two steps, one of which a crash may hit; then all is as if it had not been."""
    with simulate(WORKERS, faults=[crash], **CALM) as cluster:
        try:
            params = put(cluster, "bc")
            optimizer = jdag.Optimizer(optax.adam(0.1), params)
            jdag.fetch(params)
        except WorkerLost:
            return "early"
        step = jdag.compile(network, cluster, optimizer=optimizer, exact=True)
        done, ended = 0, "untouched"
        try:
            for number in range(2):
                step(params, *batch(number))
                done += 1
            jdag.fetch(params)
        except WorkerLost:
            ended = f"lost after {done}"
        # A step that raised has stepped none; what went with its worker is None.
        for one, wanted in zip(there(params), truth[done], strict=True):
            assert one in (wanted, None)
        del step, optimizer, params
        with cluster.context():
            pass  # What is not named goes with the next use.
        # Of each leaf its value, and three of its state.
        for worker, held in zip(WORKERS, quiet(cluster), strict=True):
            assert held[:2] == (0, 0) and held[2] in (0, 8 * (worker != "a"))
            assert held[2] or worker in ("a", crash.worker)
        if cluster.info()[crash.worker]["lost"]:
            return ended
        again = put(cluster, "bc")
        optimizer = jdag.Optimizer(optax.adam(0.1), again)
        jdag.fetch(again)
        before = quiet(cluster)
        step = jdag.compile(network, cluster, optimizer=optimizer, exact=True)
        step(again, *batch(0))
        assert bits(again) == truth[1]
        del step
        with cluster.context():
            pass
        assert quiet(cluster) == before
        return ended


def test_a_worker_that_crashes_at_any_event_commits_all_or_nothing():
    truth = versions(3)
    ended: Counter[str] = Counter()
    for place, index in enumerate(range(52, 200, STEP)):
        for victim in "bc":
            detect_ns, restart_ns = 2_000 * (index % 2), (None, 0, 3_000)[place % 3]
            crash = sim.Crash(victim, detect_ns, at_index=index, restart_ns=restart_ns)
            ended[crashed(crash, truth)] += 1
    for how in ("lost after 0", "lost after 1", "lost after 2", "untouched"):
        assert ended[how] > 0, ended


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
                with pytest.raises(RemoteError, match="the fuse for") as error:
                    step(params, *batch(7))
                text = str(error.value)
                assert "fused" in text and "test_plan_faults.py:" in text
                assert " failed on 'c'" in text and "no leaf of" in text
                of = "the backward of " if when == "vjp" else ""
                assert not exact or text.startswith(f"{of}tests.random_functions:fused")
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
