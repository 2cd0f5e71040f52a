"""Re-timing: a recorded run with other links and devices, held against running it."""

import json
from random import Random

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from msgspec.structs import replace

import jdag
from jdag import schedules
from jdag.errors import JdagError, ScenarioError
from jdag.report.formatting import formatted
from jdag.report.result import json_of
from jdag.runtime.trace import read_trace
from jdag.sim import DeviceModel, LinkModel, LogGP, Network
from tests import ROOT
from tests.tools.error_texts import fails_with
from tests.tools.pipeline_cases import batches, layer, simulated, square, step, weights
from tests.tools.tiers import TIER
from tests.unit.lab.test_campaign import command

SCENARIOS = ROOT / "scenarios"
CASES = 200 if TIER == "all" else 12
ONE_CHUNK = ("gpipe", "one_f_one_b", "eager_one_f_one_b", "zb_h1", "zb_h2")


def schedule_of(rng):
    p, m = rng.randint(1, 4), rng.randint(1, 6)
    kind = rng.choice([*ONE_CHUNK, "interleaved", "zb_v", "dualpipe_v"])
    build = getattr(schedules, kind)
    if kind == "interleaved":
        return build(stages=2 * p, chunks=2, micro_batches=m * p)
    if kind in ONE_CHUNK:
        return build(stages=p, micro_batches=m)
    return build(stages=2 * p, micro_batches=m + 2 * p)


def devices_of(rng, workers):
    def model():
        costs = [tuple(rng.randint(0, 900) for _ in range(3)) for _ in range(2)]
        functions = dict(zip(("layer", "last_stage"), costs, strict=True))
        return DeviceModel(functions=functions)

    return {worker: model() for worker in workers} if rng.random() < 0.5 else model()


def link_of(rng):
    rate = rng.choice([None, 10**7, 10**8, 333_333_333])
    latency_ns = rng.choice([0, 7, 500, 3_000])
    if rng.random() < 0.3:
        return LogGP(latency_ns, rate, overhead_ns=rng.randint(0, 90))
    return LinkModel(latency_ns, rate)


def network_of(rng, workers):
    pairs = [(a, b) for a in workers for b in workers if a != b and rng.random() < 0.3]
    return Network(link_of(rng), {pair: link_of(rng) for pair in pairs}, None, True)


def cluster_of(schedule, network, devices, **settings):
    settings = {"values": "abstract", "network": network, **settings}
    return simulated(schedule, schedule.workers, devices=devices, **settings)


def traced(schedule, network, devices, steps=1, compiled=False):
    with cluster_of(schedule, network, devices) as cluster:
        one_step(cluster, schedule, steps, compiled)
        return cluster.trace


def one_step(cluster, schedule, steps=1, compiled=False):
    stages, count = schedule.stages, schedule.micro_batches
    pipe = jdag.pipeline([layer] * stages, square)
    first, last = schedule.worker(0), schedule.worker(stages - 1)
    params = [cluster.put(schedule.worker(n), w) for n, w in enumerate(weights(stages))]
    xs = [cluster.put(first, x, tracked=False) for x in batches(count)]
    ys = [cluster.put(last, y, tracked=False) for y in batches(count)]
    jdag.fetch([params, xs, ys])
    if compiled:
        plan = jdag.compile(pipe, cluster)
    for _ in range(steps):
        if compiled:
            plan.value_and_grad(params, xs, ys)
            continue
        with cluster.context() as ctx:
            ctx.backward(*pipe(ctx, params, xs, ys))
            cluster.update(lambda w, g: w - g, params, ctx.gradient(params))


def taken(trace):
    begins, ends = (
        [r.time_ns for r in trace.of_kind(kind) if r.named["action"]]
        for kind in ("start", "finish")
    )
    return max(ends) - min(begins)


