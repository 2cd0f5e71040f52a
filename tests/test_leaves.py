"""Leaves: their versions, who keeps them, and steps that make new ones."""

import pytest

from jdag.engine.vocabulary import Failure, Outcome, PassResult
from tests.engine_cases import SEEDS, net_of, pausing
from tests.engine_values import ADD, DOUBLE, Fuse, Linear


def test_a_version_that_forward_read_is_kept_until_its_context_is_released():
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
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
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
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
    net.drain()
    assert net.leftovers() == []


def test_a_version_whose_making_failed_holds_the_failure():
    net = net_of(2)
    x = net.put("b", 3, "a")
    newer = net.update("a", x, Linear("step", ((1,),), Fuse("forward")), x)
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, newer)
    for failed in net.fetch("a", newer, y):
        assert failed.message == (
            "step raised in forward\n"
            "(not made: leaf 1 on b; what was assigned beside that is not affected)"
        )
    scope.leave()
    net.drain()
    assert net.leftovers() == []


def test_a_step_whose_context_is_aborted_fails_and_is_not_awaited_for_ever():
    net = net_of(3)
    x, other = net.put("b", 3, "a"), net.put("b", 4, "a")
    scope = net.open("a")
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
    net.drain()
    assert net.leftovers() == []


def stale(result: PassResult) -> list[tuple[int, int]]:
    assert result.outcome is Outcome.FINISHED, result
    return [(of.leaf.number, of.newer) for of in result.stale]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pass_says_which_leaves_were_updated_since_forward_read_them(seed: int):
    net = net_of(3, seed)
    x, y, z = net.put("a", 3, "a"), net.put("b", 4, "a"), net.put("c", 5, "a")
    scope = net.open("a")
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
    scope.leave()
    net.drain()
    assert (left := net.leftovers()) == [], left


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
    net = net_of(3)
    x, w = net.put("b", 3, "a"), net.put("b", 4, "a")
    scope = net.open("a")
    (u,) = scope.call("b", DOUBLE, x)
    (v,) = scope.call("b", DOUBLE, w)
    (both,) = scope.call("c", ADD, u, v)
    (one,) = scope.call("c", DOUBLE, v)
    for leaf in (x, w):
        net.update("a", leaf, DOUBLE, leaf)
    assert stale(scope.backward(both, retain=True)) == [(1, 1), (2, 1)]
    assert stale(scope.backward(one)) == [(2, 1)]
    scope.leave()
