"""Devices: what jobs cost, and what those on one device wait for."""

import re
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
import jdag.engine.functions
from jdag.compute.avals import aval_of
from jdag.engine.functions import name_of
from jdag.engine.protocol import (
    Compute,
    Computed,
    ContextId,
    Fill,
    Forward,
    Job,
    Key,
    Left,
    ScratchKey,
    Sum,
    Vjp,
)
from jdag.errors import CostWarning, RemoteError, ScenarioError
from jdag.sim.devices import FREE_DEVICE, MOVED, DeviceModel, Roofline, models
from jdag.sim.faults import Slow
from tests.tools.error_texts import fails_with
from tests.tools.sim_cases import Played, Work, job, play

CONTEXT = ContextId(0, 1, 0)
WORKERS = ("a", "b", "c")
MODEL = DeviceModel(
    forward_ns=10,
    backward_ns=20,
    sum_ns=3,
    functions={
        **{"m:named": (1, 2), "bare": (4, 5), "m:both": (6, 7), "both": (8, 9)},
        "halves": (18, 17, 9),
    },
)


def double(x: Any) -> Any:
    return 2 * x


def key(name: Any) -> Key:
    return ScratchKey(CONTEXT, name, 0)


def named(name: str) -> Any:
    return SimpleNamespace(name=name)


def forward(name: str = "m:layer") -> Forward:
    return Forward(1, CONTEXT, (1,), named(name), (), (), None)


def vjp(name: str = "m:layer") -> Vjp:
    return Vjp(1, CONTEXT, 1, (1,), named(name), key("r"), (), (), True)


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        ("m:layer", (10, 20)),
        ("m:named", (1, 2)),
        ("other:named", (10, 20)),
        ("other:bare", (4, 5)),
        ("m:both", (6, 7)),
        ("other:both", (8, 9)),
        ("m:halves", (18, 26)),
    ],
)
def test_a_function_costs_what_its_full_or_bare_name_says_or_else_the_worker(
    name: str, costs: tuple[int, int]
):
    assert (MODEL.cost_ns(forward(name=name)), MODEL.cost_ns(vjp(name=name))) == costs


@pytest.mark.parametrize("order", list(permutations(("one", "two", "hundred")))[:3])
def test_closures_of_one_code_cost_what_their_own_names_say(order: tuple[str, ...]):
    def stage(name: str) -> Any:
        def f(x: Any) -> Any:
            return 2 * x

        f.__qualname__ = name
        return f

    costs = {"one": (1, 0), "two": (2, 0), "hundred": (100, 0)}
    model = DeviceModel(functions=costs)
    with jdag.simulate(["a"], seed=0, devices=model) as cluster:
        with cluster.context() as ctx:
            for name in order:
                ctx.call("a", stage(name), 1.0).fetch()
        taken = [one.named["cost_ns"] for one in cluster.trace.of_kind("finish")]
    assert taken == [costs[name][0] for name in order]


def ran_with(costs: dict[str, Any], *fns: Any, **settings: Any) -> None:
    model = DeviceModel(functions=costs, **settings)
    cluster = jdag.simulate(["a", "b"], seed=0, devices=model)
    with cluster, cluster.context() as ctx:
        for fn in fns:
            ctx.call("b", fn, jnp.ones(3)).fetch()


def triple(x: Any) -> Any:
    return 3 * x


def test_costs_that_no_function_has_and_functions_without_a_cost_are_named_together():
    said = (
        "no function named duoble, m:triple ran; no cost is set for "
        f"{__name__}:triple, which took 0 ns (set"
    )
    with pytest.warns(CostWarning, match=re.escape(said)):
        costs = {"double": (1, 2), "duoble": (3, 4), "m:triple": (5, 6)}
        ran_with(costs, double, triple)


