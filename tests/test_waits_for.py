"""A list that waits for an action which never comes is named, on both drivers."""

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag import schedules
from jdag.errors import PassTimeout

SCHEDULE = schedules.one_f_one_b(stages=2, micro_batches=3)
WAITS = "worker w0 waits for 0B0, which is next in its list; ready behind it: 0F2"


def layer(w, x):
    return jnp.tanh(x @ w)


def mse(x, y):
    return jnp.mean((x - y) ** 2)


def total(*losses):
    return sum(losses)


def of_a_sum(cluster, timeout_s=None):
    """Gradients of a sum of losses, which no backward can begin before."""
    params = [cluster.put(worker, np.eye(3, dtype="f4")) for worker in ("w0", "w1")]
    batches = [np.ones((2, 3), "f4")] * 3
    with cluster.context() as ctx:
        losses = jdag.pipeline([layer] * 2, mse)(ctx, params, batches, batches)
        ctx.backward(ctx.call("w1", total, *losses), timeout_s=timeout_s)


def test_a_pass_in_virtual_time_that_times_out_names_the_action():
    with jdag.simulate(SCHEDULE.workers, seed=0, schedule=SCHEDULE) as cluster:
        with pytest.raises(PassTimeout, match=f"timeout_s=1.5; {WAITS}"):
            of_a_sum(cluster, 1.5)
        assert cluster.info()["w0"]["waits_for"] == WAITS


def test_a_pass_on_processes_that_times_out_names_the_action():
    with jdag.launch(SCHEDULE.workers, schedule=SCHEDULE, allow=[__name__]) as cluster:
        with pytest.raises(PassTimeout, match=f"timeout_s=1.5; {WAITS}"):
            of_a_sum(cluster, 1.5)
        assert cluster.info()["w0"]["waits_for"] == WAITS


def test_a_pass_that_ends_leaves_nothing_to_wait_for():
    with jdag.simulate(SCHEDULE.workers, seed=0, schedule=SCHEDULE) as cluster:
        params = [cluster.put(worker, np.eye(3, dtype="f4")) for worker in ("w0", "w1")]
        batches = [np.ones((2, 3), "f4")] * 3
        with cluster.context() as ctx:
            pipe = jdag.pipeline([layer] * 2, mse)
            ctx.backward(*pipe(ctx, params, batches, batches))
        assert [one["waits_for"] for one in cluster.info().values()] == ["", ""]
