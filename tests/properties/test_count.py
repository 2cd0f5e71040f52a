"""What a pass counts: sends that are owed, and what is spent by being counted."""

from typing import Any

import pytest

from jdag.engine.protocol import Argument, Cotangent, Mark, Mode, Outcome
from tests.tools.engine_cases import (
    SEEDS,
    begun,
    finished,
    kept,
    leaves_nothing,
    net_of,
)
from tests.tools.engine_net import Net, Scope
from tests.tools.engine_values import ADD, DOUBLE, SAME, TRIPLE, Fuse, Linear


def test_a_failed_pass_that_does_not_retain_spends_the_whole_context():
    net = net_of(3)
    x, y = net.put("b", 3, "a"), net.put("c", 3, "a")
    scope = net.open("a")
    (bad,) = scope.call("b", Linear("bad", ((1,),), Fuse("vjp", 1)), x)
    (other,) = scope.call("c", DOUBLE, y)
    net.drain()
    result = scope.backward(bad)
    assert result.failure is not None and result.failure.message == "bad raised in vjp"
    assert kept(net, "residuals") == []
    again = scope.backward(other)
    assert again.failure is not None and again.failure.error == "GraphError"


def marks(net: Net) -> list[tuple[str, str, list[tuple[Any, ...]]]]:
    return [
        (a, b, [(one.path, one.slots) for one in m.transfers])
        for a, b, m in net.sent
        if type(m) is Mark
    ]


def test_marks_for_one_worker_from_one_event_travel_in_one_message():
    net, scope, x, y, z = begun(3, "bbb")
    (one,) = scope.call("c", DOUBLE, x)
    (two,) = scope.call("c", TRIPLE, y)
    (three,) = scope.call("c", SAME, z)
    finished(scope, one, two, three, mode=Mode.SMART)
    ((sender, receiver, transfers),) = marks(net)
    assert (sender, receiver) == ("c", "b")
    assert sorted(transfers) == [((n,), (True,)) for n in (1, 2, 3)]


def two_slots(net: Net) -> tuple[Scope, list[Argument], list[Argument]]:
    x, y = net.put("b", 3, "a"), net.put("b", 4, "a")
    scope = net.open("a")
    (p,) = scope.call("b", DOUBLE, x)
    (q,) = scope.call("b", TRIPLE, y)
    scope.call("c", ADD, p, q)  # Dropped.
    (one,) = scope.call("c", DOUBLE, p)
    (two,) = scope.call("c", SAME, q)
    return scope, [x, y], [one, two]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slot_that_was_spent_stays_so_after_a_retained_pass_by_it(seed: int):
    """FAST waits for unspent slots: by one that is spent again nothing may come."""
    _, scope, x, y = begun(3, "bc", seed)
    (one,) = scope.call("c", DOUBLE, x)
    (two,) = scope.call("c", TRIPLE, x)
    (three,) = scope.call("c", SAME, y)
    (four,) = scope.call("b", SAME, x)
    finished(scope, one, mode=Mode.SMART)
    finished(scope, two, mode=Mode.SMART, retain=True)
    assert scope.gradients(x) == [2 + 3]
    finished(scope, three, four, mode=Mode.FAST)
    assert scope.gradients(x, y) == [2 + 3 + 1, 1]
    again = scope.backward(two, mode=Mode.FAST)
    assert again.failure is not None and again.failure.error == "GraphError"
    leaves_nothing(scope)


def test_what_fast_has_spent_a_mark_finds_spent_and_names():
    net = net_of(3)
    scope, _, (one, two) = two_slots(net)
    finished(scope, one, mode=Mode.FAST)
    result = scope.backward(two, mode=Mode.SMART)
    assert result.outcome is Outcome.FAILED and result.failure is not None
    assert result.failure.error == "GraphError"
    assert result.failure.message.startswith("triple (call (2,), here) on 'b' was")
    assert (result.failure.worker, result.failure.path) == ("b", (2,))
    assert result.failure.route[-1] == "b" and net.messages(Cotangent) == [("c", "b")]