def faster_link(rng, network, links):
    link = rng.choice(links)
    model = network.model(*link)
    rate = model.bandwidth_bytes_per_s
    model = replace(model, latency_ns=model.latency_ns * 9 // 10)
    model = replace(model, bandwidth_bytes_per_s=rate and rate * 11 // 10)
    return replace(network, links={**network.links, link: model})


def faster_job(rng, devices, workers):
    each = {w: devices if type(devices) is DeviceModel else devices[w] for w in workers}
    worker = rng.choice(workers)
    functions = dict(each[worker].functions)
    name = rng.choice(list(functions))
    forward_ns, *backward = functions[name]
    functions[name] = (forward_ns * 9 // 10, *backward)
    return {**each, worker: replace(each[worker], functions=functions)}


@pytest.mark.parametrize("seed", range(CASES))
def test_a_run_re_timed_is_the_run_repeated(seed):
    rng = Random(f"retime {seed}")
    schedule = schedule_of(rng)
    workers = schedule.workers
    first, *others = [
        (network_of(rng, workers), devices_of(rng, workers)) for _ in range(3)
    ]
    network, devices = first
    links = [(a, b) for a in workers for b in workers if a != b]
    if links:
        others.append((faster_link(rng, network, links), devices))
    others.append((network, faster_job(rng, devices, workers)))
    steps = rng.choice([1, 1, 2]), seed % 3 == 2
    trace = traced(schedule, *first, *steps)
    run = jdag.retime(trace)
    assert run.makespan() == taken(trace)
    for network, devices in others:
        expected = taken(traced(schedule, network, devices, *steps))
        assert run.makespan(network, devices) == expected
        path = run.critical_path(network, devices)
        assert path.makespan_ns == expected == sum(path.by_kind.values())
        assert sum([*path.by_worker.values(), *path.by_link.values()]) == expected
        ends = [0, *[end for _, _, end in path.steps]]
        assert [start for _, start, _ in path.steps] == ends[:-1]


LINK = LinkModel(latency_ns=170, bandwidth_bytes_per_s=91_000_000)
LANES = Network(LINK, control_lane=True)
DEVICES = DeviceModel(
    functions={"layer": (900, 810, 430), "last_stage": (700, 610, 290)}
)
SCHEDULE = schedules.zb_h1(stages=3, micro_batches=4)


@pytest.fixture(scope="module")
def trace():
    return traced(SCHEDULE, LANES, DEVICES)


def test_the_relaxation_is_the_makespan_but_for_rounding(trace):
    run = jdag.retime(trace)
    with jax.enable_x64(True):
        relaxed = float(run.makespan_fn(run.settings))
    values = len([r for r in trace.of_kind("send") if r.named["payload_bytes"]])
    assert 0 <= run.makespan() - relaxed < values


def test_its_gradient_is_that_of_finite_differences(trace):
    run = jdag.retime(trace)
    with jax.enable_x64(True):
        slopes = jax.grad(run.makespan_fn)(run.settings)
        checked = 0
        for key, of in run.settings.items():
            for name, value in of.items():
                ends = []
                for sign in (1, -1):
                    changed = {k: dict(v) for k, v in run.settings.items()}
                    changed[key][name] = value * (1 + sign * 1e-6)
                    ends.append(float(run.makespan_fn(changed)))
                found = (ends[0] - ends[1]) / (2e-6 * value)
                slope = float(slopes[key][name])
                assert abs(found - slope) <= 1e-6 * max(abs(slope), abs(found), 1e-6)
                checked += slope != 0
    assert checked >= 6


def test_what_links_carry_before_and_after_the_step_has_no_part_in_its_time():
    """Every array begins on w0; weights and targets go from there to their workers."""
    schedule = schedules.one_f_one_b(stages=4, micro_batches=3)
    with cluster_of(schedule, LANES, DEVICES) as cluster:
        one_step(cluster, schedule)
        params = [cluster.put("w3", w) for w in weights(3)]
        jdag.fetch(params)  # Takes its time on w3->w0.
        run = jdag.retime(cluster.trace)
    with jax.enable_x64(True):
        slopes = jax.grad(run.makespan_fn)(run.settings)
        assert float(run.makespan_fn(run.settings)) <= taken(cluster.trace)
    used = [
        f"w{n}->w{n + way}" for n in range(4) for way in (1, -1) if 0 <= n + way < 4
    ]
    for key in ("latency_ns", "bandwidth_bytes_per_s"):
        of = {link: float(slope) for link, slope in slopes[key].items()}
        assert {"w0->w2", "w0->w3", "w3->w0"} <= of.keys()
        assert sorted([link for link, slope in of.items() if slope]) == sorted(used)
    # There are three micro-batches, of which the first has to get to the end and back.
    assert float(slopes["latency_ns"]["w2->w3"]) >= 1


def test_a_window_has_the_steps_that_begin_in_it():
    with cluster_of(SCHEDULE, LANES, DEVICES) as cluster:
        one_step(cluster, SCHEDULE)
        between = cluster.now_ns
        one_step(cluster, SCHEDULE)
        end = cluster.now_ns
    one = taken(traced(SCHEDULE, LANES, DEVICES))
    trace = cluster.trace
    for window in ((0, between), (between, end)):
        assert jdag.retime(trace, window).makespan() == one
    assert jdag.retime(trace).makespan() > 2 * one
    fast = LinkModel(10, 10**9)
    found = taken(traced(SCHEDULE, Network(fast, control_lane=True), DEVICES))
    run = jdag.retime(trace, (between, end))
    assert run.makespan(fast) == run.critical_path(fast).makespan_ns == found
    with fails_with(JdagError, "lab.no_jobs_that_begin_in"):
        jdag.retime(trace, (0, 0))


def test_many_settings_at_once_are_each_of_them(trace):
    run = jdag.retime(trace)
    scales = np.array([0.5, 1.0, 2.0, 4.0])
    with jax.enable_x64(True):
        many = jax.tree.map(lambda value: value * jnp.asarray(scales), run.settings)
        found = jax.vmap(run.makespan_fn)(many)
        one = [
            run.makespan_fn(jax.tree.map(lambda value, s=s: value * s, run.settings))
            for s in scales
        ]
        slopes = jax.vmap(jax.grad(run.makespan_fn))(many)
    assert found.tolist() == [float(value) for value in one]
    assert slopes["job_ns"]["w0: layer F"].shape == (4,)


def test_a_trace_that_was_written_is_re_timed_alike(trace, tmp_path):
    trace.write(tmp_path / "trace.jsonl")
    again = read_trace(tmp_path / "trace.jsonl")
    assert again.digest == trace.digest and again.settings == trace.settings
    fast = LinkModel(10, 10**9)
    assert jdag.retime(again).makespan(fast) == jdag.retime(trace).makespan(fast)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"schedule": None}, "it has no schedule"),
        ({"network": LINK}, "control_lane = None: expected True"),
        ({"policy": "backward_first"}, "policy = 'backward_first'"),
        ({"faults": [jdag.sim.Drop(0.0)]}, "faults = 1: expected 0"),
        ({"devices": DeviceModel(sum_ns=3)}, "takes 3 ns but is not in the schedule"),
        ({"devices": DeviceModel(call_ns=3)}, "call_ns = 3: expected 0"),
    ],
)
def test_a_run_whose_order_depends_on_time_is_refused_by_name(settings, said):
    given = {"network": LANES, "devices": DEVICES, "schedule": SCHEDULE, **settings}
    schedule = given.pop("schedule")
    with simulated(schedule, SCHEDULE.workers, values="abstract", **given) as cluster:
        one_step(cluster, SCHEDULE)
        with fails_with(JdagError, "lab.this_run_cannot_be_re") as raised:
            jdag.retime(cluster.trace)
    assert said in str(raised.value)


