"""Virtual time goes forward, in one order."""

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdag.errors import JdagError
from jdag.sim.timeline import Timeline

entries = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=40)


def filled(entries):
    timeline = Timeline(events_max=1000)
    handles = [
        timeline.push(time_ns, priority, (time_ns, priority, place))
        for place, (time_ns, priority) in enumerate(entries)
    ]
    return timeline, handles


def drained(timeline):
    return list(iter(timeline.pop, None))


@given(entries)
def test_actions_come_by_time_then_priority_then_order_of_pushing(entries):
    timeline, _ = filled(entries)
    came = drained(timeline)
    assert came == sorted(came) and len(came) == len(entries)
    assert timeline.now_ns == (came[-1][0] if came else 0)


@settings(max_examples=200)
@given(entries, st.data())
def test_what_is_cancelled_never_comes_and_all_else_does(entries, data):
    timeline, handles = filled(entries)
    gone = [handle[-1] for handle in handles if data.draw(st.booleans())]
    for handle in handles:
        if handle[-1] in gone:
            assert timeline.cancel(handle)
            assert not timeline.cancel(handle)
    assert len(timeline) == len(entries) - len(gone)
    came = drained(timeline)
    assert sorted(came + gone) == sorted((t, p, n) for n, (t, p) in enumerate(entries))
    assert len(timeline) == 0 and timeline.next_ns() is None


def test_cancelling_what_has_happened_does_nothing():
    timeline, handles = filled([(1, 0), (2, 0), (3, 0)])
    timeline.pop()
    assert not timeline.cancel(handles[0])
    assert len(timeline) == 2


@settings(max_examples=200)
@given(entries, st.integers(0, 99))
def test_tied_shows_all_that_may_come_next_and_any_of_them_may_be_taken(entries, seed):
    timeline, handles = filled(entries)
    rng = Random(seed)
    waiting = []
    for handle in handles:
        if rng.random() < 0.2:
            timeline.cancel(handle)
        else:
            waiting.append(handle[-1])
    while waiting:
        first = min(waiting)
        tied = timeline.tied()
        expected = sorted(action for action in waiting if action[:2] == first[:2])
        assert [entry[-1] for entry in tied] == expected
        action = timeline.take(tied[rng.randrange(len(tied))])
        assert timeline.now_ns == first[0]
        waiting.remove(action)
    assert timeline.tied() == () and timeline.pop() is None


def test_taking_the_first_of_the_tied_is_popping():
    entries = [(2, 1), (2, 0), (1, 0), (2, 0), (1, 0), (1, 1)]
    by_pop, by_take = filled(entries)[0], filled(entries)[0]
    while len(by_pop):
        assert by_pop.pop() == by_take.take(by_take.tied()[0])


def test_a_run_that_does_not_end_is_stopped_by_a_bound_that_is_named():
    timeline = Timeline(events_max=100)
    with pytest.raises(JdagError, match=r"events_max = 100 .*reached at 100 ns"):
        while True:
            timeline.push(timeline.now_ns + 1, 0, "again")
            timeline.pop()
    assert timeline._pushed == 100


def test_nothing_is_queued_in_the_past():
    timeline, _ = filled([(5, 0)])
    timeline.pop()
    with pytest.raises(AssertionError):
        timeline.push(4, 0, "late")
