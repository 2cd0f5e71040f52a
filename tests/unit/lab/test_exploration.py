"""Exploration: every order of a program's events, held to a property."""

import json
import os
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from typing import Any
from unittest import mock

import jax.numpy as jnp
import numpy as np
import pytest

import jdag
from jdag.engine import worker_pass
from jdag.engine.phases import TRIPLES
from jdag.errors import ScenarioError
from jdag.lab.exploration import order_of, sound
from jdag.lab.failures import pick_text, read_failure
from jdag.lab.strategies import (
    PCT,
    Exhaustive,
    RandomWalk,
    Script,
    parsed_strategy,
)
from jdag.lab.subject import Subject
from jdag.scenario import Case
from jdag.sim.untimed import PossibleStep
from tests.tools.error_texts import fails_with, warns_with


def scaled(w, x):
    return jnp.sin(w * x)


def total(*terms):
    return sum(jnp.sum(term) for term in terms)


PARAMS = {"w": np.array([0.1, 0.7, 1.3], np.float32)}


def three_terms(ctx, params):
    w = params["w"]
    terms = [ctx.call(worker, scaled, w, w) for worker in "bcd"]
    return ctx.call("a", total, *terms)


def one_call(ctx, params):
    return ctx.call("b", total, params["w"])


def two_calls(ctx, params):
    inner = ctx.call("b", scaled, params["w"], params["w"])
    return ctx.call("a", total, inner)


def three_calls(cluster):
    with cluster.context() as ctx:
        ctx.call("b", total, PARAMS["w"]).fetch()


TERMS = Case(three_terms, PARAMS, {"w": "b"})
ONE = Case(one_call, PARAMS, {"w": "b"})
TWO = Case(two_calls, PARAMS, {"w": "b"})


# ------------------------------------------------------------------------ what it finds


@pytest.mark.parametrize("strategy", [RandomWalk(3), PCT(3), PCT(1, seed=5)])
def test_a_sound_program_is_right_in_every_order_that_is_tried(strategy):
    report = jdag.explore(TERMS, [*"abcd"], runs=25, strategy=strategy)
    assert report.failure is None and report.runs == 25
    assert report.orders > 5 and report.picks > 25


def test_sums_in_the_order_of_arrival_are_found_shrunk_and_replayed(tmp_path):
    with mock.patch.object(worker_pass, "sorted", list, create=True):
        report = jdag.explore(TERMS, [*"abcd"], runs=200)
        failure = report.failure
        assert failure is not None and "bits differ" in failure.why
        small = failure.shrink()
        assert small.why == failure.why
        (held,) = small.held
        assert f"{held} waits until nothing else can happen" in str(small)
        small.save(tmp_path / "bug.json")
        run, steps = jdag.replay(tmp_path / "bug.json", TERMS)
        assert run.trace.digest == small.digest and steps == small.steps
    assert jdag.explore(TERMS, [*"abcd"], runs=60).failure is None


def test_a_failure_says_what_comes_before_which_other_step_in_one_line():
    orders = []

    def calm(run):
        records = run.trace.of_kind("deliver", "start")
        orders.append([(one.kind, one.worker) for one in records])
        return orders[-1] == orders[0]

    jdag.explore(TWO, [*"ab"], calm, strategy=Script([]))  # First choices.
    found: Any = jdag.explore(TWO, [*"ab"], calm, runs=50).failure
    failure = found.shrink()
    off = [number for number, choice in enumerate(failure.choices) if choice]
    assert failure.held or f"at step {off[0]}: {failure.picked(off[0])}" in str(failure)
    vjp = PossibleStep("compute", "a", "Vjp 1:3")
    message = PossibleStep("deliver", "a", "b", 4)
    assert pick_text(message, vjp) == f"{message} before a's vjp of call 3"
    said = pick_text(vjp, PossibleStep("main", "a"))
    assert said == "a's vjp of call 3 before the main program continues"


CHILD = """
import sys, jdag
from tests.unit.lab.test_exploration import TERMS
run, steps = jdag.replay(sys.argv[1], TERMS)
print(run.trace.digest, *run.result[0].tolist())
"""


@pytest.mark.second
def test_a_run_replays_bit_for_bit_in_another_process_with_another_hash_seed(tmp_path):
    seen: list[Any] = []

    def third(run):
        seen.append(run)
        return len(seen) < 3

    path = tmp_path / "bug.json"
    failure: Any = jdag.explore(TERMS, [*"abcd"], third, runs=3).failure
    failure.save(path)
    assert failure.run == 2 and any(failure.choices)
    said = subprocess.run(
        [sys.executable, "-c", CHILD, str(path)],
        env={**os.environ, "PYTHONHASHSEED": "77"},
        check=True, capture_output=True, text=True,
    ).stdout  # fmt: skip
    bits = seen[2].result[0].tolist()
    assert said.split() == [failure.digest, *map(str, bits)]


