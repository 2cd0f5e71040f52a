"""Exhaustive exploration: the orders that a brute force has, each of them once."""

import json
from unittest import mock

import numpy as np
import pytest

import jdag
from jdag.lab.exploration import exploration, order_of, sound
from jdag.lab.strategies import PCT, Exhaustive, RandomWalk
from jdag.lab.subject import Subject
from jdag.scenario import Case
from jdag.sim.untimed import Step
from paper import exhaustive
from paper.figures import RESULTS
from tests.brute_orders import TWO_CALLS, case_of, searched, total

pytestmark = pytest.mark.once
W = np.array([0.1, 0.7, 1.3], np.float32)
HERE = case_of("a", ("a", (0,)))
THERE = case_of("b", ("b", (0,)))


def put(cluster):
    cluster.put("b", W)


def two_contexts(cluster):
    w = cluster.put("a", W)
    with cluster.context() as one, cluster.context() as other:
        one.backward(one.call("a", total, w))
        other.backward(other.call("a", total, w))


def two_outputs(cluster):
    w = cluster.put("a", W)
    with cluster.context() as ctx:
        ctx.backward(*ctx.call("a", lambda w: (total(w), total(w, w)), w))


@jdag.program
def waits(ctx, worker):
    return ctx.call(worker, total, W).fetch()


def two_programs(cluster):
    with cluster.context() as ctx:
        tasks = [ctx.start(worker, waits, worker) for worker in "ba"]
        [task.result() for task in tasks]


COMMITTED = json.loads((RESULTS / "exhaustive.json").read_text())["programs"]
CHEAP = ("chain here", "own leaf, here, then there", "own leaf, fan-out to both")
SECOND = ("there, then here", "own leaf, chain there")


def agrees(program, workers, faults):
    subject = Subject(program, [*workers], "abstract", faults)
    strategy = Exhaustive(10**6)
    report = exploration(subject, sound, range(10**6), strategy)
    assert strategy.complete and report.failure is None
    ended = searched(subject)
    assert report.runs == report.orders == len(ended) > 1
    assert set(report.seen) == set(ended.values())
    for other in (RandomWalk(5), PCT(2)):
        some = exploration(subject, sound, range(20), other)
        assert some.failure is None and set(some.seen) <= set(report.seen)
    return report.orders


def marks(name):
    if name in CHEAP:
        return ()
    return pytest.mark.second if name in SECOND else pytest.mark.long


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks(name)) for name in TWO_CALLS]
)
def test_two_workers_and_two_calls_have_the_orders_of_a_brute_force(name):
    counted = COMMITTED[name]
    assert agrees(TWO_CALLS[name], "ab", {}) == counted["orders"]
    assert counted["orders"] == counted["brute_force"] == counted["runs"]


@pytest.mark.parametrize(
    ("program", "workers", "faults"),
    [
        (put, "abc", {"crash": 2}),
        (put, "ab", {"crash": 1, "drop": 1}),
        (put, "ab", {"crash": 1, "rejoin": 1, "drop": 1, "duplicate": 1}),
        (HERE, "ab", {"crash": 1, "rejoin": 1}),
        pytest.param(THERE, "ab", {"crash": 1}, marks=pytest.mark.second),
        pytest.param(THERE, "ab", {"drop": 1}, marks=pytest.mark.second),
        pytest.param(THERE, "ab", {"duplicate": 1}, marks=pytest.mark.second),
        pytest.param(THERE, "ab", {"crash": 1, "drop": 1}, marks=pytest.mark.long),
        pytest.param(THERE, "ab", {"crash": 1, "rejoin": 1}, marks=pytest.mark.long),
        pytest.param(THERE, "ab", {"drop": 1, "duplicate": 1}, marks=pytest.mark.long),
    ],
)
def test_with_faults_there_are_the_orders_of_a_brute_force(program, workers, faults):
    agrees(program, workers, faults)


@pytest.mark.parametrize("program", [two_contexts, two_outputs, two_programs])
def test_steps_have_names_of_their_own_that_do_not_depend_on_other_workers(program):
    agrees(program, "ab", {})


def test_programs_of_two_contexts_begin_in_either_order():
    begun: list[str] = []
    orders: dict[tuple[str, ...], None] = {}

    @jdag.program
    def begins(ctx, name):
        begun.append(name)

    def program(cluster):
        begun.clear()
        with cluster.context() as one, cluster.context() as other:
            tasks = [one.start("b", begins, "one"), other.start("b", begins, "other")]
            [task.result() for task in tasks]
        orders[tuple(begun)] = None

    agrees(program, "ab", {})
    assert sorted(orders) == [("one", "other"), ("other", "one")]


def test_other_steps_may_come_before_the_main_program_goes_on():
    subject = Subject(two_programs, [*"ab"], "abstract", {})
    played = subject.play(lambda steps: len(steps) - 1)
    picked = zip(played.firsts, played.steps, strict=True)
    assert any(first.kind == "main" != step.kind for first, step in picked)


def test_a_crash_is_before_or_after_the_steps_of_all_workers():
    here, there = Step("deliver", "a", "c", 1), Step("deliver", "b", "c", 1)
    assert order_of([here, there]) == order_of([there, here])
    for fault in (Step("crash", "b"), Step("rejoin", "b")):
        assert order_of([here, fault]) != order_of([fault, here])


def test_all_programs_are_in_the_table_and_no_order_was_wrong():
    assert sorted(COMMITTED) == sorted(exhaustive.PROGRAMS)
    for name, of in COMMITTED.items():
        assert of["runs"] == of["orders"] > 50 and not of["wrong"], name
    said = (RESULTS / "exhaustive.md").read_text()
    assert said == exhaustive.table(COMMITTED)


def test_the_script_goes_on_where_it_was_stopped(tmp_path):
    options = "--out", str(tmp_path), "--only", "chain here"
    path = tmp_path / "exhaustive.json"

    def stopped(*args):
        if path.exists():
            raise KeyboardInterrupt
        return exploration(*args)

    with mock.patch.object(exhaustive, "CHUNK", 100):
        with (
            mock.patch.object(exhaustive, "exploration", stopped),
            pytest.raises(KeyboardInterrupt),
        ):
            exhaustive.main(options)
        assert json.loads(path.read_text())["programs"]["chain here"]["runs"] < 100
        assert "| stopped |" in (tmp_path / "exhaustive.md").read_text()
        assert exhaustive.main(options) == 0
    held = json.loads(path.read_text())["programs"]["chain here"]
    for key in ("runs", "redundant", "orders", "left", "brute_force", "wrong"):
        assert held[key] == COMMITTED["chain here"][key], key
    assert not [*tmp_path.glob("*.orders")]


def test_each_run_has_the_parameters_as_they_were():
    w = np.ones(3, np.float32)

    def program(ctx, refs):
        w[:] += 1
        return ctx.call("a", total, refs["w"], refs["w"])

    case = Case(program, {"w": w}, {"w": "b"})
    assert jdag.explore(case, [*"ab"], runs=2).failure is None
