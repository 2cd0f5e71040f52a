"""Exhaustive exploration: the orders that a brute force has, each of them once."""

import json
from typing import Any
from unittest import mock

import numpy as np
import pytest

import jdag
from jdag.engine import Engine
from jdag.engine.protocol import Computed
from jdag.lab.exploration import exploration, order_of, sound
from jdag.lab.strategies import PCT, Exhaustive, RandomWalk
from jdag.lab.subject import Subject
from jdag.scenario import Case
from jdag.sim.untimed import PossibleStep
from paper import exhaustive
from paper.figures import RESULTS
from tests.tools.brute_orders import TWO_CALLS, case_of, searched, total

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


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.second if "fan-out" in name else ())
        for name in TWO_CALLS
    ],
)
def test_two_workers_and_two_calls_have_the_orders_of_a_brute_force(name):
    counted = COMMITTED[name]
    assert agrees(TWO_CALLS[name], "ab", {}) == counted["orders"]
    assert counted["orders"] == counted["brute_force"] == counted["runs"]


@pytest.mark.parametrize("name", ["there, then here", "own leaf, fan-out to both"])
def test_each_order_is_one_that_an_engine_sees(name):
    came: dict[str, list[Any]] = {}
    handle = Engine.handle

    def noted(engine, event):
        came.setdefault(engine._state.worker, []).append(said(engine, event))
        return handle(engine, event)

    def said(engine, event):
        if isinstance(event, Computed):
            job = engine._state.jobs[event.job][2]
            return type(job), job.phase, job.path
        message = getattr(event, "message", event)
        return type(message), *[getattr(message, key, ()) for key in ("path", "paths")]

    subject = Subject(TWO_CALLS[name], [*"ab"], "abstract", {})
    subject.first()
    strategy, seen, runs = Exhaustive(10**6), set(), 0
    with mock.patch.object(Engine, "handle", noted):
        while (pick := strategy.begin(runs)) is not None:
            came.clear()
            played = subject.play(pick)
            strategy.ended(len(played.choices))
            if played.explored is not None:
                runs += 1
                seen.add(tuple([(name, *came[name]) for name in sorted(came)]))
    assert len(seen) == runs == COMMITTED[name]["orders"]


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


def test_devices_of_a_worker_compute_in_any_order():
    case = case_of("a", ("a", (0,)), ("a/cpu:1", (0,)))
    assert agrees(case, "ab", {}) == 80
    steps = Subject(case, [*"ab"], "abstract", {}).first().steps
    assert "compute Vjp 1:2 on a/cpu:1" in map(str, steps)


def test_a_job_that_is_interrupted_ends_at_once():
    def stops(cotangent):
        raise Stop

    def program(cluster):
        w = cluster.put("a", W)
        with cluster.context() as ctx:
            h = ctx.call("b", total, w)
            ctx.on_cotangent(h, stops)
            with pytest.raises(Stop):
                ctx.backward(ctx.call("a", total, h))

    strategy = Exhaustive()
    subject = Subject(program, [*"ab"], "real", {})
    report = exploration(subject, lambda run: None, range(10**6), strategy)
    assert strategy.complete and report.failure is None and report.runs > 3


class Stop(BaseException):
    pass


def test_nothing_for_a_lost_worker_is_a_step():
    case = case_of("c", ("b", (0,)), ("a", (1,)))
    subject = Subject(case, [*"abc"], "abstract", {"crash": 1})
    subject.first()
    strategy, followed = RandomWalk(), 0
    for run in range(50):
        steps = subject.play(strategy.begin(run)).steps
        for number, (kind, worker, *_) in enumerate(steps):
            if kind == "crash":
                after = steps[number + 1 :]
                followed += len(after) > 9
                assert not [step for step in after if step.worker == worker]
    assert followed


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
    here, there = (
        PossibleStep("deliver", "a", "c", 1),
        PossibleStep("deliver", "b", "c", 1),
    )
    assert order_of([here, there]) == order_of([there, here])
    for fault in (PossibleStep("crash", "b"), PossibleStep("rejoin", "b")):
        assert order_of([here, fault]) != order_of([fault, here])


def test_all_programs_are_in_the_table_and_no_order_was_wrong():
    assert [*COMMITTED] == [*exhaustive.PROGRAMS]
    for name, of in COMMITTED.items():
        assert of["runs"] == of["orders"] == of["brute_force"], name
        assert of["left"] == "no" and of["wrong"] == "none", name
    said = (RESULTS / "exhaustive.md").read_text()
    assert said == exhaustive.table(COMMITTED)


def test_the_script_counts_again_what_is_in_the_table(tmp_path):
    assert exhaustive.main(["--out", str(tmp_path), "--only", "chain here"]) == 0
    held = json.loads((tmp_path / "exhaustive.json").read_text())["programs"]
    assert held == {"chain here": COMMITTED["chain here"]}
    assert (tmp_path / "exhaustive.md").read_text() == exhaustive.table(held)


def test_each_run_has_the_parameters_as_they_were():
    w = np.ones(3, np.float32)

    def program(ctx, refs):
        w[:] += 1
        return ctx.call("a", total, refs["w"], refs["w"])

    case = Case(program, {"w": w}, {"w": "b"})
    assert jdag.explore(case, [*"ab"], runs=2).failure is None
