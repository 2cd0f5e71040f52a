"""Plans in the engine: steps in any order of events, commits, failures, losses."""

import pytest

from jdag.engine.protocol import (
    Arrived,
    ContextId,
    Failure,
    Hop,
    RunSegment,
    Settle,
    SlotKey,
    Stepping,
    Unplanned,
)
from jdag.errors import WorkerLost
from tests.tools.plan_net import PlanNet, chain

SEEDS = range(20)
PLAN = ContextId(0, 7, 0)


def made(seed, *plans):
    net = PlanNet(seed)
    w, v = net.put("b", 3), net.put("c", 4)
    for plan in plans or (PLAN,):
        net.plan(chain(plan, w, v), (5,), {4: 5})
    return net, w, v


def expected(w: int, v: int, x: int):
    y = w * x
    z = v * y + 5
    return z, w + y + x, v + z


def held(net):
    actual = []
    for name, values in net.values.items():
        stored = {
            version.stored
            for leaf in net.engines[name]._state.leaves.values()
            for version in leaf.versions.values()
        }
        actual += [
            (name, key)
            for key in values
            if key not in stored and not (key.kind == "slot" and key.name == 0)
        ]
    return actual


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_in_any_order_of_events_do_what_the_program_does(seed):
    net, w, v = made(seed)
    now = [3, 4]
    for x in (2, 1, 3):
        (z,) = net.step(PLAN, "b", x)
        actual, *now = expected(now[0], now[1], x)
        assert z == actual
    assert [net.fetch(w), net.fetch(v)] == now
    net.drain()
    assert held(net) == []
    assert all(
        len(leaf.versions) == 1 for leaf in net.engines["b"]._state.leaves.values()
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_is_committed_with_the_next_message_and_not_before(seed):
    net, w, _ = made(seed)
    net.step(PLAN, "b", 2)
    net.drain()
    (leaf,) = net.engines["b"]._state.leaves.values()
    assert leaf.newest == 0
    assert net.fetch(w) == 3 + 6 + 2
    assert leaf.newest == 1


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("where", ["b", "c"])
def test_a_failure_anywhere_commits_nowhere_and_the_next_step_is_right(seed, where):
    net, w, v = made(seed)
    net.step(PLAN, "b", 2)
    _, *now = expected(3, 4, 2)
    net.fails = lambda worker, job: worker == where and job.path == (1,)
    failed = net.step(PLAN, "b", 9)
    assert isinstance(failed, Failure) and failed.worker == where
    net.fails = lambda *_: False
    assert [net.fetch(w), net.fetch(v)] == now
    (z,) = net.step(PLAN, "b", 1)
    actual, *now = expected(now[0], now[1], 1)
    assert z == actual and [net.fetch(w), net.fetch(v)] == now
    net.drain()
    assert held(net) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_two_programs_that_step_the_same_leaves_lose_no_update(seed):
    other = ContextId(2, 3, 0)  # Of a program on c.
    net, w, v = made(seed, PLAN, other)
    (z,) = net.step(PLAN, "b", 2)  # Staged, while the other steps and commits.
    assert z == 4 * 6 + 5
    (z,) = net.step(other, "b", 1)
    assert z == 4 * 3 + 5
    net.fetch(w, "c")
    net.drain()
    assert net.fetch(w, "c") == 3 + 3 + 1
    assert net.fetch(w) == 3 + (3 + 1) + (6 + 2)
    assert net.fetch(v) == 4 + 17 + 29
    net.drain()
    assert held(net) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leaf_that_was_updated_in_between_is_read_as_it_is_then(seed):
    net, w, _ = made(seed)
    net.step(PLAN, "b", 2)
    net.update(w, lambda w: (100 * w,))
    (z,) = net.step(PLAN, "b", 1)
    assert z == (4 + 29) * 1100 + 5
    assert net.fetch(w) == 1100 + 1100 + 1


@pytest.mark.parametrize("turns", SEEDS)
def test_a_step_that_nobody_waits_for_is_over_with_the_next(turns):
    net, leaf, _ = made(3)
    net.steps[PLAN] = 1
    net.values["a"][SlotKey(PLAN, 1, 0)] = 2
    net.tell("a", Stepping(net.waiter(), PLAN, 1, (("b", (0,)),)))
    for _ in range(turns):
        net.turn()
    after = [expected(w, v, 1) for w, v in ((3, 4), expected(3, 4, 2)[1:])]
    (z,) = net.step(PLAN, "b", 1)
    assert z in [one[0] for one in after]
    assert net.fetch(leaf) == after[z == after[1][0]][1]
    net.drain()
    assert held(net) == []


def test_a_hop_of_a_step_that_is_over_is_dropped():
    net, *_ = made(0)
    net.step(PLAN, "b", 2)
    net.fetch(net.put("b", 1))
    net.drain()
    for number in (0, 1):
        key = SlotKey(PLAN, number, 2)
        net.values["c"][key] = 77
        net.tell("c", Arrived("b", Hop(PLAN, number, (2,))))
        assert key not in net.values["c"]
    (z,) = net.step(PLAN, "b", 1)
    assert z == (4 + 29) * 11 + 5


def test_a_plan_that_nobody_names_is_gone_everywhere_with_its_constants():
    net, w, _ = made(3)
    net.step(PLAN, "b", 2)
    net.tell("a", Unplanned(PLAN))
    net.drain()
    assert net.fetch(w) == 11  # What it staged is committed.
    assert [engine.plans for engine in net.engines.values()] == [0, 0, 0]
    keys = [key for values in net.values.values() for key in values]
    assert [key for key in keys if key.kind == "slot" and key.name == 0] == []
    assert [m.commits for *_, m in net.sent if isinstance(m, Settle)].count(True) == 2


def crashed(victim, at):
    net, w, v = made(at % 7)
    net.crash_at(victim, (at + 1) // 2)  # Each twice, in other orders.
    now, outcomes = (3, 4), []
    for x in (2, 1, 3):
        try:
            actual = net.step(PLAN, "b", x)
        except WorkerLost as error:
            assert f"worker '{victim}' is lost" in str(error)
            actual = None
        if isinstance(actual, Failure):
            assert actual.error == "WorkerLost" and actual.worker == victim
            actual = None
        outcomes.append(actual)
        if actual is not None:
            z, *now = expected(*now, x)
            assert actual == [z]
    survivor, leaf = ("b", w) if victim == "c" else ("c", v)
    assert survivor not in net.dead
    assert net.fetch(leaf) == now[survivor == "c"], at
    net.drain()
    assert held(net) == [] or all(name == victim for name, _ in held(net))
    return None in outcomes


@pytest.mark.parametrize("victim", ["b", "c"])
def test_a_crash_at_any_event_commits_everything_or_nothing(victim):
    was_hit = [crashed(victim, at) for at in range(1, 90)]
    assert was_hit[0] and not was_hit[-1]
    assert was_hit.count(True) > 30


def test_a_segment_runs_when_all_that_it_needs_is_there_and_only_then():
    net, *_ = made(1)
    run = []

    def note(worker, job):
        run.append((worker, job.path))
        return False

    net.fails = note
    net.step(PLAN, "b", 2)
    assert sorted(run) == [("b", (0,)), ("b", (1,)), ("c", (0,)), ("c", (1,))]
    assert run.index(("b", (0,))) < run.index(("c", (0,))) < run.index(("c", (1,)))
    assert all(
        isinstance(job, RunSegment) for jobs in net.jobs.values() for job in jobs
    )
