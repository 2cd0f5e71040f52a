"""Virtual time goes forward, in one order."""

from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdag.errors import JdagError
from jdag.runtime.chooser import Chooser
from jdag.sim.timeline import SimTimeline
from tests.tools.error_texts import fails_with

entries = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 2)), max_size=40)
HOST = SimpleNamespace(worker="a")


class Filled:
    def __init__(self, entries):
        self.timeline = SimTimeline(events_max=1000)
        self.came = []
        self.handles = [
            self.timeline.push(time_ns, priority, (self.note, HOST, (*entry, place)))
            for place, entry in enumerate(entries)
            for time_ns, priority in [entry]
        ]

    def note(self, host, what):
        assert self.timeline.now_ns == what[0]
        self.came.append(what)

    def run(self, chooser=None, until: Any = None):
        self.timeline.run(chooser or Chooser(), self.came, until)
        return self.came


class Picking(Chooser):
    picks_events = True

    def __init__(self, seed=0, at=None):
        super().__init__(seed)
        self.rng = Random(seed)
        self.at = at
        self.counts = []

    def pick_event(self, tied):
        assert set(tied) == {("note", "a")}
        self.counts.append(len(tied))
        return self.rng.randrange(len(tied)) if self.at is None else self.at


@given(entries)
def test_actions_come_by_time_then_priority_then_order_of_pushing(entries):
    filled = Filled(entries)
    came = filled.run()
    assert came == sorted(came) and len(came) == len(entries)
    assert filled.timeline.now_ns == (came[-1][0] if came else 0)


def test_an_event_for_now_comes_after_those_pushed_before_for_this_time():
    filled = Filled([(1, 1), (1, 1), (1, 2)])
    note, timeline = filled.note, filled.timeline

    def note_and_push(host, what):
        note(host, what)
        timeline.push(1, 1, (note, HOST, (1, 1, 4)))

    timeline.push(1, 0, (note_and_push, HOST, (1, 0, 3)))
    assert filled.run() == [(1, 0, 3), (1, 1, 0), (1, 1, 1), (1, 1, 4), (1, 2, 2)]


@settings(max_examples=200)
@given(entries, st.data())
def test_what_is_cancelled_never_comes_and_all_else_does(entries, data):
    filled, gone = Filled(entries), []
    for handle in filled.handles:
        if data.draw(st.booleans()):
            gone.append(handle[-1][-1])
            filled.timeline.cancel(handle)
            filled.timeline.cancel(handle)
    assert len(filled.timeline) == len(entries) - len(gone)
    chooser = data.draw(st.sampled_from([Chooser(), Picking()]))
    came = filled.run(chooser)
    assert sorted(came + gone) == sorted((t, p, n) for n, (t, p) in enumerate(entries))
    assert len(filled.timeline) == 0


def test_cancelling_what_has_happened_does_nothing():
    filled = Filled([(1, 0), (2, 0), (3, 0)])
    filled.run(until=(1, 0, 0))
    filled.timeline.cancel(filled.handles[0])
    assert len(filled.timeline) == 2


@settings(max_examples=200)
@given(entries, st.integers(0, 99))
def test_a_chooser_picks_among_all_that_may_come_next(entries, seed):
    filled, chooser = Filled(entries), Picking(seed)
    came = filled.run(chooser)
    waiting = [(t, p, n) for n, (t, p) in enumerate(entries)]
    for what, count in zip(came, chooser.counts, strict=True):
        first = min(waiting)[:2]
        assert what[:2] == first
        assert count == len([other for other in waiting if other[:2] == first])
        waiting.remove(what)
    assert waiting == []


def test_picking_the_first_is_the_order_of_pushing():
    entries = [(2, 1), (2, 0), (1, 0), (2, 0), (1, 0), (1, 1)]
    assert Filled(entries).run() == Filled(entries).run(Picking(at=0))


def test_it_stops_when_the_waiter_is_given_something():
    filled = Filled([(1, 0), (2, 0), (3, 0)])
    filled.run(until=(2, 0, 1))
    assert len(filled.came) == 2 and filled.timeline.now_ns == 2


def test_a_run_that_does_not_end_is_stopped_by_a_bound_that_is_named():
    timeline = SimTimeline(events_max=100)

    def again(host):
        timeline.push(timeline.now_ns + 1, 0, (again, host))

    again(HOST)
    with fails_with(JdagError, "sim.events_max_is_reached"):
        timeline.run(Chooser(), (), 0)
    assert timeline._pushed == 100


def test_nothing_is_queued_in_the_past():
    filled = Filled([(5, 0)])
    filled.run()
    with pytest.raises(AssertionError):
        filled.timeline.push(4, 0, (filled.note, HOST, (4, 0, 0)))
