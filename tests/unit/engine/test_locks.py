"""Locks of objects: one program at a time for each, in order of arrival."""

import random
from typing import Any

import pytest

from jdag.engine.locks import Locks
from jdag.engine.protocol import (
    Collected,
    ContextId,
    Launched,
    ObjectId,
    Path,
    Return,
    Run,
    Spawn,
)
from tests.tools.engine_net import Net, Scope

OURS, THEIRS = ContextId(0, 1, 0), ContextId(2, 1, 0)
X, Y, Z = (ObjectId(ContextId(0, 9, 0), (number,), "b", "Env") for number in (1, 2, 3))


def spawn(path: Path, *objects: ObjectId, context: ContextId = OURS) -> Spawn:
    return Spawn(context, path, print, (), "x.py:1", objects)


def test_programs_get_an_object_one_at_a_time_in_the_order_of_arrival() -> None:
    locks = Locks()
    first, second, third = (spawn((number,), X) for number in (3, 1, 2))
    assert list(locks.acquire(first)) == [first]
    assert [*locks.acquire(second), *locks.acquire(third)] == []
    assert list(locks.release(OURS, (3,))) == [second]
    assert list(locks.release(OURS, (1,))) == [third]
    assert list(locks.release(OURS, (2,))) == []
    assert list(locks.acquire(first)) == [first]  # It is free again.


def test_a_program_waits_for_all_of_its_objects_and_keeps_its_place_for_each() -> None:
    locks = Locks()
    of_x, of_y = spawn((1,), X), spawn((2,), Y)
    of_both, later, beside = spawn((3,), Y, X), spawn((4,), Y), spawn((5,), Z)
    for one in (of_x, of_y, beside):
        assert list(locks.acquire(one)) == [one]
    assert [*locks.acquire(of_both), *locks.acquire(later)] == []
    assert list(locks.release(OURS, (2,))) == []  # It has Y now, and X is held.
    assert list(locks.release(OURS, (1,))) == [of_both]
    assert list(locks.release(OURS, (3,))) == [later]


def test_programs_without_objects_never_wait() -> None:
    locks = Locks()
    assert list(locks.acquire(spawn((1,), X))) != []
    assert list(locks.acquire(spawn((2,)))) == [spawn((2,))]
    assert list(locks.release(OURS, (2,))) == []


def test_of_a_context_that_is_gone_those_that_wait_leave_and_those_that_run_stay() -> (
    None
):
    locks = Locks()
    runs, after = spawn((1,), X, context=THEIRS), spawn((9,), X)
    locks.acquire(runs)
    locks.acquire(spawn((2,), Y))
    for path, objects in (((3,), (X, Y)), ((4,), (Y,)), ((5,), (Y, X))):
        assert list(locks.acquire(spawn(path, *objects, context=THEIRS))) == []
    assert list(locks.acquire(after)) == []
    assert list(locks.forget(THEIRS)) == []  # What runs may use X.
    assert list(locks.release(THEIRS, (1,))) == [after]
    assert list(locks.release(OURS, (2,))) == []
    assert list(locks.acquire(spawn((7,), Y))) == [spawn((7,), Y)]


def test_a_program_that_is_gone_while_it_waits_frees_what_it_had() -> None:
    locks = Locks()
    locks.acquire(spawn((1,), X))
    locks.acquire(spawn((2,), X, Y, context=THEIRS))  # First for Y.
    after = spawn((3,), Y)
    assert list(locks.acquire(after)) == []
    assert list(locks.forget(THEIRS)) == [after]


def start(scope: Scope, worker: str, body: Any, *objects: ObjectId) -> None:
    scope.count += 1
    path = (*scope.path, scope.count)
    told = Launched(scope.context, path, worker, body, (), f"at {path}", objects)
    scope.net.tell(scope.worker, told)


def ends(ended: Any) -> list[Any]:
    if all(isinstance(one, Return) for one in ended):
        return [one.failure for one in ended]
    return [ended[1]]  # What the net makes of the end of a single one.


def failures(scope: Scope, count: int) -> list[Any]:
    actual: list[Any] = []
    while len(actual) < count:
        waiter = scope.net.waiter()
        asked = (waiter, scope.context, scope.path, scope.launched, None)
        scope.net.tell(scope.worker, Collected(*asked))
        ended = ends(scope.net.until(scope.worker, waiter))
        scope.launched += len(ended)
        actual += ended
    return actual


@pytest.mark.parametrize("seed", range(12))
def test_in_any_order_of_events_no_two_programs_have_an_object(seed: int) -> None:
    rng = random.Random(seed)
    net = Net("abc", rng)
    value = net.put("a", 5, "a")
    inside: dict[ObjectId, Path] = {}
    ended = []

    def body(*objects: ObjectId) -> Any:
        def run(scope: Scope) -> Any:
            for one in objects:
                assert one not in inside, one
                inside[one] = scope.path
            yield net.asked(scope.worker, value)
            for one in objects:
                del inside[one]
            ended.append(scope.path)

        return run

    scopes = [net.open(owner) for owner in ("a", "b", "c") for _ in range(2)]
    for _ in range(5):
        for scope in scopes:
            objects = rng.sample((X, Y, Z), rng.choice((1, 1, 2)))
            start(scope, "b", body(*objects), *objects)
            net.some()
    for scope in scopes:
        assert failures(scope, 5) == [None] * 5
        assert scope.leave() == ()
    net.drain()
    assert len(ended) == 30 and net.leftovers() == []


def test_a_call_below_the_holder_is_refused_and_every_other_one_waits() -> None:
    locks = Locks()
    locks.acquire(spawn((1, 2), X))
    refusal = locks.refusal(Run(OURS, (1, 2, 3), print, (), "x.py:2", (Y, X)))
    assert f"deadlock: {X} is held by the call at x.py:1" in refusal
    assert "waits for this call, at x.py:2." in refusal
    for context, path in ((OURS, (1, 3)), (OURS, (1,)), (THEIRS, (1, 2, 1))):
        run = Run(context, path, print, (), "x.py:2", (X,))
        assert locks.refusal(run) == ""
    locks.acquire(spawn((3,), X, Y))  # It waits, and does not hold Y yet.
    assert locks.refusal(Run(OURS, (3, 1), print, (), "x.py:2", (Y,))) == ""


def test_a_program_that_outlives_its_context_holds_its_object_until_it_ends() -> None:
    net = Net("abc", random.Random(3))
    value = net.put("b", 5, "b")
    log: list[str] = []

    def slow(scope: Scope) -> Any:
        log.append("slow begins")
        net.tell("b", Collected(77, scope.context, scope.path, 0, None))
        yield 77
        log.append("slow ends")

    def other(scope: Scope) -> Any:
        log.append("other")
        yield net.asked(scope.worker, value)

    theirs, ours = net.open("c"), net.open("a")
    start(theirs, "b", slow, X)
    net.drain()
    start(theirs, "b", other, X)
    start(ours, "b", other, X)
    net.drain()
    assert log == ["slow begins"]
    net.crash("c")
    net.drain()  # The context is gone, and with it the program that waits.
    assert log == ["slow begins"]
    net.places["b"].resumed[77] = ()
    assert failures(ours, 1) == [None]
    assert log == ["slow begins", "slow ends", "other"]
