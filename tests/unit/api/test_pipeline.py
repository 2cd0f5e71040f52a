"""Losses of a pipeline, and what is returned beside them, eagerly and in plans."""

from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag import schedules
from jdag.errors import JdagError, RootError
from tests.tools.pipeline_cases import batches, layer, simulated, square, weights


def measured(x, target):
    return square(x, target), {"mean": jnp.mean(x), "rows": x[:, 0]}


METRICS = schedules.zb_h1(stages=3, micro_batches=4)


def metered(ctx, params, xs):
    losses, rest = jdag.pipeline([layer] * 3, measured)(ctx, params, xs, xs)
    return reduce(partial(ctx.call, "w2", jnp.add), losses), rest


@pytest.mark.parametrize(
    ("schedule", "driver"),
    [
        pytest.param(None, "simulate", id="free"),
        pytest.param(None, "launch", id="free-launch", marks=pytest.mark.second),
        pytest.param(METRICS, "simulate", id="zb_h1"),
        pytest.param(METRICS, "launch", id="zb_h1-launch", marks=pytest.mark.second),
    ],
)
def test_what_a_loss_returns_beside_it_is_returned_and_not_differentiated(
    schedule, driver
):
    xs, params = batches(4), weights(3)

    def loss(params):
        found = [measured(reduce(lambda h, w: layer(w, h), params, x), x) for x in xs]
        return sum([one for one, _ in found]), [rest for _, rest in found]

    (_, rest), wanted = jax.value_and_grad(loss, has_aux=True)(params)
    if driver == "launch":
        made = jdag.launch(METRICS.workers, schedule=schedule, allow=["tests"])
    else:
        made = simulated(schedule, METRICS.workers)
    pipe = jdag.pipeline([layer] * 3, measured)
    with made as cluster:
        leaves = [
            cluster.put(METRICS.worker(stage), w) for stage, w in enumerate(params)
        ]
        with cluster.context() as ctx:
            losses, metrics = pipe(ctx, leaves, xs, xs)
            ctx.backward(*losses)
            found = [(jdag.fetch(metrics), jdag.fetch(ctx.gradient(leaves)))]
        for exact in (True, False):
            plan = jdag.compile(pipe, cluster, exact=exact)
            (_, metrics), gradients = plan.value_and_grad(leaves, xs, xs)
            found.append((metrics, gradients))
        if schedule is None:  # No backward action could wait for the sum.
            run = jdag.value_and_grad(metered, cluster, has_aux=True)
            (_, metrics), gradients = run(leaves, xs)
            found.append((metrics, gradients))
    (_, metrics), gradients = jdag.oracle(metered, has_aux=True)(params, xs)
    for one in (*found, (metrics, gradients)):
        jax.tree.map(
            partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
            one,
            (rest, wanted),
        )


@pytest.mark.parametrize(
    ("returned", "said"),
    [
        (lambda x, y: {"loss": square(x, y), "mean": jnp.mean(x)}, "a dict"),
        (lambda x, y: [square(x, y), jnp.mean(x)], "a list"),
        (lambda x, y: (square(x, y), 1, jnp.mean(x)), "a tuple of 3"),
        (lambda x, y: ((square(x, y),), jnp.mean(x)), "a tuple of 2"),
    ],
)
def test_a_loss_returns_it_alone_or_first_of_two(returned, said):
    pipe = jdag.pipeline([layer], returned)
    with jdag.simulate(["w0"], seed=0) as cluster, cluster.context() as ctx:
        params = [cluster.put("w0", one) for one in weights(1)]
        with pytest.raises(JdagError, match=f"returned {said}.*: expected a loss, or"):
            pipe(ctx, params, batches(3), batches(3))


def pairs(ctx, w, x):
    return [ctx.call("w0", measured, ctx.call("w0", layer, w, x), x) for _ in "abc"]


def test_the_first_result_of_a_plan_has_no_losses_beside_what_is_not_differentiated():
    with jdag.simulate(["w0"], seed=0) as cluster:
        w, x = cluster.put("w0", weights(1)[0]), batches(1)[0]
        said = "first result of .*pairs contains a tuple of 2 .*: return the losses"
        with pytest.raises(RootError, match=said):
            jdag.compile(pairs, cluster).value_and_grad(w, x)


@pytest.mark.parametrize("name", ["gpipe", "zb_h1", "zb_v"])
def test_a_hessian_vector_product_of_a_pipelines_loss_follows_a_schedule(name):
    stages = 4 if name == "zb_v" else 3
    schedule = getattr(schedules, name)(stages=stages, micro_batches=1)
    params, xs = weights(stages), batches(1)
    pipe = jdag.pipeline([layer] * stages, square)

    def loss(params):
        return square(reduce(lambda h, w: layer(w, h), params, xs[0]), xs[0])

    with simulated(schedule, schedule.workers) as cluster:
        leaves = [cluster.put(schedule.worker(s), w) for s, w in enumerate(params)]
        product = jdag.hvp(lambda ctx, w: pipe(ctx, w, xs, xs)[0], cluster)
        found = product(leaves, params)
    wanted = jax.jvp(jax.grad(loss), (params,), (params,))[1]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6)
