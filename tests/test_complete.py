"""Hooks are given complete cotangents, once a pass, in the order of the program."""

import pytest

from jdag.engine.protocol import Apply, Mode, Outcome
from tests.engine_cases import SEEDS, finished, net_of, pausing
from tests.engine_net import Scope, stopped
from tests.engine_values import ADD, DOUBLE, SAME, SPLIT, TRIPLE, Affine, Fuse, Linear

ADD4 = Linear("add4", ((1, 1, 1, 1),))
MODES = (Mode.SMART, Mode.FAST)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("seed", SEEDS)
def test_a_hook_is_given_the_sum_of_all_addends_once(seed: int, mode: Mode):
    net = net_of(4, seed)
    x = net.put("b", 5, "a")
    scope = net.open("a")
    (y,) = scope.call("b", SAME, x)
    hook = Affine("h", 10)
    scope.attach(y, hook)
    used = [scope.call(to, DOUBLE, y)[0] for to in ("c", "d", "b", "c")]
    (root,) = scope.call("a", ADD4, *used)
    finished(scope, root, mode=mode)
    assert [number for number, _ in hook.given] == [8]
    assert scope.gradients(x) == [80]
    scope.leave()
    net.drain()
    assert net.leftovers() == []


def test_the_sum_that_a_hook_is_given_is_that_of_paths_in_any_order_of_events():
    given = []
    for seed in SEEDS:
        net = net_of(4, seed)
        x = net.put("b", 5, "a")
        scope = net.open("a")
        hook = Affine("h", 1)
        scope.attach(x, hook)
        used = [scope.call(to, DOUBLE, x)[0] for to in ("c", "d", "b")]
        finished(scope, *used)
        given += hook.given
    (one,) = dict.fromkeys(given)
    assert one == (6, "((double/0(1)+double/0(1))+double/0(1))")


@pytest.mark.parametrize("seed", SEEDS)
def test_several_hooks_are_chained_in_the_order_of_the_program_whoever_attached(
    seed: int,
):
    net = net_of(3, seed)
    x = net.put("c", 5, "a")
    scope = net.open("a")
    (y,) = scope.call("c", SAME, x)

    def body(inner: Scope):
        inner.attach(y, Affine("second", 1, 1))
        inner.attach(y, Affine("third", 2))
        return []
        yield

    scope.attach(y, Affine("first", 3))
    assert scope.run("b", body) == ([], None)
    scope.attach(y, Affine("last"))
    (root,) = scope.call("b", SAME, y)
    finished(scope, root)
    ((number, made),) = net.fetch("a", scope.gradient(x))
    assert (number, made) == (8, "same/0(last(third(second(first(same/0(1))))))")


def test_hooks_of_one_value_that_arrive_in_another_order_are_in_the_programs():
    net = net_of(3)
    x = net.put("c", 5, "a")
    scope = net.open("a")
    late = scope.count = 4
    scope.attach(x, Affine("late"))
    scope.count = 1
    scope.attach(x, Affine("early"))
    scope.count = late + 1
    (root,) = scope.call("b", SAME, x)
    finished(scope, root)
    assert net.fetch("a", scope.gradient(x))[0] == (1, "late(early(same/0(1)))")


@pytest.mark.parametrize("mode", MODES)
def test_where_nothing_came_a_hook_is_given_a_zero_and_what_it_makes_goes_on(
    mode: Mode,
):
    net = net_of(2)
    x = net.put("b", 5, "a")
    scope = net.open("a")
    used, unused = scope.call("b", SPLIT, x)
    hook = Affine("h", 1, 7)
    scope.attach(unused, hook)
    (root,) = scope.call("a", SAME, used)
    finished(scope, root, mode=mode)
    assert hook.given == [(0, "0")]
    assert scope.gradients(x) == [1 + 3 * 7]


def test_a_fast_pass_hands_zeros_to_the_hooks_of_what_was_sent_along():
    for mode, given in ((Mode.FAST, [(0, "0")]), (Mode.SMART, [])):
        net = net_of(2)
        x, y = net.put("a", 5, "a"), net.put("a", 6, "a")
        scope = net.open("a")
        hook = Affine("h")
        scope.attach(y, hook)
        scope.call("b", ADD, x, y, inexact=[False])
        (root,) = scope.call("b", SAME, x)
        finished(scope, root, mode=mode)
        assert hook.given == given


@pytest.mark.parametrize("seed", SEEDS)
def test_each_pass_applies_a_hook_once_more_and_those_before_it_was_there_do_not(
    seed: int,
):
    net = net_of(3, seed)
    x = net.put("b", 5, "a")
    scope = net.open("a")
    (y,) = scope.call("b", SAME, x)
    (root,) = scope.call("c", TRIPLE, y)
    finished(scope, root, retain=True)
    assert scope.gradients(x) == [3]
    hook = Affine("h", 100)
    scope.attach(y, hook)
    finished(scope, root, retain=True)
    finished(scope, root)
    assert [number for number, _ in hook.given] == [3, 3]
    assert scope.gradients(x) == [603]


def test_a_pass_is_not_over_while_a_hook_runs():
    net = net_of(3)
    x = net.put("b", 5, "a")
    scope = net.open("a")
    (y,) = scope.call("b", SAME, x)
    scope.attach(y, Affine("slow"))
    (root,) = scope.call("c", TRIPLE, y)
    net.pauses = pausing("slow")
    waiter = scope.start_backward(root)
    net.drain()
    assert waiter not in net.places["a"].resumed
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED


@pytest.mark.parametrize("seed", SEEDS)
def test_a_hook_that_raises_fails_the_pass_with_its_name_place_and_route(seed: int):
    net = net_of(3, seed)
    x = net.put("b", 5, "a")
    scope = net.open("a")
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


def test_what_no_pass_reaches_is_not_hooked():
    net = net_of(2)
    x, y = net.put("b", 5, "a"), net.put("b", 6, "a")
    scope = net.open("a")
    hook = Affine("h")
    scope.attach(y, hook)
    (root,) = scope.call("b", ADD, x, stopped(y))
    finished(scope, root)
    assert hook.given == [] and not [job for job in net.ran if type(job) is Apply]


def test_a_root_gives_its_hook_what_the_pass_starts_with():
    net = net_of(2)
    x = net.put("b", 5, "a")
    scope = net.open("a")
    (root,) = scope.call("b", TRIPLE, x)
    hook = Affine("h", 2)
    scope.attach(root, hook)
    finished(scope, root, root, seeds=[None, 4])
    assert hook.given == [(5, "(1+4)")]
    assert scope.gradients(x) == [30]
