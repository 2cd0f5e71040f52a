"""How long values live: what nobody can use any more goes, and nothing before that."""

from typing import Any

import pytest

from jdag.engine.protocol import (
    Acknowledged,
    Call,
    Discard,
    Failure,
    Key,
    Lost,
    Primal,
    Ship,
)
from tests.tools.engine_cases import (
    SEEDS,
    begun,
    finished,
    kept,
    leaves_nothing,
    net_of,
    nothing_left,
    pausing,
)
from tests.tools.engine_net import Net, stopped
from tests.tools.engine_values import ADD, DOUBLE, SAME, TRIPLE, Fuse, Linear

ADD3 = Linear("add3", ((1, 1, 1),))


def outputs(net: Net) -> list[Key]:
    return [*kept(net, "output"), *kept(net, "received"), *kept(net, "constant")]


def test_a_value_goes_with_all_the_copies_that_its_program_had_made_of_it():
    net = net_of(4)
    scope = net.open("a")
    (x,) = scope.call("b", DOUBLE, 3)
    used = [scope.call(worker, TRIPLE, x)[0] for worker in ("a", "c", "d")]
    net.drain()
    assert len(kept(net, "received")) == 3
    scope.discard(x)
    scope.tell_discarded()
    net.drain()
    assert sorted(outputs(net)) == sorted(value.key for value in used)
    leaves_nothing(scope)


def test_a_notice_rides_on_the_next_message_to_where_the_value_is():
    net = net_of(3)
    scope = net.open("a")
    (x,) = scope.call("b", DOUBLE, 3)
    (y,) = scope.call("c", TRIPLE, x)
    scope.discard(x)
    (z,) = scope.call("a", SAME, y)  # A ship to c.
    net.drain()
    assert [key.kind for key in outputs(net) if key != x.key].count("received") == 1
    assert x.key in net.places["b"].values
    scope.call("b", SAME, z)
    net.drain()
    assert x.key not in net.places["b"].values
    ridden = {type(m): m.discarded for *_, m in net.sent if getattr(m, "discarded", 0)}
    assert {kind: len(keys) for kind, keys in ridden.items()} == {Ship: 1, Call: 1}
    assert net.messages(Discard) == []
    leaves_nothing(scope)


def test_calls_without_tracking_leave_nothing_in_the_memory_of_an_engine():
    net = net_of(3)
    scope = net.open("a")
    (x,) = scope.call("b", DOUBLE, 1)
    sizes = []
    for _ in range(6):
        (y,) = scope.call("c", SAME, x)
        scope.discard(x)
        (x,) = scope.call("b", ADD, y, 5)
        scope.discard(y)
        scope.tell_discarded()
        net.drain()
        engines: list[Any] = [place.engine for place in net.places.values()]
        parts = [engine._state.contexts[scope.context] for engine in engines]
        sizes.append([(len(p.values), len(p.recvs), len(p.nodes)) for p in parts])
        moved = parts[0].frames[()].moved
        assert [key for key in moved if key not in (x.key, y.key)] == []
    assert sizes[1:] == sizes[:1] * 5
    assert net.fetch("a", x)[0][0] == 32
    leaves_nothing(scope)


def test_a_failure_that_nobody_names_is_said_when_its_context_is_left():
    net = net_of(2)
    scope = net.open("a")
    scope.discard(*scope.call("b", Linear("bad", ((1,),), Fuse("forward")), 3))
    (y,) = scope.call("b", DOUBLE, 3)
    net.fetch("a", y)
    assert [failure.message for failure in scope.leave()] == ["bad raised in forward"]
    nothing_left(net)


def test_a_copy_of_a_leaf_goes_when_a_pass_has_spent_its_transfer():
    net, scope, x = begun(2, "a")
    for number in (1, 2, 3):
        (y,) = scope.call("b", DOUBLE, x)
        finished(scope, y)
        scope.discard(y)
        scope.tell_discarded()
        net.drain()
        assert kept(net, "received") == []
        assert scope.gradients(x) == [2 * number]
    leaves_nothing(scope)


