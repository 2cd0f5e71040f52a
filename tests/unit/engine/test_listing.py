"""What a list passes over: what a program, while it waits, or a pass cannot have."""

from functools import partial, reduce
from typing import Any

import jax
import numpy as np
import pytest

import jdag
from tests.properties.test_frozen_stages import (
    BUILT,
    COUNT,
    STAGES,
    program,
)
from tests.tools.pipeline_cases import (
    batches,
    layer,
    put,
    simulated,
    square,
    through,
    weights,
)

NONE = (False,) * STAGES
FEW = 3


def loss(params: Any, x: Any) -> Any:
    return square(reduce(through, params, x), x)


def of_jax(chosen: Any, xs: Any) -> Any:
    def total(params: Any) -> Any:
        return sum([loss(params, xs[m]) for m in chosen])

    return jax.grad(total)(weights(STAGES))


def close(actual: Any, expected: Any) -> None:
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


def evaluated(cluster: Any, params: Any, xs: Any) -> Any:
    with cluster.context() as ctx:
        return jdag.fetch(program(ctx, params, xs))


def fetched_first(cluster: Any, params: Any, xs: Any) -> Any:
    with cluster.context() as ctx:
        losses = program(ctx, params, xs)
        first = jdag.fetch(losses)
        close(first, [loss(weights(STAGES), x) for x in xs])
        ctx.backward(*losses)
        return jdag.fetch(ctx.gradient(params))


def trained(cluster: Any, params: Any, xs: Any, mode: Any = "smart") -> Any:
    with cluster.context() as ctx:
        ctx.backward(*program(ctx, params, xs), mode=mode)
        return jdag.fetch(ctx.gradient(params))


def of_one(cluster: Any, params: Any, xs: Any) -> Any:
    with cluster.context() as ctx:
        for each in program(ctx, params, xs)[::-1]:
            ctx.backward(each)
        return jdag.fetch(ctx.gradient(params))


def of_the_last(cluster: Any, params: Any, xs: Any) -> Any:
    with cluster.context() as ctx:
        ctx.backward(program(ctx, params, xs)[-1])
        return jdag.fetch(ctx.gradient(params))


def one_by_one(cluster: Any, params: Any, xs: Any) -> Any:
    with cluster.context() as ctx:
        for m, x in enumerate(xs):
            h = x
            for stage, w in enumerate(params):
                with ctx.tag(stage=stage, micro_batch=m):
                    h = ctx.call(w.worker, layer, w, h)
            ctx.backward(ctx.call(w.worker, square, h, x))
        return jdag.fetch(ctx.gradient(params))


def compiled(cluster: Any, params: Any, xs: Any) -> Any:
    step = jdag.compile(program, cluster)
    close(step(params, xs), [loss(weights(STAGES), x) for x in xs])
    return step.value_and_grad(params, xs)[1]


def within_another(cluster: Any, params: Any, xs: Any) -> Any:
    with cluster.context() as ctx:
        losses = program(ctx, params, xs)
        expected = evaluated(cluster, params, xs)
        close(jdag.compile(program, cluster)(params, xs), expected)
        ctx.backward(*losses)
        return jdag.fetch(ctx.gradient(params))


def two_open(cluster: Any, params: Any, xs: Any, order: Any) -> Any:
    expected = of_jax(range(len(xs)), xs)
    with cluster.context() as one, cluster.context() as other:
        losses, others = program(one, params, xs), program(other, params, xs)
        for does in order:
            if does == "fetch":
                close(jdag.fetch(others), [loss(weights(STAGES), x) for x in xs])
            elif does == "one":
                one.backward(*losses)
            else:
                other.backward(*others)
                close(jdag.fetch(other.gradient(params)), expected)
        return jdag.fetch(one.gradient(params))


ORDERS = (("one", "fetch"), ("fetch", "one"), ("one", "other"), ("other", "one"))
WAYS: list[Any] = [
    fetched_first,
    trained,
    partial(trained, mode="fast"),
    of_one,
    one_by_one,
    compiled,
    within_another,
    *[partial(two_open, order=order) for order in ORDERS],
]


@pytest.mark.parametrize("count", [FEW, pytest.param(COUNT, marks=pytest.mark.second)])
@pytest.mark.parametrize("name", BUILT)
def test_the_list_waits_for_nothing_that_cannot_come(name, count):
    schedule, xs = BUILT[name], batches(count)
    expected = of_jax(range(count), xs)
    with simulated(schedule, schedule.workers) as cluster:
        params = put(cluster, schedule, NONE)
        close(evaluated(cluster, params, xs), [loss(weights(STAGES), x) for x in xs])
        for way in WAYS:
            close(way(cluster, params, xs), expected)
        close(of_the_last(cluster, params, xs), of_jax([count - 1], xs))
        assert not any(one["waits_for"] for one in cluster.info().values())


def test_what_is_behind_a_stop_gradient_is_passed_over():
    schedule, xs = BUILT["one_f_one_b"], batches(COUNT)
    with simulated(schedule, schedule.workers) as cluster, cluster.context() as ctx:
        params, losses = put(cluster, schedule, NONE), []
        for m, x in enumerate(xs):
            h = x
            for stage in range(STAGES):
                with ctx.tag(stage=stage, micro_batch=m):
                    h = ctx.call(f"w{stage}", layer, params[stage], h)
                h = jdag.stop_gradient(h) if stage == 1 else h
            losses.append(ctx.call(f"w{STAGES - 1}", square, h, x))
        ctx.backward(*losses)
        actual = jdag.fetch([ctx.gradient(of) for of in params[2:]])
    close(actual, of_jax(range(COUNT), xs)[2:])


def test_forwards_that_a_fetch_lets_go_first_keep_the_order_of_the_list():
    schedule, xs = BUILT["one_f_one_b"], batches(COUNT)
    with simulated(schedule, schedule.workers) as cluster:
        fetched_first(cluster, put(cluster, schedule, NONE), xs)
        actual: dict[str, list[str]] = {name: [] for name in schedule.workers}
        for record in cluster.trace.of_kind("start"):
            if record.named["action"]:
                actual[record.worker].append(record.named["action"])
    for name, steps in schedule.lists.items():
        listed = [str(step) for step in steps]
        forwards = [each for each in listed if "F" in each]
        assert actual[name] == forwards + [each for each in listed if "B" in each]
