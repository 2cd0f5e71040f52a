"""What a pass says and when: who begins, who holds credit, how its end is known."""

import random
from typing import Any

import pytest

from jdag.engine.credit import NOTHING, WHOLE, Credit, credit_sum
from jdag.engine.protocol import (
    Acknowledged,
    Answer,
    Call,
    Cotangent,
    End,
    Fail,
    Go,
    Mark,
    Mode,
    Outcome,
    Ship,
    Start,
)
from jdag.engine.worker_pass import Pass
from tests.tools.engine_cases import (
    SEEDS,
    begun,
    holding,
    leaves_nothing,
    net_of,
    pausing,
)
from tests.tools.engine_net import Net
from tests.tools.engine_programs import Run
from tests.tools.engine_values import DOUBLE, SAME, TRIPLE, Linear
from tests.tools.random_programs import draw
from tests.tools.tiers import sized

PROGRAMS = range(sized(40, 150))
WEIGHED = (Start, Mark, Go, Cotangent, Answer)
OF_A_PASS = (*WEIGHED, Fail)
MODES = pytest.mark.parametrize("mode", [Mode.SMART, Mode.FAST])


@MODES
@pytest.mark.parametrize("kind", [Call, Ship, Acknowledged])
def test_a_pass_begins_only_when_every_call_is_acknowledged(kind: type, mode: Mode):
    net, scope, x = begun(3, "b")
    net.drain()
    net.holds = holding(kind)
    (y,) = scope.call("c", DOUBLE, x)
    (z,) = scope.call("a", TRIPLE, x)
    waiter = scope.start_backward(z, y, mode=mode)
    net.drain()
    assert not [m for _, _, m in net.sent if type(m) in OF_A_PASS]
    assert net.places["a"].engine.live_passes == 0
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED
    assert scope.gradients(x) == [5]


def test_a_fast_pass_with_its_roots_on_one_worker_is_not_announced():
    net, scope, x = begun(2, "b")
    (y,) = scope.call("b", DOUBLE, x)
    scope.backward(y, y)
    assert [m.go for _, _, m in net.sent if type(m) is Start] == [True]
    assert net.messages(Go) == []


@MODES
@pytest.mark.parametrize("seed", SEEDS)
def test_all_roots_are_heard_of_before_any_cotangent_flows(seed: int, mode: Mode):
    net, scope, x = begun(4, "a", seed)
    (one,) = scope.call("b", DOUBLE, x)
    (two,) = scope.call("c", TRIPLE, one)
    (three,) = scope.call("d", SAME, two)
    (own,) = scope.call("a", Linear("own", ((5,),)), x)  # A root of the owner's.
    result = scope.backward(one, two, three, own, mode=mode)
    assert result.outcome is Outcome.FINISHED
    assert scope.gradients(x) == [2 + 6 + 6 + 5]
    order = [type(m) for _, _, m in net.sent if type(m) in OF_A_PASS]
    assert order[:3] == [Start] * 3
    first = order.index(Go)
    assert order[first : first + 3] == [Go] * 3 and order.count(Go) == 3
    assert Cotangent not in order[:first] and Mark not in order[first:]
    assert not [m for _, _, m in net.sent if type(m) is Start and m.go]


def test_go_is_said_only_when_no_mark_is_under_way():
    """The mark that b is held back from would find that c's send is needed."""
    net, scope, x = begun(4, "b")
    (one,) = scope.call("c", DOUBLE, x)
    (two,) = scope.call("d", TRIPLE, one)
    (three,) = scope.call("c", SAME, one)
    net.drain()
    net.holds = holding(Mark, sender="c")
    waiter = scope.start_backward(two, three, mode=Mode.SMART)
    net.drain()
    assert net.messages(Mark) == [("d", "c"), ("c", "b")]
    assert net.messages(Go) == [] and net.messages(Cotangent) == []
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED
    assert scope.gradients(x) == [8]


