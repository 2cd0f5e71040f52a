"""Leaves: their versions, who keeps them, and steps that make new ones."""

from itertools import permutations
from typing import Any

import pytest

from jdag.engine import Engine
from jdag.engine.protocol import (
    Arrived,
    Assign,
    Assignment,
    Failure,
    LeafId,
    LeafKey,
    Outcome,
    PassResult,
)
from jdag.errors import ProtocolError
from tests.tools.engine_cases import (
    SEEDS,
    assign_newest,
    begun,
    leaves_nothing,
    net_of,
    newest,
    nothing_left,
    pausing,
)
from tests.tools.engine_values import ADD, DOUBLE, Fuse, Linear
from tests.tools.error_texts import fails_with


def test_a_version_that_forward_read_is_kept_until_its_context_is_released():
    net, scope, x = begun(2, "b")
    (y,) = scope.call("b", Linear("f", ((5,),)), x)
    newer = net.update("a", x, DOUBLE, x)
    (z,) = scope.call("b", ADD, y, newer)
    net.drain()
    assert x.key in net.places["b"].values
    scope.backward(z)
    assert net.fetch("a", z, newer)[0][0] == 15 + 6
    assert scope.gradients(x) == [5 + 1]  # Both versions are of one leaf.
    scope.leave()
    assert [k for k in net.places["b"].values if k.kind == "leaf"] == [newer.key]
    (read,) = net.fetch("a", x)
    assert isinstance(read, Failure) and "the newest is 1" in read.message


@pytest.mark.parametrize("times", [1, 2])
def test_a_version_that_is_made_twice_is_refused_before_anything_changes(times):
    engine = Engine("b", ("a", "b"))
    made = Assignment(
        (1, 0), None, (), (LeafKey(None, LeafId("b", 7), 0),), (None,), ""
    )
    if times == 1:
        engine.handle(Arrived("a", Assign((1,), (made,))))
    for again in (made, made):
        with fails_with(ProtocolError, "context.version_0_of_leaf_7"):
            engine.handle(Arrived("a", Assign((2,), (again,) * times)))
    assert len(engine._state.leaves) == 2 - times


def test_an_assignment_with_a_type_too_many_is_refused_before_anything_changes():
    engine = Engine("b", ("a", "b"))
    leaf = LeafKey(None, LeafId("b", 7), 0)
    made = Assignment((1, 0), None, (), (leaf,), (None, None), "")
    with fails_with(ValueError, "context.is_longer_than_argument_1"):
        engine.handle(Arrived("a", Assign((1,), (made,))))
    assert not engine._state.leaves


def test_a_leaf_dropped_while_in_use_goes_with_its_last_context():
    net = net_of(2)
    x = net.put("b", 3, "a")
    first, second = net.open("a"), net.open("a")
    (y,) = first.call("b", DOUBLE, x)
    (z,) = second.call("b", DOUBLE, x)
    net.drop("a", x)
    assert first.backward(y).leaves == (x.key.name,)
    assert first.gradients(x) == [2]
    first.leave()
    assert x.key in net.places["b"].values
    (late,) = second.call("b", ADD, x, z)  # Its context holds it already.
    assert net.fetch("a", late)[0][0] == 9
    third = net.open("a")
    (failed,) = net.fetch("a", third.call("b", DOUBLE, x)[0])
    assert (
        failed.error == "ContextError" and "version 0 of leaf 1 on b" in failed.message
    )
    second.leave()
    third.leave()
    assert net.places["b"].values == {}


def test_versions_are_made_in_the_order_in_which_they_were_asked_for():
    net = net_of(2)
    x = net.put("b", 3, "a")
    net.pauses = pausing("double")
    versions = [x]
    for _ in range(3):
        versions.append(net.update("a", versions[-1], DOUBLE, versions[-1]))
    reading = net.asked("a", versions[-1])
    net.let_go()
    assert net.until("a", reading)[0][0] == 24
    net.drain()
    assert list(net.places["b"].values) == [versions[-1].key]


def test_a_step_that_reads_a_gradient_runs_although_its_context_is_left_at_once():
    net, scope, x = begun(2, "b")
    (y,) = scope.call("b", Linear("f", ((5,),)), x)
    scope.backward(y)
    net.pauses = pausing("step")
    step = Linear("step", ((1, -1),))
    newer = net.update("a", x, step, x, scope.gradient(x))
    leaving = scope.start_leaving()
    net.drain()
    assert leaving not in net.places["a"].resumed
    net.let_go()
    assert net.until("a", leaving) == ()
    assert net.fetch("a", newer)[0][0] == 3 - 5
    nothing_left(net)


