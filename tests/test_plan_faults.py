"""Plans where workers crash and functions raise: all is committed, or nothing."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
        found = there(params)
        kept = [place for place, one in enumerate(found) if one is not None]
        # One version on all who are left: the step's own, or the one before it.
        wanted = [[truth[n][place] for place in kept] for n in (done, done + 1)]
        assert [found[place] for place in kept] in wanted[: 2 if done < 2 else 1]
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


@pytest.mark.parametrize("when", ["forward", "vjp"])
@pytest.mark.parametrize("exact", [True, False])
def test_a_segment_that_raises_names_its_calls_and_commits_nothing(
    when: str, exact: bool
):
    with simulate(WORKERS, **CALM) as cluster:
        params = put(cluster, "bcb")
        optimizer = jdag.Optimizer(optax.sgd(0.1, momentum=0.9), params)
        step = jdag.compile(breaks, cluster, optimizer=optimizer, exact=exact)
        step(params, *batch(0))
        before, left = bits([params, optimizer.states]), quiet(cluster)
        FUSE.light(when, 1)
        with pytest.raises(RemoteError, match="the fuse for") as error:
            step(params, *batch(1))
        text = str(error.value)
        assert "fused" in text and "test_plan_faults.py" in text and "on 'c'" in text
        assert "no leaf of" in text
        assert not exact or text.startswith(
            "tests.random_functions:fused failed on 'c'"
        )
        assert FUSE.burnt[when] == 1 and FUSE.left[when] == 0
        assert bits([params, optimizer.states]) == before and quiet(cluster) == left
        found = step(params, *batch(1)), bits([params, optimizer.states])
    with simulate(WORKERS, **CALM) as cluster:
        params = put(cluster, "bcb")
        optimizer = jdag.Optimizer(optax.sgd(0.1, momentum=0.9), params)
        step = jdag.compile(breaks, cluster, optimizer=optimizer, exact=exact)
        values = [step(params, *batch(number)) for number in range(2)]
        assert bits(values[1]) == bits(found[0])
        assert bits([params, optimizer.states]) == found[1]


@jdag.unjitted(shapes=lambda x: x)
def picky(x):
    if np.asarray(x)[0, 0] > 0.0:
        raise ValueError("too large")
    return x


def picking(ctx, params, x):
    y = ctx.call("b", layer, params[0], x)
    z = ctx.call("c", layer, params[1], ctx.call("b", picky, x))
    return [ctx.call("a", mse, y, z)]


@pytest.mark.parametrize("seed", range(sized(3, 20)))
def test_steps_that_fail_now_and_then_leave_those_between_as_they_are(seed: int):
    """In a network that loses messages; those that fail change no bit of the others."""
    options = random_runs.settings(seed, WORKERS)
    found: dict[bool, list[Any]] = {True: [], False: []}
    for fails in (True, False):
        with simulate(WORKERS, **options) as cluster:
            params = put(cluster, "bc")
            optimizer = jdag.Optimizer(optax.adam(0.1), params)
            step = jdag.compile(picking, cluster, optimizer=optimizer)
            for number in range(6):
                x = -np.abs(batch(number)[0])
                if number % 3 == seed % 3 and fails:
                    with pytest.raises(RemoteError, match=r"picky.*too large"):
                        step(params, -x)
                found[fails].append(bits(step(params, x)))
            found[fails].append(bits([params, optimizer.states]))
            settled = quiet(cluster)
            assert [held[:2] for held in settled] == [(0, 0)] * 3
            found[fails].append(settled)
    assert found[True] == found[False]
