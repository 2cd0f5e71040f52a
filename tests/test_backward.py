"""Backward: what is counted, in which order sums go, what is spent and what stays."""

from typing import Any

import pytest

from jdag.engine.credit import WHOLE
from jdag.engine.protocol import (
    Argument,
    Arrived,
    Cotangent,
    Fail,
    Failure,
    Mode,
    Outcome,
    Primal,
    ResidualsKey,
    Root,
    SeedKey,
    Start,
    Vjp,
)
from tests.engine_cases import (
    SEEDS,
    begun,
    finished,
    holding,
    kept,
    leaves_nothing,
    net_of,
    pausing,
)
from tests.engine_net import Net, Scope
from tests.engine_values import (
    ADD,
    DOUBLE,
    SAME,
    SPLIT,
    TRIPLE,
    Fuse,
    Linear,
    short,
    tree_fold,
)

# -------------------------------------------------------------------------------- order


def fan_out(net: Net, width: int) -> tuple[Scope, Argument, Argument]:
    """One leaf on b, used by calls on c, d and b itself; their sum on a."""
    leaf = net.put("b", 2, "a")
    scope = net.open("a")
    made = [
        scope.call("cdb"[i % 3], Linear(f"f{i}", ((i + 1,),)), leaf)[0]
        for i in range(width)
    ]
    (total,) = scope.call("a", Linear("total", ((1,) * width,)), *made)
    return scope, leaf, total


def test_the_order_of_a_wide_sum_is_that_of_the_program_whatever_comes_first():
    seen: dict[str, int] = {}
    arrivals: dict[tuple[tuple[int, ...], ...], int] = {}
    for seed in range(60):
        net = net_of(4, seed)
        scope, leaf, total = fan_out(net, 24)
        finished(scope, total)
        ((number, expression),) = net.fetch("a", scope.gradient(leaf))
        assert number == sum(range(1, 25))
        seen[expression] = seed
        arrivals[tuple(job.path for job in net.ran if type(job) is Vjp)] = seed
    assert len(arrivals) > 50
    # Two values moved once, to c and to d, by the calls 1 and 2; then those on b.
    parts = {
        worker: tree_fold(
            [(0, f"f{i}/0(total/{i}(1))") for i in range(24) if "cdb"[i % 3] == worker]
        )
        for worker in "cdb"
    }
    own = [(0, f"f{i}/0(total/{i}(1))") for i in range(2, 24, 3)]
    total_of = tree_fold([parts["c"], parts["d"], *own])
    assert total_of is not None and list(seen) == [total_of[1]]


BOTH = Linear("both", ((1, 0), (0, 1)))  # Two functions in one.


