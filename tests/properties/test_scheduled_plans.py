"""Steps of plans follow a schedule: order, times, bits, memory, and what goes wrong."""

import threading
from functools import partial, reduce
from itertools import chain
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import jdag
from jdag import schedules
from jdag.compute.segments import _fused
from jdag.errors import RemoteError, ScheduleError, WorkerLost
from jdag.schedules.actions import Action
from jdag.sim import Crash, DeviceModel, LinkModel, Network
from tests.tools.error_texts import fails_with
from tests.tools.pipeline_cases import (
    batches,
    breaks,
    layer,
    put,
    simulated,
    square,
    step,
    through,
    wave,
    weights,
)
from tests.tools.plan_cases import bits, close

ONE_STAGE = {
    build.__name__: build
    for build in (
        schedules.gpipe,
        schedules.one_f_one_b,
        schedules.zb_h1,
        schedules.zb_h2,
    )
}
SMALL = schedules.one_f_one_b(stages=2, micro_batches=3)
HALVES = schedules.zb_h1(stages=3, micro_batches=4)


def built(name: str, p: int, m: int) -> schedules.Schedule:
    if name == "interleaved":
        return schedules.interleaved(stages=2 * p, chunks=2, micro_batches=m * p)
    if name == "zb_v":
        return schedules.zb_v(stages=2 * p, micro_batches=m)
    if name == "dualpipe_v":
        return schedules.dualpipe_v(stages=2 * p, micro_batches=m + 2 * p)
    return ONE_STAGE[name](stages=p, micro_batches=m)


ALL = [*ONE_STAGE, "interleaved", "zb_v", "dualpipe_v"]


def piped(stages: int, stage: Any = layer) -> Any:
    pipe = jdag.pipeline([stage] * stages, square)

    def program(ctx: Any, params: Any, xs: Any) -> Any:
        return pipe(ctx, params, xs, xs)

    return program


def acted(records: Any, schedule: Any) -> list[list[str]]:
    found: dict[str, list[str]] = {name: [] for name in schedule.workers}
    for record in records:
        if record.kind == "start" and record.named["action"]:
            assert record.named["job"] == "runsegment"
            found[record.worker].append(record.named["action"])
    return list(found.values())


def listed(schedule: Any) -> list[list[str]]:
    return [[str(part) for s in of for part in s.parts] for of in schedule.actions]


def loss(params: Any, xs: Any) -> Any:
    return sum([square(reduce(through, params, x), x) for x in xs])


cost = st.integers(1, 50)


@settings(max_examples=25)
@given(st.sampled_from(ALL), st.integers(1, 3), st.integers(1, 4), cost, cost, cost)
@example("zb_h1", 3, 4, 37, 31, 17)
@example("dualpipe_v", 2, 3, 37, 31, 17)
def test_each_step_follows_the_lists_anew_and_takes_the_time_of_the_schedule(
    name, p, m, f, i, w
):
    schedule, comm = built(name, p, m), 5 * (name in ONE_STAGE)
    costs, overlap_ns = {"layer": (f, i, w), "last_stage": (f, i, w)}, f + i
    devices = DeviceModel(functions=costs, overlap_ns=overlap_ns)  # Of OVERLAP_F_B.
    network = Network(LinkModel(comm), control_lane=LinkModel())
    options = {"values": "abstract", "devices": devices, "network": network}
    with simulated(schedule, schedule.workers, **options) as cluster:
        params, given = put(cluster, schedule), batches(schedule.micro_batches)
        compiled = jdag.compile(piped(schedule.stages), cluster)
        for _ in range(2):
            first = len(cluster.trace)
            compiled.value_and_grad(params, given)
            cluster.driver.settle()
            records = list(cluster.trace)[first:]
            assert acted(records, schedule) == listed(schedule)
            times = [one.time_ns for one in records if one.named.get("action")]
            assert max(times) - min(times) == schedule.makespan_ns(
                forward=f,
                input_grad=i,
                weight_grad=w,
                comm=comm,
                overlap_ns=overlap_ns,
            )


