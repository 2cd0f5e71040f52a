"""Whole plans in virtual time: random programs, optimizers, and what runs beside."""

from random import Random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag import simulate
from jdag.api.oracle import pullback
from jdag.errors import RemoteError, WorkerLost
from jdag.sim import Crash
from tests.tools import random_plans, random_runs
from tests.tools.error_texts import fails_with
from tests.tools.face_cases import raises_at_run_time
from tests.tools.plan_cases import (
    batch,
    bits,
    close,
    layer,
    mse,
    network,
    put,
    stepping,
)
from tests.tools.random_functions import FUSE, fused
from tests.tools.random_hooks import numbered
from tests.tools.random_source import source_of
from tests.tools.tiers import sized

WORKERS = ("a", "b", "c", "d")
ROUGH = random_runs.settings(1, WORKERS)  # A network that jitters and loses.
CHUNKS = 10  # For tests to run side by side.
PROGRAMS = sized(10, 300)
FUSED = sized(1, 4)  # Of so many of them one, since each is compiled.
SEEDS = sized(1, 7)
CRASHED = sized(10, 300)
CRASHES = sized(3, 8)  # Of each program.


def as_plan(number: int, exact: bool | None, **options: Any) -> Any:
    plan = numbered(number)
    program = random_plans.loss_of(plan, source_of(plan))
    with simulate(plan.workers, home=plan.home, **options) as cluster:
        params = random_plans.put(cluster, plan)
        if exact is None:
            return random_plans.eager(cluster, program, params)
        step = jdag.compile(program, cluster, exact=exact)
        found = step.value_and_grad(params)
        assert bits(step.value_and_grad(params)) == bits(found)
        del step
        with cluster.context():
            pass  # The plan goes with the next use.
        random_runs.clean(cluster, params)
        return found


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs_are_eagers_bits_and_no_seed_changes_one(chunk: int):
    for number in range(chunk, PROGRAMS, CHUNKS):
        wanted = bits(as_plan(number, None, seed=number))
        assert bits(as_plan(number, True, seed=number)) == wanted, number
        for seed in range(SEEDS):
            options = random_runs.settings(seed, numbered(number).workers)
            assert bits(as_plan(number, True, **options)) == wanted, (number, seed)


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs_that_are_fused_are_the_oracles(chunk: int):
    for number in range(chunk, PROGRAMS // CHUNKS * FUSED, CHUNKS):
        plan = numbered(number)
        program = random_plans.loss_of(plan, source_of(plan))
        smooth = [leaf.array for leaf in plan.leaves if leaf.inexact]
        _, gradients = pullback(program)(smooth)
        values, found = as_plan(number, False, seed=number)
        close(found, gradients)
        close(values, as_plan(number, None, seed=number)[0])
        options = random_runs.settings(number, plan.workers)
        assert bits(as_plan(number, False, **options)) == bits((values, found)), number


def with_crash(number: int, exact: bool, *crash: Any) -> tuple[Any, int]:
    """Two steps, or None if a worker was lost; and the number of records."""
    plan, found = numbered(number), None
    program = random_plans.loss_of(plan, source_of(plan))
    options = random_runs.settings(number, plan.workers)
    options["faults"] += crash
    with simulate(plan.workers, home=plan.home, **options) as cluster:
        params = random_plans.put(cluster, plan)
        step = jdag.compile(program, cluster, exact=exact)
        try:
            found = [bits(step.value_and_grad(params)) for _ in range(2)]
        except WorkerLost as error:
            assert f"'{crash[0].worker}'" in str(error), number
        records = len(cluster.trace)
        del step
        with cluster.context():
            pass  # The plan goes with the next use.
        cluster.driver.settle()
        for worker, held in cluster.info().items():
            mine = sum(leaf.worker == worker for leaf in params)
            left = held["live_contexts"], held["values_held"]
            assert held["lost"] or left == (0, mine), (number, crash, worker)
        return found, records


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_random_programs_whose_workers_crash_are_right_or_say_who_was_lost(chunk: int):
    for number in range(chunk, CRASHED, CHUNKS):
        plan, rng, exact = numbered(number), Random(number), bool(number // CHUNKS % 4)
        wanted, records = with_crash(number, exact)
        for _ in range(CRASHES if len(plan.workers) > 1 else 0):
            victim = rng.choice([each for each in plan.workers if each != plan.home])
            crash = Crash(victim, 2_000, at_index=rng.randrange(records))
            assert with_crash(number, exact, crash)[0] in (wanted, None), crash


TX = {"sgd": optax.sgd(0.1, momentum=0.5), "adam": optax.adam(0.05)}


def trained(exact: bool | None, dtype: Any, name: str, clip_norm: float | None) -> Any:
    with simulate(WORKERS, **ROUGH) as cluster:
        params = put(cluster, "bcd", dtype)
        optimizer = jdag.Optimizer(TX[name], params, clip_norm)
        step = stepping(cluster, network, optimizer, exact)
        losses = [step(params, *batch(number, dtype)) for number in range(10)]
        return losses, jdag.fetch([params, optimizer.states])


@pytest.mark.parametrize("clip_norm", [None, 0.2])
@pytest.mark.parametrize("name", TX)
def test_ten_fused_steps_are_eagers_but_for_rounding(name: str, clip_norm: Any):
    dtype = np.float32
    wanted = trained(None, dtype, name, clip_norm)
    close(trained(False, dtype, name, clip_norm), wanted, dtype)
    assert bits(trained(True, dtype, name, clip_norm)) == bits(wanted)


def reads(ctx, params):
    return [ctx.call(p.worker, jnp.copy, p) for p in jax.tree.leaves(params)]


@pytest.mark.parametrize("exact", [None, True, False])
def test_a_context_beside_a_step_reads_what_it_reads_beside_an_eager_one(exact: Any):
    with simulate(WORKERS, **ROUGH) as cluster:
        params = put(cluster, "bcd", np.float32)
        optimizer = jdag.Optimizer(optax.sgd(0.5), params)
        step = stepping(cluster, network, optimizer, exact)
        old = bits(params)
        with cluster.context() as ctx:
            first = reads(ctx, params[:1])
            step(params, *batch(0, np.float32))
            assert bits(first) == old[:2]
            seen = bits(reads(ctx, params))
        new = bits(params)
        assert seen == new and not {*new} & {*old}


def stack(ctx, worker, params, x, y):
    for p in params:
        x = ctx.call(worker, layer, p, x)
    return ctx.call(worker, mse, x, y)


def replicated(ctx, params, xs, ys):
    losses = []
    for worker, own in zip("bcd", ctx.replicate(["b", "c", "d"], params), strict=True):
        for x, y in zip(xs[worker], ys[worker], strict=True):
            losses.append(stack(ctx, worker, own, x, y))
    return losses


def summed(ctx, trees, x):
    trees = {t.worker: ctx.call(t.worker, jnp.multiply, t, x) for t in trees}
    sums = ctx.all_reduce(trees, "ring")
    return [ctx.call(w, jnp.vdot, s, s) for w, s in sums.items()]


@pytest.mark.parametrize("exact", [True, False])
def test_replicas_micro_batches_and_several_roots_are_eagers(exact: bool):
    xs, ys = [
        {w: [batch(n + ord(w))[i] for n in range(2)] for w in "bcd"} for i in (0, 1)
    ]
    with simulate(WORKERS, **ROUGH) as cluster:
        params = put(cluster, "abc")
        leaves = [cluster.put(w, np.arange(3.0) + ord(w)) for w in "bcd"]
        for program, args in ((replicated, (params, xs, ys)), (summed, (leaves, 0.3))):
            wanted = random_plans.eager(cluster, program, *args)
            step = jdag.compile(program, cluster, exact=exact)
            values, gradients = step.value_and_grad(*args)
            found = values, jax.tree.leaves(gradients)
            close(found, wanted)
            if exact:
                assert bits(found) == bits(wanted)


def quiet(cluster: Any) -> list[tuple[int, ...]]:
    cluster.driver.settle()
    names = ("live_contexts", "live_passes", "values_held")
    return [tuple(held[name] for name in names) for held in cluster.info().values()]


def breaks(ctx, params, x, y):
    for p in params:
        x = ctx.call(p["w"].worker, layer, p, x)
        x = ctx.call("c", fused, "forward", fused, "vjp", jnp.sin, x)
    return ctx.call("a", mse, x, y)


def broken(seed: int, when: str, exact: bool, *, breaks_at: int) -> list[Any]:
    found: list[Any] = []
    with simulate(WORKERS[:3], **random_runs.settings(seed, WORKERS[:3])) as cluster:
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
                assert "fused" in text and "test_plan_runs.py:" in text
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


def unused(ctx, worker, x):
    ctx.call(worker, raises_at_run_time, ctx.call(worker, jnp.sin, x))
    return ctx.call("c", jnp.sum, x)


@pytest.mark.parametrize("worker", ["a", "b"])
def test_a_step_waits_for_a_call_that_nobody_needs_and_fails_with_it(worker: str):
    """Otherwise time would decide whether the step fails."""
    for seed in range(sized(5, 20)):
        with simulate(WORKERS, **random_runs.settings(seed, WORKERS)) as cluster:
            step = jdag.compile(unused, cluster)
            with fails_with(RemoteError, "properties.only_at_run_time"):
                step(worker, np.ones(3))