def test_costs_are_as_meant_where_all_have_one_and_where_not_all_was_run(recwarn: Any):
    here = f"{__name__}:double(float64[3])"
    ran_with({here: (1, 2), "double": (1, 2), "triple": (0, 0)}, double, triple)
    ran_with({"double": (1, 2)}, double, triple, forward_ns=1)
    ran_with({"double": (1, 2)})
    with pytest.raises(RemoteError):
        ran_with({"triple": (1, 2)}, double, lambda x: 1 // 0, triple)
    assert [one for one in recwarn if one.category is CostWarning] == []


def test_sums_and_fills_cost_the_same():
    jobs: tuple[Job, ...] = (
        Sum(1, CONTEXT, 1, (1,), (key("a"), key("b")), None, key("s")),
        Fill(1, CONTEXT, 1, (1,), None, 0, key("f")),
    )
    assert [MODEL.cost_ns(job) for job in jobs] == [3, 3]


def test_moving_a_value_is_no_work_unless_it_is_named():
    assert name_of(jdag.engine.functions.transferred) == MOVED
    jobs = (forward(name=MOVED), vjp(name=MOVED))
    assert [MODEL.cost_ns(job) for job in jobs] == [0, 0]
    dear = DeviceModel(forward_ns=10, functions={"transferred": (7, 8)})
    assert [dear.cost_ns(job) for job in jobs] == [7, 8]


def test_one_model_serves_all_and_who_is_not_named_is_free():
    assert models(None, WORKERS) == dict.fromkeys(WORKERS, FREE_DEVICE)
    assert models(MODEL, WORKERS) == dict.fromkeys(WORKERS, MODEL)
    free = dict.fromkeys(WORKERS, FREE_DEVICE)
    assert models({"b": MODEL}, WORKERS) == {**free, "b": MODEL}
    assert FREE_DEVICE.cost_ns(forward()) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"forward_ns": -1}, "forward_ns = -1: expected an integer >= 0"),
        ({"backward_ns": 1.5}, "backward_ns = 1.5: expected an integer >= 0"),
        ({"sum_ns": True}, "sum_ns = True: expected"),
        ({"functions": {"f": (1, -2)}}, r"functions.f = \(1, -2\): expected two int"),
        ({"functions": {"f": (1,)}}, r"functions.f = \(1,\): expected two"),
        ({"functions": 3}, "functions = 3: expected costs by name"),
        *[
            ({"functions": {name: (1, 2)}}, "functions: name = .*: expected name, m")
            for name in ("", 3, "m:", ":f", "m: f", "f(float32[8])", "m:f(float32[8]")
        ],
        ({"functions": {"f": (1, 2, -3)}}, r"\(1, 2, -3\): .*weight_grad_ns\)"),
        ({"functions": {"f": (1, 2, 3, 4)}}, r"\(1, 2, 3, 4\): expected two"),
        ({"roofline": 3}, "roofline = 3: expected a Roofline"),
        ({"functions": {"f": 3}}, r"functions.f = 3: expected two"),
    ],
)
def test_an_unusable_cost_is_refused_by_name(settings: Any, said: str):
    with pytest.raises(ScenarioError, match=said):
        DeviceModel(**settings)


def test_a_device_of_nobody_is_refused_by_name():
    with fails_with(ScenarioError, "sim.worker_z_allowed_is_one"):
        models({"z": MODEL}, WORKERS)


def work(number: int) -> Any:
    return job(number, Work("m:layer"))


def asked(monkeypatch: pytest.MonkeyPatch, react: Any, **settings: Any) -> Played:
    played = play(monkeypatch, react, devices=MODEL, **settings)
    played.ask()
    played.simulation.settle()
    return played


def test_a_device_runs_one_job_at_a_time_and_each_names_the_end_it_waited_for(
    monkeypatch: pytest.MonkeyPatch,
):
    def react(engine: Any, event: Any) -> Any:
        match event:
            case Left():
                return [Compute(work(1)), Compute(work(2))]
            case Computed(job=1):
                return [Compute(work(3))]
            case Computed(job=3):
                return [Compute(work(4))]

    played = asked(monkeypatch, react)
    times = [(r.kind, r.time_ns) for r in played.records("start", "finish")]
    one_by_one = [(("start", 10 * n), ("finish", 10 * n + 10)) for n in range(4)]
    assert times == [each for pair in one_by_one for each in pair]
    assert played.simulation.info()["a"]["busy_ns"] == 40
    (issue,) = [r.index for r in played.records("issue")]
    ends = [r.index for r in played.records("finish")]
    causes = [r.causes for r in played.records("start")]
    # The last two: it was asked for while another ran, or when none did.
    assert causes == [(issue,), (issue, ends[0]), (ends[0], ends[1]), (ends[2],)]


