"""How contexts and workers end, and that nothing is left of any of them."""

from collections.abc import Generator
from typing import Any

import pytest

from jdag.engine.credit import WHOLE
from jdag.engine.protocol import (
    Acknowledged,
    Argument,
    Arrived,
    Call,
    ConstantKey,
    ContextId,
    Cotangent,
    End,
    Forward,
    Incoming,
    Mark,
    Marked,
    Message,
    Mode,
    Outcome,
    OutputKey,
    Primal,
    Release,
    Return,
    Root,
    Run,
    Ship,
    Start,
    landing,
)
from jdag.errors import WorkerLost
from tests.tools.engine_cases import (
    SEEDS,
    begun,
    finished,
    holding,
    leaves_nothing,
    net_of,
    nothing_left,
    pausing,
)
from tests.tools.engine_net import Net, Scope
from tests.tools.engine_values import ADD, DOUBLE, SAME, TRIPLE, Fuse, Linear
from tests.tools.error_texts import fails_with
from tests.tools.tiers import sized


def state_of(net: Net, worker: str) -> Any:
    engine: Any = net.places[worker].engine
    return engine._state


def test_a_context_is_released_everywhere_it_was_and_nowhere_else():
    net, scope, x = begun(4, "b")
    scope.call("c", DOUBLE, x)
    scope.leave()
    assert sorted(net.messages(Release)) == [("a", "b"), ("a", "c")]
    nothing_left(net)


@pytest.mark.parametrize("seed", SEEDS)
def test_leaving_with_calls_in_flight_waits_for_them_and_their_errors_are_told(
    seed: int,
):
    net, scope, x = begun(4, "b", seed)
    (y,) = scope.call("c", DOUBLE, x)
    scope.call("d", Linear("late", ((1,),), Fuse("forward")), y)
    scope.call("b", Linear("early", ((1,),), Fuse("forward")), x)
    scope.call("c", ADD, y, 5)
    failures = scope.leave()
    calls = [(failure.path, failure.worker, failure.function) for failure in failures]
    assert calls == [((2,), "d", "late"), ((3,), "b", "early")]
    nothing_left(net)


def test_release_leaves_only_when_all_calls_are_acknowledged():
    net, scope, x = begun(3, "b")
    net.drain()
    net.holds = holding(Acknowledged, sender="c")
    scope.call("c", DOUBLE, x)
    scope.start_leaving()
    net.drain()
    assert net.messages(Release) == []
    nothing_left(net)


def waits(scope: Scope, x: Argument) -> Generator[int, Any, None]:
    scope.call("c", SAME, x)
    (slow,) = scope.call("b", Linear("slow", ((1,),)), x)
    yield scope.net.asked(scope.worker, slow)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_context_left_while_a_program_of_it_runs_is_aborted_everywhere(seed: int):
    net, scope, x = begun(4, "b", seed)
    net.pauses = pausing("slow")
    scope.launch("b", waits, x)
    for _ in range(seed):
        net.step()
    scope.start_leaving()
    nothing_left(net)
    assert [m.abort for _, _, m in net.sent if type(m) is Release] == [True] * 3


def late_messages(context: ContextId, leaf: Argument) -> list[Message]:
    key = ConstantKey(context, (9,), 0)
    root = Root(OutputKey(context, (1,), 0), "aval", True, 0)
    incoming = (Incoming("c", (True,)),)
    return [
        Call(context, (9,), SAME, (key,), (False,), (True,), incoming, "here"),
        Ship(context, (9,), "a", (leaf.key,), (True,), "same", "here"),
        Primal(context, (1,), "c", (None,)),
        Run(context, (9,), iter, (), "here"),
        Start(context, 5, (root,), Mode.FAST, False, True, WHOLE, 0),
        Mark(context, 5, (Marked((1,), (True,)),), False, WHOLE, 0),
        Cotangent(context, 5, (1,), (True,), False, WHOLE, 0),
        End(context, 5, Outcome.FINISHED, False),
        Release(context, (), False),
    ]


@pytest.mark.parametrize("lost", [False, True])
def test_late_messages_of_a_context_that_is_gone_do_not_remake_it(lost: bool):
    net = net_of(3)
    x = net.put("b", 3, "c")
    scope = net.open("a")
    scope.call("b", DOUBLE, x)
    if lost:
        net.drain()
        net.crash("a")
        net.drain()
    else:
        scope.leave()
    for message in late_messages(scope.context, x):
        for sender in ("a", "c"):
            store = net.places["b"].values
            store.update((key, (1, "late")) for key in landing(message))
            net.tell("b", Arrived(sender, message))
            assert net.places["b"].engine.live_contexts == 0, message
    nothing_left(net)


