"""Exactly once and in order, whatever lies below."""

from dataclasses import dataclass, field
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from jdag.errors import ProtocolError, ScenarioError, WorkerLost
from jdag.sim.reliable_link import NEVER, Frame, Link, LinkSettings
from tests.tools.error_texts import fails_with

SETTINGS = LinkSettings(resend_ns=1000, resend_max=3, ack_delay_ns=100)
LATENCY_NS = 200  # With the acknowledgement's delay and the way back well below 1000.
EVENTS_MAX = 20_000


def unacknowledged(link: Link) -> list[object]:
    return [payload for payload, _, _ in link._unacked]


@dataclass
class Pair:
    settings: LinkSettings
    # Delays of the copies that arrive: () is a drop, two are a duplicate.
    fates: list[tuple[int, ...]] = field(default_factory=list)
    cut: bool = False

    def __post_init__(self) -> None:
        self.ends = {"a": Link("b", self.settings), "b": Link("a", self.settings)}
        self.got: dict[str, list[object]] = {"a": [], "b": []}
        self.acks = {"a": 0, "b": 0}  # Pure acknowledgements.
        self.queue: list[tuple[int, int, str, object]] = []
        self.now_ns = self.pushed = self.delivered_ns = 0

    def push(self, time_ns: int, end: str, what: object) -> None:
        self.pushed += 1
        assert self.pushed < EVENTS_MAX, "the ends never fall silent"
        heappush(self.queue, (time_ns, self.pushed, end, what))

    def carry(self, end: str, frame: Frame) -> None:
        peer = self.ends[end].peer
        self.acks[end] += not frame.sequence
        delays = self.fates.pop(0) if self.fates else (LATENCY_NS,)
        for delay_ns in () if self.cut else delays:
            self.push(self.now_ns + delay_ns, peer, frame)

    def run(self) -> None:
        while self.queue:
            self.now_ns, _, end, what = heappop(self.queue)
            link = self.ends[end]
            if isinstance(what, Frame):
                if ready := link.receive(what, self.now_ns):
                    self.got[end].extend(ready)
                    self.delivered_ns = self.now_ns
            elif what == "tick":
                if link.deadline_ns > self.now_ns:
                    continue
                for frame in link.tick(self.now_ns):
                    self.carry(end, frame)
            else:
                self.carry(end, link.send(what, self.now_ns))
            if link.deadline_ns < NEVER:
                self.push(max(link.deadline_ns, self.now_ns), end, "tick")


sends = st.lists(
    st.tuples(st.integers(0, 5000), st.sampled_from(["a", "b"])), max_size=25
)
fates = st.lists(
    st.lists(st.integers(0, 3000), max_size=3).map(tuple), min_size=0, max_size=60
)


def start(pair: Pair, sends: list[tuple[int, str]]) -> dict[str, list[object]]:
    told: dict[str, list[object]] = {"a": [], "b": []}
    for number, (time_ns, end) in enumerate(sorted(sends)):
        pair.push(time_ns, end, ("payload", number))
        told[pair.ends[end].peer].append(("payload", number))
    return told


@settings(max_examples=300, deadline=None)
@given(sends=sends, fates=fates)
def test_all_arrives_once_in_order_over_drops_duplicates_and_disorder(sends, fates):
    pair = Pair(replace(SETTINGS, resend_max=1000), fates)
    told = start(pair, sends)
    pair.run()
    assert pair.got == told
    for link in pair.ends.values():
        assert link.deadline_ns == NEVER
        assert unacknowledged(link) == []
        assert not link._early
        assert link.sent == len(told[link.peer])


@settings(max_examples=100, deadline=None)
@given(sends=sends)
def test_a_clean_link_never_resends(sends):
    pair = Pair(SETTINGS)
    told = start(pair, sends)
    pair.run()
    assert pair.got == told
    for link in pair.ends.values():
        assert (link.resent, link.duplicates) == (0, 0)
    assert all(pair.acks[end] <= len(pair.got[end]) for end in pair.ends)


def test_a_lost_first_frame_costs_one_resend_and_holds_back_the_rest():
    pair = Pair(SETTINGS, [()])
    told = start(pair, [(0, "a"), (1, "a"), (2, "a"), (3, "a")])
    pair.run()
    assert pair.got == told
    assert pair.ends["a"].resent == 1
    assert pair.ends["b"].duplicates == 0


def test_many_lost_frames_cost_one_wait_and_a_round_trip_each():
    pair = Pair(SETTINGS, [()] * 10)
    start(pair, [(0, "a")] * 10)
    pair.run()
    round_trip_ns = 2 * LATENCY_NS + SETTINGS.ack_delay_ns
    assert pair.ends["a"].resent == 10
    assert pair.delivered_ns <= SETTINGS.resend_ns + 10 * round_trip_ns


