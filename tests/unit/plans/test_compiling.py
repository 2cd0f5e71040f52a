"""Plans give what the eager path gives: values, gradients, steps of an optimizer."""

from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jdag
from jdag.api.drivers import simulate
from jdag.api.value_and_grad import value_and_grad
from jdag.context.refs import fetch
from jdag.errors import ContextError, JdagError, RootError, WorkerLost
from jdag.plans.compiling import compile
from jdag.runtime.worker_runtime import WorkerRuntime
from jdag.schedules import one_f_one_b
from jdag.sim import Crash, LinkModel
from jdag.training.optimizer import Optimizer
from tests.tools import pipeline_cases
from tests.tools.error_texts import fails_with, warns_with

X = jnp.linspace(-0.5, 1, 12).reshape(3, 4)


def layer(stage, x):
    return jnp.tanh(x @ stage["w"]) + stage["b"]


def mse(x, y):
    return jnp.mean((x - y) ** 2)


def loss(ctx, params, x, y):
    for stage in params["stages"]:
        x = ctx.call(stage["w"].worker, layer, stage, x)
    return ctx.call(ctx.here, mse, x, y / 2)


def placed(cluster, workers="bcb"):
    def leaves(number, worker):
        w = jnp.eye(4) / 2 + jnp.arange(4) * number / 10
        return {"w": cluster.put(worker, w), "b": cluster.put(worker, jnp.zeros(4))}

    stages = [leaves(*of) for of in enumerate(workers)]
    return {"stages": stages, "unused": cluster.put("d", jnp.ones(3)), "name": "mlp"}


def assert_equal(got, wanted, exact=True):
    assert str(jax.tree.structure(got)) == str(jax.tree.structure(wanted))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        if exact:
            np.testing.assert_array_equal(a, b)
        else:
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("exact", [True, False])
def test_value_and_gradients_are_those_of_a_context(cluster, exact):
    params = placed(cluster)
    step = compile(loss, cluster, exact=exact)
    for x in (X, X + 1, X - 1):
        wanted = value_and_grad(loss, cluster)(params, x, X)
        got = step.value_and_grad(params, x, X)
        assert_equal(got, wanted, exact)
        assert_equal(step(params, x, X), wanted[0], exact)
    assert got[1]["name"] is None
    np.testing.assert_array_equal(got[1]["unused"], jnp.zeros(3))
    assert "2 plans" in repr(step)


@pytest.mark.parametrize(
    "schedule", [None, one_f_one_b(stages=3, micro_batches=3)], ids=["none", "1F1B"]
)
def test_a_clipped_step_of_a_compiled_pipeline_is_that_of_a_context(schedule):
    pipe = jdag.pipeline([pipeline_cases.layer] * 3, pipeline_cases.square)
    xs = pipeline_cases.batches(3)
    found = []
    for compiled in (False, True):
        with simulate(["w0", "w1", "w2"], seed=0, schedule=schedule) as cluster:
            both = zip(cluster.workers, pipeline_cases.weights(3), strict=True)
            params = [cluster.put(*of) for of in both]
            optimizer = Optimizer(optax.sgd(0.1), params, clip_norm=0.05)
            if compiled:
                compile(pipe, cluster, optimizer, exact=True)(params, xs, xs)
            else:
                with cluster.context() as ctx:
                    ctx.backward(*pipe(ctx, params, xs, xs))
                    optimizer.step(ctx)
            found.append(fetch(params))
    assert_equal(found[1], found[0])


def trained(params, optimizer, exact, cluster):
    step = jdag.compile(loss, cluster, optimizer, exact=exact)
    return [float(step(params, X + number, X)) for number in range(3)]


def test_each_program_of_run_has_plans_of_its_own(cluster):
    params = placed(cluster)
    optimizer = Optimizer(optax.sgd(0.01), params["stages"], clip_norm=0.05)
    train = partial(trained, params, optimizer, True)
    found = cluster.run({"b": train, "d": train})
    assert len(found["b"]) == len(found["d"]) == 3
    optimizer.drop()
    with fails_with(ContextError, "plans.states_were_dropped"):
        compile(loss, cluster, optimizer)


def test_abstract_clusters_give_shapes():
    with simulate(["a", "b", "c", "d"], seed=0, values="abstract") as cluster:
        params = placed(cluster)
        optimizer = Optimizer(optax.adam(0.01), params["stages"], clip_norm=1.0)
        struct = jax.ShapeDtypeStruct((3, 4), X.dtype)
        step = compile(loss, cluster, optimizer)
        assert step(params, struct, struct).shape == ()
        gradients = step.value_and_grad(params, struct, struct)[1]
        assert gradients["stages"][2]["w"].shape == (4, 4)