def test_a_slow_worker_takes_longer_while_it_is_slow(monkeypatch: pytest.MonkeyPatch):
    def react(engine: Any, event: Any) -> Any:
        number = event.job if isinstance(event, Computed) else 0
        return [Compute(work(number + 1))] if number < 3 else None

    slow = [Slow("a", 2.5, from_ns=10, until_ns=35), Slow("b", 9)]
    played = asked(monkeypatch, react, faults=slow)
    assert [r.time_ns for r in played.records("start")] == [0, 10, 35]
    assert played.simulation.info()["a"]["busy_ns"] == 45


@pytest.mark.parametrize("key", ["flops_per_s", "bytes_per_s"])
def test_an_unusable_rate_of_a_roofline_is_refused_by_name(key: str):
    with pytest.raises(ScenarioError, match=f"{key} = 0: expected an integer >= 1"):
        Roofline(**{"flops_per_s": 1, "bytes_per_s": 1, key: 0})


def times_of(roofline: Roofline, **settings: Any) -> list[int]:
    """How long forward and vjp of a product of 64 x 32 and 32 x 16 take."""
    model = DeviceModel(roofline=roofline, **settings)
    with jdag.simulate(["a"], seed=0, devices=model, values="abstract") as cluster:
        with cluster.context() as ctx:
            x = cluster.put("a", np.ones((64, 32), np.float32))
            w = cluster.put("a", np.ones((32, 16), np.float32))
            ctx.backward(ctx.call("a", product, x, w))
        starts = [one for one in cluster.trace if one.kind == "start"]
        costs = [one.named["cost_ns"] for one in starts]
    return [cost for cost in costs if cost]


def product(x: Any, w: Any) -> Any:
    return (x @ w).sum()


def test_a_roofline_is_bound_by_operations_or_by_bytes_as_xla_counts_them():
    flops = 2 * 64 * 32 * 16
    slow = times_of(Roofline(flops_per_s=1_000_000_000, bytes_per_s=10**15))
    assert flops <= slow[0] <= 1.1 * flops
    assert len(slow) == 2
    nbytes = 4 * (64 * 32 + 32 * 16 + 1)  # At least what it reads and returns.
    narrow = times_of(Roofline(flops_per_s=10**15, bytes_per_s=1_000_000_000))
    assert nbytes <= narrow[0] <= 4 * nbytes
    slowest = Roofline(flops_per_s=1, bytes_per_s=1)
    assert times_of(slowest, functions={"product": (3, 4)})[:2] == [3, 4]


def test_calls_and_jobs_take_what_processes_add():
    model = DeviceModel(job_ns=5, call_ns=7, functions={"double": (10, 20)})
    with jdag.simulate(["a"], seed=0, devices=model) as cluster:
        w = cluster.put("a", jnp.ones(3))
        with cluster.context() as ctx:
            x = ctx.call("a", double, w)
            assert cluster.now_ns == 7
            loss = ctx.call("a", jnp.sum, ctx.call("a", double, x))
            assert cluster.now_ns == 7 * 3
            ctx.backward(loss)
            # Jobs at 7, 22 and 37, the sum's for 5; then back: 5, 25 and 25.
            assert cluster.now_ns == 7 + 2 * 15 + 5 + 5 + 2 * 25


def test_an_entry_with_types_goes_before_that_of_the_name():
    name = f"{__name__}:double"
    costs = {f"{name}({aval_of(jnp.ones(3))})": (1, 1), name: (10, 1)}
    model = DeviceModel(functions=costs)
    with jdag.simulate(["a"], seed=0, devices=model) as cluster, cluster.context() as c:
        c.call("a", double, jnp.ones(3)).fetch()
        assert cluster.now_ns == 1
        c.call("a", double, jnp.ones(4)).fetch()
        assert cluster.now_ns == 1 + 10
