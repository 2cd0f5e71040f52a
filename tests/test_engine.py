"""Forward: calls, transfers, leaves, reads and programs on engines alone."""

import random
from collections.abc import Generator
from dataclasses import replace
from typing import Any

import pytest

from jdag.engine.vocabulary import (
    Acknowledge,
    Argument,
    Call,
    Failure,
    Key,
    Primal,
    Read,
    Release,
    Return,
    Run,
    Ship,
)
from jdag.errors import ContextError
from tests.engine_net import Net, Scope, names, stopped
from tests.engine_values import ADD, DOUBLE, SAME, SPLIT, Fuse, Linear

SEEDS = range(20)


def net_of(count: int, seed: int = 0) -> Net:
    return Net(names(count), random.Random(seed))


def ends(scope: Scope, worker: str) -> tuple[int, int]:
    """How many sends and recvs of the context a worker has in its graph."""
    drawing = scope.net.places[worker].engine.graph(scope.context)
    assert drawing is not None, worker
    return len(drawing.sends), len(drawing.recvs)


def holding(kind: type, sender: str = "", receiver: str = "") -> Any:
    """Hold back messages of a kind, from a worker, to a worker."""
    return lambda a, b, message: (
        type(message) is kind and sender in ("", a) and receiver in ("", b)
    )


def pausing(kind: str) -> Any:
    """Hold back the forward of the functions of this name."""
    return lambda _, job: getattr(getattr(job, "function", None), "name", "") == kind


# ------------------------------------------------------------------ calls and transfers


@pytest.mark.parametrize("seed", SEEDS)
def test_a_call_computes_on_arguments_wherever_they_are(seed: int):
    net = net_of(4, seed)
    x, y = net.put("b", 3, "a"), net.put("c", 4, "a")
    scope = net.open("a")
    (z,) = scope.call("d", Linear("f", ((1, 10, 100, 1000),)), x, y, 5, x)
    (far,) = scope.call("b", ADD, z, x)
    assert [n for n, _ in net.fetch("a", z, far)] == [3543, 3546]
    assert scope.leave() == ()
    assert net.leftovers() == []


def test_a_value_moves_to_a_worker_once_in_an_activation():
    net = net_of(3)
    x, y = net.put("b", 3, "a"), net.put("b", 4, "a")
    scope = net.open("a")
    scope.call("c", ADD, x, x)
    scope.call("c", ADD, x, y)
    scope.call("c", ADD, y, x)
    net.drain()
    carried = [len(m.keys) for _, _, m in net.sent if type(m) is Ship]
    assert carried == [1, 1]
    assert net.messages(Primal) == [("b", "c")] * 2


def test_tracked_and_not_tracked_a_value_moves_apart():
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    scope.call("a", ADD, x, stopped(x))
    net.drain()
    (transfer,) = [m for _, _, m in net.sent if type(m) is Primal]
    assert len(transfer.failures) == 2
    assert ends(scope, "b") == (1, 0) and ends(scope, "a") == (0, 1)


def test_a_call_without_tracked_arguments_makes_no_node_but_belongs_to_the_context():
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("c", ADD, stopped(x), 1)
    assert not y.tracked
    assert net.fetch("a", y)[0][0] == 4
    net.drain()
    for worker in ("b", "c"):
        drawing = net.places[worker].engine.graph(scope.context)
        assert drawing is not None
        assert not (drawing.nodes or drawing.sends or drawing.recvs)
    scope.leave()
    assert sorted(net.messages(Release)) == [("a", "b"), ("a", "c")]


def test_an_add_there_and_back_has_one_send_and_one_recv_at_each_end():
    net = net_of(2)
    t1, t2 = net.put("a", 1, "a"), net.put("a", 1, "a")
    scope = net.open("a")
    (t3,) = scope.call("b", ADD, t1, t2)
    scope.move("a", t3)
    net.drain()
    assert ends(scope, "a") == ends(scope, "b") == (1, 1)


def test_three_hops_have_two_sends_and_two_recvs_in_the_middle():
    net = net_of(4)
    value = net.put("a", 1, "a")
    scope = net.open("a")
    for worker in "bcd":
        (value,) = scope.call(worker, DOUBLE, value)
    for worker in "cba":
        value = scope.move(worker, value)
    net.drain()
    assert [ends(scope, worker) for worker in "abcd"] == [
        (1, 1),
        (2, 2),
        (2, 2),
        (1, 1),
    ]


