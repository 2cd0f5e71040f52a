"""Programs that ask their caller, between engines: order, losses, and ends."""

from typing import Any

import pytest

from jdag.engine.protocol import (
    Answered,
    Argument,
    Asked,
    Collected,
    Launched,
    Return,
    Tell,
)
from tests.tools.engine_cases import leaves_nothing, net_of
from tests.tools.engine_values import IDENTITY

SEEDS = range(40)


def asks(scope, data):
    """Ask the caller; the waiter for (answer, failure)."""
    waiter = scope.net.waiter()
    scope.tell_discarded()
    scope.net.tell(scope.worker, Asked(waiter, scope.context, scope.path, data))
    return waiter


def started(scope, worker, body, *given):
    scope.count += 1
    path = (*scope.path, scope.count)
    scope.net.tell(
        scope.worker, Launched(scope.context, path, worker, body, given, "here")
    )
    return path


def news(scope):
    """The next news: a list of asks and ends, an end as (result, failure)."""
    waiter = scope.net.waiter()
    event = Collected(waiter, scope.context, scope.path, scope.launched, None)
    scope.net.tell(scope.worker, event)
    found = scope.net.until(scope.worker, waiter)
    if not isinstance(found[0], Tell | Return):
        found = (found,)  # The net takes a single end apart.
    scope.launched += len(found)
    return list(found)


def answer(scope, path, data):
    scope.net.tell(scope.worker, Answered(scope.context, path, data))


def counts(scope, name, times):
    got = []
    for number in range(times):
        got.append((yield asks(scope, (name, number))))
    return got


def ends_in(one):
    return one if isinstance(one, tuple) else (one.result, one.failure)


@pytest.mark.parametrize("seed", SEEDS)
def test_each_program_gets_the_answers_to_its_own_asks_in_their_order(seed):
    net = net_of(4, seed)
    scope = net.open("a")
    where = {started(scope, name, counts, name, 4): name for name in "abcd"}
    seen, ended = dict.fromkeys("abcd", 0), list[Any]()
    waiting = []
    while len(ended) < 4:
        for one in news(scope):
            if not isinstance(one, Tell):
                ended.append(ends_in(one))
                continue
            name = where[one.path]
            assert one.data == (name, seen[name])
            seen[name] += 1
            waiting.append(one)
        net.rng.shuffle(waiting)
        if waiting:
            one = waiting.pop()
            answer(scope, one.path, [*one.data])
    right = [[(([name, n]), None) for n in range(4)] for name in "abcd"]
    assert sorted(result for result, _ in ended) == right
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_caller_may_use_what_a_program_had_issued_before_it_asked(seed):
    net = net_of(4, seed)

    def body(scope):
        (one,) = scope.call("c", IDENTITY, 7)
        (key, owner), _ = yield asks(scope, (one.key, one.owner))
        found = yield scope.net.asked(scope.worker, Argument(key, owner, False))
        scope.discard(one)
        return found[0][0]

    scope = net.open("a")
    path = started(scope, "b", body)
    (ask,) = news(scope)
    (two,) = scope.call("d", IDENTITY, Argument(ask.data[0], ask.data[1], False))
    answer(scope, path, (two.key, two.owner))
    (end,) = news(scope)
    assert ends_in(end) == (7, None)
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_loss_of_a_worker_that_asks_is_its_end_and_others_are_answered(seed):
    net = net_of(4, seed)
    scope = net.open("a")
    paths = {name: started(scope, name, counts, name, 1) for name in "bcd"}
    asked: list[Any] = []
    while len(asked) < 3:
        asked += news(scope)
    net.crash("c")
    answer(scope, paths["c"], "too late")
    (lost,) = news(scope)
    assert ends_in(lost)[1].error == "WorkerLost"
    answer(scope, paths["c"], "to nobody")
    for name in "bd":
        answer(scope, paths[name], name)
    ended: list[Any] = []
    while len(ended) < 2:
        ended += map(ends_in, news(scope))
    assert sorted(ended, key=str) == [([("b", None)], None), ([("d", None)], None)]
    leaves_nothing(scope)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("ends", ["leave", "crash"])
def test_who_asks_is_told_that_its_context_is_released(seed, ends):
    net, told = net_of(4, seed), []
    scope = net.open("b")

    def body(scope):
        told.append((yield asks(scope, "anybody?")))

    for name in "acd":
        started(scope, name, body)
    asked: list[Any] = []
    while len(asked) < 3:
        asked += news(scope)
    if ends == "leave":
        scope.leave()
    else:
        net.crash("b")
    net.drain()
    assert [data for data, _ in told] == [None] * 3
    assert all(failure is not None for _, failure in told)
    assert net.leftovers() == []
