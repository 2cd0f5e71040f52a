"""Cotangents are summed, hooked once a pass, added, committed, then seen."""

from typing import Any

import pytest

from jdag.engine.protocol import End, Failure, Mode, Outcome
from tests.tools.engine_cases import (
    SEEDS,
    begun,
    finished,
    holding,
    leaves_nothing,
    net_of,
    pausing,
)
from tests.tools.engine_net import Net, Scope
from tests.tools.engine_values import (
    ADD,
    SAME,
    TRIPLE,
    Affine,
    Fuse,
    Linear,
)


def test_hooks_of_one_value_that_arrive_in_another_order_are_in_the_programs():
    net, scope, x = begun(3, "c", first=5)
    late = scope.count = 4
    scope.attach(x, Affine("late"))
    scope.count = 1
    scope.attach(x, Affine("early"))
    scope.count = late + 1
    (root,) = scope.call("b", SAME, x)
    finished(scope, root)
    assert net.fetch("a", scope.gradient(x))[0] == (1, "late(early(same/0(1)))")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hook_that_raises_fails_the_pass_with_its_name_place_and_route(seed: int):
    _, scope, x = begun(3, "b", seed, first=5)
    (y,) = scope.call("b", SAME, x)
    path = scope.attach(y, Affine("bad", fuse=Fuse("hook", 1)))
    (root,) = scope.call("c", TRIPLE, y)
    result = scope.backward(root, retain=True, mode=Mode.FAST)
    assert result.outcome is Outcome.FAILED and result.failure is not None
    failure = result.failure
    assert (failure.worker, failure.function, failure.path) == ("b", "bad", path)
    assert failure.call_site == f"hooked at {path}"
    assert failure.route == ("a", "c", "b")
    finished(scope, root)
    assert scope.gradients(x) == [3]


def test_who_sees_a_gradient_sees_it_after_it_has_been_committed():
    net, scope, x, root = _seen_by(lambda _: None)
    committed = []

    def look(_: Any) -> None:
        engine: Any = net.places["b"].engine
        fragment = engine._state.contexts[scope.context]
        committed.append((fragment.leaves[x.key.name].gradient, fragment.live))

    scope.attach(x, look, replaces=False)
    net.holds = holding(End)
    waiter = scope.start_backward(root)
    net.drain()
    assert committed == []
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED
    ((gradient, live),) = committed
    assert gradient is not None and live is None


def _seen_by(*hooks: Any) -> tuple[Net, Scope, Any, Any]:
    net, scope, x = begun(3, "b", first=5)
    for hook in hooks:
        scope.attach(x, hook, replaces=False)
    (root,) = scope.call("c", TRIPLE, x)
    return net, scope, x, root


def test_on_one_worker_hooks_see_in_the_order_of_the_program_over_all_leaves():
    net = net_of(2)
    order: list[str] = []
    x, y, z = (net.put("b", 5, "a") for _ in range(3))
    scope = net.open("a")
    for name, leaf in (("1", z), ("2", x), ("3", y), ("4", x)):
        scope.attach(leaf, lambda _, name=name: order.append(name), replaces=False)
    (root,) = scope.call("a", Linear("add3", ((1, 1, 1),)), x, y, z)
    finished(scope, root)
    assert order == ["1", "2", "3", "4"]


@pytest.mark.parametrize("seed", SEEDS)
def test_what_raises_when_it_sees_a_gradient_is_reported_of_a_pass_that_finished(
    seed: int,
):
    _, scope, x, y = begun(4, "bc", seed, first=5)
    after = Affine("after")
    paths = [
        scope.attach(leaf, Affine(name, fuse=Fuse("hook")), replaces=False)
        for leaf, name in ((y, "first"), (x, "second"), (y, "third"))
    ]
    scope.attach(x, after, replaces=False)
    (root,) = scope.call("d", ADD, x, y)
    result = scope.backward(root)
    assert result.outcome is Outcome.FINISHED
    assert result.failure is not None and result.failure.path == paths[0]
    failure = result.failure
    assert (failure.worker, failure.function, failure.route) == ("c", "first", ("c",))
    assert failure.call_site == f"hooked at {paths[0]}"
    assert [number for number, _ in after.given] == [1]
    assert scope.gradients(x, y) == [1, 1]


def test_by_zeros_alone_what_was_there_stays_though_hooks_see_a_zero():
    net, scope, x, y = begun(2, "aa", first=5)
    scope.call("b", ADD, x, y, inexact=[False])  # They travel together.
    (first,) = scope.call("b", SAME, y)
    (root,) = scope.call("b", SAME, x)
    finished(scope, first, retain=True)
    sees = Affine("sees")
    scope.attach(y, sees, replaces=False)
    finished(scope, root)
    assert sees.given == [(0, "0")]
    before, after = (net.fetch("a", scope.gradient(y, n))[0] for n in (1, 2))
    assert before == after == (1, "same/0(1)")
    leaves_nothing(scope)


def test_what_is_to_be_seen_is_held_while_it_is_added_though_the_pass_has_failed():
    net, scope, x, y = begun(3, "bc", first=5)
    scope.attach(x, Affine("sees"), replaces=False)
    (good,) = scope.call("b", SAME, x)
    finished(scope, good, retain=True)
    (bad,) = scope.call("c", Linear("bad", ((1,),), Fuse("vjp", 1)), y)
    net.drain()
    net.pauses = lambda _, job: getattr(job, "base", None) is not None
    waiter = scope.start_backward(good, bad, retain=True)
    net.drain()
    assert waiter not in net.places["a"].resumed
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FAILED
    leaves_nothing(scope)


def test_a_leaf_that_is_lost_while_its_gradient_is_seen_ends_the_pass_as_lost():
    net, scope, _, root = _seen_by(Affine("slow"))
    net.pauses = pausing("slow")
    waiter = scope.start_backward(root)
    net.drain()
    net.crash("b")
    result = net.until("a", waiter)
    assert result.outcome is Outcome.FAILED
    assert isinstance(result.failure, Failure)
    assert result.failure.error == "WorkerLost"
    leaves_nothing(scope)


def test_leaving_while_gradients_are_seen_waits_for_who_sees_and_leaves_nothing():
    net, scope, _, root = _seen_by(Affine("slow"), never := Affine("never"))
    net.pauses = pausing("slow")
    scope.start_backward(root)
    net.drain()
    leaving = scope.start_leaving()
    net.drain()
    assert leaving not in net.places["a"].resumed
    net.let_go()
    net.until("a", leaving)
    net.drain()
    assert never.given == [] and net.leftovers() == []