def test_contexts_that_take_turns_on_a_device_are_refused():
    pipe = jdag.pipeline([layer] * SCHEDULE.stages, square)
    with cluster_of(SCHEDULE, LANES, DEVICES, values="real") as cluster:
        params = list(map(cluster.put, SCHEDULE.workers, weights(3)))
        xs = batches(SCHEDULE.micro_batches)
        with cluster.context() as one, cluster.context() as other:
            losses, others = pipe(one, params, xs, xs), pipe(other, params, xs, xs)
            one.backward(*losses)
            other.backward(*others)
        with fails_with(JdagError, "lab.contexts_0_and_0_are"):
            jdag.retime(cluster.trace)


def test_a_topology_is_refused_by_name():
    ring = jdag.sim.topologies.ring(SCHEDULE.workers, LINK)
    network = Network(LINK, {}, None, True, ring.routed, ring.route)
    with fails_with(JdagError, "lab.a_topology_whose_links_are"):
        jdag.retime(traced(SCHEDULE, network, DEVICES))


@pytest.mark.parametrize(
    ("network", "devices", "said"),
    [
        (Network(LINK, control_lane=LINK), None, "control_lane = LinkModel"),
        (Network(LINK, {}, 10**9, True), None, "port_bandwidth_bytes_per_s = 10+: "),
        (Network(LinkModel(jitter_ns=1), control_lane=True), None, "jitter_ns = 1"),
        (LogGP(gap_ns=9), None, "gap_ns = "),
        (None, DeviceModel(sum_ns=1), "sum_ns = 1"),
        (None, DeviceModel(overlap_ns=1), "overlap_ns = 1"),
        (None, DeviceModel(call_ns=1), "call_ns = 1"),
        (None, DeviceModel(functions={"m:f(float32[2])": (1, 2)}), "without types"),
        (None, {"w0": DEVICES}, "including w1"),
        (None, 7, "devices = 7"),
    ],
)
def test_settings_that_would_change_the_order_are_refused(
    trace, network, devices, said
):
    with pytest.raises(ScenarioError, match=said):
        jdag.retime(trace).makespan(network, devices)