def test_an_error_that_is_not_jdags_is_a_violation_unless_it_is_in_every_order():
    def fails(cluster):
        raise KeyError("in every order")

    with fails_with(KeyError, "lab.in_every_order"):
        jdag.explore(fails, [*"ab"], runs=2)
    count: list[int] = []

    def second(cluster):
        count.append(1)
        three_calls(cluster)
        if len(count) == 3:
            raise KeyError("now")

    failure: Any = jdag.explore(second, [*"ab"], runs=5).failure
    assert failure.run == 1 and failure.why.startswith("KeyError: 'now'")


def test_a_property_of_ones_own_is_told_by_its_name_or_its_words():
    def never(run):
        return False

    def says(run):
        assert len(run.trace) < 3, f"{len(run.trace) // 1000} thousand records"

    assert "never is False" in str(jdag.explore(ONE, [*"ab"], never, runs=5))
    for found in (np.False_, jnp.array(False), np.True_, True, None):
        report = jdag.explore(ONE, [*"ab"], mock.Mock(return_value=found), runs=5)
        assert (report.failure is None) == (found is None or bool(found))
    failure: Any = jdag.explore(ONE, [*"ab"], says, runs=5).failure
    assert failure.run == 0 and failure.why == "0 thousand records"


def test_a_function_of_a_cluster_may_train():
    def train(cluster):
        w = cluster.put("b", PARAMS["w"])
        for _ in range(2):
            with cluster.context() as ctx:
                ctx.backward(ctx.call("c", total, ctx.call("b", scaled, w, w)))
                cluster.update(lambda w, g: w - 0.5 * g, w, ctx.gradient(w))
        return {"w": w}

    seen: dict[bytes, None] = {}

    def notes(run):
        sound(run)
        seen[run.result[0].tobytes()] = None

    report = jdag.explore(train, [*"abc"], notes, runs=20)
    assert report.failure is None and report.orders == 20
    assert len(seen) == 1


def test_what_came_in_each_phase_is_counted_and_what_did_not_is_named():
    report = jdag.explore(TERMS, [*"abcd"], runs=5, values="abstract")
    marking = ("owner", "marking", "Mark")
    assert marking in report.reached or marking in report.unreached
    assert report.reached["owner", "open", "Differentiated"] == 5
    assert ("participant", "open", "Lost") in report.unreached
    assert not [one for one in report.unreached if one in report.reached]
    assert sorted([*report.reached, *report.unreached]) == sorted(TRIPLES)
    first, *rest = report.coverage()
    assert first.startswith(f"{len(report.reached)} of {len(TRIPLES)} triples")
    assert any(line.startswith("  participant, absent: ") for line in rest)


# ------------------------------------------------------------------------------- faults


def test_faults_befall_a_run_within_their_budget():
    faults = {"crash": 1, "rejoin": 1, "drop": 2, "duplicate": 2}
    counts: Counter[str] = Counter()

    def counted(run):
        sound(run)
        of = Counter(record.kind for record in run.trace)
        assert of["crash"] <= 1 and of["restart"] <= of["crash"]
        counts.update({"crash": of["crash"], "restart": of["restart"]})
        counts.update({"resend": of["resend"], "duplicate": of["duplicate"]})

    report = jdag.explore(TERMS, [*"abcd"], counted, runs=80, faults=faults)
    assert report.failure is None, report.failure
    assert [one for one in report.reached if one not in TRIPLES] == []
    assert report.reached["participant", "open", "Lost"]
    assert min(counts.values()) > 0, counts


def test_without_a_budget_no_fault_befalls_a_run():
    def quiet(run):
        return not any(run.trace.of_kind("crash", "drop", "duplicate", "resend"))

    assert jdag.explore(TERMS, [*"abcd"], quiet, runs=10).failure is None


# --------------------------------------------------------------------------- strategies


def test_a_script_repeats_the_picks_of_a_run():
    subject = Subject(TERMS, [*"abcd"], "real", {})
    played: Any = subject.play(RandomWalk(1).begin(4))
    script: Any = Script(played.choices).begin(0)
    again: Any = subject.play(script)
    assert again.steps == played.steps and any(played.choices)
    assert again.explored.trace.digest == played.explored.trace.digest
    report = jdag.explore(TERMS, [*"abcd"], strategy=Script(played.choices))
    assert report.runs == 1


