"""What an engine remembers of contexts that are over."""

from itertools import permutations, product

from jdag.engine import Engine
from jdag.engine.credit import WHOLE
from jdag.engine.protocol import Answer, Arrived, ContextId
from jdag.engine.state import Horizon

COUNTERS = range(1, 6)


def test_a_horizon_only_ever_rises_in_whatever_order_it_is_told():
    some = [
        Horizon(counter, live)
        for counter in (1, 3, 4)
        for live in ((), (1,), (2,), (1, 2), (1, 3))
        if max(live, default=0) < counter
    ]
    for told in product(some, repeat=3):
        passed = [any(each.passed(c) for each in told) for c in COUNTERS]
        for one, two, three in permutations(told):
            known = one.union(two).union(three)
            assert [known.passed(c) for c in COUNTERS] == passed, told


def test_a_horizon_remembers_no_more_than_what_is_still_live():
    known = Horizon(0, ())
    for counter in range(2, 100):
        known = known.union(Horizon(counter, (1,)))
    assert known == Horizon(99, (1,))
    assert known.union(Horizon(1, ())) == Horizon(99, ())


def test_a_message_about_a_context_of_this_worker_that_was_never_opened_is_ignored():
    engine = Engine("a", ("a", "b"))
    stray = Answer(ContextId(0, 99, 0), 1, WHOLE, 0)
    assert engine.handle(Arrived("b", stray)) == []
    assert engine.live_contexts == 0
