"""A port passes one frame at a time, each as early as it can."""

from hypothesis import given
from hypothesis import strategies as st

from jdag.sim.ports import NetworkPort


def test_frames_that_are_there_at_once_pass_one_after_another():
    port = NetworkPort()
    assert [port.reserve(50, 100, 50) for _ in range(3)] == [50, 150, 250]
    assert port.reserve(1_000, 100, 60) == 1_000


def test_one_that_comes_later_holds_up_none_that_is_there_before():
    port = NetworkPort()
    assert port.reserve(1_000, 100, 0) == 1_000
    assert port.reserve(0, 400, 0) == 0
    assert port.reserve(0, 601, 0) == 1_100  # It does not fit before.
    assert port.reserve(0, 600, 0) == 400
    assert port.reserve(0, 1, 0) == 1_701


@given(
    st.lists(
        st.tuples(st.integers(0, 20), st.integers(0, 60), st.integers(1, 15)),
        max_size=40,
    )
)
def test_each_takes_the_first_gap_that_is_long_enough(frames):
    port = NetworkPort()
    taken: set[int] = set()
    now_ns = 0
    for later_ns, ahead_ns, takes_ns in frames:
        now_ns += later_ns
        start_ns = now_ns + ahead_ns
        while not taken.isdisjoint(range(start_ns, start_ns + takes_ns)):
            start_ns += 1
        assert port.reserve(now_ns + ahead_ns, takes_ns, now_ns) == start_ns
        taken.update(range(start_ns, start_ns + takes_ns))
