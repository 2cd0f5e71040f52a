"""Program frames: which of the sent messages an acknowledgement is for."""

from collections.abc import Generator
from typing import Any

import pytest

from jdag.engine.phases import PartPhase, Phase
from jdag.engine.protocol import (
    ACKNOWLEDGED,
    Acknowledged,
    Assign,
    Attach,
    Awaited,
    Call,
    Lost,
    Primal,
    Release,
    Run,
    Ship,
)
from jdag.errors import ProtocolError
from tests.tools.engine_cases import (
    SEEDS,
    begun,
    holding,
    leaves_nothing,
    net_of,
    nothing_left,
)
from tests.tools.engine_net import Net, Scope
from tests.tools.engine_values import DOUBLE, SAME, Affine
from tests.tools.error_texts import fails_with


def awaits(scope: Scope) -> int:
    """Wait until all that the top frame has issued is acknowledged."""
    waiter = scope.net.waiter()
    scope.net.tell(scope.worker, Awaited(waiter, scope.context))
    return waiter


def unhandled(net: Net, issuer: str, receiver: str) -> int:
    engine: Any = net.places[issuer].engine
    return len(engine._state.unhandled.get(receiver, ()))


def test_acknowledgements_count_in_the_order_of_sending():
    net = net_of(2)
    one, two = net.open("a"), net.open("a")
    one.call("b", SAME, 1)
    two.call("b", SAME, 1)
    two.call("b", SAME, 1)
    waiters = [awaits(one), awaits(two)]
    resumed = net.places["a"].resumed
    for count, expected in ((1, [0]), (1, [0]), (1, [0, 1])):
        net.tell("a", Acknowledged("b", count))
        assert [n for n, waiter in enumerate(waiters) if waiter in resumed] == expected
    net.queues["a", "b"].clear()


def test_acknowledgements_of_several_workers_are_counted_apart():
    net, scope, x = begun(3, "b")
    net.drain()
    net.holds = holding(Ship)
    scope.call("c", DOUBLE, x)
    waiter = awaits(scope)
    net.drain()
    assert (unhandled(net, "a", "b"), unhandled(net, "a", "c")) == (1, 0)
    assert waiter not in net.places["a"].resumed
    net.let_go()
    net.until("a", waiter)
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_message_of_these_classes_is_acknowledged_once(seed: int):
    net, scope, x = begun(3, "b", seed)
    (y,) = scope.call("c", DOUBLE, x)
    scope.attach(y, Affine("h", 1, 0, None))
    scope.call("a", SAME, y)
    scope.leave()
    net.drain()
    sent = [(a, b) for a, b, m in net.sent if type(m) in ACKNOWLEDGED]
    counts = [(b, a, m.count) for a, b, m in net.sent if type(m) is Acknowledged]
    for pair in (("a", "b"), ("a", "c")):
        assert sum(n for *ends, n in counts if (*ends,) == pair) == sent.count(pair)
    kinds = {type(m) for *_, m in net.sent}
    assert kinds >= {Assign, Attach, Call, Ship}
    nothing_left(net)


@pytest.mark.parametrize("count", [1, 3])
def test_more_acknowledgements_than_sent_messages_are_refused(count: int):
    net, scope, x = begun(2, "a")
    with fails_with(ProtocolError, "engine.nothing_is_unacknowledged"):
        net.tell("a", Acknowledged("b", 1))
    scope.call("b", DOUBLE, x)
    scope.call("b", SAME, 1)
    with fails_with(ProtocolError, "engine.only_2_are_unacknowledged"):
        net.tell("a", Acknowledged("b", 3))
    assert unhandled(net, "a", "b") == 2
    leaves_nothing(scope)


def test_an_acknowledgement_of_a_lost_worker_is_ignored():
    net, scope, x = begun(3, "a")
    net.drain()
    net.holds = holding(Acknowledged, sender="b")
    scope.call("b", DOUBLE, x)
    scope.call("c", DOUBLE, x)
    waiter = awaits(scope)
    net.drain()
    assert waiter not in net.places["a"].resumed
    net.part("a", "b")
    net.unnoticed.remove(("a", Lost("b")))
    net.tell("a", Lost("b"))
    assert waiter in net.places["a"].resumed
    net.tell("a", Acknowledged("b", 1))
    assert unhandled(net, "a", "b") == 0
    leaves_nothing(scope)


def test_who_waits_for_a_ship_that_was_lost_is_told_so_in_its_own_context():
    net, scope, x = begun(3, "b")
    other = net.open("a")
    other.call("c", SAME, 1)
    net.drain()
    net.holds = holding(Ship)
    scope.call("c", DOUBLE, x)
    net.drain()
    net.part("a", "b")
    net.drain()
    failed = [(m.context, m.path, to) for _, to, m in net.sent if type(m) is Primal]
    assert failed == [(scope.context, (1,), "c")]
    other.leave()
    leaves_nothing(scope)


def test_a_message_to_a_lost_worker_is_not_counted():
    net, scope, _ = begun(3, "a")
    net.part("a", "b")
    net.drain()
    engine: Any = net.places["a"].engine
    engine._state.expect_handling("b", (1,))
    assert (unhandled(net, "a", "b"), engine._state.assignments) == (0, 0)
    leaves_nothing(scope)


def test_the_calls_of_an_aborted_context_are_counted_before_later_ones():
    net, scope, x = begun(2, "b")
    net.drain()
    net.holds = holding(Acknowledged)
    scope.call("b", DOUBLE, x)
    scope.launch("b", calls_of, "a")
    scope.start_leaving()
    other = net.open("a")
    other.call("b", SAME, 1)
    waiter = awaits(other)
    net.drain()
    assert (net.messages(Release), net.messages(Run)) == ([("a", "b")], [])
    net.tell("a", Acknowledged("b", 1))
    assert waiter not in net.places["a"].resumed
    net.tell("a", Acknowledged("b", 1))
    assert waiter in net.places["a"].resumed
    queue = net.queues["b", "a"]
    for each in [one for one in queue if type(one[0]) is Acknowledged]:
        queue.remove(each)
    leaves_nothing(other)


def calls_of(scope: Scope, worker: str) -> Generator[int, Any, None]:
    scope.call(worker, SAME, 1)
    yield scope.net.asked(scope.worker)


def test_the_situations_of_an_acknowledgement_are_those_of_the_counted_calls():
    net, one, x = begun(3, "a")
    net.drain()
    two = net.open("a")
    net.holds = holding(Acknowledged)
    net.put("b", 1, "a")  # Of no context.
    two.call("b", SAME, 1)
    one.call("b", DOUBLE, x)
    (root,) = two.call("b", DOUBLE, x)
    launched = one.launch("c", calls_of, "b")
    net.drain()
    engine = net.places["a"].engine
    is_open = (Phase.OPEN, Acknowledged)
    listed = [engine.situations(Acknowledged("b", count)) for count in range(5)]
    assert list(map(len, listed)) == [0, 0, 1, 2, 2]
    assert listed[-1] == [is_open, is_open]
    two.start_backward(root)
    gathering = (Phase.GATHERING, Acknowledged)
    assert engine.situations(Acknowledged("b", 2)) == [gathering]
    assert engine.situations(Acknowledged("b", 3)) == [is_open, gathering]
    assert engine.situations(Acknowledged("c", 1)) == []
    net.holds = holding(Acknowledged, receiver="c")
    net.drain()
    there = net.places["c"].engine
    part = (PartPhase.OPEN, Acknowledged)
    assert there.situations(Acknowledged("b", 1)) == [part]
    net.let_go()
    net.until("a", launched)
    two.leave()
    leaves_nothing(one)
