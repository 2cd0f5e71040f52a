"""Pipelines whose work follows a schedule: times, bits, memory, and what goes wrong."""

from itertools import product
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jdag
from jdag import schedules
from jdag.errors import JdagError, RemoteError, ScenarioError, ScheduleError
from jdag.sim import DeviceModel, LinkModel, Network
from tests.tools.error_texts import fails_with
from tests.tools.pipeline_cases import (
    ROWS,
    WIDTH,
    batches,
    breaks,
    drawn_step,
    layer,
    put,
    simulated,
    square,
    step,
    wave,
    weights,
)

ONE_STAGE = [
    schedules.gpipe,
    schedules.one_f_one_b,
    schedules.eager_one_f_one_b,
    schedules.zb_h1,
    schedules.zb_h2,
]
cost = st.integers(1, 50)


def every_schedule(p, m):
    for build in ONE_STAGE:
        yield build(stages=p, micro_batches=m)
    yield schedules.interleaved(stages=2 * p, chunks=2, micro_batches=m * p)
    yield schedules.zb_v(stages=2 * p, micro_batches=m)
    yield schedules.dualpipe_v(stages=2 * p, micro_batches=m + 2 * p)


@settings(max_examples=30)
@given(st.integers(1, 3), st.integers(1, 4), st.tuples(*[cost] * 4), st.integers(0, 7))
@example(3, 1, (5, 3, 1, 20), 7)  # One of two that overlap is there before the other.
def test_a_run_takes_as_long_as_its_schedule_says(p, m, costs, number):
    f, i, w, comm = costs
    schedule = list(every_schedule(p, m))[number]
    devices = DeviceModel(functions={"layer": (f, i, w), "last_stage": (f, i, w)})
    settings = {"values": "abstract", "devices": devices}
    settings["network"] = Network(LinkModel(comm), control_lane=LinkModel())
    with simulated(schedule, schedule.workers, **settings) as cluster:
        step(cluster, schedule, fetched=False)
        acts = [one for one in cluster.trace.of_kind("finish") if one.named["action"]]
        assert max([one.time_ns for one in acts]) == schedule.makespan_ns(
            forward=f, input_grad=i, weight_grad=w, comm=comm
        )
        found: dict[str, list[str]] = {name: [] for name in schedule.workers}
        for record in cluster.trace.of_kind("start"):
            if record.named["action"]:
                found[record.worker].append(record.named["action"])
    wanted = [[str(part) for s in of for part in s.parts] for of in schedule.actions]
    assert list(found.values()) == wanted


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.second)])
def test_no_schedule_changes_a_bit(p):
    for number, schedule in enumerate(every_schedule(p, 3)):
        found = []
        for followed in (schedule, None):
            with simulated(followed, schedule.workers) as cluster:
                found.append(np.stack(drawn_step(cluster, schedule, number)).tobytes())
        assert found[0] == found[1], schedule


def test_activations_at_the_peak_are_those_of_the_schedule():
    for p, m, build in product((3, 5), (7, 9), ONE_STAGE):
        schedule = build(stages=p, micro_batches=m + p - 3)
        with simulated(schedule, schedule.workers, values="abstract") as cluster:
            step(cluster, schedule, fetched=False, stage=wave)
            info = cluster.info()
        one = 2 * ROWS * WIDTH * 4
        found = [info[name]["activation_bytes_peak"] / one for name in schedule.workers]
        wanted = list(schedule.peak_activations().values())
        # The last stage has the loss. The first one needs no cotangent of its input: it
        # keeps half, and of one micro-batch the cotangent until W.
        assert found[1:-1] == wanted[1:-1], build
        split = schedule.halves(0, 0)
        assert found[0] == (wanted[0] + split) / 2, build