def test_data_may_come_before_its_call():
    net = net_of(3)
    x, y = net.put("b", 3, "a"), net.put("b", 4, "a")
    scope = net.open("a")
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
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
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
    net = net_of(3, seed)
    x = net.put("b", 1, "a")
    scope = net.open("a")
    made, failure = scope.run("b", nests, 4, x)
    assert failure is None
    assert net.fetch("a", made)[0][0] == 32
    result = scope.backward(made)
    assert scope.gradients(x) == [32] and result.leaves == (x.key.name,)
    scope.leave()
    assert net.leftovers() == []


def test_a_program_call_leaves_only_when_all_earlier_calls_have_arrived():
    net = net_of(3)
    x = net.put("c", 3, "a")
    scope = net.open("a")
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
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
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
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    result, failure = scope.run("b", raises, x)
    assert result is None and failure.message == "no luck on b"
    assert scope.leave() == ()
    assert ("a", "c") in net.messages(Release)
    assert net.leftovers() == []


def test_a_program_may_not_go_on_in_a_context_that_is_gone():
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    inner = Scope(net, "b", scope.context, (1,))
    with pytest.raises(ContextError, match=r"context 0\.1 is not open on 'b'"):
        inner.call("b", DOUBLE, x)
    scope.leave()
    with pytest.raises(ContextError, match=r"context 0\.1 is not open on 'a'"):
        scope.call("b", DOUBLE, x)
    assert net.leftovers() == []


# ------------------------------------------------------------------------------- leaves


def test_a_version_that_forward_read_is_kept_until_its_context_is_released():
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("b", Linear("f", ((5,),)), x)
    newer = net.update("a", x, DOUBLE, x)
    (z,) = scope.call("b", ADD, y, newer)
    net.drain()
    assert x.key in net.places["b"].values
    scope.backward(z)
    assert net.fetch("a", z, newer)[0][0] == 15 + 6
    assert scope.gradients(x) == [5 + 1]  # Both versions are of one leaf.
    scope.leave()
    assert [k for k in net.places["b"].values if k.kind == "leaf"] == [newer.key]
    (read,) = net.fetch("a", x)
    assert isinstance(read, Failure) and "the newest is 1" in read.message


def test_a_leaf_dropped_while_in_use_goes_with_its_last_context():
    net = net_of(2)
    x = net.put("b", 3, "a")
    first, second = net.open("a"), net.open("a")
    (y,) = first.call("b", DOUBLE, x)
    (z,) = second.call("b", DOUBLE, x)
    net.drop("a", x)
    assert first.backward(y).leaves == (x.key.name,)
    assert first.gradients(x) == [2]
    first.leave()
    assert x.key in net.places["b"].values
    (late,) = second.call("b", ADD, x, z)  # Its context holds it already.
    assert net.fetch("a", late)[0][0] == 9
    third = net.open("a")
    (failed,) = net.fetch("a", third.call("b", DOUBLE, x)[0])
    assert (
        failed.error == "ContextError" and "version 0 of leaf 1 on b" in failed.message
    )
    second.leave()
    third.leave()
    assert net.places["b"].values == {}


def test_versions_are_made_in_the_order_in_which_they_were_asked_for():
    net = net_of(2)
    x = net.put("b", 3, "a")
    net.pauses = pausing("double")
    versions = [x]
    for _ in range(3):
        versions.append(net.update("a", versions[-1], DOUBLE, versions[-1]))
    reading = net.asked("a", versions[-1])
    net.let_go()
    assert net.until("a", reading)[0][0] == 24
    net.drain()
    assert list(net.places["b"].values) == [versions[-1].key]


def test_a_step_that_reads_a_gradient_runs_although_its_context_is_left_at_once():
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("b", Linear("f", ((5,),)), x)
    scope.backward(y)
    net.pauses = pausing("step")
    step = Linear("step", ((1, -1),))
    newer = net.update("a", x, step, x, scope.gradient(x))
    leaving = scope.start_leaving()
    net.drain()
    assert leaving not in net.places["a"].resumed
    net.let_go()
    assert net.until("a", leaving) == ()
    assert net.fetch("a", newer)[0][0] == 3 - 5
    net.drain()
    assert net.leftovers() == []


def test_a_version_whose_making_failed_holds_the_failure():
    net = net_of(2)
    x = net.put("b", 3, "a")
    newer = net.update("a", x, Linear("step", ((1,),), Fuse("forward")), x)
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, newer)
    for failed in net.fetch("a", newer, y):
        assert failed.message == "step raised in forward"
    scope.leave()
    net.drain()
    assert net.leftovers() == []


