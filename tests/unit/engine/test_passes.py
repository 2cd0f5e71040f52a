"""How a pass ends: told to all, gradients committed by that and by nothing else."""

import pytest

from jdag.engine.protocol import End, Expired, Failure, Mode, Outcome, Owed
from tests.tools.engine_cases import (
    begun,
    finished,
    holding,
    kept,
    leaves_nothing,
    nothing_left,
    pausing,
)
from tests.tools.engine_values import DOUBLE, Affine, Fuse, Linear


def test_a_gradient_is_there_when_its_pass_has_ended_finished_and_not_before():
    net, scope, x = begun(3, "b")
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
    net, scope, x, y = begun(4, "bc")
    (root,) = scope.call("b", DOUBLE, x)
    scope.call("c", DOUBLE, y)
    finished(scope, root)
    assert sorted(net.messages(End)) == [("a", "b"), ("a", "c")]


def test_a_pass_whose_time_is_over_ends_and_names_what_is_owed():
    net, scope, x = begun(3, "b")
    (y,) = scope.call("b", DOUBLE, x)
    (root,) = scope.call("c", Linear("slow", ((1,),)), y)
    net.drain()
    net.pauses = pausing("slow")
    waiter = scope.start_backward(root, retain=True, mode=Mode.SMART, timeout_ns=5)
    net.drain()
    net.ring("a")
    late = net.until("a", waiter)
    assert late.outcome is Outcome.EXPIRED and late.leaves == ()
    assert late.owed == (Owed((2,), "b", "c", "slow", "here"),)
    assert not any(place.engine.live_passes for place in net.places.values())
    net.let_go()
    finished(scope, root, retain=True)
    assert scope.gradients(x) == [2]
    leaves_nothing(scope)


@pytest.mark.parametrize("retain", [True, False])
def test_a_pass_whose_time_is_over_before_it_begins_says_what_it_waits_for(
    retain: bool,
):
    net, scope, x = begun(3, "b")
    net.drain()
    net.holds = lambda *_: True
    (y,) = scope.call("b", DOUBLE, x)
    (root,) = scope.call("c", DOUBLE, y)
    net.put("c", 4, "a")
    waiter = scope.start_backward(root, retain=retain, timeout_ns=5, seeds=[2])
    net.drain()
    net.ring("a")
    net.let_go()
    late = net.until("a", waiter)
    assert late.outcome is Outcome.EXPIRED and late.owed == ()
    assert late.failure is not None and late.failure.message == (
        "acknowledgements of call (1,) on 'b', call (2,) on 'b', call (2,) on 'c', "
        "assignment (2,) on 'c'"
    )
    again = scope.backward(root)
    assert again.outcome is (Outcome.FINISHED if retain else Outcome.FAILED)
    if not retain:  # As of any pass that did not finish: on every worker.
        assert again.failure is not None and again.failure.error == "GraphError"
        assert kept(net, "residuals") == []
    leaves_nothing(scope)


def test_a_pass_that_has_failed_waits_for_its_jobs_until_its_time_is_over():
    net, scope, x, y = begun(4, "bc")
    (bad,) = scope.call("c", Linear("bad", ((1,),), Fuse("vjp", 1)), y)
    (good,) = scope.call("b", Linear("slow", ((1,),)), x)
    net.drain()
    net.pauses = pausing("slow")
    waiter = scope.start_backward(good, bad, retain=True, timeout_ns=5)
    net.drain()
    assert waiter not in net.places["a"].resumed
    net.ring("a")
    result = net.until("a", waiter)
    assert result.outcome is Outcome.FAILED
    assert result.failure is not None and result.failure.function == "bad"
    second = scope.start_backward(good, bad, retain=True)
    net.drain()
    assert second not in net.places["a"].resumed  # That of the first is still there.
    net.let_go()
    assert net.until("a", second).outcome is Outcome.FINISHED
    assert scope.gradients(x, y) == [1, 1]
    leaves_nothing(scope)


@pytest.mark.parametrize("mode", list(Mode))
def test_a_time_that_is_over_when_the_pass_is_changes_nothing(mode: Mode):
    net, scope, x = begun(3, "b")
    (root,) = scope.call("c", DOUBLE, x)
    late = Expired(scope.context, 1)
    finished(scope, root, retain=True, mode=mode)
    net.tell("a", late)
    second = scope.start_backward(root, mode=mode)
    net.tell("a", late)
    assert net.until("a", second).outcome is Outcome.FINISHED
    assert scope.gradients(x) == [4]
    net.tell("a", Expired(scope.context, 2))
    scope.leave()
    net.tell("a", Expired(scope.context, 2))
    nothing_left(net)


def test_who_sees_gradients_takes_the_time_that_it_takes():
    net, scope, x = begun(2, "b")
    (root,) = scope.call("b", DOUBLE, x)
    scope.attach(x, Affine("slow"), replaces=False)
    net.pauses = pausing("slow")
    waiter = scope.start_backward(root, timeout_ns=5)
    net.drain()
    net.ring("a")
    net.drain()
    assert waiter not in net.places["a"].resumed
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED
