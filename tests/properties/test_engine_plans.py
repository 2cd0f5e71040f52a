"""Random plans over engines alone: any order of events, failures, crashes."""

from functools import partial
from itertools import count

import pytest

from jdag.engine.protocol import Failure
from jdag.errors import WorkerLost
from tests.tools.plan_net import PlanNet, held
from tests.tools.random_plan_net import PLAN, RandomPlan
from tests.tools.tiers import sized

PLANS = sized(60, 300)
CRASHED = sized(5, 300)
CHUNKS = 10  # For tests to run side by side.
STEPS = 4


def fetched(net, plan, but=""):
    return {leaf: net.fetch(leaf) for leaf in plan.leaves if leaf.worker != but}


def fails_at(at, worker, job):
    return (worker, job.path) == at


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_steps_and_failures_do_in_any_order_of_events_what_plain_python_does(chunk):
    for seed in range(chunk, PLANS, CHUNKS):
        net = PlanNet(seed)
        plan = RandomPlan(net, seed)
        for x in range(1, STEPS):
            worker = plan.rng.choice([*plan.parts])
            rows = [
                n for n, each in enumerate(plan.parts[worker].segments) if each.makes
            ]
            if rows and plan.rng.random() < 0.5:
                at = worker, (plan.rng.choice(rows),)
                net.fails = partial(fails_at, at)
                failed = net.step(PLAN, x)
                assert isinstance(failed, Failure) and failed.worker == worker, seed
                net.fails = lambda *_: False
            wanted, plan.leaves = plan.step(x)
            assert net.step(PLAN, x) == wanted, seed
            if plan.rng.random() < 0.5:
                assert fetched(net, plan) == plan.leaves, seed
        assert fetched(net, plan) == plan.leaves, seed
        net.drain()
        assert held(net) == [], seed


def crashed(seed: int, victim: str, at: int) -> bool:
    """Run steps in which a worker crashes at an event. Return whether it was lost."""
    net = PlanNet(seed)
    plan = RandomPlan(net, seed)
    net.crash_at(victim, at)
    for x in range(1, STEPS):
        wanted, after = plan.step(x)
        try:
            found = net.step(PLAN, x)
        except WorkerLost as error:
            assert f"worker '{victim}' is lost" in str(error)
            continue
        if isinstance(found, Failure):
            assert (found.error, found.worker) == ("WorkerLost", victim)
        else:
            assert found == wanted, (seed, victim, at)
            plan.leaves = after
    rest = {leaf: n for leaf, n in plan.leaves.items() if leaf.worker != victim}
    assert fetched(net, plan, victim) == rest, (seed, victim, at)
    net.drain()
    assert all(name == victim for name, _ in held(net)), (seed, victim, at)
    return victim in net.dead


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_crash_at_any_event_commits_a_step_on_all_others_or_on_none(chunk):
    for seed in range(chunk, CRASHED, CHUNKS):
        victim = "bc"[seed // CHUNKS % 2]
        assert any(not crashed(seed, victim, at) for at in count(1))
