"""Devices: what jobs cost, in which order they run, and what they waited for."""

from types import SimpleNamespace
from typing import Any

import pytest

import jdag.engine.functions
from jdag.engine.functions import name_of
from jdag.engine.protocol import (
    ContextId,
    Fill,
    Forward,
    Job,
    Key,
    ScratchKey,
    Sum,
    Vjp,
)
from jdag.errors import ScenarioError
from jdag.runtime.chooser import Chooser
from jdag.sim.devices import FREE, MOVED, Device, DeviceModel, models
from jdag.sim.faults import Faults, Slow

CONTEXT = ContextId(0, 1, 0)
WORKERS = ("a", "b", "c")
MODEL = DeviceModel(
    forward_ns=10,
    backward_ns=20,
    sum_ns=3,
    functions={"m:named": (1, 2), "bare": (4, 5), "m:both": (6, 7), "both": (8, 9)},
)


def key(name: Any) -> Key:
    return ScratchKey(CONTEXT, name, 0)


def named(name: str) -> Any:
    return SimpleNamespace(name=name)


def forward(path: tuple[int, ...] = (1,), name: str = "m:layer") -> Forward:
    return Forward(1, CONTEXT, path, named(name), (), (), None)


def vjp(path: tuple[int, ...] = (1,), name: str = "m:layer", phase: int = 1) -> Vjp:
    return Vjp(1, CONTEXT, phase, path, named(name), key("r"), (), (), True)


def device(policy: str = "path", *faults: Slow) -> Device:
    return Device("a", MODEL, Chooser(0, policy), Faults(faults, WORKERS))


@pytest.mark.parametrize(
    ("name", "costs"),
    [
        ("m:layer", (10, 20)),
        ("m:named", (1, 2)),
        ("other:named", (10, 20)),
        ("other:bare", (4, 5)),
        ("m:both", (6, 7)),
        ("other:both", (8, 9)),
    ],
)
def test_a_function_costs_what_its_full_or_bare_name_says_or_else_the_worker(
    name: str, costs: tuple[int, int]
):
    assert (MODEL.cost_ns(forward(name=name)), MODEL.cost_ns(vjp(name=name))) == costs


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
    assert models(None, WORKERS) == dict.fromkeys(WORKERS, FREE)
    assert models(MODEL, WORKERS) == dict.fromkeys(WORKERS, MODEL)
    assert models({"b": MODEL}, WORKERS) == {"a": FREE, "b": MODEL, "c": FREE}
    assert FREE.cost_ns(forward()) == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"forward_ns": -1}, "forward_ns = -1: allowed is an integer >= 0"),
        ({"backward_ns": 1.5}, "backward_ns = 1.5: allowed is an integer >= 0"),
        ({"sum_ns": True}, "sum_ns = True: allowed is"),
        ({"functions": {"f": (1, -2)}}, r"functions\['f'\].backward_ns = -2: allowed"),
        ({"functions": {"f": (1,)}}, r"functions\['f'\] = \(1,\): allowed is two"),
        ({"functions": 3}, "functions = 3: allowed is costs by name"),
        ({"functions": {"f": 3}}, r"functions\['f'\] = 3: allowed is two"),
    ],
)
def test_an_unusable_cost_is_refused_by_name(settings: Any, said: str):
    with pytest.raises(ScenarioError, match=said):
        DeviceModel(**settings)


def test_a_device_of_nobody_and_what_is_no_device_are_refused_by_name():
    with pytest.raises(ScenarioError, match="worker = 'z': allowed is one of a, b, c"):
        models({"z": MODEL}, WORKERS)
    devices: Any = {"a": 5}
    with pytest.raises(ScenarioError, match=r"devices\['a'\] = 5: allowed is a Device"):
        models(devices, WORKERS)
    devices = "gpu"
    with pytest.raises(ScenarioError, match="devices = 'gpu': allowed is a DeviceMode"):
        models(devices, WORKERS)


def ran(of: Device, jobs: list[Job]) -> list[tuple[int, tuple[int, ...]]]:
    """The (phase, path) of jobs that are all ready at once, in the order they run."""
    for job in jobs:
        of.add(job, 0, 0)
    order = []
    while (task := of.begin(0)) is not None:
        order.append((task.job.phase, task.job.path))
        of.end()
    return order


JOBS: list[Job] = [
    vjp((2,)),
    forward((3,)),
    forward((2, 1)),
    vjp((1,), phase=2),
    vjp((1,)),
    forward((2,)),
]


def test_by_path_forward_goes_first_then_by_pass_then_by_path():
    assert ran(device("path"), JOBS) == [
        (0, (2,)),
        (0, (2, 1)),
        (0, (3,)),
        (1, (1,)),
        (1, (2,)),
        (2, (1,)),
    ]


def test_backward_first_puts_every_vjp_before_every_forward():
    assert ran(device("backward_first"), JOBS) == [
        (1, (1,)),
        (1, (2,)),
        (2, (1,)),
        (0, (2,)),
        (0, (2, 1)),
        (0, (3,)),
    ]


def test_a_device_runs_one_task_at_a_time_and_adds_up_what_ran():
    of = device()
    assert not of.wanting
    of.add(forward((1,)), 11, 0)
    of.add(vjp((1,)), 12, 0)
    assert of.wanting
    first = of.begin(0)
    assert first is not None and (first.cost_ns, first.asked) == (10, 11)
    assert not of.wanting
    with pytest.raises(AssertionError):
        of.begin(5)
    of.end()
    assert of.wanting
    second = of.begin(10)
    assert second is not None and second.cost_ns == 20
    assert of.busy_ns == 30
    of.end()
    assert of.begin(30) is None


def test_a_task_knows_the_end_that_it_waited_for_and_none_if_it_did_not_wait():
    of = device()
    of.add(forward((1,)), 0, 0)
    assert (task := of.begin(0)) is not None and task.behind == -1
    of.add(forward((2,)), 0, 4)
    of.end()
    of.finish = 21
    of.add(forward((3,)), 0, 10)
    assert (task := of.begin(10)) is not None and task.behind == 21
    of.end()
    of.finish = 22
    assert (task := of.begin(10)) is not None and task.behind == -1


def test_a_slow_worker_takes_longer_while_it_is_slow():
    of = device("path", Slow("a", 2.5, from_ns=100, until_ns=200), Slow("b", 9))
    costs = []
    for now_ns in (99, 100, 199, 200):
        of.add(forward(), 0, now_ns)
        task = of.begin(now_ns)
        assert task is not None
        costs.append(task.cost_ns)
        of.end()
    assert costs == [10, 25, 25, 10]
    assert of.busy_ns == 70


def test_a_device_that_stops_forgets_what_runs_and_what_waits():
    of = device()
    for place in range(3):
        of.add(forward((place,)), 0, 0)
    assert of.begin(0) is not None
    of.stop()
    assert of.running is None and not of.wanting
    assert of.begin(0) is None
