"""What goes wrong is what the seed and the list say, and nothing else."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jdag.errors import ScenarioError
from jdag.runtime.chooser import Chooser
from jdag.sim.faults import (
    DELIVERED,
    Crash,
    Delay,
    Drop,
    Duplicate,
    Fault,
    Faults,
    Partition,
    Slow,
    Verdict,
)
from tests.tools.error_texts import fails_with
from tests.tools.sim_cases import Unasked

WORKERS = ["a", "b", "c"]


def verdicts(faults, count=1, seed=0, now_ns=0, source="a", destination="b"):
    made, chooser = Faults(faults, WORKERS), Chooser(seed)
    return [made.verdict(source, destination, now_ns, chooser) for _ in range(count)]


def test_without_faults_frames_arrive_once_and_on_time():
    assert verdicts([]) == [DELIVERED] == [Verdict((0,))]
    calm: list[Fault] = [Slow("a", 2), Crash("b", detect_ns=1, at_ns=5)]
    assert not Faults(calm, WORKERS).on_frames


def test_a_drop_takes_the_share_of_frames_that_it_says():
    dropped = [not verdict.copies for verdict in verdicts([Drop(0.1)], 5000)]
    assert 400 < sum(dropped) < 600


@given(st.integers(0, 1 << 30))
def test_one_seed_gives_one_row_of_verdicts(seed):
    faults = [Drop(0.3), Delay(0.5, 1, 9), Duplicate(0.5, 9)]
    first, again = (verdicts(faults, 50, seed) for _ in range(2))
    assert first == again
    assert first != verdicts(faults, 50, seed + 1)


@pytest.mark.parametrize(
    ("fault", "source", "destination", "now_ns"),
    [
        (Drop(0.5, source="b"), "a", "b", 0),
        (Drop(0.5, destination="c"), "a", "b", 0),
        (Drop(0.5, from_ns=10), "a", "b", 9),
        (Drop(0.5, until_ns=10), "a", "b", 10),
        (Drop(0), "a", "b", 0),
        (Delay(0, 1, 9), "a", "b", 0),
        (Partition((("a",), ("b",))), "a", "c", 0),
        (Partition((("a",), ("b",)), 5, 9), "a", "b", 9),
    ],
)
def test_nothing_is_drawn_where_no_fault_applies(fault, source, destination, now_ns):
    faults = Faults([fault], WORKERS)
    assert faults.verdict(source, destination, now_ns, Unasked()) is DELIVERED


def test_what_is_certain_is_not_drawn_either():
    faults = Faults([Delay(1, 7, 7), Duplicate(1)], WORKERS)
    assert faults.verdict("a", "b", 0, Unasked()).copies == (7, 7)
    assert Faults([Drop(1)], WORKERS).verdict("a", "b", 0, Unasked()).copies == ()


def test_a_delay_reaches_both_its_ends_and_stays_between():
    drawn = [verdict.copies for verdict in verdicts([Delay(1, 3, 5)], 200)]
    assert sorted(dict.fromkeys(drawn)) == [(3,), (4,), (5,)]


def test_a_duplicate_comes_after_its_first_copy_and_shares_its_delay():
    for verdict in verdicts([Duplicate(1, 4), Delay(1, 10, 20)], 100):
        first, second = verdict.copies
        assert 10 <= first <= 20 and 0 <= second - first <= 4
        assert verdict.causes == ("duplicate", "delay")


def test_a_drop_ends_the_matter_and_says_what_went_before():
    faults = [Delay(1, 5, 5), Drop(1), Duplicate(1)]
    assert verdicts(faults) == [Verdict((), ("delay", "drop"))]


def test_a_partition_parts_its_groups_and_is_repaired_when_it_says():
    faults = Faults([Partition((("a",), ("b", "c")), from_ns=5, until_ns=9)], WORKERS)

    def passes(source, destination, now_ns):
        return faults.verdict(source, destination, now_ns, Chooser(0)) is DELIVERED

    passed = [passes("a", "b", now_ns) for now_ns in (4, 5, 8, 9)]
    assert passed == [True, False, False, True]
    assert not passes("c", "a", 6)
    assert passes("b", "c", 6)


def test_a_slow_worker_takes_longer_within_its_time():
    faults = Faults([Slow("a", 1.5, 10, 20), Slow("a", 2, 15)], WORKERS)
    stretched = [faults.stretched_ns("a", 101, now_ns) for now_ns in (9, 10, 15, 20)]
    assert stretched == [101, 152, 304, 202]
    assert faults.stretched_ns("b", 101, 15) == 101
    assert Faults([Slow("a", 1.1)], WORKERS).stretched_ns("a", 10, 0) == 11


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (Drop, (1.5,), "probability = 1.5: expected a number from 0 to 1"),
        (Drop, (float("nan"),), "probability = nan"),
        (Drop, (True,), "probability = True"),
        (Drop, (0.1, None, None, -1), "from_ns = -1: expected an integer >= 0"),
        (Drop, (0.1, None, None, 5, 4), "until_ns = 4: expected an int"),
        (Delay, (0.1, 9, 3), "delay_max_ns = 3: expected an integer >= delay"),
        (Delay, (0.1, 1.5, 3), "delay_min_ns = 1.5"),
        (Duplicate, (0.1, -1), "delay_max_ns = -1"),
        (Partition, ("ab",), "groups = 'ab'"),
        (Crash, ("a", 0), "(at_ns, at_index) = (None, None): expected exactly one of"),
        (Crash, ("a", 0, 1, 1), "(at_ns, at_index) = (1, 1)"),
        (Crash, ("a", -1, 1), "detect_ns = -1"),
        (Slow, ("a", 0.5), "factor = 0.5: expected a number from 1 to 1e9"),
        (Slow, ("a", float("inf")), "factor = inf"),
    ],
)
def test_a_fault_that_cannot_be_is_refused_by_key_value_and_what_is_allowed(
    kind: Any, values: Any, said: str
):
    with pytest.raises(ScenarioError) as caught:
        kind(*values)
    assert str(caught.value).startswith(said)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Drop(0.1, source="z"), "faults[0].source = 'z': expected one of a, b, c"),
        (Drop(0.1, destination="z"), "faults[0].destination = 'z'"),
        (Partition((("a",),)), "expected at least two disjoint groups"),
        (Partition((("a", "b"), ("b",))), "expected at least two disjoint groups"),
        (Partition((("a",), ())), "expected at least two disjoint groups"),
        (Partition((("a",), ("z",))), "faults[0].groups"),
        (Crash("z", 0, at_ns=1), "faults[0].worker = 'z'"),
    ],
)
def test_a_fault_of_nobody_is_refused_by_key_value_and_what_is_allowed(fault, said):
    with pytest.raises(ScenarioError) as caught:
        Faults([fault], WORKERS)
    assert said in str(caught.value)


def test_all_that_is_wrong_is_named_at_once():
    with pytest.raises(ScenarioError) as caught:
        Faults([Drop(0.2, "y", "z"), Slow("y", 2), Drop(0.5)], WORKERS)
    for name in ("faults[0].source", "faults[0].destination", "faults[1].worker"):
        assert name in str(caught.value)
    assert "faults[2]" not in str(caught.value)
    with fails_with(ScenarioError, "sim.probability_2_until_ns_1"):
        Drop(2, until_ns=-1)
