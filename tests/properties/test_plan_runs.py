"""Whole plans in virtual time: random programs, optimizers, and what runs beside."""

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag import simulate
from jdag.api.oracle import pullback
from jdag.errors import ContextError
from tests.tools import random_plans, random_runs
from tests.tools.error_texts import fails_with
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
from tests.tools.random_features import all_steps
from tests.tools.random_hooks import numbered
from tests.tools.random_programs import Branch, Fetch, Invoke
from tests.tools.random_source import source_of
from tests.tools.tiers import sized

WORKERS = ("a", "b", "c", "d")
ROUGH = random_runs.settings(1, WORKERS)  # A network that jitters and loses.
CHUNKS = 10  # For tests to run side by side.
PROGRAMS = sized(10, 100)
FUSED = sized(1, 4)  # Of so many of them one, since each is compiled.
SEEDS = sized(1, 20)


def as_plan(number: int, exact: bool | None, **options: Any) -> Any:
    """The value and the gradients of a program, by a plan or a context."""
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


def test_random_programs_that_fetch_hook_or_call_programs_are_refused_at_their_line():
    refused = 0
    for number in range(PROGRAMS):
        plan = numbered(number)
        source = source_of(plan)
        program = random_plans.loss_of(plan, source, flat=False)
        kinds = {type(step) for _, step in all_steps(plan.steps)}
        hooks = "hook(" in source.text
        with simulate(plan.workers, home=plan.home, seed=0) as cluster:
            params = random_plans.put(cluster, plan)
            step = jdag.compile(program, cluster)
            if not hooks and not kinds & {Fetch, Branch, Invoke}:
                jdag.compile(program, cluster, exact=True).value_and_grad(params)
                continue
            with fails_with(ContextError, "properties.is_recorded_by") as error:
                step.value_and_grad(params)
            line = re.search(r"at plan.py:(\d+) in", str(error.value))
            if line is None:
                assert hooks and "ctx.on_" in str(error.value)
            else:
                text = source.lines[int(line[1]) - 1]
                assert "fetch(" in text or "ctx.start(" in text or "ctx.call(" in text
            random_runs.clean(cluster, params)
        refused += 1
    assert refused > PROGRAMS // 2


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
    """Its program's own step is what renews its versions; all of them, at once."""
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
    """Data-parallel replicas, two micro-batches each; the losses are several roots."""
    losses = []
    for worker, own in zip("bcd", ctx.replicate(["b", "c", "d"], params), strict=True):
        for x, y in zip(xs[worker], ys[worker], strict=True):
            losses.append(stack(ctx, worker, own, x, y))
    return losses


def summed(ctx, trees, x):
    """A sum over replicas, and what each makes of it."""
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
