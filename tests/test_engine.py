"""Forward: calls, transfers, leaves, reads and programs on engines alone."""

from collections.abc import Generator
from typing import Any

import pytest

from jdag.engine.protocol import (
    Acknowledge,
    Argument,
    Call,
    ConstantKey,
    Primal,
    Release,
    Return,
    Run,
    Ship,
)
from jdag.errors import ContextError
from tests.engine_cases import SEEDS, begun, holding, net_of, pausing
from tests.engine_net import Scope, stopped
from tests.engine_values import ADD, DOUBLE, SPLIT, Fuse, Linear


def ends(scope: Scope, worker: str) -> tuple[int, int]:
    """How many sends and recvs of the context a worker has in its graph."""
    drawing = scope.net.places[worker].engine.graph(scope.context)
    assert drawing is not None, worker
    return len(drawing.sends), len(drawing.recvs)


# ------------------------------------------------------------------ calls and transfers


@pytest.mark.parametrize("seed", SEEDS)
def test_a_call_computes_on_arguments_wherever_they_are(seed: int):
    net, scope, x, y = begun(4, "bc", seed)
    (z,) = scope.call("d", Linear("f", ((1, 10, 100, 1000),)), x, y, 5, x)
    (far,) = scope.call("b", ADD, z, x)
    assert [n for n, _ in net.fetch("a", z, far)] == [3543, 3546]
    assert scope.leave() == ()
    assert net.leftovers() == []


def test_a_value_moves_to_a_worker_once_in_an_activation():
    net, scope, x, y = begun(3, "bb")
    scope.call("c", ADD, x, x)
    scope.call("c", ADD, x, y)
    scope.call("c", ADD, y, x)
    net.drain()
    carried = [len(m.keys) for _, _, m in net.sent if type(m) is Ship]
    assert carried == [1, 1]
    assert net.messages(Primal) == [("b", "c")] * 2


def test_tracked_and_not_tracked_a_value_moves_apart():
    net, scope, x = begun(2, "b")
    scope.call("a", ADD, x, stopped(x))
    net.drain()
    (transfer,) = [m for _, _, m in net.sent if type(m) is Primal]
    assert len(transfer.failures) == 2
    assert ends(scope, "b") == (1, 0) and ends(scope, "a") == (0, 1)


def test_data_may_come_before_its_call():
    net, scope, x, y = begun(3, "bb")
    net.holds = holding(Call)
    (z,) = scope.call("c", ADD, x, y)
    net.drain()
    assert net.messages(Primal) == [("b", "c")]
    assert net.places["c"].engine.live_contexts == 1
    net.let_go()
    assert net.fetch("a", z)[0][0] == 7
    assert scope.leave() == ()
    assert net.leftovers() == []


# ------------------------------------------------------------------- errors are values


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


# ----------------------------------------------------------------------------- programs


def adds(scope: Scope, worker: str, x: Argument) -> Generator[int, Any, Argument]:
    """A program: call there, return the ref."""
    (made,) = scope.call(worker, ADD, x, 1)
    yield scope.net.asked(scope.worker, x)
    return made


def nests(scope: Scope, depth: int, x: Argument) -> Generator[int, Any, Argument]:
    """A program that calls itself on the next worker, back to the first."""
    workers = scope.net.workers
    following = workers[(workers.index(scope.worker) + 1) % len(workers)]
    (made,) = scope.call(following, DOUBLE, x)
    if depth > 0:
        made, failure = yield scope.launch(following, nests, depth - 1, made)
        assert failure is None, failure
    return made


def raises(scope: Scope, x: Argument) -> Generator[int, Any, Argument]:
    """A program that calls, fetches and then raises."""
    scope.call("c", DOUBLE, x)
    yield scope.net.asked(scope.worker, x)
    raise ValueError(f"no luck on {scope.worker}")


@pytest.mark.parametrize("seed", SEEDS)
def test_programs_nest_recurse_and_come_back_to_the_caller(seed: int):
    net, scope, x = begun(3, "b", seed, first=1)
    made, failure = scope.run("b", nests, 4, x)
    assert failure is None
    assert net.fetch("a", made)[0][0] == 32
    result = scope.backward(made)
    assert scope.gradients(x) == [32] and result.leaves == (x.key.name,)
    scope.leave()
    assert net.leftovers() == []


def test_a_program_call_leaves_only_when_all_earlier_calls_have_arrived():
    net, scope, x = begun(3, "c")
    net.holds = holding(Call, receiver="c")
    (y,) = scope.call("c", DOUBLE, x)
    waiter = scope.launch("b", adds, "b", y)
    net.drain()
    assert net.messages(Run) == []
    net.holds = holding(Acknowledge, sender="c")
    net.drain()
    assert net.messages(Run) == []
    net.let_go()
    made, failure = net.until("a", waiter)
    assert failure is None and net.fetch("a", made)[0][0] == 7


def test_a_program_call_leaves_only_when_all_assignments_have_arrived():
    net = net_of(3)
    net.holds = holding(Acknowledge, sender="c")
    x = net.put("c", 3, "a")
    scope = net.open("a")
    waiter = scope.launch("b", adds, "c", x)
    net.drain()
    assert net.messages(Run) == []
    net.let_go()
    made, _ = net.until("a", waiter)
    assert net.fetch("a", made)[0][0] == 4


def test_a_program_returns_only_when_its_own_calls_have_arrived():
    net, scope, x = begun(3, "b")
    waiter = scope.launch("b", adds, "c", x)
    net.holds = holding(Acknowledge, sender="c")
    net.drain()
    assert net.messages(Return) == []
    net.let_go()
    made, _ = net.until("a", waiter)
    returned = [m for _, _, m in net.sent if type(m) is Return]
    assert [sorted(m.workers) for m in returned] == [["b", "c"]]
    assert net.fetch("a", made)[0][0] == 4


def test_a_program_that_raises_says_so_and_its_workers_are_released():
    net, scope, x = begun(3, "b")
    result, failure = scope.run("b", raises, x)
    assert result is None and failure.message == "no luck on b"
    assert scope.leave() == ()
    assert ("a", "c") in net.messages(Release)
    assert net.leftovers() == []


def test_a_program_may_not_go_on_in_a_context_that_is_gone():
    net, scope, x = begun(2, "b")
    inner = Scope(net, "b", scope.context, (1,))
    with pytest.raises(ContextError, match=r"context 0\.1 is not open on 'b'"):
        inner.call("b", DOUBLE, x)
    scope.leave()
    with pytest.raises(ContextError, match=r"context 0\.1 is not open on 'a'"):
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


def test_an_output_that_cannot_be_tracked_makes_no_edge():
    _, scope, x = begun(2, "a")
    whole, part = scope.call("b", SPLIT, x, inexact=(False, True))
    assert (whole.tracked, part.tracked) == (False, True)
    (y,) = scope.call("b", ADD, whole, part)
    scope.backward(y)
    assert scope.gradients(x) == [3]
