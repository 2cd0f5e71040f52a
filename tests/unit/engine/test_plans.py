"""Plans in the engine: steps in any order of events, commits, failures, losses."""

import pytest
from msgspec.structs import replace

from jdag.engine.protocol import (
    Acknowledged,
    Arrived,
    Assign,
    Assignment,
    ContextId,
    Failure,
    NewestKey,
    Outgoing,
    Prepare,
    Run,
    RunSegment,
    Segment,
    Settle,
    Slotted,
    StepFrame,
    Stepping,
    Unplanned,
)
from jdag.engine.tables import table_of
from jdag.errors import ProtocolError, WorkerLost
from tests.tools.engine_cases import holding
from tests.tools.plan_net import UNSENDABLE, PlanNet, chain, held

SEEDS = range(20)
PLAN = ContextId(0, 7, 0)


def made(seed, *plans, workers="abc"):
    net = PlanNet(seed, workers)
    w, v = net.put("b", 3), net.put("c", 4)
    for plan in plans or (PLAN,):
        net.plan(chain(plan, w, v), (5,), {4: 5})
    return net, w, v


def expected(w: int, v: int, x: int):
    y = w * x
    z = v * y + 5
    return z, w + y + x, v + z


@pytest.mark.parametrize("seed", SEEDS)
def test_steps_in_any_order_of_events_do_what_the_program_does(seed):
    net, w, v = made(seed)
    now = [3, 4]
    for x in (2, 1, 3):
        (z,) = net.step(PLAN, x)
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
    net.step(PLAN, 2)
    net.drain()
    (leaf,) = net.engines["b"]._state.leaves.values()
    assert leaf.newest == 0
    assert net.fetch(w) == 3 + 6 + 2
    assert leaf.newest == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_an_acknowledgement_commits_no_step(seed):
    net, *_ = made(seed, workers="abcd")
    net.net.holds = holding(Acknowledged, sender="d")
    net.put("d", 1)
    net.step(PLAN, 2)
    net.let_go()
    net.drain()
    assert net.engines["a"]._state.assignments == 0
    (leaf,) = net.engines["b"]._state.leaves.values()
    assert leaf.newest == 0


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_is_called_once_a_dropped_step_is_known_to_be_dropped(seed):
    net, *_ = made(seed)
    scope = net.open("a")
    net.drain()
    net.fails = lambda *_: True
    net.net.holds = holding(Acknowledged, sender="c")
    assert isinstance(net.step(PLAN, 2), Failure)
    waiter = scope.launch("b", ends)
    net.drain()
    assert [m.commits for *_, m in net.sent if isinstance(m, Settle)] == [False] * 2
    assert net.messages(Run) == []
    net.let_go()
    assert net.until("a", waiter) == ("over", None)


def ends(scope):
    yield scope.net.asked(scope.worker)
    return "over"


@pytest.mark.parametrize("seed", SEEDS)
def test_a_version_is_held_by_its_step_or_by_its_leaf_and_never_by_both(seed):
    net, *_ = made(seed)
    net.step(PLAN, 2)
    net.drain()
    steps, at_commit = net.places["b"].steps, []
    assert steps.held == [3, 1]  # The new version, y, and what b keeps of its row.
    steps.put = lambda key, value: at_commit.append(steps.held)
    net.fetch(net.put("c", 1))
    net.drain()
    assert at_commit == [[2, 1]]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("where", ["b", "c"])
def test_a_failure_anywhere_commits_nowhere_and_the_next_step_is_right(seed, where):
    net, w, v = made(seed)
    net.step(PLAN, 2)
    _, *now = expected(3, 4, 2)
    net.fails = lambda worker, job: worker == where and job.path == (1,)
    failed = net.step(PLAN, 9)
    assert isinstance(failed, Failure) and failed.worker == where
    net.fails = lambda *_: False
    assert [net.fetch(w), net.fetch(v)] == now
    (z,) = net.step(PLAN, 1)
    actual, *now = expected(now[0], now[1], 1)
    assert z == actual and [net.fetch(w), net.fetch(v)] == now
    net.drain()
    assert held(net) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_two_programs_that_step_the_same_leaves_lose_no_update(seed):
    other = ContextId(2, 3, 0)  # Of a program on c.
    net, w, v = made(seed, PLAN, other)
    (z,) = net.step(PLAN, 2)  # Staged, while the other steps and commits.
    assert z == 4 * 6 + 5
    (z,) = net.step(other, 1)
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
    net.step(PLAN, 2)
    net.update(w, lambda w: (100 * w,))
    (z,) = net.step(PLAN, 1)
    assert z == (4 + 29) * 1100 + 5
    assert net.fetch(w) == 1100 + 1100 + 1


