"""A worker that joins again is another one: nothing of the former is taken for it."""

from collections.abc import Generator
from typing import Any

import pytest

from jdag.engine.protocol import Argument, Call, Failure, Joined, Lost, Primal, Release
from jdag.errors import WorkerLost
from tests.tools.engine_cases import (
    SEEDS,
    begun,
    finished,
    holding,
    leaves_nothing,
    net_of,
    nothing_left,
)
from tests.tools.engine_net import Net, Scope
from tests.tools.engine_outages import hear
from tests.tools.engine_values import DOUBLE, SAME, TRIPLE
from tests.tools.error_texts import fails_with


def told(net: Net, worker: str, *losses: Lost | Joined) -> None:
    for loss in losses:
        hear(net, worker, loss)


def again(net: Net, name: str) -> str:
    net.crash(name)
    worker = net.rejoin(name)
    net.unnoticed.clear()
    return worker


BACK = (Lost("b"), Joined("b", 1))


@pytest.mark.parametrize("seed", SEEDS)
def test_why_a_worker_was_lost_comes_after_who_noticed_and_who_is_back(seed: int):
    net = net_of(3, seed)
    x = net.put("b", 3, "a")
    net.drain()
    again(net, "b")
    net.unnoticed = []
    net.tell("a", Lost("b", "its mains were cut; its last words:\n  help"))
    net.tell("a", Lost("b", "it was lost before"))
    net.tell("a", Joined("b", 1))
    (failed,) = net.fetch("a", x)
    assert failed.message == (
        "worker 'b' is lost; 'b#1', which joined later, does not have its values "
        "(noticed by 'a'): its mains were cut; its last words:\n  help"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_what_lived_on_the_former_one_stays_lost_and_says_so(seed: int):
    net = net_of(3, seed)
    x = net.put("b", 3, "a")
    net.drain()
    again(net, "b")
    told(net, "a", *BACK)
    (failed,) = net.fetch("a", x)
    assert failed.error == "WorkerLost" and failed.message == (
        "worker 'b' is lost; 'b#1', which joined later, does not have its values "
        "(noticed by 'a')"
    )
    scope = net.open("a")
    with pytest.raises(WorkerLost) as caught:
        scope.call("b", SAME, x)
    assert str(caught.value) == (
        "same cannot be called on 'b#1': leaf 1 on b is lost, worker 'b' is lost; "
        "'b#1', which joined later, does not have its values"
    )
    with fails_with(WorkerLost, "properties.leaf_1_on_b_cannot"):
        net.update("a", x, DOUBLE, x)
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_context_of_which_the_former_one_was_part_has_failed(seed: int):
    net, scope, x = begun(3, "c", seed)
    (y,) = scope.call("b", DOUBLE, x)
    net.drain()
    again(net, "b")
    told(net, "a", *BACK)
    for worker, argument in (("b", x), ("c", x), ("c", y)):
        with fails_with(WorkerLost, "properties.worker_b_is_lost"):
            scope.call(worker, SAME, argument)
    with fails_with(WorkerLost, "properties.worker_b_is_lost"):
        scope.start_backward(y)
    leaves_nothing(scope)


def test_to_be_told_of_the_next_one_is_to_be_told_of_the_loss_and_once_is_enough():
    net = net_of(3)
    x = net.put("b", 3, "a")
    net.drain()
    waiter = net.asked("a", x)
    again(net, "b")
    told(net, "a", Joined("b", 1))
    ((failed,),) = (net.until("a", waiter),)
    assert failed.error == "WorkerLost" and failed.worker == "b"
    scope = net.open("a")
    y = net.put("b", 4, "a")
    told(net, "a", Joined("b", 1), Lost("b"), Joined("b", 0))
    (z,) = scope.call("b", DOUBLE, y)
    assert z.owner == "b#1" and net.fetch("a", z)[0][0] == 8
    assert scope.leave() == ()
    other = net.open("a")
    other.launch("c", uses_b)
    other.start_leaving()
    releases = [b for _, b, message in net.sent if type(message) is Release]
    assert sorted(releases[1:]) == ["b#1", "c"]
    net.drain()
    net.places["c"].running.clear()
    nothing_left(net)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_was_told_of_none_between_has_lost_them_all(seed: int):
    net = net_of(3, seed)
    again(net, "b")
    told(net, "c", *BACK)
    x = net.put("b", 3, "c")
    assert x.owner == "b#1"
    net.drain()
    net.crash("b#1")
    net.rejoin("b")
    net.unnoticed.clear()
    told(net, "a", Joined("b", 2))
    (failed,) = net.fetch("a", x)
    assert failed.message.startswith("worker 'b#1' is lost; 'b#2', which joined later")
    told(net, "c", Joined("b", 2))
    nothing_left(net)


def calls_c(scope: Scope, x: Argument) -> Generator[int, Any, None]:
    scope.call("c", DOUBLE, x)
    yield scope.net.waiter()  # For ever.


@pytest.mark.parametrize("seed", SEEDS)
def test_contexts_of_the_former_one_are_gone_for_ever(seed: int):
    net = net_of(4, seed)
    x = net.put("d", 3, "b")
    scope = net.open("b")
    net.holds = holding(Call, "d", "c")
    scope.launch("d", calls_c, x)
    net.drain()
    again(net, "b")
    told(net, "c", *BACK)
    net.let_go()
    net.drain()
    assert net.places["c"].engine.live_contexts == 0
    told(net, "d", *BACK)
    net.places["d"].running.clear()
    nothing_left(net)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_the_former_one_said_is_not_heard_after_the_next_one(seed: int):
    net, scope, x = begun(3, "b", seed)
    net.holds = holding(Primal, "b", "c")
    (y,) = scope.call("c", DOUBLE, x)
    net.drain()
    held = list(net.queues["b", "c"])
    again(net, "b")
    told(net, "c", *BACK)
    net.queues["b", "c"].extend(held)
    net.let_go()
    (failed,) = net.fetch("a", y)
    assert isinstance(failed, Failure) and failed.worker == "b"
    told(net, "a", *BACK)
    leaves_nothing(scope)


def uses_b(scope: Scope) -> Generator[int, Any, None]:
    yield scope.net.waiter()
    scope.call("b", SAME, 1)
    yield scope.net.waiter()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("late", [True, False])
def test_a_context_that_its_owner_aborts_unaware_of_it_leaves_nothing_on_it(
    late: bool, seed: int
):
    """The owner's release goes to the former one; the next hears of it in time."""
    net = net_of(3, seed)
    scope = net.open("a")
    scope.launch("c", uses_b)
    net.drain()
    again(net, "b")
    told(net, "c", *BACK)
    net.holds = holding(Call) if late else net.holds
    (waiter,) = net.places["c"].running
    net.places["c"].resumed[waiter] = None
    net.drain()
    assert net.places["b#1"].engine.live_contexts == (0 if late else 1)
    left = scope.start_leaving()
    net.drain()
    releases = [b for _, b, message in net.sent if type(message) is Release]
    assert sorted(releases) == ["b", "c"]
    assert net.open("a").leave() == ()
    net.places["c"].running.clear()
    told(net, "a", *BACK)
    net.until("a", left)
    nothing_left(net)


@pytest.mark.parametrize("seed", SEEDS)
def test_who_joins_hears_which_contexts_are_over_and_may_be_in_the_others(seed: int):
    net = net_of(3, seed)
    x = net.put("c", 3, "a")
    for _ in range(3):
        over = net.open("a")
        over.call("c", DOUBLE, x)
        live = net.open("a")
        (y,) = live.call("c", DOUBLE, x)
        over.leave()
    again(net, "b")
    told(net, "a", *BACK)
    net.drain()
    (release,) = [m for _, b, m in net.sent if type(m) is Release and b == "b#1"]
    assert (release.context.counter, release.live) == (5, (2, 4))
    (z,) = live.call("b", TRIPLE, y)
    finished(live, z)
    assert live.gradients(x) == [6]
    live.leave()