@pytest.mark.parametrize("name", ALL)
def test_no_schedule_changes_a_bit_of_a_plan(name):
    schedule = built(name, 3, 17 if name == "zb_h1" else 3)  # More than one sum has.
    given = batches(schedule.micro_batches)
    with simulated(schedule, schedule.workers) as cluster:
        wanted = step_of_context = bits(step(cluster, schedule))
    for followed in (schedule, None):
        with simulated(followed, schedule.workers) as cluster:
            params = put(cluster, schedule)
            for exact in (True, False):
                step_ = jdag.compile(piped(schedule.stages), cluster, exact=exact)
                found = step_.value_and_grad(params, given)[1]
                if exact:
                    assert bits(found) == wanted == step_of_context
                close(found, jax.grad(loss)(weights(schedule.stages), given), "f4", 4)


def test_processes_follow_the_lists_and_have_the_bits_of_a_context():
    with simulated(HALVES, HALVES.workers) as cluster:
        wanted = step(cluster, HALVES)
    with jdag.launch(HALVES.workers, schedule=HALVES, allow=["tests"]) as cluster:
        assert bits(step(cluster, HALVES)) == bits(wanted)
        params = put(cluster, HALVES)
        for exact in (True, False):
            compiled = jdag.compile(piped(3), cluster, exact=exact)
            for _ in range(3):  # The second and third time are not slow.
                _, found = compiled.value_and_grad(params, batches(4))
                assert not exact or bits(found) == bits(wanted)
                close(found, wanted, "f4", 4)
        waits = [one["waits_for"] for one in cluster.info().values()]
        assert waits == [""] * 3


@pytest.mark.parametrize("name", ONE_STAGE)
def test_activations_at_the_peak_are_those_of_a_context(name):
    schedule = built(name, 4, 9)
    peaks = []
    for exact in (None, True, False):
        with simulated(schedule, schedule.workers, values="abstract") as cluster:
            if exact is None:
                step(cluster, schedule, fetched=False, stage=wave)
            else:
                compiled = jdag.compile(piped(4, wave), cluster, exact=exact)
                compiled.value_and_grad(put(cluster, schedule), batches(9))
            info = cluster.info()
            peaks.append([info[w]["activation_bytes_peak"] for w in schedule.workers])
    assert peaks[0] == peaks[1] == peaks[2]


def test_memory_grows_with_the_logarithm_of_micro_batches():
    peaks = []
    for micro_batches in (20, 60, 120):
        schedule = schedules.one_f_one_b(stages=1, micro_batches=micro_batches)
        with simulated(schedule, schedule.workers, values="abstract") as cluster:
            leaf = cluster.put("w0", np.zeros(1 << 16, "f4"))
            pipe = jdag.pipeline([jnp.multiply], square)
            xs = [np.float32(0)] * micro_batches
            jdag.compile(pipe, cluster).value_and_grad([leaf], xs, xs)
            peaks.append(cluster.info()["w0"]["bytes_peak"] >> 18)
    # Less than eight gradients of each of two levels wait, or of three.
    assert peaks[0] <= peaks[1] <= 16 and peaks[2] <= 24


def test_each_action_is_one_segment_and_micro_batches_share_executables():
    made = []
    for micro_batches in (3, 8):
        schedule = schedules.zb_h1(stages=3, micro_batches=micro_batches)
        with simulated(schedule, schedule.workers) as cluster:
            before = _fused.cache_info().misses
            compiled = jdag.compile(
                piped(3, lambda w, x: layer(w, layer(w, x))), cluster
            )
            compiled.value_and_grad(put(cluster, schedule), batches(micro_batches))
            made.append(_fused.cache_info().misses - before)
            pieces = [piece.segment for piece in compiled.plan.cut.pieces]
        acts = [
            str(Action(one.action, one.tag.stage, one.tag.micro_batch))
            for one in pieces
            if one.tag is not None
        ]
        assert sorted(acts) == sorted(chain(*listed(schedule)))
        assert "2I0 fill, I of last_stage" in str(compiled.plan)
    assert made[1] <= 1 < made[0]  # The sum of so many.


