"""The tree of a pass: who begins when, who answers when, and how stuck is known."""

import random
from collections import Counter
from typing import Any

import pytest

from jdag.engine.tree import Pass
from jdag.engine.vocabulary import (
    Acknowledge,
    Answer,
    Call,
    Cotangent,
    End,
    Fail,
    Go,
    Job,
    Outcome,
    Ship,
    Start,
)
from tests.engine_cases import SEEDS, holding, net_of, pausing
from tests.engine_net import Net
from tests.engine_programs import Run, draw
from tests.engine_values import DOUBLE, SAME, TRIPLE, Linear

PROGRAMS = range(150)
OF_A_PASS = (Start, Go, Cotangent, Answer, Fail)


# ----------------------------------------------------------------- when a pass begins


@pytest.mark.parametrize("kind", [Call, Ship, Acknowledge])
def test_a_pass_begins_only_when_every_call_is_acknowledged(kind: type):
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    net.drain()
    net.holds = holding(kind)
    (y,) = scope.call("c", DOUBLE, x)
    (z,) = scope.call("a", TRIPLE, x)
    waiter = scope.start_backward(z, y)
    net.drain()
    assert not [m for _, _, m in net.sent if type(m) in OF_A_PASS]
    assert net.places["a"].engine.live_passes == 0
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED
    assert scope.gradients(x) == [5]


def test_a_send_that_is_not_there_yet_is_waited_for_and_not_forgotten():
    """Without the acknowledgement the pass would end before the send is counted."""
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    net.drain()
    (root,) = scope.call("b", DOUBLE, x)
    net.drain()
    net.holds = holding(Ship)
    scope.call("c", TRIPLE, x)  # Dropped: its send is owed.
    waiter = scope.start_backward(root)
    net.drain()
    net.let_go()
    result = net.until("a", waiter)
    assert result.outcome is Outcome.STUCK
    assert [owed.path for owed in result.owed] == [(2,)]


def test_values_may_still_be_on_their_way_when_a_pass_begins():
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    net.pauses = pausing("double")
    (y,) = scope.call("c", DOUBLE, x)
    waiter = scope.start_backward(y)
    net.drain()
    assert net.places["c"].engine.live_passes == 1
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED


def test_a_pass_with_its_roots_on_one_worker_is_not_announced():
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, x)
    scope.backward(y, y)
    assert [m.go for _, _, m in net.sent if type(m) is Start] == [True]
    assert net.messages(Go) == []


@pytest.mark.parametrize("seed", SEEDS)
def test_roots_on_several_workers_are_all_announced_before_any_begins(seed: int):
    net = net_of(4, seed)
    x = net.put("a", 3, "a")
    scope = net.open("a")
    (one,) = scope.call("b", DOUBLE, x)
    (two,) = scope.call("c", TRIPLE, one)
    (three,) = scope.call("d", SAME, two)
    result = scope.backward(one, two, three, x_at(net, scope, x))
    assert result.outcome is Outcome.FINISHED
    assert scope.gradients(x) == [2 + 6 + 6 + 5]
    order = [type(m) for _, _, m in net.sent if type(m) in OF_A_PASS]
    assert order[:6] == [Start] * 3 + [Answer] * 3
    assert order[6:9] == [Go] * 3
    assert not [m for _, _, m in net.sent if type(m) is Start and m.go]


def x_at(net: Net, scope: Any, x: Any) -> Any:
    """A root of the owner's own."""
    return scope.call("a", Linear("own", ((5,),)), x)[0]


def test_a_root_that_comes_late_would_be_counted_too_late():
    """C's root is behind b's: told first, b must wait for what c's root brings."""
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (one,) = scope.call("b", DOUBLE, x)
    (two,) = scope.call("b", TRIPLE, one)
    (three,) = scope.call("c", SAME, two)
    net.holds = holding(Start, receiver="c")
    waiter = scope.start_backward(two, three)
    net.drain()
    assert net.messages(Go) == []
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED
    assert scope.gradients(x) == [12]


# ------------------------------------------------------------------- who answers when


@pytest.mark.parametrize("program", PROGRAMS)
def test_when_a_pass_ends_nothing_of_it_is_under_way_and_all_is_answered(program: int):
    plan = draw(random.Random(program))
    net = Net(plan.workers, random.Random(f"tree {program}"))
    seen = 0

    def look(net: Net) -> None:
        """Look at each End of a pass that did not fail, as soon as it is sent."""
        nonlocal seen
        while seen < len(net.sent):
            _, _, message = net.sent[seen]
            seen += 1
            if type(message) is End and message.outcome is not Outcome.FAILED:
                _nothing_under_way(net, seen, message)

    net.before_step = look
    run = Run(plan, net)
    run.all()
    net.drain()
    if not any(result.outcome is Outcome.FAILED for result in run.passes):
        _all_answered(net)


def _nothing_under_way(net: Net, sent: int, end: End) -> None:
    queued = [m for queue in net.queues.values() for m, _ in queue]
    assert not [m for m in queued if type(m) in OF_A_PASS], end
    jobs = [job for place in net.places.values() for job in place.jobs]
    assert not [job for job in jobs if job.phase == end.number], end