def test_a_plan_prints_segments_hops_and_bytes(cluster):
    params = placed(cluster)
    step = compile(loss, cluster)
    with fails_with(JdagError, "plans.was_not_called"):
        _ = step.plan
    step.value_and_grad(params, X, X)
    lines = str(step.plan).splitlines()
    assert lines[0].endswith("8 segments on 3 workers")
    assert "caller  d" not in str(step.plan)  # Its leaves are on no path to a result.
    rows = [line.split() for line in lines]
    assert ["5", "b", "4", "1", "vjp", "of", "layer"] in rows
    assert ["caller", "b", "1", "1", "96"] in rows
    assert lines[-1].startswith("each step: 11 messages, 1,152 bytes of values")
    graph = step.plan.graph()
    assert len([one for one in graph.vertices if one.kind == "node"]) == 8
    assert '"b/segment 5" -> "c/segment 6"' in graph.dot()


def test_a_plan_that_nobody_names_is_dropped(cluster):
    w = cluster.put("b", jnp.ones(4))
    cluster.driver.settle()
    held = [cluster.info()[one]["values_held"] for one in "ab"]
    step = compile(lambda ctx, w: ctx.call("b", jnp.add, w, jnp.ones(4)), cluster)
    step(w)
    assert [cluster.info()[one]["values_held"] for one in "ab"] != held
    del step
    cluster.context()
    cluster.driver.settle()
    assert [cluster.info()[one]["values_held"] for one in "ab"] == held


def test_what_has_no_gradient_is_allowed_by_allow_int_alone(cluster):
    def indexed(ctx, p):
        return ctx.call("b", lambda p: jnp.sum(p["w"][p["i"]]), p)

    p = cluster.put("b", {"i": jnp.arange(3), "k": jax.random.key(0), "w": jnp.ones(4)})
    step = compile(indexed, cluster)
    for _ in range(2):
        found = step.value_and_grad(p, allow_int=True)
        assert_equal(found, value_and_grad(indexed, cluster, allow_int=True)(p))
        with fails_with(JdagError, "plans.int_3_has_no_gradient"):
            step.value_and_grad(p)


@pytest.mark.parametrize("exact", [True, False])
def test_a_loss_that_depends_on_nothing_has_zero_gradients(cluster, exact):
    def constant(ctx, w):
        return ctx.call("b", jnp.sum, jdag.stop_gradient(w))

    def both(ctx, w):
        return [constant(ctx, w), ctx.call("c", jnp.sum, w)]

    w = cluster.put("b", jnp.arange(4.0))
    found = compile(constant, cluster, exact=exact).value_and_grad(w)
    assert_equal(found, value_and_grad(constant, cluster)(w))
    assert_equal(compile(both, cluster, exact=exact).value_and_grad(w)[1], jnp.ones(4))


@pytest.mark.parametrize(
    ("program", "text"),
    [
        (lambda ctx, w, x: jnp.sum(x), "root 0 is .*, or a value computed outside of"),
        (lambda ctx, w, x: (x, ctx.call("b", jnp.sum, w)), "root 0 is an input of"),
        (lambda ctx, w, x: [ctx.call("b", jnp.sum, w), x], "root 1 is an input of"),
        (lambda ctx, w, x: None, "first result of .* is None: expected a loss"),
    ],
)
def test_a_first_result_that_no_call_gives_is_named(cluster, program, text):
    w = cluster.put("b", jnp.ones(4))
    optimizer = Optimizer(optax.sgd(0.1), w)
    bare, stepping = compile(program, cluster), compile(program, cluster, optimizer)
    for step in (bare.value_and_grad, stepping):
        with pytest.raises(RootError, match=text):
            step(w, X)


def test_wrong_use_is_one_error_each(cluster):
    w = cluster.put("b", jnp.ones(4))

    def total(ctx, w):
        return ctx.call("b", jnp.sum, w)

    with fails_with(JdagError, "plans.takes_a_jdag_optimizer_not"):
        compile(total, cluster, cast(Any, 3))
    with fails_with(RootError, "plans.of_size_4"):
        compile(lambda ctx, w: ctx.call("b", jnp.sin, w), cluster).value_and_grad(w)
    with fails_with(JdagError, "plans.argument_0_of_value_and"):
        compile(total, cluster).value_and_grad(jnp.ones(4))
    with simulate(["a", "b"], seed=0) as other:
        theirs = other.put("b", jnp.ones(4))
        optimizer = Optimizer(optax.sgd(0.1), theirs)
        with fails_with(ContextError, "plans.has_to_be_one_of"):
            compile(total, cluster, optimizer)
        step = compile(total, cluster)
        step(w)
        with fails_with(ContextError, "plans.refs_do_not_leave_their"):
            step(theirs)
        outlives = compile(total, other)
        outlives(theirs)
    with fails_with(ContextError, "plans.which_is_closed"):
        outlives(theirs)
    with cluster.context() as ctx:
        ref = ctx.call("b", jnp.sin, w)
        with fails_with(JdagError, "plans.is_no_leaf"):
            step(ref)
        with fails_with(ContextError, "plans.refs_do_not_leave_their_context"):
            compile(lambda ctx: ctx.call("b", jnp.sum, ref), cluster)()
    cluster.drop(w)
    with fails_with(ContextError, "plans.was_dropped"):
        step(w)


