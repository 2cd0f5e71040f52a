"""Reads: every one is answered, and none makes a node, an edge or a context."""

import pytest

from jdag.engine.protocol import Primal, Read
from tests.tools.engine_cases import begun, holding, net_of, nothing_left, pausing
from tests.tools.engine_values import DOUBLE, SAME, Linear


def test_a_read_is_answered_when_the_value_is_there_and_makes_no_context():
    net, scope, x = begun(3, "b")
    net.pauses = pausing("double")
    (y,) = scope.call("b", DOUBLE, x)
    net.drain()
    waiter = net.asked("c", y, x)
    net.drain()
    assert waiter not in net.places["c"].resumed
    net.let_go()
    assert [n for n, _ in net.until("c", waiter)] == [6, 3]
    assert net.places["c"].engine.live_contexts == 0


def test_a_read_of_a_released_context_says_so_and_does_not_remake_it():
    net, scope, x = begun(3, "b")
    (y,) = scope.call("b", DOUBLE, x)
    scope.backward(y)
    gradient = scope.gradient(x)
    scope.leave()
    for reader in "abc":
        for failed in net.fetch(reader, y, gradient):
            assert failed.error == "ContextError" and "context 0.1" in failed.message
    assert net.leftovers() == []


def test_a_read_that_waits_is_answered_when_its_context_is_aborted():
    net, scope, x = begun(4, "b")
    (y,) = scope.call("b", DOUBLE, x)
    net.drain()
    net.holds = holding(Primal)
    (z,) = scope.call("c", DOUBLE, y)
    net.drain()
    far, own = net.asked("d", z), net.asked("c", z)
    net.drain()
    scope.start_backward(z)
    net.drain()
    scope.leave()
    for reader, waiter in (("d", far), ("c", own)):
        (failed,) = net.until(reader, waiter)
        assert "context 0.1 was released" in failed.message
    nothing_left(net)


def test_a_read_of_several_keeps_a_version_while_another_value_is_awaited():
    net, scope, x = begun(2, "b")
    net.pauses = pausing("double")
    (y,) = scope.call("b", SAME, 1)
    (z,) = scope.call("b", DOUBLE, y)
    waiter = net.asked("a", x, z)
    net.drain()
    net.update("a", x, SAME, x)
    net.drain()
    net.let_go()
    assert [number for number, _ in net.until("a", waiter)] == [3, 2]
    scope.leave()
    net.drain()
    assert x.key not in net.places["b"].values
    assert net.leftovers() == []


def test_reads_of_a_lost_worker_fail_before_and_after_it_is_lost():
    net = net_of(2)
    x = net.put("b", 3, "a")
    net.drain()
    net.holds = holding(Read)
    waiter = net.asked("a", x)
    net.crash("b")
    (failed,) = net.until("a", waiter)
    assert failed.error == "WorkerLost" and "'b' is lost" in failed.message
    (again,) = net.fetch("a", x)
    assert again == failed
    assert net.leftovers() == []


def test_a_fetch_from_two_workers_keeps_its_own_version_while_the_other_is_awaited():
    net = net_of(3)
    x, y = net.put("b", 3, "a"), net.put("c", 4, "a")
    net.drain()
    net.holds = holding(Read)
    waiter = net.asked("b", x, y)
    net.update("b", x, SAME, x)
    net.drain()
    net.let_go()
    assert [number for number, _ in net.until("b", waiter)] == [3, 4]
    net.drain()
    assert x.key not in net.places["b"].values
    assert net.leftovers() == []


@pytest.mark.parametrize("reader", ["b", "d"])
def test_a_value_that_goes_with_its_context_while_another_is_awaited_is_a_failure(
    reader: str,
):
    net = net_of(4)
    x, y = net.put("b", 3, "d"), net.put("b", 4, "d")
    net.drain()
    scope = net.open("a")
    (own,) = scope.call("b", DOUBLE, x)
    net.drain()
    net.pauses = pausing("slow")
    slow = net.update("d", y, Linear("slow", ((1,),)), y)
    net.drain()
    waiter = net.asked(reader, own, slow)
    net.drain()
    net.crash("a")
    net.drain()
    assert waiter not in net.places[reader].resumed
    assert own.key not in net.places["b"].values
    net.let_go()
    failed, (number, _) = net.until(reader, waiter)
    assert failed.error == "ContextError" and "is not stored here" in failed.message
    assert number == 4
    nothing_left(net)


def test_a_read_of_several_gives_each_in_its_place_whoever_keeps_it():
    net = net_of(3)
    assert net.fetch("a") == []
    put = [net.put(worker, n, "a") for n, worker in enumerate("baacaab")]
    assert [n for n, _ in net.fetch("a", *put)] == [0, 1, 2, 3, 4, 5, 6]
    assert [n for n, _ in net.fetch("c", *put)] == [0, 1, 2, 3, 4, 5, 6]