def test_a_step_whose_context_is_aborted_fails_and_is_not_awaited_for_ever():
    net = net_of(3)
    x, other = net.put("b", 3, "a"), net.put("b", 4, "a")
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, x)
    scope.call("c", DOUBLE, 1)
    scope.backward(y)
    net.pauses = pausing("slow")
    slow = net.update("a", other, Linear("slow", ((1,),)), other)
    step = Linear("step", ((1, 1),))
    late = net.update("a", x, step, slow, scope.gradient(x))
    net.drain()
    net.crash("c")
    net.drain()
    scope.leave()
    net.let_go()
    number, failed = net.fetch("a", slow, late)
    assert number[0] == 4
    assert "context 0.1 was released before its values were used" in failed.message
    net.drain()
    assert net.leftovers() == []


# -------------------------------------------------------------------------------- reads


def test_a_read_is_answered_when_the_value_is_there_and_makes_no_context():
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    net.pauses = pausing("double")
    (y,) = scope.call("b", DOUBLE, x)
    net.drain()
    waiter = net.asked("c", y, x)
    net.drain()
    assert waiter not in net.places["c"].resumed
    net.let_go()
    assert [n for n, _ in net.until("c", waiter)] == [6, 3]
    assert net.places["c"].engine.live_contexts == 0


def test_a_read_of_a_released_context_says_so_and_does_not_remake_it():
    net = net_of(3)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, x)
    scope.backward(y)
    gradient = scope.gradient(x)
    scope.leave()
    for reader in "abc":
        for failed in net.fetch(reader, y, gradient):
            assert failed.error == "ContextError" and "context 0.1" in failed.message
    assert net.leftovers() == []


def test_a_read_that_waits_is_answered_when_its_context_is_aborted():
    net = net_of(4)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    (y,) = scope.call("b", DOUBLE, x)
    net.drain()
    net.holds = holding(Primal)
    (z,) = scope.call("c", DOUBLE, y)
    net.drain()
    far, own = net.asked("d", z), net.asked("c", z)
    net.drain()
    scope.start_backward(z)
    net.drain()
    scope.leave()
    for reader, waiter in (("d", far), ("c", own)):
        (failed,) = net.until(reader, waiter)
        assert "context 0.1 was released" in failed.message
    net.let_go()
    net.drain()
    assert net.leftovers() == []


def test_a_read_of_several_does_not_name_one_that_went_while_another_was_awaited():
    net = net_of(2)
    x = net.put("b", 3, "a")
    scope = net.open("a")
    net.pauses = pausing("double")
    (y,) = scope.call("b", SAME, 1)
    (z,) = scope.call("b", DOUBLE, y)
    waiter = net.asked("a", x, z)
    net.drain()
    net.update("a", x, SAME, x)
    net.drain()
    net.let_go()
    gone, number = net.until("a", waiter)
    assert "version 0 of leaf 1 on b is not held any more" in gone.message
    assert number[0] == 2


def test_a_read_of_nothing_returns_at_once():
    net = net_of(1)
    assert net.fetch("a") == []


def test_reads_of_a_lost_worker_fail_before_and_after_it_is_lost():
    net = net_of(2)
    x = net.put("b", 3, "a")
    net.drain()
    net.holds = holding(Read)
    waiter = net.asked("a", x)
    net.crash("b")
    (failed,) = net.until("a", waiter)
    assert failed.error == "WorkerLost" and "'b' is lost" in failed.message
    (again,) = net.fetch("a", x)
    assert again == replace(failed)
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
        "b": [Key("constant", scope.context, (1,), i) for i in (0, 1)],
        "a": [Key("constant", scope.context, (2,), i) for i in (0, 1)],
    }
    net.let_go()
    net.drain()
    for place in net.places.values():
        assert [k.kind for k in place.values] == ["output"]


def test_an_output_that_cannot_be_tracked_makes_no_edge():
    net = net_of(2)
    x = net.put("a", 3, "a")
    scope = net.open("a")
    whole, part = scope.call("b", SPLIT, x, inexact=(False, True))
    assert (whole.tracked, part.tracked) == (False, True)
    (y,) = scope.call("b", ADD, whole, part)
    scope.backward(y)
    assert scope.gradients(x) == [3]