def test_the_trace_of_a_run_has_what_was_picked_in_its_order():
    subject = Subject(TERMS, [*"abcd"], "real", {})
    subject.first()
    played: Any = subject.play(RandomWalk(1).begin(4))
    told = [
        (one.worker, *(one.detail[:2] if one.kind == "deliver" else ()))
        for one in played.explored.trace.of_kind("deliver", "finish")
    ]
    picked = [
        (step.worker, *((step.detail, step.message[0]) if step.number else ()))
        for step in played.steps
        if step.kind not in ("main", "spawn", "wake")
    ]
    assert told == picked and len(picked) > 50


@pytest.mark.parametrize("make", [RandomWalk, PCT])
def test_a_crash_comes_anywhere_in_a_run_and_the_report_says_how_many_it_ended(make):
    budget = {"crash": 1}
    found = jdag.explore(TERMS, [*"abcd"], runs=60, strategy=make(), faults=budget)
    assert found.failure is None and 15 < found.lost < 50
    assert f"60 runs, {found.lost} of them ended by a crash" in str(found)
    assert found.reached["owner", "ending", "Lost"]


class Raising(Exhaustive):
    """All orders, but for what one pick raises."""

    def __init__(self, raised):
        super().__init__()
        self._raised = raised

    def begin(self, run):
        pick: Any = super().begin(run)
        left = iter(range(20))

        def picked(steps):
            number = next(left, None)
            if run == 2 and number == 19:
                raise self._raised
            if run == 2 and number is None:  # The program leaves its context.
                raise ValueError("asked again")
            return pick(steps)

        return picked


@pytest.mark.parametrize("raised", [KeyboardInterrupt(), ZeroDivisionError("mine")])
def test_an_interrupt_and_errors_of_a_strategy_are_no_violation(raised):
    with pytest.raises(type(raised)):
        jdag.explore(TERMS, [*"abcd"], strategy=Raising(raised))


@pytest.mark.parametrize(
    ("begun", "said"),
    [
        (3, r"RandomWalk\.begin\(0\) = 3: expected a function that takes steps"),
        (
            lambda steps: 999,
            "pick of RandomWalk = 999: expected an index from 0 to 2",
        ),
        (
            lambda steps: None,
            "pick of RandomWalk = None: expected an index from 0 to 2",
        ),
        (
            lambda steps: np.int64(0),
            "pick of RandomWalk = .*: expected an index from 0",
        ),
    ],
)
def test_what_a_strategy_of_ones_own_gives_is_checked(begun, said):
    strategy: Any = RandomWalk()
    strategy.begin = lambda run: begun
    with pytest.raises(ScenarioError, match=f"strategy: {said}"):
        jdag.explore(TERMS, [*"abcd"], strategy=strategy)


def picks_of(strategy, run, points):
    pick = strategy.begin(run)
    return [pick(steps) for steps in points]


CHAINS = [
    tuple(PossibleStep("deliver", "a", peer, n) for peer in "bcd") for n in range(20)
]


def test_pct_runs_one_chain_until_a_change_point():
    strategy = PCT(1)
    assert len(set(picks_of(strategy, 0, CHAINS))) == 1
    strategy = PCT(3)
    strategy.planned(20)
    changes = [
        sum(one != other for one, other in pairwise(of))
        for of in (picks_of(strategy, run, CHAINS) for run in range(40))
    ]
    assert max(changes) == 2 and changes.count(2) > 8
    assert strategy.bound().endswith(
        "a bug of depth 3 with probability at least 1/2,700 (3 chains, first 30 steps)"
    )


def test_equal_runs_of_a_strategy_pick_alike_and_others_differ():
    for make in (RandomWalk, PCT):
        first, other = [picks_of(make(), run, CHAINS) for run in (0, 1)]
        assert first == picks_of(make(), 0, CHAINS)
        assert any(picks_of(make(), n, CHAINS) != first for n in range(1, 9)), other


