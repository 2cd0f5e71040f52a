"""How a pass ends: told to all, gradients committed by that and by nothing else."""

from typing import Any

from jdag.engine.vocabulary import End, Failure, Outcome
from tests.engine_cases import finished, holding, net_of, pausing
from tests.engine_values import ADD, DOUBLE, Fuse, Linear


def test_a_gradient_is_there_when_its_pass_has_ended_finished_and_not_before():
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, x)
    net.drain()
    net.holds = holding(End)
    waiter = scope.start_backward(y)
    net.drain()
    (early,) = net.fetch("c", scope.gradient(x))
    assert isinstance(early, Failure) and waiter not in net.places["a"].resumed
    net.let_go()
    net.until("a", waiter)
    assert net.fetch("c", scope.gradient(x))[0][0] == 2


def test_every_participant_is_told_the_end_of_a_pass_reached_or_not():
    net = net_of(4)
    x, y = net.put("b", 3, "a"), net.put("c", 4, "a")
    scope = net.open("a")
    (root,) = scope.call("b", DOUBLE, x)
    scope.call("c", DOUBLE, y)
    finished(scope, root)
    assert sorted(net.messages(End)) == [("a", "b"), ("a", "c")]


def test_a_leaf_that_was_complete_when_the_pass_failed_has_no_gradient():
    net = net_of(3)
    x, y = net.put("b", 3, "a"), net.put("c", 4, "a")
    scope = net.open("a")
    (bad,) = scope.call("c", Linear("bad", ((1,),), Fuse("vjp", 1)), y)
    (good,) = scope.call("b", ADD, x, x)
    (root,) = scope.call("a", ADD, good, bad)
    net.drain()
    net.pauses = pausing("bad")
    waiter = scope.start_backward(root, retain=True)
    net.drain()
    engine: Any = net.places["b"].engine
    assert engine._state.contexts[scope.context].live.staged != {}
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FAILED
    (failed,) = net.fetch("a", scope.gradient(x))
    assert isinstance(failed, Failure)
    finished(scope, root)
    assert scope.gradients(x, y) == [2, 1]
    scope.leave()
    net.drain()
    assert net.leftovers() == []


def test_a_late_answer_of_a_pass_that_ended_changes_nothing():
    net = net_of(3)
    x, y = net.put("b", 3, "a"), net.put("c", 4, "a")
    scope = net.open("a")
    (bad,) = scope.call("c", Linear("bad", ((1,),), Fuse("vjp", 1)), y)
    (good,) = scope.call("b", DOUBLE, x)
    net.drain()
    net.pauses = pausing("double")
    first = scope.start_backward(good, bad, retain=True)
    net.drain()
    net.let_go()
    assert net.until("a", first).outcome is Outcome.FAILED
    finished(scope, good, bad)
    assert scope.gradients(x, y) == [2, 1]
