"""Which collective calls belong together, who waits for what, and who is told."""

import random
from itertools import count
from typing import Any

import pytest

from jdag.collectives.collective_matcher import CollectiveCall, CollectiveMatcher

ALL = ("a", "b", "c")


def call(among=ALL, line=1, **agreed):
    where = f"cluster.all_reduce, called at train.py:{line} in train"
    return CollectiveCall(where, tuple(among), agreed, given=line)


def arrived(place, *arrivals):
    return [place.arrive(name, one) for name, one in arrivals]


def test_a_group_is_complete_when_its_last_member_has_come_and_is_in_its_order():
    place = CollectiveMatcher(ALL)
    calls = {name: call("bca", line) for line, name in enumerate("abc")}
    first, second, (complete, errors) = arrived(place, *calls.items())
    assert (first, second, errors) == (({}, {}), ({}, {}), {})
    assert list(complete.items()) == [(name, calls[name]) for name in "bca"]


def test_calls_of_the_same_number_belong_together_whoever_comes_first():
    for seed in range(50):
        place, rng = CollectiveMatcher(ALL), random.Random(seed)
        rest = {name: count(1) for name in ALL}
        free, done = list(ALL), list[Any]()
        while len(done) < 10:
            name = free.pop(rng.randrange(len(free)))
            complete, errors = place.arrive(name, call(line=next(rest[name])))
            assert not errors
            if complete:
                done.append({one.given for one in complete.values()})
                free = list(ALL)
        assert done == [{number} for number in range(1, 11)]


def test_groups_do_not_meet():
    place = CollectiveMatcher("abcdef")
    found = arrived(
        place,
        ("a", call("abc")),
        ("d", call("def")),
        ("e", call("def")),
        ("b", call("abc")),
        ("c", call("abc")),
    )
    assert [list(complete) for complete, _ in found] == [[], [], [], [], list(ALL)]
    assert list(place.arrive("f", call("def"))[0]) == ["d", "e", "f"]


def test_one_member_is_a_group():
    assert list(CollectiveMatcher(ALL).arrive("b", call("b"))[0]) == ["b"]


def test_whoever_waits_for_a_program_that_ended_is_told_and_so_is_who_comes_later():
    place = CollectiveMatcher("abcd")
    arrived(place, ("a", call()), ("d", call("ad", 7)))
    told = place.ended("c", "has returned")
    text = (
        "a collective cannot be completed: 'c' has returned\n"
        "  'a' waits in cluster.all_reduce, called at train.py:1 in train"
    )
    assert told == {"a": text}
    later = "\n  'b' called later: cluster.all_reduce, called at train.py:3 in"
    assert place.arrive("b", call(line=3)) == ({}, {"b": f"{text}{later} train"})
    ((_, next_one),) = arrived(place, ("a", call(line=4)))
    assert "'c' has returned\n  'a' waits in" in next_one["a"]
    assert "train.py:4" in next_one["a"]
    assert "train.py:7" in place.ended("a", "has failed (boom)")["d"]


def test_a_call_that_cannot_complete_any_more_names_all_that_have_ended():
    place = CollectiveMatcher(ALL)
    assert place.ended("a", "has returned") == place.ended("c", "has failed") == {}
    _, errors = place.arrive("b", call())
    assert "completed: 'a' has returned; 'c' has failed\n  'b' waits" in errors["b"]


@pytest.mark.parametrize(
    ("one", "other", "text"),
    [
        ({"the call": "all_reduce"}, {"the call": "barrier"}, "the call is all_reduce"),
        ({"how": "owner"}, {"how": "ring"}, "how is owner in 'a' and ring in 'b'"),
        ({"root": "a"}, {"root": "c"}, "root is a in 'a' and c in 'b'"),
        ({"['w']": "f[3]"}, {"['w']": "f[4]"}, r"\['w'\] is f\[3\] in 'a' and f\[4\]"),
        ({"['w']": "f[3]"}, {}, r"\['w'\] is f\[3\] in 'a' and None in 'b'"),
    ],
)
def test_members_that_disagree_are_told_at_once_with_both_values_and_places(
    one, other, text
):
    place = CollectiveMatcher(ALL)
    found = arrived(place, ("b", call(line=5, **other)), ("a", call(line=3, **one)))
    errors = found[1][1]
    assert list(errors) == ["a", "b"] and len(set(errors.values())) == 1
    with pytest.raises(AssertionError, match=text):
        raise AssertionError(errors["a"])
    assert "'a' waits in cluster.all_reduce, called at train.py:3" in errors["a"]
    assert "'b' waits in cluster.all_reduce, called at train.py:5" in errors["a"]


def test_after_an_error_numbers_still_match_for_a_member_that_comes_later():
    place = CollectiveMatcher(ALL)
    arrived(place, ("a", call(x=1)), ("b", call(x=2)))
    arrived(place, ("a", call(line=2)), ("b", call(line=2)))  # Their second ones.
    complete, errors = place.arrive("c", call(x=1))  # Its first.
    assert not complete and "x is 1 in 'a' and 2 in 'b'" in errors["c"]
    assert "'c' called later" in errors["c"]
    complete, _ = place.arrive("c", call(line=2))
    assert [one.given for one in complete.values()] == [2, 2, 2]
    assert not any(place._owed.values()) and not place._waiting


def test_members_that_wait_for_each_other_in_two_orders_are_told():
    place = CollectiveMatcher(ALL)
    arrived(place, ("a", call("abc", 1)), ("c", call("abc", 2)))
    _, errors = place.arrive("b", call("bac", 3))
    text = errors["b"]
    assert errors == dict.fromkeys(ALL, text)
    assert "wait for each other" in text.partition("\n")[0]
    assert sorted(text.splitlines()[1:]) == [
        f"  {name!r} waits in cluster.all_reduce, called at train.py:{line} in train"
        for name, line in (("a", 1), ("b", 3), ("c", 2))
    ]


def test_a_ring_of_groups_is_told_and_whoever_waits_outside_of_it_goes_on():
    place = CollectiveMatcher("abcde")
    outside = call(("d", "a"), 9)
    arrived(place, ("d", outside), ("a", call("ab")), ("b", call("bc", 2)))
    complete, errors = place.arrive("c", call("ca", 3))
    assert not complete and sorted(errors) == ["a", "b", "c"]
    said = errors["a"].partition("\n")[0]
    assert "wait for each other, in groups ('" in said
    for group in ("('a', 'b')", "('b', 'c')", "('c', 'a')"):
        assert f" {group}" in said
    # c and a meet what they crossed, and then the same group counts on.
    _, late = place.arrive("a", call("ca"))
    assert "'a' called later" in late["a"]
    place.arrive("c", call("ca", 4))
    assert list(place.arrive("a", call("ca", 4))[0]) == ["c", "a"]
    assert list(place.arrive("a", outside)[0]) == ["d", "a"]


def test_waiting_for_a_member_that_waits_elsewhere_is_no_error_while_it_can_go_on():
    place = CollectiveMatcher("abcd")
    found = arrived(
        place, ("a", call("abd")), ("b", call("bc")), ("d", call("abd")),
        ("c", call("bc")), ("b", call("abd")),
    )  # fmt: skip
    assert [list(complete) for complete, errors in found if not errors] == [
        [], [], [], ["b", "c"], ["a", "b", "d"],
    ]  # fmt: skip
