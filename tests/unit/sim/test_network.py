"""When what leaves arrives, and what that costs the link."""

from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdag.errors import ScenarioError
from jdag.runtime.chooser import Chooser
from jdag.sim.network import LinkModel, LogGP, Network, Traffic
from tests.tools.error_texts import fails_with
from tests.tools.sim_cases import Unasked

WORKERS = ["a", "b", "c"]
GIGABYTE = 1_000_000_000  # Per second: one byte a nanosecond.
PORTS = partial(Network, LinkModel())


def traffic(default, links=None):
    return Traffic(Network(default, links or {}), WORKERS)


def transmit(way, source, destination, size, now_ns, chooser=None):
    return way.lane(source, destination).transmit(size, now_ns, chooser or Chooser(0))


def test_a_free_link_delivers_at_once_and_in_any_number():
    way = traffic(LinkModel())
    assert [transmit(way, "a", "b", 1 << 40, 7) for _ in range(3)] == [7] * 3


def test_frames_leave_one_after_another_and_their_latencies_overlap():
    way = traffic(LinkModel(latency_ns=1000, bandwidth_bytes_per_s=GIGABYTE))
    sizes = [300, 200, 100]
    arrivals = [transmit(way, "a", "b", size, 50) for size in sizes]
    assert arrivals == [1350, 1550, 1650]
    lane = way.lane("a", "b")
    assert (lane.start_ns, lane.busy_until_ns) == (550, 650)
    assert (lane.frames, lane.bytes, lane.busy_ns) == (3, 600, 600)
    assert transmit(way, "a", "b", 10, 5000) == 6010
    assert (lane.start_ns, lane.busy_ns) == (5000, 610)


def test_each_direction_is_a_link_of_its_own():
    slow = LinkModel(latency_ns=9, bandwidth_bytes_per_s=1000)
    way = traffic(LinkModel(latency_ns=5), {("a", "b"): slow})
    assert transmit(way, "a", "b", 1, 0) == 1_000_009
    assert transmit(way, "b", "a", 1, 0) == 5
    assert transmit(way, "a", "c", 1, 0) == 5
    assert way.lane("a", "b").drained_ns == 1_000_009
    assert way.lane("b", "a").drained_ns == 5


def test_a_transfer_takes_whole_nanoseconds_rounded_up():
    model = LinkModel(bandwidth_bytes_per_s=3 * GIGABYTE)
    assert [model.transfer_ns(size) for size in (0, 1, 3, 4)] == [0, 1, 1, 2]


@given(st.integers(1, 50), st.integers(0, 1 << 30))
def test_jitter_is_uniform_up_to_its_bound_and_comes_from_the_seed(jitter_ns, seed):
    model = LinkModel(latency_ns=10, jitter_ns=jitter_ns)
    runs = []
    for _ in range(2):
        way, chooser = traffic(model), Chooser(seed)
        runs.append([transmit(way, "a", "b", 1, 0, chooser) - 10 for _ in range(50)])
        assert way.lane("a", "b").drained_ns == 10 + jitter_ns
    assert runs[0] == runs[1]
    assert all(0 <= extra_ns <= jitter_ns for extra_ns in runs[0])
    assert len(dict.fromkeys(runs[0])) > 1


def test_jitter_reaches_both_its_ends():
    way, chooser = traffic(LinkModel(jitter_ns=2)), Chooser(1)
    drawn = [transmit(way, "a", "b", 1, 0, chooser) for _ in range(200)]
    assert sorted(dict.fromkeys(drawn)) == [0, 1, 2]


def test_without_jitter_nothing_is_drawn():
    way = traffic(LinkModel(latency_ns=5))
    assert transmit(way, "a", "b", 100, 0, Unasked()) == 5


def test_two_runs_over_one_network_do_not_meet():
    network = Network(LinkModel(bandwidth_bytes_per_s=1))
    for _ in range(2):
        way = Traffic(network, WORKERS)
        assert transmit(way, "a", "b", 1, 0) == GIGABYTE


