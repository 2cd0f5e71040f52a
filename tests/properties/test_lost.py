"""Workers that are lost to some while they are in the middle of something with them."""

from collections.abc import Generator
from typing import Any

import pytest

from jdag.engine.protocol import (
    Argument,
    Call,
    Fail,
    Failure,
    Lost,
    Mode,
    Outcome,
    Release,
    Ship,
)
from jdag.errors import WorkerLost
from tests.tools.engine_cases import (
    SEEDS,
    begun,
    finished,
    holding,
    leaves_nothing,
    net_of,
    nothing_left,
    pausing,
)
from tests.tools.engine_net import Scope
from tests.tools.engine_values import ADD, DOUBLE, SAME, TRIPLE, Fuse, Linear
from tests.tools.error_texts import fails_with


def inner(scope: Scope, y: Argument) -> Generator[int, Any, None]:
    scope.call("b", SAME, y)
    yield scope.net.waiter()  # For ever.


def outer(scope: Scope, y: Argument) -> Generator[int, Any, str]:
    _, failure = yield scope.launch("c", inner, y)
    return str(failure.error)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_program_that_swallows_a_loss_fails_its_context_all_the_same(seed: int):
    """On b a call waits for what nobody asks for, and d alone knows that c is lost."""
    net, scope, x = begun(4, "d", seed)
    (y,) = scope.call("d", DOUBLE, x)
    net.drain()
    net.holds = holding(Ship, sender="c")
    waiter = scope.launch("d", outer, y)
    net.drain()
    net.queues["c", "d"].clear()
    net.crash("c")
    net.unnoticed = [("d", Lost("c"))]
    result, failure = net.until("a", waiter)
    assert result is None and failure.error == "WorkerLost"
    with fails_with(WorkerLost, "properties.worker_c_is_lost"):
        scope.call("b", SAME, 1)
    scope.start_leaving()
    assert next(m.abort for _, _, m in net.sent if type(m) is Release)
    net.unnoticed = [("a", Lost("c")), ("b", Lost("c"))]
    nothing_left(net)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_noticed_while_leaving_turns_the_release_into_an_abort(seed: int):
    net, scope, x, y = begun(4, "bc", seed)
    scope.call("a", Linear("mine", ((1,),), Fuse("forward")), 1)
    scope.call("c", ADD, x, y)
    net.drain()
    net.pauses = pausing("slow")
    scope.call("b", Linear("slow", ((1,),)), x)
    waiter = scope.start_leaving()
    net.drain()
    assert waiter not in net.places["a"].resumed
    net.crash("c")
    net.drain()
    aborts = [(b, m.abort) for _, b, m in net.sent if type(m) is Release]
    assert sorted(aborts[2:]) == [("b", True), ("d", True)]
    net.let_go()
    assert [f.message for f in net.until("a", waiter)] == [
        "worker 'c' is lost (noticed by 'a')",
        "mine raised in forward",
    ]
    nothing_left(net)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_noticed_while_leaving_waits_for_calls_ends_the_context_once(seed: int):
    net, scope, x, y = begun(4, "bc", seed)
    scope.call("a", Linear("mine", ((1,),), Fuse("forward")), 1)
    scope.call("c", ADD, x, y)
    waiter = scope.start_leaving()  # Nothing is acknowledged.
    for _ in range(seed % 5):
        net.step()
    net.crash("c")
    told = [f.message for f in net.until("a", waiter)]
    assert told.count("mine raised in forward") <= 1  # An abort does not wait for it.
    assert told.count("worker 'c' is lost (noticed by 'a')") == 1
    nothing_left(net)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("before", [True, False])
def test_a_pass_whose_way_is_cut_fails_and_names_who_lost_whom(before: bool, seed: int):
    net, scope, x = begun(4, "b", seed)
    (y,) = scope.call("c", DOUBLE, x)
    (z,) = scope.call("d", TRIPLE, y)
    net.drain()
    if before:
        net.part("b", "c")
        net.drain()
    net.pauses = pausing("double")
    waiter = scope.start_backward(z)
    net.drain()
    if not before:
        net.part("b", "c")
    net.let_go()
    result = net.until("a", waiter)
    assert result.outcome is Outcome.FAILED
    assert result.failure.error == "WorkerLost"
    assert result.failure.route == ("a", "d", "c", "b")
    leaves_nothing(scope)


@pytest.mark.parametrize("mode", [Mode.SMART, Mode.FAST])
def test_a_worker_that_lost_who_told_it_of_a_pass_tells_the_owner_itself(mode: Mode):
    """C hears of the pass from d, and loses it; d has not noticed yet."""
    net, scope, x = begun(4, "b")
    (y,) = scope.call("c", DOUBLE, x)
    (z,) = scope.call("d", TRIPLE, y)
    net.drain()
    net.pauses = pausing("double")
    waiter = scope.start_backward(z, mode=mode)
    net.drain()
    assert net.places["c"].engine.live_passes == 1
    net.part("c", "d")
    net.unnoticed = [("c", Lost("d"))]
    net.drain()
    assert net.messages(Fail) == [("c", "a")]
    net.let_go()
    result = net.until("a", waiter)
    assert result.outcome is Outcome.FAILED
    assert result.failure.error == "WorkerLost"
    assert result.failure.route == ("a", "c", "d")
    net.unnoticed = [("d", Lost("c"))]
    leaves_nothing(scope)


