"""Backward: what is counted, in which order sums go, what is spent and what stays."""

import pytest

from jdag.engine.credit import WHOLE
from jdag.engine.protocol import (
    Arrived,
    Cotangent,
    Fail,
    Mode,
    Outcome,
    Primal,
    ResidualsKey,
    Root,
    SeedKey,
    Start,
    Vjp,
)
from tests.tools.engine_cases import (
    SEEDS,
    begun,
    finished,
    holding,
    kept,
    leaves_nothing,
    net_of,
    pausing,
)
from tests.tools.engine_values import (
    ADD,
    DOUBLE,
    SAME,
    SPLIT,
    TRIPLE,
    Fuse,
    Linear,
)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_got_only_symbolic_zeros_is_not_run(seed: int):
    net = net_of(3, seed)
    x, y = net.put("c", 3, "a"), net.put("b", 4, "a")
    scope = net.open("a")
    (unused,) = scope.call("b", DOUBLE, x)
    (used,) = scope.call("b", TRIPLE, y)
    scope.call("a", ADD, unused, used)  # Both values are in one transfer.
    (root,) = scope.call("a", SAME, used)
    finished(scope, root)
    vjps = [job.function.name for job in net.ran if type(job) is Vjp]
    assert vjps == ["same", "triple"]
    present = [m.present for _, _, m in net.sent if type(m) is Cotangent]
    assert present == [(False, True), (False,)]
    net.drain()
    assert kept(net, "residuals") == [ResidualsKey(scope.context, (3,), 0)]


def test_residuals_are_dropped_with_the_pass_that_spends_them_and_not_before():
    net, scope, x = begun(2, "b")
    (y,) = scope.call("b", SPLIT, x)[:1]
    (z,) = scope.call("a", DOUBLE, y)
    (side,) = scope.call("a", TRIPLE, y)
    net.drain()
    assert len(kept(net, "residuals")) == 3
    pair = scope.call("a", Linear("pair", ((1, 0), (0, 1))), z, side)
    finished(scope, pair[0], retain=True)
    assert len(kept(net, "residuals")) == 4
    finished(scope, pair[0])
    assert kept(net, "residuals") == []
    assert scope.gradients(x) == [4]


def test_the_failure_of_a_pass_says_by_which_way_it_came():
    net, scope, x = begun(3, "c")
    (bad,) = scope.call("c", Linear("bad", ((1,),), Fuse("vjp")), x)
    (there,) = scope.call("b", DOUBLE, bad)
    (here,) = scope.call("a", DOUBLE, there)
    result = scope.backward(here)
    assert result.failure is not None
    assert result.failure.route == ("a", "b", "c")
    assert (result.failure.worker, result.failure.path) == ("c", (1,))
    assert net.messages(Fail) == [("c", "b"), ("b", "a")]


def test_a_pass_over_a_call_that_failed_in_forward_fails_with_its_failure():
    _, scope, x = begun(3, "c")
    (bad,) = scope.call("c", Linear("bad", ((1,),), Fuse("forward")), x)
    (there,) = scope.call("b", DOUBLE, bad)
    result = scope.backward(there)
    assert result.failure is not None
    assert result.failure.message == "bad raised in forward"
    assert (result.failure.worker, result.failure.route) == ("c", ("a", "b"))


def test_a_second_cotangent_on_one_transfer_is_refused_and_not_added():
    net, scope, x = begun(2, "b")
    (y,) = scope.call("a", DOUBLE, x)
    (z,) = scope.call("b", TRIPLE, x)
    net.drain()
    net.holds = holding(Cotangent)
    net.pauses = lambda _, job: type(job) is Vjp and job.path == (2,)
    waiter = scope.start_backward(y, z)
    net.drain()
    message, carried = net.queues["a", "b"][0]
    net.queues["a", "b"].append((message, list(carried)))
    net.holds = lambda *_: False
    net.drain()
    net.let_go()
    result = net.until("a", waiter)
    assert result.outcome is Outcome.FAILED
    assert "the send to double (call (1,), here) on 'b'" in result.failure.message
    leaves_nothing(scope)


def test_residuals_of_a_call_that_was_spent_before_it_ran_do_not_stay():
    net, scope, x = begun(2, "b")
    net.pauses = pausing("slow")
    scope.call("b", Linear("slow", ((1,),)), x)
    (bad,) = scope.call("b", Linear("bad", ((1,),), Fuse("vjp")), x)
    assert scope.backward(bad).outcome is Outcome.FAILED
    net.let_go()
    net.drain()
    assert net.ran[-1].path == (1,) and kept(net, "residuals") == []


@pytest.mark.parametrize("leave", [True, False])
def test_cotangents_of_a_pass_that_never_began_do_not_stay(leave: bool):
    net, scope, x = begun(2, "b")
    (mine,) = scope.call("a", SAME, x)
    net.holds = holding(Primal)
    (y,) = scope.call("b", DOUBLE, mine)
    scope.start_backward(y, mine, seeds=(5, 6))
    assert len(kept(net, "seed")) == 2
    if leave:
        scope.start_leaving()
    else:
        net.crash("b")
    net.let_go()
    net.drain()
    if not leave:
        scope.leave()
    assert net.leftovers() == []


def test_a_late_start_of_a_pass_that_ended_is_dropped_with_what_it_carries():
    net, scope, x = begun(2, "b")
    (y,) = scope.call("b", DOUBLE, x)
    finished(scope, y, retain=True)
    root = Root(y.key, "aval", True, 0)
    late = Start(scope.context, 1, (root,), Mode.FAST, True, True, WHOLE, 0)
    net.places["b"].values[SeedKey(scope.context, 1, 0)] = (9, "late")
    net.tell("b", Arrived("a", late))
    assert kept(net, "seed") == []
    assert net.places["b"].engine.live_passes == 0