def test_what_processes_add_to_jobs_is_re_timed(trace):
    slower = replace(DEVICES, job_ns=70)
    assert jdag.retime(trace).makespan(devices=slower) == taken(
        traced(SCHEDULE, LANES, slower)
    )


def test_jobs_between_the_steps_take_no_time_on_other_devices_either():
    run = jdag.retime(traced(SCHEDULE, LANES, DEVICES, steps=2))
    for devices in (DeviceModel(forward_ns=1), replace(DEVICES, job_ns=1)):
        with fails_with(ScenarioError, "lab.lambda_f_which_is_in"):
            run.makespan(devices=devices)


def test_settings_by_which_messages_would_leave_in_another_order_are_refused():
    """The arrays of calls travel with them, and the pass begins when they have come."""
    schedule = schedules.one_f_one_b(stages=2, micro_batches=3)
    slow = Network(LinkModel(3_000, 10**8), control_lane=True)
    with cluster_of(schedule, slow, DEVICES) as cluster:
        step(cluster, schedule, fetched=False)
        run = jdag.retime(cluster.trace)
        assert run.makespan() == taken(cluster.trace)
    with fails_with(ScenarioError, "lab.w0_to_w1_leave_in"):
        run.makespan(LinkModel(0))


def test_settings_without_a_number_are_refused_by_key(trace):
    run = jdag.retime(trace)
    with fails_with(ScenarioError, "lab.latency_ns_none_allowed_is"):
        run.makespan_fn({"job_ns": run.settings["job_ns"]})


# ------------------------------------------------------------------------- the command


def test_what_if_prints_both_times_and_what_they_waited_for(trace, tmp_path):
    trace.write(tmp_path / "trace.jsonl")
    code, said = command("what-if", tmp_path, "--bandwidth", "x2", "--latency", "0e3")
    assert code == 0
    for words in ("makespan", "compute", "transfer", "latency", "w0->w1", "recorded"):
        assert words in said
    run = jdag.retime(trace)
    fast = run.makespan(LinkModel(0, 182_000_000))
    assert f"what if / recorded: {fast / run.makespan():.3f}" in said
    code, said = command("what-if", tmp_path, "--compute", "x1")
    assert code == 0 and "recorded: 1.000" in said


def test_what_if_is_about_the_part_of_a_run_that_its_report_shows(tmp_path):
    out = tmp_path / "out"
    command("run", SCENARIOS / "zero_bubble.toml", "--out", out)
    result = json_of(out / "result.json")
    shorter = {**result, "window_ns": [4_000, 11_000]}
    for one, makespan_ns in ((result, 27_000), (shorter, 8_000)):
        (out / "result.json").write_text(json.dumps(one), encoding="utf-8")
        code, said = command("what-if", out, "--compute", "x1")
        row = next(line for line in said.splitlines() if "makespan" in line)
        assert code == 0 and row.count(formatted("makespan_ns", makespan_ns)) == 2
    (out / "result.json").write_text("{}", encoding="utf-8")
    code, said = command("what-if", out)
    assert code == 2 and "expected a folder that `jdag run` wrote" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bandwidth", "-5"], "--bandwidth = '-5': expected a factor such as x2"),
        (["--latency", "xx"], "--latency = 'xx': expected a factor above 0"),
        (["--compute", "2"], "--compute = '2': expected a factor above 0"),
        (["--bandwidth", "x0"], "--bandwidth = 'x0'"),
    ],
)
def test_bad_input_is_one_line(trace, tmp_path, words, said):
    trace.write(tmp_path / "trace.jsonl")
    code, output = command("what-if", tmp_path, *words)
    assert code == 2 and said in output and output.count("\n") == 1


def test_a_folder_without_such_a_run_is_one_line(tmp_path):
    code, output = command("what-if", tmp_path)
    assert code == 2 and "expected a folder that `jdag run` wrote; " in output
    assert f"{tmp_path / 'trace.jsonl'}: No such file" in output
    with jdag.simulate(["a"], seed=0) as cluster:
        cluster.trace.write(tmp_path / "trace.jsonl")
    code, output = command("what-if", tmp_path)
    assert code == 2 and "this run cannot be re-timed: it has no schedule" in output