@pytest.mark.parametrize("mode", ["smart", "fast"])
@pytest.mark.parametrize("dtype", ["f4", "bfloat16"])
def test_sums_that_begin_early_have_the_bits_of_one_sum(mode, dtype):
    found = []
    # First contributions come in order; then those of slow c, the first ones, last.
    for devices in (None, {"c": DeviceModel(backward_ns=1_000)}):
        with jdag.simulate(["a", "b", "c"], seed=0, devices=devices) as cluster:
            leaf = cluster.put("a", np.linspace(0.1, 3, 64).astype(dtype))
            with cluster.context() as ctx:
                losses = []
                for n in range(29):
                    x = np.linspace(-n, n / 3, 64).astype(dtype)
                    made = ctx.call("a", lambda w, x: (w * x).sum() ** 2, leaf, x)
                    losses.append(ctx.call("c" if n < 14 else "b", jnp.sin, made))
                ctx.backward(*losses, mode=mode)
                found.append(np.asarray(ctx.gradient(leaf).fetch()).tobytes())
    assert found[0] == found[1]


NO_FUNCTION: Any = 3
SMALL = schedules.one_f_one_b(stages=2, micro_batches=3)


def called(ctx, params, stage, micro_batch, x):
    with ctx.tag(stage=stage, micro_batch=micro_batch):
        return ctx.call(f"w{stage}", layer, params[stage], x)


def test_what_is_left_of_a_list_runs_when_no_backward_comes():
    with simulated(SMALL, SMALL.workers) as cluster:
        params = put(cluster, SMALL)
        for _ in range(2):
            with cluster.context() as ctx:
                for m, x in enumerate(batches(3)):
                    called(ctx, params, 1, m, called(ctx, params, 0, m, x))
        assert cluster.info()["w0"]["values_held"] == 1
        started = list(cluster.trace.of_kind("start"))
        assert [record.named["action"] for record in started].count("0F2") == 2


def losses_of(ctx, params):
    losses = []
    for m, x in enumerate(batches(3)):
        out = called(ctx, params, 1, m, called(ctx, params, 0, m, x))
        losses.append(ctx.call("w1", square, out, x))
    return losses


def test_a_stage_that_fails_holds_nothing_up():
    with simulated(SMALL, SMALL.workers) as cluster:
        params = put(cluster, SMALL)
        for _ in range(2):
            with (
                fails_with(RemoteError, "properties.it_is_too_large"),
                cluster.context() as ctx,
            ):
                outs = []
                for m, x in enumerate(batches(3)):
                    hidden = called(ctx, params, 0, m, x)
                    with ctx.tag(stage=1, micro_batch=m):
                        fn = breaks if m == 1 else layer
                        out = ctx.call("w1", fn, params[1], hidden)
                    outs.append(ctx.call("w1", jnp.sum, out))
                ctx.backward(*outs)
        assert cluster.info()["w1"]["values_held"] == 1


def test_nothing_waits_for_a_stage_that_cannot_run():
    schedule = schedules.gpipe(stages=2, micro_batches=3)
    with simulated(schedule, schedule.workers) as cluster:
        params = put(cluster, SMALL)
        with fails_with(RemoteError, "properties.too_large"), cluster.context() as ctx:
            outs = []
            for m, x in enumerate(batches(3)):
                with ctx.tag(stage=0, micro_batch=m):
                    fn = layer if m else breaks
                    hidden = ctx.call("w0", fn, params[0], x)
                outs.append(called(ctx, params, 1, m, hidden))
            assert outs[1].fetch().shape == (ROWS, WIDTH)


def test_contexts_follow_the_list_each_by_itself():
    with simulated(SMALL, SMALL.workers) as cluster:
        params = put(cluster, SMALL)
        with cluster.context() as one, cluster.context() as other:
            losses, others = losses_of(one, params), losses_of(other, params)
            one.backward(*losses)
            other.backward(*others)
            found = [jdag.fetch(ctx.gradient(params)) for ctx in (one, other)]
        np.testing.assert_array_equal(found[0], found[1])
        started: dict[str, list[str]] = {}
        for record in cluster.trace.of_kind("start"):
            if record.worker == "w0" and record.named["action"]:
                acted = started.setdefault(record.named["context"], [])
                acted.append(record.named["action"])
    steps = [str(step) for step in SMALL.lists["w0"]]
    forwards_first = sorted(steps, key=lambda action: "B" in action)
    assert [*started.values()] == [steps, forwards_first]