def test_a_copy_of_a_version_goes_when_the_next_one_is_moved():
    net, scope, x = begun(2, "a")
    for _ in range(3):
        (y,) = scope.call("b", DOUBLE, stopped(x))
        scope.discard(y)
        x = net.update("a", x, DOUBLE, x)
    (y,) = scope.call("b", DOUBLE, stopped(x))
    assert net.fetch("a", y)[0][0] == 48
    assert [net.places["b"].values[key][0] for key in kept(net, "received")] == [24]
    leaves_nothing(scope)


@pytest.mark.parametrize("first", [0, 1])
def test_a_call_of_two_versions_of_a_leaf_has_both(first: int):
    net, scope, x = begun(2, "a")
    scope.call("b", DOUBLE, x)
    both = (x, net.update("a", x, TRIPLE, x))
    one, other = both[first], both[1 - first]
    (y,) = scope.call("b", ADD3, one, other, one)
    (z,) = scope.call("b", ADD3, other, one, other)
    numbers = [number for number, _ in net.fetch("a", y, z)]
    assert numbers == [[15, 21], [21, 15]][first]
    leaves_nothing(scope)


def test_what_an_assignment_waits_for_is_kept_until_it_has_run():
    net, scope, leaf = begun(2, "b", first=5)
    net.pauses = pausing("double")
    (y,) = scope.call("b", DOUBLE, 3)
    newer = net.update("a", leaf, ADD, leaf, y)
    scope.discard(y)
    scope.tell_discarded()
    net.drain()
    net.let_go()
    assert net.fetch("a", newer)[0][0] == 11
    assert outputs(net) == []
    leaves_nothing(scope)


def test_gradients_of_earlier_passes_go_and_the_current_one_stays():
    net, scope, x = begun(2, "b")
    (y,) = scope.call("b", DOUBLE, x)
    (zero,) = scope.call("b", Linear("both", ((0, 1),)), x, 7)
    for number in (1, 2, 3):
        finished(scope, y, zero, retain=True)
        if number > 1:
            scope.discard(scope.gradient(x, number - 1))
            scope.tell_discarded()
            net.drain()
        held = [key for key in net.places["b"].values if key.kind == "scratch"]
        assert len(held) == 1
    assert scope.gradients(x) == [6]
    scope.discard(scope.gradient(x))
    scope.tell_discarded()
    assert finished(scope, y, zero) == 4
    assert scope.gradients(x) == [8]
    leaves_nothing(scope)


def test_a_gradient_that_a_pass_left_as_it_was_goes_with_the_last_of_its_names():
    net, scope, x, w = begun(3, "bb")
    (u,) = scope.call("b", DOUBLE, x)
    (v,) = scope.call("b", TRIPLE, w)
    (both,) = scope.call("c", ADD, u, v)
    (one,) = scope.call("c", SAME, v)
    finished(scope, both, retain=True)
    for _ in range(2):  # These reach x by zeros alone.
        finished(scope, one, retain=True)
    assert scope.gradients(x, w) == [2, 9]
    for gone in (1, 2, 3):
        assert net.fetch("a", scope.gradient(x, gone))[0][0] == 2
        scope.discard(scope.gradient(x, gone))
        scope.tell_discarded()
        (read,) = net.fetch("a", scope.gradient(x, gone))
        assert isinstance(read, Failure) and "is not stored here" in read.message
    finished(scope, both, retain=True)
    assert scope.gradients(x, w) == [4, 12]
    scope.discard(*[scope.gradient(w, number) for number in (1, 2, 3)])
    scope.tell_discarded()
    net.drain()
    assert sum(key.kind == "scratch" for key in net.places["b"].values) == 2
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_value_that_comes_after_its_loss_was_told_is_not_kept(seed: int):
    """The issuer loses who is to send, and who waits for it gets both."""
    net, scope, x = begun(3, "c", seed)
    (y,) = scope.call("c", DOUBLE, x)
    net.fetch("a", y)
    net.holds = lambda a, b, m: a == "c" and type(m) in (Primal, Acknowledged)
    (z,) = scope.call("b", TRIPLE, y)
    scope.discard(y)
    net.drain()
    net.part("a", "c")
    net.unnoticed = [("a", Lost("c"))]
    net.drain()
    scope.tell_discarded()
    (failure,) = net.fetch("a", z)
    assert failure.error == "WorkerLost"
    net.let_go()
    net.drain()
    assert kept(net, "received") == []
    scope.leave()
    net.unnoticed = [("c", Lost("a"))]
    nothing_left(net)
