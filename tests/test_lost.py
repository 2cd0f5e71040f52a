"""Workers that are lost while others are in the middle of something with them."""

from collections.abc import Generator
from typing import Any

import pytest

from jdag.engine.vocabulary import Argument, Release, Ship
from tests.engine_cases import SEEDS, holding, net_of
from tests.engine_net import Net, Scope
from tests.engine_values import ADD, DOUBLE, SAME, Fuse, Linear


def inner(scope: Scope, y: Argument) -> Generator[int, Any, None]:
    """On c: a call on b, of a value on d that d never hears is wanted."""
    scope.call("b", SAME, y)
    yield scope.net.waiter()  # For ever.


def outer(scope: Scope, y: Argument) -> Generator[int, Any, str]:
    """On d: it calls c, and does not mind that c is lost."""
    _, failure = yield scope.launch("c", inner, y)
    return str(failure.error)


def half_told(seed: int) -> tuple[Net, Scope]:
    """On b waits a call whose argument was never asked for; only d knows c is lost."""
    net = net_of(4, seed)
    x = net.put("d", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("d", DOUBLE, x)
    scope.call("a", Linear("mine", ((1,),), Fuse("forward")), 1)
    net.drain()
    net.holds = holding(Ship, sender="c")
    waiter = scope.launch("d", outer, y)
    net.drain()
    for queue in net.queues.values():
        queue.clear()
    net.crash("c")
    net.unnoticed = [("d", "c")]
    assert net.until("a", waiter) == ("WorkerLost", None)
    net.drain()
    return net, scope


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_noticed_while_leaving_turns_the_release_into_an_abort(seed: int):
    net, scope = half_told(seed)
    waiter = scope.start_leaving()
    net.drain()
    assert waiter not in net.places["a"].resumed  # b waits for what d never sent.
    net.unnoticed = [("a", "c"), ("b", "c")]
    failures = net.until("a", waiter)
    assert sorted(f.message for f in failures) == [
        "mine raised in forward",
        "worker 'c' is lost (noticed by 'a')",
    ]
    assert [m.abort for _, _, m in net.sent if type(m) is Release][-2:] == [True, True]
    net.drain()
    assert net.leftovers() == []


@pytest.mark.parametrize("seed", SEEDS)
def test_a_loss_noticed_while_leaving_waits_for_calls_ends_the_context_once(seed: int):
    net = net_of(4, seed)
    x, y = net.put("b", 3, "a"), net.put("c", 4, "a")
    scope = net.open("a")
    scope.call("a", Linear("mine", ((1,),), Fuse("forward")), 1)
    scope.call("c", ADD, x, y)
    waiter = scope.start_leaving()  # Nothing is acknowledged.
    for _ in range(seed % 5):
        net.step()
    net.crash("c")
    failures = net.until("a", waiter)
    told = [f.message for f in failures]
    assert told.count("mine raised in forward") <= 1  # An abort does not wait for it.
    assert told.count("worker 'c' is lost (noticed by 'a')") == 1
    net.drain()
    assert net.leftovers() == []