def uses(scope: Scope, x: Argument) -> Generator[int, Any, Argument]:
    (one,) = scope.call("c", DOUBLE, x)
    (two,) = scope.call("b", TRIPLE, one)
    (back,) = scope.call("c", ADD, two, one)
    (number,) = yield scope.net.asked("c", back)
    if isinstance(number, Failure):
        raise ValueError(number.message)
    return back


def returns_far(scope: Scope) -> Generator[int, Any, Argument]:
    (far,) = scope.call("c", SAME, 1)
    yield scope.net.asked(scope.worker)
    return far


@pytest.mark.parametrize("seed", SEEDS)
def test_a_ref_that_may_not_be_there_is_not_returned(seed: int):
    net = net_of(3, seed)
    scope = net.open("a")
    net.holds = holding(Call)
    waiter = scope.launch("b", returns_far)
    net.drain()
    net.part("b", "c")
    result, failure = net.until("a", waiter)
    assert result is None and failure.message == "worker 'c' is lost (noticed by 'b')"
    with fails_with(WorkerLost, "properties.worker_c_is_lost"):
        scope.start_backward()
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_waits_for_what_a_lost_worker_may_not_have_heard_of_is_told(seed: int):
    """The owner loses b before b acknowledges the ship; c waits for b's value."""
    net, scope, x = begun(3, "b", seed)
    net.drain()
    net.holds = holding(Ship)
    (y,) = scope.call("c", DOUBLE, x)
    net.drain()
    net.part("a", "b")
    (failed,) = net.fetch("a", y)
    assert failed.error == "WorkerLost" and failed.worker == "b"
    leaves_nothing(scope)


def test_a_cut_that_nobody_needs_is_not_missed():
    net, scope, x, y = begun(4, "bc")
    (one,) = scope.call("d", DOUBLE, x)
    (two,) = scope.call("d", TRIPLE, y)
    net.drain()
    net.part("b", "c")
    net.drain()
    finished(scope, one, two)
    assert scope.gradients(x, y) == [2, 3]
    assert scope.leave() == ()
    nothing_left(net)


def swallows(scope: Scope, worker: str, body: Any) -> Generator[int, Any, str]:
    _, failure = yield scope.launch(worker, body)
    return str(failure.message)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("body", [uses, swallows])
def test_who_calls_a_worker_that_has_lost_the_owner_is_answered(body: Any, seed: int):
    net, scope, x = begun(3, "c", seed)
    net.drain()
    net.part("a", "b")
    net.drain()
    arguments = (x,) if body is uses else ("b", returns_far)
    result, failure = net.until("a", scope.launch("c", body, *arguments))
    assert result is None
    assert failure.message == "worker 'a' is lost (noticed by 'b')"
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_that_an_inner_program_returned_cannot_be_swallowed(seed: int):
    net = net_of(4, seed)
    scope = net.open("a")
    net.holds = holding(Call)
    waiter = scope.launch("d", swallows, "b", returns_far)
    net.drain()
    net.part("b", "c")
    result, failure = net.until("a", waiter)
    assert result is None and failure.message == "worker 'c' is lost (noticed by 'b')"
    with fails_with(WorkerLost, "properties.worker_c_is_lost"):
        scope.start_backward()
    leaves_nothing(scope)


def for_ever(scope: Scope) -> Generator[int, Any, None]:
    yield scope.net.waiter()


@pytest.mark.parametrize("seed", SEEDS)
def test_who_waits_for_a_program_whose_worker_then_loses_the_owner_is_told(seed: int):
    net = net_of(3, seed)
    scope = net.open("a")
    waiter = scope.launch("c", swallows, "b", for_ever)
    net.drain()
    net.part("a", "b")
    net.drain()
    result, failure = net.until("a", waiter)
    assert result is None and failure.message == "worker 'a' is lost (noticed by 'b')"
    net.places["b"].running.clear()
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_waits_for_a_value_whose_maker_then_loses_the_owner_is_told(seed: int):
    net, scope, x = begun(3, "b", seed)
    net.pauses = pausing("slow")
    (slow,) = scope.call("b", Linear("slow", ((1,),)), x)
    (far,) = scope.call("c", DOUBLE, slow)
    net.drain()
    net.part("a", "b")
    (failed,) = net.fetch("a", far)
    assert failed.message == "worker 'a' is lost (noticed by 'b')"
    leaves_nothing(scope)
