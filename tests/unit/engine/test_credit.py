"""Weights: parts of one whole, split and added without loss."""

from functools import reduce
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jdag.engine.credit import (
    NOTHING,
    WHOLE,
    Credit,
    credit_sum,
    split_credit,
    units_of,
)

counts = st.integers(1, 40)
# Not st.randoms(): Hypothesis would draw and keep each number by itself.
seeds = st.integers(0, 2**32 - 1).map(Random)


def total(parts: list[Credit]) -> Credit:
    return reduce(credit_sum, parts, NOTHING)


def taken(rng: Random, parts: list[Credit]) -> Credit:
    return parts.pop(rng.randrange(len(parts)))


def scatter(rng: Random, splits: list[int]) -> list[Credit]:
    parts = [WHOLE]
    for count in splits:
        parts += split_credit(taken(rng, parts), count)
    return parts


@given(seeds, st.lists(counts, max_size=30))
def test_however_often_it_is_split_the_parts_are_positive_and_sum_to_the_whole(
    rng: Random, splits: list[int]
):
    parts = scatter(rng, splits)
    halvings = max(part.halvings for part in parts)
    assert all(units_of(part) > 0 and part.halvings >= 0 for part in parts)
    units = [units_of(part) << halvings - part.halvings for part in parts]
    assert sum(units) == 1 << halvings


@given(seeds, st.lists(counts, max_size=30))
@settings(max_examples=200)
def test_in_whatever_order_parts_are_joined_the_whole_is_the_whole(
    rng: Random, splits: list[int]
):
    parts = scatter(rng, splits)
    while len(parts) > 1:
        one = credit_sum(taken(rng, parts), taken(rng, parts))
        assert units_of(one) % 2 == 1 or one.halvings == 0, one  # In lowest terms.
        parts.append(one)
    assert parts == [WHOLE]


@pytest.mark.parametrize("count", [2, 3, 1000, 100_000])
def test_a_wide_fan_out_comes_together_again(count: int):
    parts = split_credit(WHOLE, count)
    assert len(parts) == count
    assert max(part.halvings for part in parts) == (count - 1).bit_length()
    assert total(parts) == WHOLE


def test_a_chain_of_fan_outs_grows_by_a_bit_each_and_comes_together():
    rest, given_away = WHOLE, []
    for _ in range(3000):
        rest, part = split_credit(rest, 2)
        given_away.append(part)
    assert rest == Credit(1, 3000)
    assert total([*given_away, rest]) == WHOLE


def test_nothing_adds_nothing():
    part = split_credit(WHOLE, 3)[1]
    assert credit_sum(NOTHING, part) == part == credit_sum(part, NOTHING)
    assert credit_sum(NOTHING, NOTHING) == NOTHING


@pytest.mark.parametrize(("credit", "count"), [(NOTHING, 1), (NOTHING, 3), (WHOLE, 0)])
def test_nothing_cannot_be_split_and_no_weight_into_no_parts(credit: Credit, count):
    with pytest.raises(AssertionError):
        split_credit(credit, count)
