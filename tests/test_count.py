"""What a pass counts: sends that are owed, and what is spent by being counted."""

from collections import Counter
from collections.abc import Generator
from typing import Any

import pytest

from jdag.engine.protocol import (
    Argument,
    Cotangent,
    Failure,
    Mark,
    Mode,
    Outcome,
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
)
from tests.engine_net import Net, Scope, stopped
from tests.engine_values import ADD, DOUBLE, SAME, TRIPLE, Fuse, Linear

# ------------------------------------------------------------------ what is spent


def test_a_second_pass_over_a_spent_graph_fails_and_names_what_was_spent():
    _, scope, x = begun(2, "b")
    (y,) = scope.call("b", TRIPLE, x)
    finished(scope, y)
    result = scope.backward(y)
    assert result.outcome is Outcome.FAILED and result.failure is not None
    assert result.failure.error == "GraphError"
    assert result.failure.message.startswith("triple (call (1,), here) on 'b' was")
    assert "retain_graph=True" in result.failure.message
    assert (result.failure.worker, result.failure.path) == ("b", (1,))
    assert scope.net.fetch("a", scope.gradient(x, 1))[0] == (3, "triple/0(1)")


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_after_a_pass_that_spent_work_and_leaves_move_again(seed: int):
    net, scope, x = begun(3, "b", seed)
    (y,) = scope.call("c", DOUBLE, x)
    finished(scope, y)
    (z,) = scope.call("c", TRIPLE, x)
    (w,) = scope.call("b", SAME, z)
    finished(scope, w)
    assert scope.gradients(x) == [5]
    paths = [m.path for _, _, m in net.sent if type(m) is Cotangent]
    assert paths == [(1,), (3,), (2,)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_spent_value_used_by_sends_fails_the_next_pass_once_for_all_cotangents(
    seed: int,
):
    _, scope, x = begun(4, "b", seed)
    (y,) = scope.call("b", DOUBLE, x)
    finished(scope, y)
    (c,) = scope.call("c", SAME, y)
    (d,) = scope.call("d", SAME, y)
    for _ in range(2):
        result = scope.backward(c, d)
        assert result.failure is not None and result.failure.error == "GraphError"
        assert result.owed == ()
    leaves_nothing(scope)


def test_a_failed_pass_that_does_not_retain_spends_the_whole_context():
    net = net_of(3)
    x, y = net.put("b", 3, "a"), net.put("c", 3, "a")
    scope = net.open("a")
    (bad,) = scope.call("b", Linear("bad", ((1,),), Fuse("vjp", 1)), x)
    (other,) = scope.call("c", DOUBLE, y)
    net.drain()
    result = scope.backward(bad)
    assert result.failure is not None and result.failure.message == "bad raised in vjp"
    assert kept(net, "residuals") == []
    again = scope.backward(other)
    assert again.failure is not None and again.failure.error == "GraphError"


# ------------------------------------------------ where the peer hangs or fails


def test_sends_of_workers_that_the_pass_never_reaches_are_not_owed():
    _, scope, x, other = begun(4, "bc")
    scope.call("d", DOUBLE, other)
    (y,) = scope.call("b", DOUBLE, x)
    finished(scope, y)
    assert scope.gradients(x) == [2]


def test_a_stuck_pass_leaves_no_gradient_and_can_be_run_again_if_retained():
    net, scope, x = begun(2, "a")
    (reply,) = scope.call("b", DOUBLE, x)
    (y,) = scope.call("a", TRIPLE, x)
    (z,) = scope.call("a", SAME, stopped(y))
    assert not z.tracked
    first = scope.backward(y, retain=True)
    assert first.outcome is Outcome.STUCK and first.leaves == ()
    assert isinstance(net.fetch("a", scope.gradient(x))[0], Failure)
    finished(scope, y, reply)
    assert scope.gradients(x) == [5]


# -------------------------------------------------------------------- SMART: marks


def marks(net: Net) -> list[tuple[str, str, list[tuple[Any, ...]]]]:
    """Each mark message: from, to, and its (path, slots)."""
    return [
        (a, b, [(one.path, one.slots) for one in m.transfers])
        for a, b, m in net.sent
        if type(m) is Mark
    ]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_mark_goes_to_the_worker_of_each_send_once_a_slot(seed: int):
    """C learns that b's slots are needed from a root of its own, and from d."""
    net, scope, x, y = begun(4, "bb", seed)
    (both,) = scope.call("c", ADD, x, y)
    (one,) = scope.call("c", DOUBLE, x)
    (two,) = scope.call("d", TRIPLE, both)
    (three,) = scope.call("d", SAME, one)
    finished(scope, two, three, one, mode=Mode.SMART)
    assert scope.gradients(x, y) == [3 + 2 + 2, 3]
    told: Counter[tuple[Any, ...]] = Counter()
    for sender, receiver, transfers in marks(net):
        for path, slots in transfers:
            assert any(slots), transfers
            told.update(
                (sender, receiver, path, slot) for slot, on in enumerate(slots) if on
            )
    assert told == {
        ("c", "b", (1,), 0): 1,
        ("c", "b", (1,), 1): 1,
        ("d", "c", (3,), 0): 1,
        ("d", "c", (4,), 0): 1,
    }


def test_marks_for_one_worker_from_one_event_travel_in_one_message():
    net, scope, x, y, z = begun(3, "bbb")
    (one,) = scope.call("c", DOUBLE, x)
    (two,) = scope.call("c", TRIPLE, y)
    (three,) = scope.call("c", SAME, z)
    finished(scope, one, two, three, mode=Mode.SMART)
    ((sender, receiver, transfers),) = marks(net)
    assert (sender, receiver) == ("c", "b")
    assert sorted(transfers) == [((n,), (True,)) for n in (1, 2, 3)]


def test_a_slot_that_no_root_needs_is_not_marked_and_what_made_it_not_run():
    net = net_of(3)
    scope, (x, y), (one, _) = two_slots(net)
    finished(scope, one, mode=Mode.SMART)
    assert marks(net) == [("c", "b", [((3,), (True, False))])]
    assert scope.gradients(x) == [2 * 2]
    assert isinstance(net.fetch("a", scope.gradient(y))[0], Failure)
    assert [job.path for job in net.ran if type(job) is Vjp] == [(4,), (1,)]


def two_slots(net: Net) -> tuple[Scope, list[Argument], list[Argument]]:
    """Two values go to c in one transfer; two losses there use one each."""
    x, y = net.put("b", 3, "a"), net.put("b", 4, "a")
    scope = net.open("a")
    (p,) = scope.call("b", DOUBLE, x)
    (q,) = scope.call("b", TRIPLE, y)
    scope.call("c", ADD, p, q)  # Dropped.
    (one,) = scope.call("c", DOUBLE, p)
    (two,) = scope.call("c", SAME, q)
    return scope, [x, y], [one, two]


@pytest.mark.parametrize("seed", SEEDS)
def test_two_losses_go_one_at_a_time_through_one_transfer_that_is_not_retained(
    seed: int,
):
    net = net_of(3, seed)
    scope, (x, y), (one, two) = two_slots(net)
    finished(scope, one, mode=Mode.SMART)
    finished(scope, two, mode=Mode.SMART)
    assert net.fetch("a", scope.gradient(x, 1))[0][0] == 4
    assert net.fetch("a", scope.gradient(y, 2))[0][0] == 3
    again = scope.backward(one, mode=Mode.SMART)
    assert again.failure is not None and again.failure.error == "GraphError"
    leaves_nothing(scope)


def dropped(scope: Scope, x: Argument) -> list[Argument]:
    scope.call("b", DOUBLE, x)
    return scope.call("a", TRIPLE, x)


def stopped_gradient(scope: Scope, x: Argument) -> list[Argument]:
    (reply,) = scope.call("b", DOUBLE, x)
    return scope.call("a", Linear("of", ((3, 1),)), x, stopped(reply))


def integer_reply(scope: Scope, x: Argument) -> list[Argument]:
    (place,) = scope.call("b", Linear("argmax", ((1,),)), x, inexact=(False,))
    return scope.call("a", Linear("of", ((3, 1),)), x, place)


def logged(scope: Scope, x: Argument) -> list[Argument]:
    (y,) = scope.call("b", DOUBLE, x)
    scope.move("c", y)
    (z,) = scope.call("a", SAME, x)
    return [y, z]


def nested_dropped(scope: Scope, x: Argument) -> list[Argument]:
    """B's program calls c and drops the reply."""

    def body(inner: Scope, given: Argument) -> Generator[Any, Any, Any]:
        inner.call("c", DOUBLE, given)
        (kept,) = inner.call("b", TRIPLE, given)
        return kept
        yield

    result, failure = scope.run("b", body, x)
    assert failure is None
    return [result]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(
    ("program", "owed"),
    [
        (dropped, [((1,), "a", "b", "double")]),
        (stopped_gradient, [((1,), "a", "b", "double")]),
        (integer_reply, [((1,), "a", "b", "argmax")]),
        (logged, [((1,), "a", "b", "double"), ((2,), "b", "c", "move")]),
        (nested_dropped, [((1, 1), "a", "c", "double")]),
    ],
)
def test_smart_does_not_wait_for_what_no_root_needs_and_fast_does(
    program: Any, owed: Any, seed: int
):
    outcomes = []
    for mode in (Mode.SMART, Mode.FAST):
        net = net_of(3, seed)
        x = net.put("a", 3, "a")
        scope = net.open("a")
        result = scope.backward(*program(scope, x), mode=mode)
        outcomes.append(result.outcome)
        if mode is Mode.SMART:
            assert scope.gradients(x) == [3]
        else:
            assert result.failure is None and owed == [
                (o.path, o.worker, o.destination, o.function) for o in result.owed
            ]
        scope.leave()
        net.drain()
        assert net.leftovers() == []
    assert outcomes == [Outcome.FINISHED, Outcome.STUCK]


@pytest.mark.parametrize("retain", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_modes_mix_on_one_graph_if_it_is_retained_and_say_what_is_spent_if_not(
    seed: int, retain: bool
):
    net = net_of(3, seed)
    scope, (x, y), (one, two) = two_slots(net)
    finished(scope, one, mode=Mode.SMART, retain=retain)
    second = scope.backward(one, two, mode=Mode.FAST, retain=retain)
    if retain:
        assert second.outcome is Outcome.FINISHED
        finished(scope, two, one, mode=Mode.SMART)
        assert scope.gradients(x, y) == [4 + 4 + 4, 3 + 3]
    else:
        assert second.failure is not None and second.failure.error == "GraphError"
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
def test_what_smart_left_of_a_transfer_fast_can_use(seed: int):
    """Each slot is spent by itself, so FAST counts the one that is left."""
    net = net_of(3, seed)
    scope, (x, y), (one, two) = two_slots(net)
    finished(scope, one, mode=Mode.SMART)
    finished(scope, two, mode=Mode.FAST)
    assert net.fetch("a", scope.gradient(x, 1))[0][0] == 4
    assert net.fetch("a", scope.gradient(y, 2))[0][0] == 3


@pytest.mark.parametrize("seed", SEEDS)
def test_a_slot_that_was_spent_stays_so_after_a_retained_pass_by_it(seed: int):
    """FAST waits for unspent slots: by one that is spent again nothing may come."""
    _, scope, x, y = begun(3, "bc", seed)
    (one,) = scope.call("c", DOUBLE, x)
    (two,) = scope.call("c", TRIPLE, x)
    (three,) = scope.call("c", SAME, y)
    (four,) = scope.call("b", SAME, x)
    finished(scope, one, mode=Mode.SMART)
    finished(scope, two, mode=Mode.SMART, retain=True)
    assert scope.gradients(x) == [2 + 3]
    finished(scope, three, four, mode=Mode.FAST)
    assert scope.gradients(x, y) == [2 + 3 + 1, 1]
    again = scope.backward(two, mode=Mode.FAST)
    assert again.failure is not None and again.failure.error == "GraphError"
    leaves_nothing(scope)


def test_what_fast_has_spent_a_mark_finds_spent_and_names():
    net = net_of(3)
    scope, _, (one, two) = two_slots(net)
    finished(scope, one, mode=Mode.FAST)
    result = scope.backward(two, mode=Mode.SMART)
    assert result.outcome is Outcome.FAILED and result.failure is not None
    assert result.failure.error == "GraphError"
    assert result.failure.message.startswith("triple (call (2,), here) on 'b' was")
    assert (result.failure.worker, result.failure.path) == ("b", (2,))
    assert result.failure.route[-1] == "b" and net.messages(Cotangent) == [("c", "b")]


def test_a_mark_to_a_worker_that_is_lost_fails_the_pass_and_names_it():
    net, scope, x = begun(4, "b")
    (one,) = scope.call("c", DOUBLE, x)
    (two,) = scope.call("d", TRIPLE, one)
    net.drain()
    net.holds = holding(Mark, sender="d")
    waiter = scope.start_backward(two, mode=Mode.SMART)
    net.drain()
    net.crash("b")
    net.let_go()
    result = net.until("a", waiter)
    assert result.outcome is Outcome.FAILED and result.failure is not None
    assert result.failure.error == "WorkerLost" and "'b'" in result.failure.message
    leaves_nothing(scope)