@MODES
@pytest.mark.parametrize("program", PROGRAMS)
def test_when_a_pass_ends_nothing_of_it_is_under_way(program: int, mode: Mode):
    plan = draw(random.Random(program))
    net = Net(plan.workers, random.Random(f"credits {program}"))
    seen = 0

    def look(net: Net) -> None:
        nonlocal seen
        while seen < len(net.sent):
            _, _, message = net.sent[seen]
            seen += 1
            if type(message) is End and message.outcome is not Outcome.FAILED:
                _nothing_under_way(net, message)

    net.before_step = look
    run = Run(plan, net, mode)
    run.all()
    net.drain()
    if mode is Mode.SMART:
        assert Outcome.STUCK not in [result.outcome for result in run.passes]


def _nothing_under_way(net: Net, end: End) -> None:
    queued = [m for queue in net.queues.values() for m, _ in queue]
    assert not [m for m in queued if type(m) in OF_A_PASS], end
    jobs = [job for place in net.places.values() for job in place.jobs]
    assert not [job for job in jobs if job.phase == end.number], end
    owner = net.places[net.workers[end.context.number]]
    for place in net.places.values():
        part = place.engine._state.contexts.get(end.context)
        live = None if part is None else part.live
        if live is not None and place is not owner:
            assert live.credit == NOTHING and not live.busy, (end, place)


@MODES
@pytest.mark.parametrize("program", range(sized(15, 40)))
def test_at_every_moment_of_a_pass_its_parts_sum_to_the_whole(program: int, mode: Mode):
    plan = draw(random.Random(program))
    net = Net(plan.workers, random.Random(f"parts {program}"))
    looks = 0

    def look(net: Net) -> None:
        nonlocal looks
        for context, live in _live(net):
            if live.parent is None and not live.failed:
                parts = _parts(net, context, live.number)
                if parts is not None:
                    assert parts == WHOLE, (context, parts)
                    looks += 1

    net.before_step = look
    Run(plan, net, mode).all()
    assert looks > 0


def _live(net: Net) -> list[tuple[Any, Pass]]:
    return [
        (context, part.live)
        for place in net.places.values()
        for context, part in place.engine._state.contexts.items()
        if part.live is not None
    ]


def _parts(net: Net, context: Any, number: int) -> Credit | None:
    total = NOTHING
    for other, live in _live(net):
        if (other, live.number) == (context, number):
            if live.failed:
                return None
            total = credit_sum(total, live.credit)
    for queue in net.queues.values():
        weighed = [message for message, _ in queue if type(message) in WEIGHED]
        for message in [
            m for m in weighed if (m.context, m.number) == (context, number)
        ]:
            assert message.credit.units > 0, message
            total = credit_sum(total, message.credit)
    return total


@pytest.mark.parametrize("count", [2, 3, 6])
def test_a_chain_of_any_length_is_answered_once_a_wave(count: int):
    for mode, waves in ((Mode.FAST, 1), (Mode.SMART, 2)):
        net = net_of(count)
        *others, last = net.workers[1:]
        x = net.put("b", 3, "a")
        scope = net.open("a")
        y = x
        for worker in (*others, last):
            (y,) = scope.call(worker, DOUBLE, y)
        assert scope.backward(y, mode=mode).outcome is Outcome.FINISHED
        assert net.messages(Answer) == [("b", "a")] * waves
        assert scope.gradients(x) == [2 ** (count - 1)]


@MODES
def test_a_job_of_a_failed_pass_that_still_runs_ends_before_the_pass_does(mode: Mode):
    net = net_of(3)
    x, y = net.put("b", 3, "a"), net.put("c", 3, "a")
    scope = net.open("a")
    (slow,) = scope.call("b", Linear("slow", ((1,),)), x)
    (far,) = scope.call("c", SAME, slow)
    (near,) = scope.call("b", TRIPLE, x)
    net.drain()
    net.pauses = pausing("slow")
    first = scope.start_backward(far, near, slow, retain=True, mode=mode)
    net.drain()
    net.crash("c")  # The pass fails while b computes for it.
    net.drain()
    assert first not in net.places["a"].resumed
    net.let_go()
    result = net.until("a", first)
    assert result.outcome is Outcome.FAILED and y.tracked
    assert [job.path for job in net.ran][-1] == (1,)
    leaves_nothing(scope)