def test_steps_of_an_optimizer_have_the_bits_of_contexts():
    wanted = None
    for exact in (None, True):
        with simulated(HALVES, HALVES.workers) as cluster:
            params = put(cluster, HALVES)
            optimizer = jdag.Optimizer(optax.sgd(0.1, momentum=0.5), params)
            train: Any = partial(stepped, cluster, optimizer)
            if exact is not None:
                train = jdag.compile(piped(3), cluster, optimizer, exact=exact)
            found = []
            for _ in range(3):
                found.append(train(params, batches(4)))
            found += jdag.fetch([params, optimizer.states])
        wanted = wanted or bits(found)
        assert bits(found) == wanted


def stepped(cluster: Any, optimizer: Any, params: Any, xs: Any) -> Any:
    with cluster.context() as ctx:
        losses = piped(3)(ctx, params, xs)
        ctx.backward(*losses)
        optimizer.step(ctx)
        return jdag.fetch(losses)


def tied(ctx: Any, params: Any, xs: Any) -> Any:
    losses = []
    for m, x in enumerate(xs):
        h = ctx.call("w0", jnp.sin, x)
        for s, w in enumerate([params[0], params[1], params[0]]):
            with ctx.tag(stage=s, micro_batch=m):
                h = ctx.call(f"w{s}", layer, w, h)
            h = ctx.call(f"w{s}", jnp.cos, h)
        losses.append(ctx.call("w2", square, h, x))
        ctx.call("w1", jnp.sum, h)  # Nothing reads it.
    return losses


def test_what_no_list_has_waits_for_none_and_halves_are_of_leaves_at_home():
    for schedule in (HALVES, schedules.one_f_one_b(stages=3, micro_batches=4)):
        with simulated(schedule, schedule.workers) as cluster:
            params = put(cluster, schedule)[:2]
            with cluster.context() as ctx:
                ctx.backward(*tied(ctx, params, batches(4)))
                wanted = jdag.fetch(ctx.gradient(params))
            for exact in (True, False):
                compiled = jdag.compile(tied, cluster, exact=exact)
                first = len(cluster.trace)
                _, found = compiled.value_and_grad(params, batches(4))
                cluster.driver.settle()
                records = list(cluster.trace)[first:]
                assert acted(records, schedule) == listed(schedule)
                assert not exact or bits(found) == bits(wanted)
                close(found, wanted, "f4", 8)


def test_a_step_without_gradients_leaves_backward_actions_out():
    with simulated(SMALL, SMALL.workers) as cluster:
        params, given = put(cluster, SMALL), batches(3)
        evaluate, train = [jdag.compile(piped(2), cluster) for _ in range(2)]
        for _ in range(2):
            first = len(cluster.trace)
            found = evaluate(params, given)
            forward = [[f"{s}F{m}" for m in range(3)] for s in range(2)]
            assert acted(list(cluster.trace)[first:], SMALL) == forward
            assert bits(train.value_and_grad(params, given)[0]) == bits(found)


def two_stages(ctx: Any, params: Any, xs: Any, second: Any) -> Any:
    losses = []
    for m, x in enumerate(xs):
        with ctx.tag(stage=0, micro_batch=m):
            hidden = ctx.call("w0", layer, params[0], x)
        with ctx.tag(stage=1, micro_batch=m):
            out = ctx.call("w1", *second(m), params[1], hidden)
        losses.append(ctx.call("w1", square, out, x))
    return losses


def broken(ctx: Any, params: Any, xs: Any, at: int) -> Any:
    return two_stages(ctx, params, xs, lambda m: [breaks if m == at else layer])


@pytest.mark.parametrize("exact", [True, False])
def test_a_step_that_fails_holds_nothing_up_and_leaves_nothing_in_lists(exact):
    with simulated(SMALL, SMALL.workers) as cluster:
        params, given = put(cluster, SMALL), batches(3)
        right = jdag.compile(piped(2), cluster, exact=exact)
        wanted = bits(right.value_and_grad(params, given))
        wrong = jdag.compile(broken, cluster, exact=exact)
        for _ in range(2):
            with fails_with(RemoteError, "properties.it_is_too_large"):
                wrong.value_and_grad(params, given, jdag.static(1))
            assert bits(right.value_and_grad(params, given)) == wanted
        assert [one["waits_for"] for one in cluster.info().values()] == ["", ""]
        assert cluster.info()["w1"]["values_held"] == 1
        lists = [device.ready for device in cluster.driver._jobs._devices.values()]
        assert not any(each._runs for each in lists)


