"""What engines do when values of one context come after what is said of others."""

from typing import Any

import pytest

from jdag.engine.protocol import Run
from tests.engine_cases import (
    SEEDS,
    assign_newest,
    leaves_nothing,
    net_of,
    newest,
    nothing_left,
    pausing,
)
from tests.engine_net import Net, Scope
from tests.engine_values import ADD, DOUBLE, TRIPLE, Fuse, Linear


def late(count: int, seed: int) -> Net:
    """A net in which all values come after their messages, and not now."""
    net = net_of(count, seed)
    net.links.large = 1.0
    net.links.stalls = True
    return net


def ended(net: Net, waiter: int) -> Any:
    net.let_go()
    return net.until("a", waiter)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_release_overtakes_that_of_a_context_before_it_and_ends_its_own(seed: int):
    """The earlier one's call, which has all to come yet, runs, and fails unseen."""
    net = net_of(3, seed)
    one, two = net.open("a"), net.open("a")
    net.pauses = pausing("slow")
    (y,) = one.call("a", Linear("slow", ((1,),)), 3)
    one.call("b", Linear("mine", ((1,),), Fuse("forward")), y)
    net.drain()  # The call is known on b; what it is called with is not.
    net.let_go()
    net.links.large, net.links.stalls = 1.0, True
    net.drain()
    left = one.start_leaving()
    net.drain()
    two.call("b", Linear("small", ()))
    net.drain()
    assert two.leave() == ()
    net.drain()
    parts = net.places["b"].engine._state.contexts.values()
    assert [part.context.counter for part in parts] == [1]
    three = net.open("a")
    three.call("b", Linear("small", ()))
    three.launch("b", for_ever)
    net.drain()
    three.leave()  # An abort: what is over goes at once, and the first is not over.
    (failure,) = ended(net, left)
    assert failure.message == "mine raised in forward"
    net.drain()
    state = net.places["b"].engine._state
    assert all(state.gone(scope.context) for scope in (one, two, three))
    net.places["b"].running.clear()
    nothing_left(net)


def for_ever(scope: Scope) -> Any:
    yield scope.net.waiter()


@pytest.mark.parametrize("seed", SEEDS)
def test_what_reads_a_leaf_comes_after_its_value_whatever_the_context(seed: int):
    net = late(2, seed)
    leaf = net.put("b", 3, "a")
    scope = net.open("a")
    (out,) = scope.call("b", DOUBLE, newest(leaf))
    waiter = net.asked("a", newest(leaf), out)
    net.drain()
    assert [n for n, _ in ended(net, waiter)] == [3, 6]
    assert scope.leave() == ()
    nothing_left(net)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leaf_is_replaced_when_what_came_before_has_read_it(seed: int):
    net = net_of(2, seed)
    leaf = net.put("b", 3, "a")
    net.drain()
    net.links.large, net.links.stalls = 1.0, True
    scope = net.open("a")
    (out,) = scope.call("b", ADD, newest(leaf), 10)  # The constant is to come.
    assign_newest(net, "a", leaf, TRIPLE, newest(leaf))
    waiter = net.asked("a", out, newest(leaf))
    net.drain()
    assert [n for n, _ in ended(net, waiter)] == [13, 9]
    assert scope.leave() == ()
    nothing_left(net)


def test_a_leaf_that_is_dropped_before_its_value_comes_is_not_kept():
    net = late(2, 0)
    net.drop("a", net.put("b", 3, "a"))
    net.drain()
    nothing_left(net)
    assert not net.places["b"].values


@pytest.mark.parametrize("seed", SEEDS)
def test_a_read_comes_before_the_end_of_what_it_reads(seed: int):
    """Two programs: one asks for what the other's context makes, which then ends."""
    net = net_of(2, seed)
    scope, other = net.open("a"), net.open("a")
    (out,) = scope.call("b", DOUBLE, 4)
    (held,) = other.call("b", DOUBLE, 5)
    net.drain()
    net.links.large, net.links.stalls = 1.0, True
    other.call("b", DOUBLE, 6)
    waiter = net.asked("a", out, held)
    left = scope.start_leaving()
    net.drain()
    assert [n for n, _ in ended(net, waiter)] == [8, 10]
    assert net.until("a", left) == () and other.leave() == ()
    nothing_left(net)


def test_what_answers_waits_for_nobody():
    """What b has to say of others' leaves: nothing of it waits for b's own to a."""
    net = net_of(2)
    mine = net.put("b", 5, "b")
    net.drain()
    net.links.large, net.links.stalls = 1.0, True
    net.put("a", 4, "b")  # From b to a: what is for all, and to come yet.
    net.drain()
    net.links.large = 0.0
    scope = net.open("a")
    theirs = net.put("b", 6, "a")  # Acknowledged by b, or else nothing is launched.
    waiter = scope.launch("b", reads)
    assert net.fetch("a", mine, theirs)[1][0] == 6
    net.drain()
    assert any(type(m) is Run for _, _, m in net.sent)
    net.let_go()
    net.until("a", waiter)
    leaves_nothing(scope)


def reads(scope: Scope) -> Any:
    yield scope.net.asked("b")