def test_a_retained_graph_is_used_again_beside_the_list():
    with simulated(SMALL, SMALL.workers) as cluster:
        params = put(cluster, SMALL)
        with cluster.context() as ctx:
            outs = losses_of(ctx, params)
            ctx.backward(*outs, retain_graph=True)
            first = jdag.fetch(ctx.gradient(params))
            ctx.backward(*outs)
            second = jdag.fetch(ctx.gradient(params))
    np.testing.assert_allclose(second, 2 * np.stack(first), rtol=1e-6)


@pytest.mark.parametrize(
    ("use", "message"),
    [
        (
            lambda ctx, w: called(ctx, [w[1], w[0]], 1, 3, batches(1)[0]),
            "ctx.tag: micro_batch = 3: expected an integer from 0 to 2",
        ),
        (
            lambda ctx, w: ctx.tag(stage=-1, micro_batch=0).__enter__(),
            "ctx.tag: stage = -1: expected an integer from 0 to 1, as in the sch",
        ),
        (
            lambda ctx, w: [called(ctx, w, 0, 0, x) for x in batches(2)],
            "layer is a second call of stage 0 and micro-batch 0, after .*layer",
        ),
        (
            lambda ctx, w: [losses_of(ctx, w) for _ in range(2)],
            "context can run a pipeline only once: .* in another context, `with clus",
        ),
    ],
)
def test_a_mark_that_the_schedule_does_not_have_is_one_clear_error(use, message):
    with simulated(SMALL, SMALL.workers) as cluster:
        params = put(cluster, SMALL)
        with cluster.context() as ctx, pytest.raises(ScheduleError, match=message):
            use(ctx, params)


def test_a_stage_on_another_worker_is_one_clear_error():
    with (
        simulated(SMALL, SMALL.workers) as cluster,
        cluster.context() as ctx,
        ctx.tag(stage=1, micro_batch=0),
        fails_with(ScheduleError, "properties.has_on_w1"),
    ):
        ctx.call("w0", layer, weights(1)[0], batches(1)[0])


def test_a_schedule_for_other_workers_is_refused():
    for make in (
        lambda s: simulated(s, ["a", "b"]),
        lambda s: jdag.launch(["a"], schedule=s),
    ):
        with fails_with(ScheduleError, "properties.worker_w0_allowed_is_workers"):
            make(SMALL)
    with fails_with(ScenarioError, "properties.schedule_zb_h1_allowed_is"):
        simulated("zb_h1", ["a", "b"])  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stages", "loss", "message"),
    [
        ([], square, "stages = .*expected a list of functions"),
        ([layer, NO_FUNCTION], square, r"stages\[1\] = 3: expected a fun"),
        ([layer], NO_FUNCTION, "loss = 3: expected a function"),
    ],
)
def test_a_pipeline_of_what_is_no_function_is_refused(stages, loss, message):
    with pytest.raises(JdagError, match=message):
        jdag.pipeline(stages, loss)


def test_a_pipeline_of_another_size_than_its_schedule_is_refused():
    pipe = jdag.pipeline([layer] * 2, square)
    with simulated(SMALL, SMALL.workers) as cluster, cluster.context() as ctx:
        params, xs = put(cluster, SMALL), batches(4)
        with fails_with(JdagError, "properties.has_4_micro_batches_and"):
            pipe(ctx, params, xs, xs)
        with fails_with(JdagError, "properties.params_are_1_allowed_is"):
            pipe(ctx, params[:1], xs, xs)
        with fails_with(JdagError, "properties.inputs_are_4_allowed_is"):
            pipe(ctx, params, xs, xs[:3])


def test_a_stage_without_refs_has_no_worker():
    pipe = jdag.pipeline([layer], square)
    with (
        jdag.simulate(["a"], seed=0) as cluster,
        cluster.context() as ctx,
        fails_with(JdagError, "properties.params_0_is_without_refs"),
    ):
        pipe(ctx, [None], batches(1), batches(1))