def test_a_version_whose_making_failed_holds_the_failure():
    net = net_of(2)
    x = net.put("b", 3, "a")
    newer = net.update("a", x, Linear("step", ((1,),), Fuse("forward")), x)
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, newer)
    for failed in net.fetch("a", newer, y):
        assert failed.message == (
            "step raised in forward\n"
            "(not assigned: leaf 1 on b; other leaves assigned with it are not "
            "affected)"
        )
    leaves_nothing(scope)


def test_a_step_whose_context_is_aborted_fails_and_is_not_awaited_for_ever():
    net, scope, x, other = begun(3, "bb")
    (y,) = scope.call("b", DOUBLE, x)
    scope.call("c", DOUBLE, 1)
    scope.backward(y)
    net.pauses = pausing("slow")
    slow = net.update("a", other, Linear("slow", ((1,),)), other)
    step = Linear("step", ((1, 1),))
    late = net.update("a", x, step, slow, scope.gradient(x))
    net.drain()
    net.crash("c")
    net.drain()
    scope.leave()
    net.let_go()
    number, failed = net.fetch("a", slow, late)
    assert number[0] == 4
    assert "context 0.1 was released before its values were used" in failed.message
    nothing_left(net)


def stale(result: PassResult) -> list[tuple[int, int]]:
    assert result.outcome is Outcome.FINISHED, result
    return [(of.leaf.number, of.newer) for of in result.stale]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pass_says_which_leaves_were_updated_since_forward_read_them(seed: int):
    net, scope, x, y, z = begun(3, "abc", seed)
    add3 = Linear("add3", ((1, 1, 1),))
    (loss,) = scope.call("a", add3, x, y, z)
    assert stale(scope.backward(loss, retain=True)) == []
    for _ in range(3):
        y = net.update("a", y, DOUBLE, y)
    x = net.update("a", x, DOUBLE, x)
    assert stale(scope.backward(loss, retain=True)) == [(1, 1), (2, 3)]
    assert scope.gradients(x, y, z) == [2, 2, 2]
    (newer,) = scope.call("c", add3, x, y, z)
    assert stale(scope.backward(newer, loss)) == [(1, 1), (2, 3)]
    scope.leave()
    scope = net.open("a")
    (newest,) = scope.call("c", add3, x, y, z)
    assert stale(scope.backward(newest)) == []
    leaves_nothing(scope)


def test_of_several_versions_the_oldest_that_the_pass_differentiates_counts():
    net = net_of(2)
    versions = [net.put("b", 3, "a")]
    scope = net.open("a")
    made = []
    for _ in range(4):
        made.append(scope.call("b", DOUBLE, versions[-1])[0])
        versions.append(net.update("a", versions[-1], DOUBLE, versions[-1]))
    for first in (0, 2, 3):
        assert stale(scope.backward(*made[first:], retain=True)) == [(1, 4 - first)]
    assert scope.gradients(versions[0]) == [2 * (4 + 2 + 1)]
    net.drop("a", versions[-1])
    assert stale(scope.backward(made[1])) == [(1, 3)]
    scope.leave()
    net.drain()
    assert net.places["b"].values == {}


def test_a_version_that_a_pass_reaches_by_zeros_alone_is_not_differentiated():
    net, scope, x, w = begun(3, "bb")
    (u,) = scope.call("b", DOUBLE, x)
    (v,) = scope.call("b", DOUBLE, w)
    (both,) = scope.call("c", ADD, u, v)
    (one,) = scope.call("c", DOUBLE, v)
    for leaf in (x, w):
        net.update("a", leaf, DOUBLE, leaf)
    assert stale(scope.backward(both, retain=True)) == [(1, 1), (2, 1)]
    assert stale(scope.backward(one)) == [(2, 1)]
    scope.leave()


def versions(net, worker):
    return sorted(k.index for k in net.places[worker].values if k.kind == "leaf")


STEP = Linear("step", ((2, 1),))  # Twice what it was, and an addend.


def test_updates_of_several_workers_each_start_from_the_one_before():
    orders: dict[Any, Any] = {}
    for seed in range(20):
        net = net_of(4, seed)
        x = net.put("d", 1, "a")
        addends = [net.put("d", 10**place, "a") for place in range(4)]
        net.drain()
        for issuer, addend in zip("abca", addends, strict=True):
            assign_newest(net, issuer, x, STEP, newest(x), addend)
        net.drain()
        ((found, _),) = net.fetch("b", newest(x))
        asked = [
            sum(10**place * 2 ** (3 - turn) for turn, place in enumerate(order))
            for order in permutations(range(4))
        ]
        assert found - 16 in asked
        orders[found] = None
        assert versions(net, "d") == [0, 0, 0, 0, 4]
        assert net.leftovers() == []
    assert len(orders) > 3