def test_it_gives_up_after_so_many_resends():
    pair = Pair(SETTINGS, cut=True)
    start(pair, [(0, "a"), (1, "a"), (2, "b")])
    pair.run()
    link = pair.ends["a"]
    assert link.lost and link.deadline_ns == NEVER
    assert link.resent == SETTINGS.resend_max
    assert unacknowledged(link) == [("payload", 0), ("payload", 1)]
    assert pair.now_ns >= 15 * SETTINGS.resend_ns  # 1 + 2 + 4 + 8: waits double.
    with fails_with(WorkerLost, "sim.b_lost_after_3_resends"):
        link.send("more", pair.now_ns)
    assert link.receive(Frame(1, 0, "late"), pair.now_ns) == ()
    assert link.tick(pair.now_ns) == ()


def test_waits_grow_no_longer_than_the_backoff_allows():
    link = Link("b", replace(SETTINGS, resend_max=6, backoff_max=4))
    link.send("x", 0)
    waits, now_ns = [], 0
    while link.deadline_ns < NEVER:
        waits.append(link.deadline_ns - now_ns)
        now_ns = link.deadline_ns
        link.tick(now_ns)
    assert waits == [1000, 2000, 4000, 4000, 4000, 4000, 4000]
    assert link.lost


def test_progress_starts_waits_and_tries_anew():
    link = Link("b", SETTINGS)
    link.send("x", 0)
    link.send("y", 0)
    for _ in range(SETTINGS.resend_max):
        assert link.tick(link.deadline_ns)
    link.receive(Frame(0, 1), 20_000)
    assert link.tick(20_000) == (Frame(2, 0, "y"),)
    assert link.deadline_ns == 20_000 + 2 * SETTINGS.resend_ns
    assert not link.lost


def test_an_acknowledgement_rides_on_data_and_goes_alone_only_after_its_delay():
    link = Link("b", SETTINGS)
    link.receive(Frame(1, 0, "x"), 0)
    assert link.send("y", 50) == Frame(1, 1, "y")
    link.receive(Frame(2, 1, "z"), 60)
    assert link.deadline_ns == 160
    assert link.tick(159) == ()
    assert link.tick(160) == (Frame(0, 2),)
    assert link.deadline_ns == NEVER


def test_a_frame_that_comes_again_is_acknowledged_again():
    link = Link("b", SETTINGS)
    assert link.receive(Frame(1, 0, "x"), 0) == ("x",)
    link.tick(100)
    assert link.receive(Frame(1, 0, "x"), 5000) == ()
    assert link.duplicates == 1
    assert link.tick(5100) == (Frame(0, 1),)


def test_a_long_flight_puts_the_resend_off():
    link = Link("b", SETTINGS)
    link.send("large", 0, flight_ns=1_000_000)
    assert link.deadline_ns == 1_001_000


def test_a_busy_path_puts_each_resend_off_once_and_not_for_ever():
    link = Link("b", SETTINGS)
    link.send("x", 0)
    assert link.tick(1000, busy_until_ns=9000) == ()
    assert link.deadline_ns == 9000 + SETTINGS.resend_ns
    assert link.tick(10_000, busy_until_ns=99_000) == (Frame(1, 0, "x"),)
    assert link.deadline_ns == 10_000 + 2 * SETTINGS.resend_ns
    assert link.tick(12_000, busy_until_ns=13_000) == ()
    assert link.deadline_ns == 13_000 + SETTINGS.resend_ns


def test_numbers_that_cannot_be_are_refused_by_name():
    link = Link("b", replace(SETTINGS, window_max=3))
    with fails_with(ProtocolError, "sim.b_frame_1_is_acknowledged"):
        link.receive(Frame(0, 1), 0)
    with fails_with(ProtocolError, "sim.frame_4_the_next_is"):
        link.receive(Frame(4, 0, "x"), 0)
    with fails_with(ProtocolError, "sim.frame_1_the_first_is"):
        link.receive(Frame(-1, 0, "x"), 0)


def test_the_window_bounds_what_is_unacknowledged():
    link = Link("b", replace(SETTINGS, window_max=3))
    for payload in range(3):
        link.send(payload, 0)
    with fails_with(ProtocolError, "sim.3_frames_are_unacknowledged_window"):
        link.send(3, 0)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("resend_ns", 0),
        ("resend_ns", 1.5),
        ("resend_max", -1),
        ("ack_delay_ns", -1),
        ("ack_delay_ns", 1000),
        ("backoff_max", 0),
        ("window_max", True),
    ],
)
def test_unusable_settings_are_refused_by_key_and_value(key, value):
    with pytest.raises(ScenarioError, match=rf"{key} = {value}.*expected an integer"):
        replace(SETTINGS, **{key: value})