@pytest.mark.parametrize("mode", [Mode.SMART, Mode.FAST])
def test_a_zero_among_many_addends_leaves_its_place_empty_whatever_comes_first(
    mode: Mode,
):
    """Every third use of x gives it a symbolic zero, here and on another worker."""
    seen: dict[str, int] = {}
    for seed in range(20):
        net = net_of(3, seed)
        x, y = net.put("b", 2, "a"), net.put("b", 3, "a")
        scope = net.open("a")
        made = []
        for number in range(40):
            of = (y, x) if number % 3 == 0 else (x, y)
            made.append(scope.call("bc"[number % 2], BOTH, *of)[0])
        (total,) = scope.call("a", Linear("total", ((1,) * 40,)), *made)
        finished(scope, total, mode=mode)
        ((number, expression),) = net.fetch("a", scope.gradient(x))
        assert number == 26
        seen[expression] = seed
        scope.leave()
        net.drain()
        assert net.leftovers() == []
    places = [
        (0, short(f"both/0(total/{i}(1),0)")) if i % 3 else None for i in range(40)
    ]
    # The value moved to c with call 1; the first here is call 0.
    total_of = tree_fold([places[0], tree_fold(places[1::2]), *places[2::2]])
    assert total_of is not None and list(seen) == [total_of[1]]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pass_that_fails_drops_the_cotangents_of_a_leaf_that_wait(seed: int):
    _, scope, x = begun(3, "b", seed, first=2)
    y = x
    for number in range(60):
        fuse = Fuse("vjp", 1) if number == 20 else None
        (y,) = scope.call("bc"[number % 2], Linear("f", ((1, 1),), fuse), x, y)
    assert scope.backward(y, retain=True).outcome is Outcome.FAILED
    finished(scope, y)
    assert scope.gradients(x) == [61]
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
def test_sums_go_by_path_then_position_and_seeds_of_roots_come_last(seed: int):
    net, scope, x = begun(3, "b", seed, first=1)
    (y,) = scope.call("b", DOUBLE, x)
    (z,) = scope.call("b", Linear("wide", ((1, 1, 1),)), y, 1, y)
    (far,) = scope.call("c", TRIPLE, y)
    (late,) = scope.call("b", SAME, y)
    finished(scope, y, late, z, y, far, seeds=(5, None, None, 7, None))
    ((number, expression),) = net.fetch("a", scope.gradient(x))
    assert number == 2 * (1 + 1 + 3 + 1 + 5 + 7)
    assert expression == (
        "double/0((((((wide/0(1)+wide/2(1))+triple/0(1))+same/0(1))+5)+7))"
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_calls_of_a_program_come_where_the_program_was_called(seed: int):
    def calls(scope: Scope, x: Argument) -> Any:
        made = [scope.call("b", Linear(f"g{i}", ((1,),)), x)[0] for i in range(3)]
        yield scope.net.asked(scope.worker, x)
        return made

    net, scope, x = begun(3, "b", seed, first=1)
    first = scope.call("b", Linear("first", ((1,),)), x)
    inner, _ = scope.run("c", calls, x)
    last = scope.call("b", Linear("last", ((1,),)), x)
    finished(scope, *last, *reversed(inner), *first)
    ((_, expression),) = net.fetch("a", scope.gradient(x))
    assert expression == "((((first/0(1)+g0/0(1))+g1/0(1))+g2/0(1))+last/0(1))"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_slots_of_a_transfer_are_summed_each_by_itself_where_they_were_used(
    seed: int,
):
    net, scope, x, y, z = begun(2, "bbb", seed, first=1)
    (one,) = scope.call("a", Linear("one", ((1, 2, 3),)), x, y, z)
    (two,) = scope.call("a", Linear("two", ((5, 7),)), y, x)
    (three,) = scope.call("a", Linear("three", ((11,),)), x)
    finished(scope, three, one, two)
    gradients = net.fetch("a", *(scope.gradient(leaf) for leaf in (x, y, z)))
    assert gradients == [
        (19, "((one/0(1)+two/1(1))+three/0(1))"),
        (7, "(one/1(1)+two/0(1))"),
        (3, "one/2(1)"),
    ]
    assert net.messages(Cotangent) == [("a", "b")]


# -------------------------------------------------------------------------------- zeros


def half_used(net: Net) -> tuple[Scope, Argument, Argument, Argument, Argument]:
    """Two values in one transfer, of which the root uses the second alone.

    The first was made on b of a leaf on c, so that zeros go on from b to c.
    """
    x, y = net.put("c", 3, "a"), net.put("b", 4, "a")
    scope = net.open("a")
    (unused,) = scope.call("b", DOUBLE, x)
    (used,) = scope.call("b", TRIPLE, y)
    (both,) = scope.call("a", ADD, unused, used)
    (root,) = scope.call("a", SAME, used)
    return scope, x, y, root, both


@pytest.mark.parametrize("seed", SEEDS)
def test_a_node_that_got_only_symbolic_zeros_is_not_run(seed: int):
    net = net_of(3, seed)
    scope, _, _, root, _ = half_used(net)
    finished(scope, root)
    vjps = [job.function.name for job in net.ran if type(job) is Vjp]
    assert vjps == ["same", "triple"]
    present = [m.present for _, _, m in net.sent if type(m) is Cotangent]
    assert present == [(False, True), (False,)]
    net.drain()
    assert kept(net, "residuals") == [ResidualsKey(scope.context, (3,), 0)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_leaf_that_only_symbolic_zeros_reach_has_an_explicit_zero(seed: int):
    net = net_of(3, seed)
    scope, x, y, root, _ = half_used(net)
    finished(scope, root)
    assert net.fetch("a", scope.gradient(x), scope.gradient(y)) == [
        (0, "0"),
        (3, "triple/0(same/0(1))"),
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_zeros_alone_leave_an_earlier_gradient_as_it_was(seed: int):
    net = net_of(3, seed)
    scope, x, _, root, _ = half_used(net)
    (early,) = scope.call("b", SAME, x)
    finished(scope, early, root, retain=True)
    assert scope.gradients(x) == [1]
    finished(scope, root)
    assert net.fetch("a", scope.gradient(x)) == [(1, "same/0(1)")]


def test_what_zeros_passed_by_in_a_pass_that_retains_can_be_used_in_the_next():
    net = net_of(3)
    scope, x, y, root, both = half_used(net)
    finished(scope, root, retain=True)
    finished(scope, both)
    assert scope.gradients(x, y) == [2, 3 + 3]
    assert kept(net, "residuals") == [ResidualsKey(scope.context, (4,), 0)]


# --------------------------------------------------------------------- passes and graph


@pytest.mark.parametrize("seed", SEEDS)
def test_a_root_given_twice_counts_twice_and_a_second_pass_adds(seed: int):
    net, scope, x = begun(2, "b", seed)
    (y,) = scope.call("a", DOUBLE, x)
    finished(scope, y, y, retain=True)
    assert scope.gradients(x) == [4]
    finished(scope, y, retain=True)
    assert net.fetch("a", scope.gradient(x, 1), scope.gradient(x, 2)) == [
        (4, "double/0((1+1))"),
        (6, "(double/0((1+1))+double/0(1))"),
    ]
    finished(scope, y)
    assert scope.gradients(x) == [8]


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


@pytest.mark.parametrize("seed", SEEDS)
def test_after_a_failed_pass_that_retained_the_next_gives_one_good_gradient(seed: int):
    net, scope, x, y = begun(4, "bc", seed)
    fuse = Fuse("vjp", 50)
    (early,) = scope.call("d", DOUBLE, y)
    (one,) = scope.call("b", TRIPLE, x)
    (bad,) = scope.call("c", Linear("bad", ((1, 1),), fuse), one, y)
    (total,) = scope.call("a", Linear("total", ((1, 1, 1),)), early, bad, x)
    for _ in range(50):
        result = scope.backward(total, retain=True)
        assert result.outcome is Outcome.FAILED and result.leaves == ()
        assert all(place.engine.live_passes == 0 for place in net.places.values())
    unread = net.fetch("a", *(scope.gradient(leaf) for leaf in (x, y)))
    assert all(isinstance(failure, Failure) for failure in unread)
    finished(scope, total)
    assert scope.gradients(x, y) == [4, 3]
    leaves_nothing(scope)


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


# ------------------------------------------------------------------- forward on its way


@pytest.mark.parametrize("seed", SEEDS)
def test_a_pass_may_begin_before_forward_has_run(seed: int):
    net, scope, x = begun(3, "b", seed)
    slow = Linear("slow", ((5,),))
    net.pauses = pausing("slow")
    (y,) = scope.call("b", slow, x)
    (z,) = scope.call("c", TRIPLE, y)
    waiter = scope.start_backward(z, retain=seed % 2 == 0)
    net.drain()
    assert waiter not in net.places["a"].resumed
    net.let_go()
    assert net.until("a", waiter).outcome is Outcome.FINISHED
    assert scope.gradients(x) == [15]


def test_residuals_of_a_call_that_was_spent_before_it_ran_do_not_stay():
    net, scope, x = begun(2, "b")
    net.pauses = pausing("slow")
    scope.call("b", Linear("slow", ((1,),)), x)
    (bad,) = scope.call("b", Linear("bad", ((1,),), Fuse("vjp")), x)
    assert scope.backward(bad).outcome is Outcome.FAILED
    net.let_go()
    net.drain()
    assert net.ran[-1].path == (1,) and kept(net, "residuals") == []


# ----------------------------------------------------------------- given cotangents


def test_cotangents_that_are_given_travel_with_the_announcement():
    net, scope, x, y = begun(3, "bc")
    (one,) = scope.call("b", DOUBLE, x)
    (two,) = scope.call("c", TRIPLE, y)
    finished(scope, one, two, one, seeds=(5, 7, None))
    assert scope.gradients(x, y) == [12, 21]
    starts = [m for _, _, m in net.sent if type(m) is Start]
    assert [[root.given for root in m.roots] for m in starts] == [[True, False], [True]]
    assert kept(net, "seed") == []


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