def test_what_steps_on_one_worker_differ_in_is_an_order():
    first, second = [PossibleStep("deliver", "a", "b", n) for n in (1, 2)]
    elsewhere = PossibleStep("deliver", "b", "a", 1)
    assert order_of([first, elsewhere, second]) == order_of([elsewhere, first, second])
    assert order_of([first, second]) != order_of([second, first])


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"runs": 0}, "runs = 0: expected an integer >= 1"),
        ({"strategy": "pct"}, "strategy = 'pct': expected one of jdag.strategies"),
        ({"property": 3}, "property = 3: expected a function of a run"),
        ({"program": 3}, "program = 3: expected a jdag.scenario.Case, or a function"),
        ({"workers": []}, r"workers = \[\]: expected a list of 1 to 65,536"),
        ({"values": "none"}, "values = 'none'"),
        ({"faults": [1]}, r"faults = \[1\]: expected numbers by kind"),
        ({"faults": {"fire": 1}}, "faults: name = 'fire': expected one of crash"),
        ({"faults": {"delay": 1}}, "frames may be late even without"),
        ({"faults": {"crash": -1}}, "faults.crash = -1: expected an integer >= 0"),
    ],
)
def test_a_setting_that_is_unusable_is_one_line(given, said):
    settings = {"program": ONE, "workers": ["a", "b"], **given}
    with pytest.raises(ScenarioError, match=said):
        jdag.explore(**settings)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: PCT(101), "depth = 101: expected an integer from 1 to 100"),
        (lambda: RandomWalk(-1), "seed = -1: expected an integer >= 0"),
        (lambda: Exhaustive(0), "max_runs = 0"),
        (lambda: Script([1, -1]), r"choices = \[1, -1\]: expected a list of integ"),
        (lambda bad=3: Script(bad), "choices = 3: expected a list of integers >= 0"),
        (lambda: parsed_strategy("fuzz"), r"strategy = 'fuzz': .*random\[:SEED\]"),
        (lambda: parsed_strategy("pct:x"), "strategy = 'pct:x'"),
    ],
)
def test_a_strategy_that_is_unusable_is_one_line(make, said):
    with pytest.raises(ScenarioError, match=said):
        make()


def saved(folder):
    failure: Any = jdag.explore(ONE, [*"ab"], lambda run: False, runs=1).failure
    failure.save(folder / "bug.json")
    return folder / "bug.json"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda held: held.update(format=0), "format = 0: expected 5"),
        (lambda held: held.pop("choices"), "choices = None: expected a list"),
        (lambda held: held.update(digest=0), "digest = 0: expected a string"),
        (lambda held: held["steps"].reverse(), "pick 0 is '.*', not '"),
        (lambda held: held["steps"].pop(), r"pick \d+ is '.+', not 'none'"),
        (lambda held: held["steps"].append("x"), r"pick \d+ is 'none', not 'x'"),
    ],
)
def test_a_file_of_another_run_is_refused(tmp_path, change, said):
    path = saved(tmp_path)
    jdag.replay(path, ONE)
    held = json.loads(path.read_text())
    change(held)
    path.write_text(json.dumps(held))
    with pytest.raises(ScenarioError, match=said):
        jdag.replay(path, ONE)


def test_a_run_with_other_values_in_the_same_steps_is_told(tmp_path):
    path = saved(tmp_path)
    with warns_with(UserWarning, "lab.bug_json_but_the_digest"):
        jdag.replay(path, Case(one_call, {"w": PARAMS["w"] + 1}, {"w": "b"}))


def test_a_bug_of_a_script_replays_as_that_of_a_module_without_a_word(tmp_path):
    script = tmp_path / "scripted.py"
    script.write_text(
        "import jdag; third = lambda x: 3 * x\n"
        "def case(cluster):\n"
        "    with cluster.context() as ctx:\n"
        "        return [ctx.call(at, third, 1.0).fetch() for at in 'abb']\n"
        "if __name__ == '__main__':\n"
        "    found = jdag.explore(case, ['a', 'b'], lambda run: False, runs=1)\n"
        "    found.failure.save('bug.json')\n"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, str(script)], cwd=tmp_path, env=env, check=True)
    space: dict[str, Any] = {"__name__": "scripted"}
    exec(script.read_text(), space)
    assert read_failure(tmp_path / "bug.json")["program"] == "__main__:case"
    run, steps = jdag.replay(tmp_path / "bug.json", space["case"])
    assert len(steps) > 6 and run.error is None


def test_a_file_that_is_cut_off_or_absent_is_refused(tmp_path):
    path = saved(tmp_path)
    for spoilt in (path.read_text()[:-40], "[" * 100_000):
        path.write_text(spoilt)
        with fails_with(ScenarioError, "lab.is_no_run_that_jdag"):
            jdag.replay(path, ONE)
    with fails_with(ScenarioError, "lab.bug_jso_no_such_file"):
        jdag.replay(str(path)[:-1], ONE)
