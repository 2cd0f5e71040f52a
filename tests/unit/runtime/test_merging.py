"""The traces of several processes as one, in the time of the main one."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jdag.runtime.merging import Sample, TracePart, merged, sampled

ISSUE = ("Called", "1.1", 0, (1,))
SAID = ("Call", "1.1", 0, (1,))


def send(at_ns: int, there: str, *causes: int) -> tuple[Any, ...]:
    return at_ns, "send", "", (there, *SAID, 0, 80, ()), causes


def deliver(at_ns: int, here: str, source: str, number: int) -> tuple[Any, ...]:
    return at_ns, "deliver", here, (source, *SAID), (number,)


def issue(at_ns: int, here: str, *causes: int) -> tuple[Any, ...]:
    return at_ns, "issue", here, ISSUE, causes


@given(
    st.integers(-(10**15), 10**15),
    st.integers(0, 10**9),
    st.integers(0, 10**6),
    st.data(),
)
def test_the_true_offset_of_a_clock_is_within_the_error_of_its_sample(
    offset_ns: int, asked_ns: int, trip_ns: int, data: st.DataObject
):
    answered_ns = asked_ns + data.draw(st.integers(0, trip_ns))
    found = sampled(asked_ns, answered_ns - offset_ns, asked_ns + trip_ns)
    assert abs(found.offset_ns - offset_ns) <= found.error_ns <= (trip_ns + 1) // 2


def test_a_clock_that_drifts_is_corrected_between_its_samples():
    part = TracePart("b", clock=[Sample(1_000, 500, 10), Sample(2_000, 600, 30)])
    times_ns = [part.to_main_ns(ns) for ns in (1_000, 1_500, 2_000)]
    assert times_ns == [1_500, 2_050, 2_600]
    assert part.error_ns == 30
    assert TracePart("b", clock=[Sample(7, -7, 1)]).to_main_ns(100) == 93


def test_records_are_ordered_by_time_but_never_before_their_causes():
    """The clock of b is behind by 50, so that it seems to have heard before."""
    a = TracePart("a", [issue(100, "a"), send(110, "b", 0), issue(300, "a", 0)])
    b = TracePart("b", [deliver(1_070, "b", "a", 1), issue(1_080, "b", 0)])
    b.clock = [Sample(1_000, -1_000, 60)]
    trace = merged([a, b])
    kinds = [(one.time_ns, one.kind, one.worker) for one in trace]
    assert kinds == [
        (100, "issue", "a"),
        (110, "send", ""),
        (70, "deliver", "b"),
        (80, "issue", "b"),
        (300, "issue", "a"),
    ]
    assert [one.causes for one in trace] == [(), (0,), (1,), (2,), (0,)]
    assert trace.settings["clocks"]["b"] == {"offset_ns": -1_000, "error_ns": 60}


def test_a_message_is_known_by_its_number_on_its_link():
    a = TracePart("a", [send(1, "b"), send(2, "c"), send(3, "b")])
    b = TracePart("b", [deliver(9, "b", "a", 2), deliver(10, "b", "a", 1)])
    assert [one.causes for one in merged([a, b])][3:] == [(2,), (0,)]


def test_a_frame_without_messages_has_a_number_of_its_own_on_its_link():
    empty = ("b", "Acknowledge", "", 1, (), 0, 32, ())
    told = ("a", "Acknowledge", "", 1, ())
    a = TracePart("a", [(1, "send", "a", empty, ()), send(2, "b")])
    a.rows.append((3, "send", "a", empty, ()))
    numbers = (1, -2, -1)
    b = TracePart("b", [(9, "deliver", "b", told, (number,)) for number in numbers])
    assert [one.causes for one in merged([a, b])][3:] == [(1,), (2,), (0,)]


def test_a_message_whose_sender_has_no_part_was_sent_by_nothing():
    lost = 5, "lost", "a", ("b",), ()
    a = TracePart("a", [deliver(4, "a", "b", 1), lost])
    trace = merged([a, TracePart("b", missing="it was killed")])
    assert [(one.kind, one.worker, one.causes) for one in trace] == [
        ("deliver", "a", ()),
        ("crash", "b", ()),
        ("lost", "a", ()),
    ]
    assert trace[1].detail == ("it was killed; its part of the trace is missing",)
    assert trace.settings["missing"] == {"b": "it was killed"}


def test_parts_that_contradict_each_other_make_a_trace_nevertheless():
    """As a peer could send: each message waits for the other."""
    a = TracePart("a", [deliver(1, "a", "b", 1), send(2, "b", 0)])
    b = TracePart("b", [deliver(1, "b", "a", 1), send(2, "a", 0)])
    assert len(merged([a, b])) == 4