def test_a_worker_that_is_lost_in_a_step_holds_no_list_up():
    devices = DeviceModel(functions={"layer": (9, 9, 9), "last_stage": (9, 9, 9)})
    crash = Crash("w1", detect_ns=1_000, at_ns=60, restart_ns=2_000)
    options = {"devices": devices, "faults": (crash,)}
    with simulated(HALVES, HALVES.workers, **options) as cluster:
        lost = jdag.compile(piped(3), cluster)
        with pytest.raises(WorkerLost):
            lost.value_and_grad(put(cluster, HALVES), batches(4))
        cluster.driver.settle()
        again = jdag.compile(piped(3), cluster, exact=True)
        _, found = again.value_and_grad(put(cluster, HALVES), batches(4))
    with simulated(HALVES, HALVES.workers) as cluster:
        assert bits(found) == bits(step(cluster, HALVES))


def backwards(ctx: Any, params: Any, xs: Any) -> Any:
    made: Any = xs[2]
    for m in (2, 1, 0):
        with ctx.tag(stage=0, micro_batch=m):
            made = ctx.call("w0", layer, params[0], made)
        with ctx.tag(stage=1, micro_batch=m):
            made = ctx.call("w1", layer, params[1], made)
    return ctx.call("w1", square, made, xs[0])


def summed(ctx: Any, params: Any, xs: Any) -> Any:
    losses = piped(2)(ctx, params, xs)
    return ctx.call("w1", lambda *of: reduce(jnp.add, of), *losses)


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (backwards, "cannot follow the schedule: .*0F1 waits for 0F0 waits for 1F1 wa"),
        (summed, "the schedule: .*, 1F1 waits for 1B0; .* return the losses instead"),
    ],
)
def test_a_plan_that_a_list_would_hold_up_is_refused_before_it_runs(program, said):
    with simulated(SMALL, SMALL.workers) as cluster:
        with pytest.raises(ScheduleError, match=said):
            step = jdag.compile(program, cluster)
            step.value_and_grad(put(cluster, SMALL), batches(3))
        assert not acted(cluster.trace, SMALL)[0]


def await_file(path: str, x: Any) -> Any:
    while not Path(path).exists():
        threading.Event().wait(0.01)
    return x


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def awaits(path: str, x: Any) -> Any:
    return jax.pure_callback(
        partial(await_file, path), jax.ShapeDtypeStruct(x.shape, x.dtype), x
    )


awaits.defvjp(lambda path, x: (awaits(path, x), None), lambda path, _, ct: (ct,))


def slow(path: str, w: Any, x: Any) -> Any:
    return layer(w, awaits(path, x))


def held_up(ctx: Any, params: Any, xs: Any, path: Any) -> Any:
    return two_stages(ctx, params, xs, lambda m: [slow, jdag.static(path)])


@pytest.mark.second
def test_the_action_that_a_step_waits_for_is_told_meanwhile(tmp_path: Path):
    path, said = tmp_path / "go", ""
    wanted = "0B0, which is next in its list; ready later in the list: 0F2"
    with jdag.launch(SMALL.workers, schedule=SMALL, allow=["tests"]) as cluster:

        def look() -> None:
            nonlocal said
            try:
                while not (said := cluster.info()["w0"]["waits_for"]):
                    threading.Event().wait(0.01)
            finally:
                path.touch()

        thread = threading.Thread(target=look)
        thread.start()
        compiled = jdag.compile(held_up, cluster, exact=True)
        compiled.value_and_grad(put(cluster, SMALL), batches(3), jdag.static(str(path)))
        thread.join()
    assert said == f"worker w0 waits for {wanted}"