def test_thousands_of_contexts_beside_an_open_one_take_no_memory():
    net = net_of(3)
    x = net.put("b", 3, "a")
    held = net.open("a")
    held.call("b", DOUBLE, x)
    count = sized(1_000, 10_000)
    for number in range(count):
        scope = net.open("a")
        scope.call("bc"[number % 2], SAME, 1)
        scope.leave()
        net.sent.clear()
    for worker in "abc":
        state = state_of(net, worker)
        assert list(state.horizons) == [(0, 0)]
        (horizon,) = state.horizons.values()
        assert horizon.counter >= count and len(horizon.live) <= 1
        assert len(state.contexts) == (0 if worker == "c" else 1)
    (late,) = held.call("c", DOUBLE, x)
    finished(held, late)
    assert held.gradients(x) == [2]
    held.leave()
    nothing_left(net)


def nested(scope: Scope, x: Argument) -> Generator[int, Any, list[Argument]]:
    (one,) = scope.call("d", DOUBLE, x)
    (two,) = scope.call("c", TRIPLE, one)
    yield scope.net.asked(scope.worker, one)
    return [one, two]


def test_a_pass_whose_worker_is_lost_fails_with_its_name_and_way():
    net, scope, x = begun(3, "b")
    (y,) = scope.call("b", DOUBLE, x)
    net.drain()
    net.pauses = pausing("double")
    waiter = scope.start_backward(y)
    net.crash("b")
    result = net.until("a", waiter)
    assert result.outcome is Outcome.FAILED and result.leaves == ()
    assert result.failure.error == "WorkerLost" and result.failure.route == ("a", "b")
    assert "worker 'b' is lost" in result.failure.message
    leaves_nothing(scope)


def test_nothing_new_starts_in_a_context_that_was_aborted():
    net = net_of(3)
    x, y = net.put("b", 3, "a"), net.put("b", 4, "a")
    net.pauses = pausing("double")
    slow = net.update("a", x, DOUBLE, x)
    scope = net.open("a")
    (own,) = scope.call("b", TRIPLE, y)
    (next_own,) = scope.call("b", Linear("f", ((1, 1, 1),)), own, slow, 7)
    scope.call("b", SAME, next_own)
    scope.call("c", ADD, own, slow)
    net.drain()
    net.holds = holding(Start)
    scope.start_backward(next_own)
    net.drain()
    waiter = scope.start_leaving()
    net.holds = lambda *_: False
    net.drain()
    assert net.places["a"].resumed.pop(waiter) == ()
    nothing_left(net)
    assert net.fetch("a", slow)[0][0] == 6
    calls = [job for job in net.ran if type(job) is Forward and job.context is not None]
    assert [job.path for job in calls] == [(1,)]
    assert net.messages(Primal) == []


def test_an_abort_does_not_wait_for_a_lost_worker_that_took_no_part():
    net, scope, x = begun(4, "b")
    (y,) = scope.call("c", DOUBLE, x)
    net.drain()
    scope.start_backward(y)
    net.holds = holding(Release, receiver="d")
    waiter = scope.start_leaving()
    net.drain()
    assert waiter not in net.places["a"].resumed
    net.crash("d")
    assert net.until("a", waiter) == ()
    nothing_left(net)


def test_a_worker_that_only_a_program_knew_is_missed_when_the_program_returns():
    net, scope, x = begun(4, "b")
    net.holds = holding(Return)
    waiter = scope.launch("b", nested, x)
    net.drain()
    net.crash("d")
    net.drain()
    assert state_of(net, "a").contexts[scope.context].lost is None
    net.let_go()
    _, failure = net.until("a", waiter)
    assert failure is None
    with fails_with(WorkerLost, "engine.worker_d_is_lost"):
        scope.call("b", SAME, 1)
    leaves_nothing(scope)


def test_who_waits_for_a_program_on_a_lost_worker_is_told():
    net, scope, x = begun(4, "b")
    net.pauses = pausing("slow")
    waiter = scope.launch("b", waits, x)
    net.drain()
    net.crash("b")
    result, failure = net.until("a", waiter)
    assert result is None and failure.error == "WorkerLost"
    leaves_nothing(scope)


def test_nothing_can_be_asked_of_a_lost_worker():
    net = net_of(3)
    x = net.put("b", 3, "a")
    net.drain()
    net.crash("b")
    net.drain()
    scope = net.open("a")
    with fails_with(WorkerLost, "engine.callee_or_argument_lost"):
        scope.call("c", DOUBLE, x)
    with fails_with(WorkerLost, "engine.program_on_lost_worker"):
        scope.launch("b", nested, x)
    with fails_with(WorkerLost, "engine.leaf_owner_lost"):
        net.put("b", 4, "a")
    assert scope.leave() == ()
