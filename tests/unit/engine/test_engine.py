"""Forward: calls, transfers, leaves, reads and programs on engines alone."""

from collections.abc import Generator
from typing import Any

from jdag.engine.protocol import (
    Acknowledged,
    Argument,
    ConstantKey,
    Run,
)
from jdag.errors import ContextError
from tests.tools.engine_cases import begun, holding, net_of, pausing
from tests.tools.engine_net import Scope
from tests.tools.engine_values import ADD, DOUBLE, Fuse, Linear
from tests.tools.error_texts import fails_with


def test_who_computes_on_a_failure_holds_it_and_the_first_argument_counts():
    net, scope, x = begun(3, "b")
    bad = Fuse("forward")
    (first,) = scope.call("b", Linear("first", ((1,),), bad), x)
    (second,) = scope.call("c", Linear("second", ((1,),), bad), x)
    (both,) = scope.call("a", ADD, second, first)
    (good,) = scope.call("c", DOUBLE, x)
    failed, number = net.fetch("a", both, good)
    assert failed.message == "second raised in forward"
    assert (failed.worker, failed.path) == ("c", (2,))
    assert number[0] == 6
    assert [failure.path for failure in scope.leave()] == [(1,), (2,)]
    assert net.leftovers() == []


def test_a_program_call_leaves_only_when_all_assignments_have_arrived():
    def adds(scope: Scope, worker: str, x: Argument) -> Generator[int, Any, Argument]:
        (made,) = scope.call(worker, ADD, x, 1)
        yield scope.net.asked(scope.worker, x)
        return made

    net = net_of(3)
    net.holds = holding(Acknowledged, sender="c")
    x = net.put("c", 3, "a")
    scope = net.open("a")
    waiter = scope.launch("b", adds, "c", x)
    net.drain()
    assert net.messages(Run) == []
    net.let_go()
    made, _ = net.until("a", waiter)
    assert net.fetch("a", made)[0][0] == 4


def test_a_program_may_not_go_on_in_a_context_that_is_gone():
    net, scope, x = begun(2, "b")
    inner = Scope(net, "b", scope.context, (1,))
    with fails_with(ContextError, "engine.context_not_open_on_b"):
        inner.call("b", DOUBLE, x)
    scope.leave()
    with fails_with(ContextError, "engine.context_not_open_on_a"):
        scope.call("b", DOUBLE, x)
    assert net.leftovers() == []


def test_constants_live_where_they_are_used_and_go_when_they_were():
    net = net_of(2)
    scope = net.open("a")
    net.pauses = pausing("add")
    scope.call("b", ADD, 1, 2)
    scope.call("a", ADD, 3, 4)
    net.drain()
    held = {
        w: [k for k in p.values if k.kind == "constant"] for w, p in net.places.items()
    }
    assert held == {
        "b": [ConstantKey(scope.context, (1,), i) for i in (0, 1)],
        "a": [ConstantKey(scope.context, (2,), i) for i in (0, 1)],
    }
    net.let_go()
    net.drain()
    for place in net.places.values():
        assert [k.kind for k in place.values] == ["output"]