@pytest.mark.parametrize(
    ("make", "key", "value", "least"),
    [
        (LinkModel, "latency_ns", -1, 0),
        (LinkModel, "jitter_ns", -2, 0),
        (LinkModel, "bandwidth_bytes_per_s", 0, 1),
        (LogGP, "overhead_ns", -1, 0),
        (LogGP, "gap_ns", -1, 0),
        (PORTS, "port_bandwidth_bytes_per_s", 0, 1),
    ],
)
def test_an_unusable_number_is_refused_by_key_value_and_what_is_allowed(
    make, key, value, least
):
    text = f"^{key} = {value!r}: expected an integer >= {least}"
    with pytest.raises(ScenarioError, match=text):
        make(**{key: value})


def with_ports(model):
    network = Network(model, port_bandwidth_bytes_per_s=GIGABYTE)
    return Traffic(network, WORKERS)


def test_all_that_a_worker_sends_and_all_that_comes_to_it_passes_its_port():
    way = with_ports(LinkModel(latency_ns=1_000))
    sent = [transmit(way, "a", to, 100, 0) for to in ("b", "c", "b")]
    assert sent == [1_100, 1_200, 1_300]
    assert way.lane("a", "c").start_ns == 100
    way = with_ports(LinkModel(latency_ns=1_000))
    came = [transmit(way, worker, "c", 100, 0) for worker in ("a", "b")]
    assert came == [1_100, 1_200]
    assert way.lane("b", "c").drained_ns == 1_200
    assert way.lane("a", "c").drained_ns == 1_100


def test_what_comes_to_a_worker_does_not_pass_where_it_sends():
    way = with_ports(LinkModel())
    assert transmit(way, "a", "b", 100, 0) == 100
    assert transmit(way, "b", "a", 100, 0) == 100
    assert transmit(way, "c", "b", 100, 0) == 200


def test_where_a_link_is_slower_than_the_ports_it_alone_tells_the_time():
    way = with_ports(LinkModel(bandwidth_bytes_per_s=GIGABYTE // 10))
    assert transmit(way, "a", "b", 10, 0) == 100
    assert transmit(way, "a", "b", 10, 0) == 200
    assert transmit(way, "a", "c", 10, 0) == 110  # The port was free from 10.


def test_links_of_unknown_workers_are_refused_by_name():
    with fails_with(ScenarioError, "sim.a_z_z_allowed_is"):
        traffic(LinkModel(), {("a", "z"): LinkModel()})
    with fails_with(ScenarioError, "sim.two_workers"):
        traffic(LinkModel(), {("a", "a"): LinkModel()})


@pytest.mark.parametrize(
    ("network", "said"),
    [
        ((3,), "default = 3: expected a LinkModel"),
        ((LinkModel(), 3), "links = 3: expected LinkModels by source and dest"),
        ((LinkModel(), {"ab": LinkModel()}), "links: name = 'ab': expected source"),
        ((LinkModel(), {("a", 1): LinkModel()}), r"links: name\[1\] = 1: expected"),
        ((LinkModel(), {("a", "b"): 3}), r"links\[\('a', 'b'\)\] = 3: expected"),
    ],
)
def test_what_is_no_model_of_a_link_is_refused_by_name(network: Any, said: str):
    with pytest.raises(ScenarioError, match=said):
        Network(*network)


def test_a_control_lane_is_a_model_a_bool_or_none():
    lane = LinkModel(latency_ns=3)
    found = [Network(LinkModel(), control_lane=c) for c in (None, False, True, lane)]
    assert [one.control_lane for one in found] == [None, None, LinkModel(), lane]
    with fails_with(ScenarioError, "sim.control_lane_5_allowed_is"):
        Network(LinkModel(), control_lane=5)  # type: ignore[arg-type]


def test_in_loggp_a_message_takes_o_plus_l_plus_k_minus_1_g_plus_o():
    model = LogGP(1_000, 2 * GIGABYTE, overhead_ns=30, gap_ns=50)
    for size in (1, 2, 1_001):
        way = traffic(model)
        assert transmit(way, "a", "b", size, 7) == 7 + 30 + 1_000 + size // 2 + 30


@pytest.mark.parametrize(("gap_ns", "least_ns"), [(50, 50), (10, 30)])
def test_in_loggp_messages_follow_each_other_by_the_gap_or_the_overhead(
    gap_ns, least_ns
):
    way = traffic(LogGP(1_000, GIGABYTE, overhead_ns=30, gap_ns=gap_ns))
    arrivals = [transmit(way, "a", "b", 101, 0) for _ in range(3)]
    assert arrivals == [1_160 + n * (100 + least_ns) for n in range(3)]