def test_a_row_knows_which_outputs_leave_the_worker():
    sent = Segment("f", (0,), (4, 5, 6), (Outgoing("c", (6,)), Outgoing("d", (4, 0))))
    kept = Segment("g", (5,), (7,))
    prepare = Prepare(PLAN, 0, (sent, kept), (), (), (), (), False)
    table = table_of(prepare, "a", {})
    assert [row.sent for row in table.rows] == [(0, 2), ()]


@pytest.mark.parametrize("turns", SEEDS)
def test_a_step_that_nobody_waits_for_is_over_with_the_next(turns):
    net, leaf, _ = made(3)
    net.steps[PLAN] = 1
    net.tell("a", Stepping(net.waiter(), PLAN, 1, (2,)))
    for _ in range(turns):
        net.turn()
    after = [expected(w, v, 1) for w, v in ((3, 4), expected(3, 4, 2)[1:])]
    (z,) = net.step(PLAN, 1)
    assert z in [one[0] for one in after]
    assert net.fetch(leaf) == after[z == after[1][0]][1]
    net.drain()
    assert held(net) == []


def test_a_step_that_is_dropped_while_it_waits_for_a_leaf_runs_no_row():
    net, w, _ = made(0)
    key = NewestKey(None, w, 0)
    wait = Assignment((9, 0), lambda w: (w,), (key,), (key,), (1,), "")
    net.tell("b", Arrived("a", Assign((9,), (wait,))))
    net.tell("b", Arrived("a", StepFrame(PLAN, 1, (0,), 0, True), (2,)))
    net.tell("b", Arrived("a", Settle(PLAN, 1, False, False)))
    net.drain()
    assert held(net) == [] and net.engines["b"]._state.leaves[w].newest == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_a_step_that_updates_no_leaf_keeps_no_version(seed):
    net, w, v = made(seed)
    plan = ContextId(0, 8, 0)
    parts = [
        (name, replace(part, segments=part.segments[:1], stages=(), updates=()))
        for name, part in chain(plan, w, v)
    ]
    net.plan(parts, (5,), {4: 5})
    for x in (2, 1):
        net.step(plan, x)
        net.update(w, lambda w: (w + 1,))
    net.drain()
    (leaf,) = net.engines["b"]._state.leaves.values()
    assert [*leaf.versions] == [2] and held(net) == []


def test_a_value_of_a_step_that_is_over_is_dropped():
    net, *_ = made(0)
    net.step(PLAN, 2)
    net.fetch(net.put("b", 1))
    net.drain()
    for number in (0, 1):
        frame = StepFrame(PLAN, number, (2,), 0, False)
        net.tell("c", Arrived("b", frame, (77,)))
        assert not net.engines["c"]._steps.tables[PLAN].steps
    (z,) = net.step(PLAN, 1)
    assert z == (4 + 29) * 11 + 5


def test_a_plan_that_nobody_names_is_gone_everywhere_with_its_constants():
    net, w, _ = made(3)
    net.step(PLAN, 2)
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
            actual = net.step(PLAN, x)
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
    net.step(PLAN, 2)
    assert sorted(run) == [("b", (0,)), ("b", (1,)), ("c", (0,)), ("c", (1,))]
    assert run.index(("b", (0,))) < run.index(("c", (0,))) < run.index(("c", (1,)))
    assert all(
        isinstance(job, RunSegment) for jobs in net.jobs.values() for job in jobs
    )


def add_one(value: int) -> tuple[int]:
    return (value + 1,)


def add(x: int, y: int) -> tuple[int]:
    return (x + y,)


