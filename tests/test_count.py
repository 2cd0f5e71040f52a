"""What a pass counts: sends that are owed, and what is spent by being counted."""

from typing import Any

import pytest

from jdag.engine.vocabulary import Argument, Cotangent, Failure, Outcome
from tests.engine_cases import SEEDS, finished, kept, net_of
from tests.engine_net import Scope, stopped
from tests.engine_values import ADD, DOUBLE, SAME, TRIPLE, Fuse, Linear

# ------------------------------------------------------------------ what is spent


def test_a_second_pass_over_a_spent_graph_fails_and_names_what_was_spent():
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("b", TRIPLE, x)
    finished(scope, y)
    result = scope.backward(y)
    assert result.outcome is Outcome.FAILED and result.failure is not None
    assert result.failure.error == "GraphError"
    assert result.failure.message.startswith("triple (call (1,), here) on 'b' was")
    assert "retain_graph=True" in result.failure.message
    assert (result.failure.worker, result.failure.path) == ("b", (1,))
    assert scope.net.fetch("a", scope.gradient(x, 1))[0] == (3, "triple/0(1)")


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_after_a_pass_that_spent_work_and_leaves_move_again(seed: int):
    net = net_of(3, seed)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("c", DOUBLE, x)
    finished(scope, y)
    (z,) = scope.call("c", TRIPLE, x)
    (w,) = scope.call("b", SAME, z)
    finished(scope, w)
    assert scope.gradients(x) == [5]
    paths = [m.path for _, _, m in net.sent if type(m) is Cotangent]
    assert paths == [(1,), (3,), (2,)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spent_value_used_by_sends_fails_the_next_pass_once_for_all_cotangents(
    seed: int,
):
    net = net_of(4, seed)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, x)
    finished(scope, y)
    (c,) = scope.call("c", SAME, y)
    (d,) = scope.call("d", SAME, y)
    for _ in range(2):
        result = scope.backward(c, d)
        assert result.failure is not None and result.failure.error == "GraphError"
        assert result.owed == ()
    scope.leave()
    net.drain()
    assert net.leftovers() == []


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


# ------------------------------------------------ where the peer hangs or fails


def stuck(scope: Scope, *roots: Argument) -> list[tuple[Any, ...]]:
    """Run a pass that gets stuck; for each send owed: path, from, to, for whom."""
    result = scope.backward(*roots)
    assert result.outcome is Outcome.STUCK and result.failure is None, result
    return [
        (o.path, o.worker, o.destination, o.function, o.call_site) for o in result.owed
    ]


def test_a_dropped_reply_is_owed():
    net = net_of(2)
    x = net.put("a", 3, "a")
    scope = net.open("a")
    scope.call("b", DOUBLE, x)
    (y,) = scope.call("a", TRIPLE, x)
    assert stuck(scope, y) == [((1,), "a", "b", "double", "here")]


def test_a_reply_that_passed_through_a_stopped_gradient_is_owed():
    net = net_of(2)
    x = net.put("a", 3, "a")
    scope = net.open("a")
    (reply,) = scope.call("b", DOUBLE, x)
    (y,) = scope.call("a", ADD, x, stopped(reply))
    assert stuck(scope, y) == [((1,), "a", "b", "double", "here")]


def test_an_integer_reply_is_owed():
    net = net_of(2)
    x = net.put("a", 3, "a")
    scope = net.open("a")
    (place,) = scope.call("b", Linear("argmax", ((1,),)), x, inexact=(False,))
    (y,) = scope.call("a", ADD, x, place)
    assert stuck(scope, y) == [((1,), "a", "b", "argmax", "here")]


def test_a_value_moved_only_to_be_logged_is_owed():
    net = net_of(3)
    x = net.put("a", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, x)
    scope.move("c", y)
    (z,) = scope.call("a", TRIPLE, x)
    assert stuck(scope, y, z) == [
        ((1,), "a", "b", "double", "here"),
        ((2,), "b", "c", "move", "here"),
    ]


def test_two_losses_differentiated_one_at_a_time_owe_each_others_sends():
    net = net_of(3)
    x = net.put("a", 3, "a")
    scope = net.open("a")
    (one,) = scope.call("b", DOUBLE, x)
    (two,) = scope.call("c", TRIPLE, x)
    assert stuck(scope, one) == [((2,), "a", "c", "triple", "here")]
    again = scope.backward(two)
    assert again.failure is not None and again.failure.error == "GraphError"


def test_sends_of_workers_that_the_pass_never_reaches_are_not_owed():
    net = net_of(4)
    x, other = net.put("b", 3, "a"), net.put("c", 4, "a")
    scope = net.open("a")
    scope.call("d", DOUBLE, other)
    (y,) = scope.call("b", DOUBLE, x)
    finished(scope, y)
    assert scope.gradients(x) == [2]


def test_a_stuck_pass_leaves_no_gradient_and_can_be_run_again_if_retained():
    net = net_of(2)
    x = net.put("a", 3, "a")
    scope = net.open("a")
    (reply,) = scope.call("b", DOUBLE, x)
    (y,) = scope.call("a", TRIPLE, x)
    (z,) = scope.call("a", SAME, stopped(y))
    assert not z.tracked
    first = scope.backward(y, retain=True)
    assert first.outcome is Outcome.STUCK and first.leaves == ()
    assert isinstance(net.fetch("a", scope.gradient(x))[0], Failure)
    finished(scope, y, reply)
    assert scope.gradients(x) == [5]