def test_each_call_looks_at_its_own_arguments(cluster):
    step = compile(lambda ctx, x: ctx.call("b", jnp.add, x, x), cluster)
    weak = jnp.asarray(2.5)
    args: list[Any] = [
        X,
        X,
        X + 1,
        X[0],
        weak,
        weak * jnp.ones(()),
        2.5,
        3,
        np.ones(3),
        X,
        X,
    ]
    for value in args:
        for got in (step(value), step(value)):
            assert_equal(got, jnp.add(value, value))
            assert jax.typeof(got).dtype == jax.typeof(jnp.add(value, value)).dtype
    w, v = cluster.put("b", X), cluster.put("b", X + 1)
    for ref in (w, w, v, w):
        assert_equal(step(ref), 2 * fetch(ref))
    gone = X + 0
    step(gone)
    gone.delete()
    with pytest.raises(JdagError, match="was deleted"):
        step(gone)
    step(v)
    cluster.drop(v)
    with fails_with(ContextError, "plans.was_dropped"):
        step(v)


def test_recording_in_a_loop_warns_once(cluster):
    def total(ctx, x):
        return ctx.call("b", jnp.sum, x)

    for _ in range(31):
        compile(total, cluster)(X)
    with warns_with(UserWarning, "plans.was_recorded_32_times"):
        compile(total, cluster)(X)
    compile(total, cluster)(X)


def test_a_lost_worker_is_named_with_the_steps_that_were_made():
    crash = Crash("c", at_ns=5_000_000, detect_ns=1_000_000)
    with simulate(
        ["a", "b", "c"], seed=0, faults=[crash], network=LinkModel(latency_ns=100_000)
    ) as cluster:
        w = cluster.put("b", jnp.ones(3))
        optimizer = Optimizer(optax.sgd(0.5), w)
        step = compile(lambda ctx, w: ctx.call("c", jnp.sum, w), cluster, optimizer)
        step(w)
        said = r"(?s)'c'.*no leaf of .* was stepped by step \d+; step \d+ .* on 'b'"
        with pytest.raises(WorkerLost, match=said):
            for _ in range(50):
                step(w)


def scaled_layer(w, x):
    return jnp.tanh(x @ w)


def test_a_step_in_one_process_waits_for_no_array_and_copies_none(monkeypatch):
    names = ["a", "b", "c", "d"]
    array_class, log = type(X), []
    arrays = [jnp.eye(4) * scale for scale in (0.5, 0.25, 2, 1)]

    def program(ctx, refs, x):
        for name, ref in zip(names, refs, strict=True):
            x = ctx.call(name, scaled_layer, ref, x)
        return ctx.call("a", mse, x, 0.5)

    with simulate(names, seed=0, trace=False) as cluster:
        refs = [cluster.put(*each) for each in zip(names, arrays, strict=True)]
        step = compile(program, cluster)
        expected = step.value_and_grad(refs, X)
        for owner, name in (
            *((array_class, name) for name in ("block_until_ready", "__array__")),
            *((array_class, name) for name in ("copy_to_host_async", "item")),
            *((jax, name) for name in ("block_until_ready", "device_put")),
        ):
            monkeypatch.setattr(owner, name, lambda *_, name=name: log.append(name))
        found = step.value_and_grad(refs, X)
        monkeypatch.undo()
    assert log == []
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def called_on_b(ctx, x):
    return ctx.call("a", jnp.cos, ctx.call("b", jnp.sin, x))


@pytest.mark.parametrize("trace", [True, False])
def test_a_step_has_keys_for_its_values_only_for_a_trace(monkeypatch, trace: bool):
    dropped: list[Any] = []
    with simulate(["a", "b"], seed=0, trace=trace) as cluster:
        step = compile(called_on_b, cluster)
        step(X)
        monkeypatch.setattr(WorkerRuntime, "drop", lambda _, keys: dropped.extend(keys))
        step(X)
        monkeypatch.undo()
    assert bool(dropped) == trace