def test_a_step_begins_with_the_owners_frame_and_with_no_other():
    net, _, v = made(0)
    plan = ContextId(0, 8, 0)  # On c: slot 3 is slot 2 and 1; slot 5 is leaf v and 1.
    segments = Segment(add_one, (2,), (3,)), Segment(add_one, (4,), (5,))
    net.tell(
        "c",
        Arrived("a", Prepare(plan, 0, segments, (), (Slotted(v, 4),), (), (), False)),
    )
    net.jobs["c"].clear()  # They compile.
    net.tell("c", Arrived("b", StepFrame(plan, 1, (2,), 0, False), (6,)))
    assert not net.jobs["c"]
    with pytest.raises(ProtocolError, match="only 'a' may begin it"):
        net.tell("c", Arrived("b", StepFrame(plan, 1, (), 0, True), ()))
    net.tell("c", Arrived("a", StepFrame(plan, 1, (), 0, True), ()))
    assert [job.path for job in net.jobs["c"]] == [(0,), (1,)]


@pytest.mark.parametrize("base", [0, 1])
def test_a_step_is_committed_by_the_next_only_if_its_owner_has_committed_it(base):
    net, *_ = made(0)
    net.step(PLAN, 2)
    net.drain()
    (leaf,) = net.engines["b"]._state.leaves.values()
    net.tell("b", Arrived("a", StepFrame(PLAN, 2, (0,), base, True), (1,)))
    assert leaf.newest == base
    assert [*net.engines["b"]._steps.tables[PLAN].steps] == [2]


@pytest.mark.parametrize("seed", range(40))
def test_what_has_arrived_of_an_interrupted_step_is_dropped_everywhere(seed):
    """Worker c adds two values of b; the owner sends it nothing in a step."""
    net = PlanNet(seed)
    net.net.slow = "job"
    hops = [(Outgoing("c", (slot,)),) for slot in (1, 2)]
    b = Segment(add_one, (0,), (1,), hops[0]), Segment(add_one, (1,), (2,), hops[1])
    c = Segment(add, (1, 2), (3,), (Outgoing("a", (3,)),))
    parts = [
        (worker, Prepare(PLAN, 0, segments, (), (), (), (), False))
        for worker, segments in (("b", b), ("c", (c,)))
    ]
    net.plan(parts, (3,), {})
    net.steps[PLAN] = 1
    net.tell("a", Stepping(net.waiter(), PLAN, 1, (2,)))
    for _ in range(seed % 5):
        net.turn()
    assert net.step(PLAN, 5) == [6 + 7]
    net.drain()
    assert held(net) == []


@pytest.mark.parametrize("seed", [1, 3, 5, 7])
def test_a_step_whose_inputs_cannot_be_sent_commits_the_step_before_once(seed):
    net, w, v = made(seed)  # Of odd seeds, frames are sent at once.
    _, *now = expected(3, 4, 2)
    net.step(PLAN, 2)
    with pytest.raises(ValueError, match="cannot be sent"):
        net.step(PLAN, UNSENDABLE)
    net.some()
    (z,) = net.step(PLAN, 1)
    actual, *now = expected(now[0], now[1], 1)
    assert z == actual
    with pytest.raises(ValueError, match="cannot be sent"):
        net.step(PLAN, UNSENDABLE)
    assert [net.fetch(w), net.fetch(v)] == now
    net.drain()
    net.tell("a", Unplanned(PLAN))
    net.drain()
    assert held(net) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_report_counts_once_and_a_slot_comes_once(seed):
    net, *_ = made(seed)
    net.tell("a", Stepping(net.waiter(), PLAN, 1, (2,)))
    report = StepFrame(PLAN, 1, (), 0, False)
    step = net.engines["a"]._steps.tables[PLAN].steps[1]
    for sender in ("b", "b", "c", "c", "d"):
        net.tell("a", Arrived(sender, report))
    assert step.left[-1] == 1 and not step.ready  # The result itself is missing.
    value = StepFrame(PLAN, 1, (2,), 0, False)
    net.tell("c", Arrived("b", value, (6,)))
    with pytest.raises(ProtocolError, match="slot 2 of step 1 came twice"):
        net.tell("c", Arrived("b", value, (6,)))


@pytest.mark.parametrize("seed", SEEDS)
def test_two_plans_of_one_program_read_what_the_other_has_committed(seed):
    other = ContextId(0, 8, 0)
    net, w, v = made(seed, PLAN, other)
    now = [3, 4]
    for plan, x in ((PLAN, 2), (other, 1), (PLAN, 3), (PLAN, 1), (other, 2)):
        (z,) = net.step(plan, x)
        actual, *now = expected(now[0], now[1], x)
        assert z == actual
    assert [net.fetch(w), net.fetch(v)] == now