def _all_answered(net: Net) -> None:
    """As many answers come back to each as it sent messages that are answered."""
    asked: Counter[tuple[str, str]] = Counter()
    answered: Counter[tuple[str, str]] = Counter()
    for sender, receiver, message in net.sent:
        if type(message) in (Start, Go, Cotangent):
            asked[sender, receiver] += 1
        elif type(message) is Answer:
            answered[receiver, sender] += 1
    assert asked == answered


def test_a_worker_that_computes_does_not_answer():
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, x)
    net.drain()
    net.pauses = pausing("double")
    waiter = scope.start_backward(y)
    net.drain()
    assert net.messages(Answer) == [] and net.messages(End) == []
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED
    assert net.messages(Answer) == [("b", "a")]


def test_a_worker_whose_node_waits_for_its_forward_does_not_answer():
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    net.pauses = pausing("double")
    (y,) = scope.call("b", DOUBLE, x)
    waiter = scope.start_backward(y)
    net.drain()
    assert net.places["b"].engine.live_passes == 1 and net.places["b"].jobs != []
    assert net.messages(Answer) == []
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED


def test_a_worker_answers_who_engaged_it_last_and_others_at_once():
    """B is engaged by a's Go; c's cotangent, while b computes, is answered at once."""
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (slow,) = scope.call("b", Linear("slow", ((1,),)), x)
    (there,) = scope.call("c", DOUBLE, x)
    net.drain()
    net.pauses = pausing("slow")
    waiter = scope.start_backward(slow, there)
    net.drain()
    assert ("b", "c") in net.messages(Answer)
    assert net.messages(Answer).count(("b", "a")) == 1  # The announcement's.
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED
    assert net.messages(Answer).count(("b", "a")) == 2
    assert scope.gradients(x) == [3]


# -------------------------------------------------------------------------------- owed


def test_a_worker_that_is_engaged_again_reports_the_change_alone():
    """B answers twice: two sends owed, then one of them gone."""
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (there,) = scope.call("c", DOUBLE, x)
    (here,) = scope.call("b", TRIPLE, x)
    net.drain()
    result = scope.backward(here, there)
    assert result.outcome is Outcome.FINISHED
    changes = [m.owed for a, b, m in net.sent if type(m) is Answer and a == "b"]
    assert sum(changes) == 0
    assert changes.count(1) == 1 and changes.count(-1) == 1


@pytest.mark.parametrize("seed", SEEDS)
def test_the_changes_that_reach_the_owner_add_up_to_what_is_owed(seed: int):
    net = net_of(4, seed)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    for worker in "cd":
        scope.call(worker, DOUBLE, x)  # Dropped.
    (one,) = scope.call("c", TRIPLE, x)
    (two,) = scope.call("b", SAME, one)
    (three,) = scope.call("d", SAME, two)
    result = scope.backward(three)
    assert result.outcome is Outcome.STUCK
    assert [(o.path, o.worker, o.destination) for o in result.owed] == [
        ((2,), "b", "d")  # What moved to c, for the first call, came back.
    ]
    climbed = [m.owed for _, to, m in net.sent if type(m) is Answer and to == "a"]
    assert sum(climbed) == len(result.owed)


def test_a_stuck_pass_is_known_without_any_timer():
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    scope.call("c", DOUBLE, x)
    (y,) = scope.call("b", TRIPLE, x)
    net.drain()
    waiter = scope.start_backward(y)
    net.drain()
    result = net.places["a"].resumed.pop(waiter)
    assert result.outcome is Outcome.STUCK
    assert [(o.worker, o.destination, o.function) for o in result.owed] == [
        ("b", "c", "double")
    ]


def test_a_pass_reports_each_change_once():
    live = Pass(1, retain=False, is_owner=False)
    live.unreported = 3
    assert live.report() == 3
    assert live.report() == 0
    live.unreported -= 1
    assert live.report() == -1


def test_a_pass_is_engaged_by_one_message_until_it_answers():
    live = Pass(1, retain=False, is_owner=False)
    assert live.engage("b") and live.parent == "b"
    assert not live.engage("c") and live.parent == "b"
    owner = Pass(1, retain=False, is_owner=True)
    assert not owner.engage("b") and owner.parent is None


@pytest.mark.parametrize("what", ["unanswered", "computing", "waiting"])
def test_a_pass_is_not_passive_while_anything_is_open(what: str):
    live = Pass(1, retain=False, is_owner=False)
    assert live.passive
    setattr(live, what, 1)
    assert not live.passive


def test_a_job_of_a_failed_pass_that_still_runs_ends_before_the_pass_does():
    net = net_of(3)
    x, y = net.put("b", 3, "a"), net.put("c", 3, "a")
    scope = net.open("a")
    (slow,) = scope.call("b", Linear("slow", ((1,),)), x)
    (far,) = scope.call("c", SAME, slow)
    (near,) = scope.call("b", TRIPLE, x)
    net.drain()
    ran: list[Job] = net.ran
    net.pauses = pausing("slow")
    first = scope.start_backward(far, near, slow, retain=True)
    net.drain()
    net.crash("c")  # The pass fails while b computes for it.
    net.drain()
    assert first not in net.places["a"].resumed
    net.let_go()
    result = net.until("a", first)
    assert result.outcome is Outcome.FAILED and y.tracked
    assert [job.path for job in ran][-1] == (1,)
    scope.leave()
    net.drain()
    assert net.leftovers() == []