def test_a_context_reads_one_version_until_its_own_worker_assigns():
    net = net_of(3)
    x, one = net.put("c", 1, "a"), net.put("c", 1, "a")
    scope = net.open("a")
    (first,) = scope.call("c", DOUBLE, newest(x))
    (far,) = scope.call("b", DOUBLE, newest(x))
    net.drain()
    assign_newest(net, "b", x, STEP, newest(x), one)
    net.drain()
    (second,) = scope.call("c", DOUBLE, newest(x))
    (again,) = scope.call("b", Linear("g", ((3,),)), newest(x))
    found = net.fetch("a", first, far, second, again, newest(x))
    assert [number for number, _ in found] == [2, 2, 2, 3, 3]
    assert versions(net, "c") == [0, 0, 1]
    scope.backward(*[scope.call("c", ADD, far, again)[0], first, second])
    assert scope.gradients(x) == [2 + 3 + 2 + 2]
    assign_newest(net, "a", x, STEP, newest(x), one)
    (own,) = scope.call("c", DOUBLE, newest(x))
    (moved,) = scope.call("b", DOUBLE, newest(x))
    assert [number for number, _ in net.fetch("a", own, moved)] == [14, 14]
    scope.leave()
    net.drain()
    assert versions(net, "c") == [0, 2]
    assert net.leftovers() == []


def test_an_update_of_a_leaf_that_was_dropped_makes_nothing_and_leaves_nothing():
    net, scope, x, one, y = begun(3, "ccc")
    (used,) = scope.call("c", DOUBLE, newest(x))
    net.drain()
    net.pauses = pausing("step")
    assign_newest(net, "a", x, STEP, newest(x), one)
    net.drop("b", x)
    net.drain()
    assign_newest(net, "a", x, STEP, one, one)  # Its owner holds a version yet.
    scope.leave()
    net.drain()
    net.let_go()
    net.drain()
    assign_newest(net, "a", x, STEP, one, one)  # And now none.
    net.drain()
    (failed,) = net.fetch("b", newest(x))
    assert failed.message == (
        "leaf 1 on c is not stored here: it was dropped, or not assigned yet"
    )
    assert net.fetch("b", newest(y))[0][0] == 5
    net.drain()
    assert versions(net, "c") == [0, 0]
    assert net.leftovers() == []
    assert used.owner == "c"


def test_what_a_lost_worker_asked_for_and_cannot_be_made_changes_no_leaf():
    net = net_of(4)
    x = net.put("c", 3, "a")
    scope = net.open("b")
    net.pauses = pausing("slow")
    (slow,) = scope.call("d", Linear("slow", ((1,),)), 7)
    (late,) = scope.call("c", DOUBLE, slow)
    net.drain()
    for _ in range(2):
        assign_newest(net, "b", x, STEP, newest(x), late)
    assign_newest(net, "a", x, STEP, newest(x), newest(x))
    net.drain()
    reading = net.asked("d", newest(x))
    net.drain()
    net.crash("b")
    net.drain()
    net.let_go()
    assert net.until("d", reading)[0][0] == 9
    net.drain()
    assert len(versions(net, "c")) == 1
    assert net.leftovers() == []


def test_what_a_lost_worker_asked_for_of_a_context_that_went_with_it_changes_no_leaf():
    """The failure says that the context is gone, and not that the worker is."""
    net = net_of(3)
    x, other = net.put("c", 3, "a"), net.put("c", 4, "a")
    scope = net.open("b")
    (ready,) = scope.call("c", DOUBLE, x)
    net.drain()
    net.pauses = pausing("slow")
    assign_newest(net, "a", other, Linear("slow", ((1,),)), newest(other))
    net.drain()
    assign_newest(net, "b", x, STEP, ready, newest(other))
    net.drain()
    net.crash("b")
    net.drain()
    net.let_go()
    assert [number for number, _ in net.fetch("a", newest(x), newest(other))] == [3, 4]
    net.drain()
    assert len(versions(net, "c")) == 2
    assert net.leftovers() == []


def test_a_version_that_one_context_reads_is_as_before_the_lost_update():
    net = net_of(4)
    x = net.put("c", 3, "a")
    lost, scope = net.open("b"), net.open("a")
    net.pauses = pausing("slow")
    (slow,) = lost.call("d", Linear("slow", ((1,),)), 7)
    (late,) = lost.call("c", DOUBLE, slow)
    net.drain()
    assign_newest(net, "b", x, STEP, newest(x), late)
    net.drain()
    (here,) = scope.call("c", DOUBLE, newest(x))
    (far,) = scope.call("a", DOUBLE, newest(x))
    net.crash("b")
    net.drain()
    net.let_go()
    net.drain()
    root = scope.call("a", ADD, here, far)[0]
    scope.backward(root)
    assert net.fetch("a", root)[0][0] == 12 and scope.gradients(x) == [4]
    assign_newest(net, "a", x, DOUBLE, newest(x))
    net.drain()
    assert versions(net, "c") == [0, 2]  # The first is stored for the second.
    scope.leave()
    net.drain()
    assert versions(net, "c") == [2]
    assert net.leftovers() == []
