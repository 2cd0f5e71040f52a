"""Stages without gradients: a list passes over what a program cannot have."""

from functools import reduce
from itertools import product
from typing import Any

import jax
import numpy as np
import pytest

import jdag
from jdag import schedules
from tests.tools.pipeline_cases import (
    batches,
    layer,
    put,
    simulated,
    square,
    through,
    weights,
)
from tests.tools.tiers import FIRST, sized

STAGES, COUNT = 4, 4
BUILT = {
    "interleaved": schedules.interleaved(stages=STAGES, micro_batches=COUNT, chunks=2),
    **{
        build.__name__: build(stages=STAGES, micro_batches=COUNT)
        for build in (
            schedules.gpipe,
            schedules.one_f_one_b,
            schedules.eager_one_f_one_b,
            schedules.zb_h1,
            schedules.zb_h2,
            schedules.zb_v,
            schedules.dualpipe_v,
        )
    },
}
SUBSETS = [frozen for frozen in product((False, True), repeat=STAGES) if any(frozen)]
SOME = SUBSETS[:: sized(-3, -1)]  # All of them first.
PIPE = jdag.pipeline([layer] * STAGES, square)


def program(ctx: Any, params: Any, xs: Any) -> Any:
    return PIPE(ctx, params, xs, xs)


def of_jax() -> tuple[Any, Any]:
    def losses(params: Any) -> Any:
        return [square(reduce(through, params, x), x) for x in batches(COUNT)]

    def total(params: Any) -> Any:
        return sum(losses(params))

    return losses(weights(STAGES)), jax.grad(total)(weights(STAGES))


def eager(cluster: Any, params: Any, frozen: Any) -> list[Any]:
    with cluster.context() as ctx:
        losses = program(ctx, params, batches(COUNT))
        if all(frozen):
            return jdag.fetch(losses)
        ctx.backward(*losses)
        return jdag.fetch([ctx.gradient(of) for of in params if of.tracked])


def compiled(cluster: Any, params: Any, frozen: Any) -> list[Any]:
    step = jdag.compile(program, cluster)
    if all(frozen):
        return step(params, batches(COUNT))
    _, found = step.value_and_grad(params, batches(COUNT))
    return [of for of, off in zip(found, frozen, strict=True) if not off]


def check(found: Any, frozen: Any, losses: Any, gradients: Any) -> None:
    wanted = [of for of, off in zip(gradients, frozen, strict=True) if not off]
    assert len(found) == len(wanted or losses)
    for one, other in zip(found, wanted or losses, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", BUILT)
@pytest.mark.parametrize("way", [eager, compiled])
def test_the_gradients_of_the_rest_are_those_of_jax(name, way):
    schedule, wanted = BUILT[name], of_jax()
    for frozen in SOME:
        with simulated(schedule, schedule.workers) as cluster:
            found = way(cluster, put(cluster, schedule, frozen), frozen)
            check(found, frozen, *wanted)
            waits = [one["waits_for"] for one in cluster.info().values()]
            assert waits == [""] * len(waits), frozen


ON_PROCESSES = ["zb_v"] if FIRST else list(BUILT)


@pytest.mark.parametrize("name", ON_PROCESSES)
def test_processes_pass_over_what_is_not_differentiated(name):
    schedule, wanted = BUILT[name], of_jax()
    with jdag.launch(schedule.workers, schedule=schedule, allow=["tests"]) as cluster:
        for frozen in ((True, True, False, False), (True, False, True, True)):
            for way in (eager, compiled):
                params = put(cluster, schedule, frozen)
                check(way(cluster, params, frozen), frozen, *wanted)


@jdag.program
def called_elsewhere(ctx: Any, params: Any, xs: Any) -> Any:
    return program(ctx, params, xs)


def test_a_program_on_a_worker_may_call_stages_without_gradients():
    schedule, wanted = BUILT["one_f_one_b"], of_jax()
    for frozen in SOME[1:]:
        with simulated(schedule, schedule.workers) as cluster:
            params = put(cluster, schedule, frozen)
            with cluster.context() as ctx:
                ctx.backward(*ctx.call("w1", called_elsewhere, params, batches(COUNT)))
                found = jdag.fetch([ctx.gradient(of) for of in params if of.tracked])
            check(found, frozen, *wanted)
