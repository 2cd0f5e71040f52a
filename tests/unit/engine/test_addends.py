"""A sum of many addends has one order, whichever of them come, and when they arrive."""

import random
from collections.abc import Sequence
from typing import Any

import pytest

from jdag.engine.addends import ADDENDS_MAX, AddendEdge, addend_tree, top
from tests.tools.engine_values import Number, left_fold, tree_fold

COUNTS = (1, 3, 8, 9, 16, 17, 63, 64, 65, 71, 100, 512, 513, 600)


def edges(count: int) -> list[AddendEdge]:
    return [((at,), 0) for at in range(count)]


def numbers(count: int, rng: random.Random, empty: float) -> list[Number | None]:
    return [None if rng.random() < empty else (1, str(at)) for at in range(count)]


def whole(addends: Sequence[Number | None]) -> Number | None:
    few = top(addends, left_fold)
    assert len(few) <= ADDENDS_MAX
    return left_fold(few) if few else None


def arriving(addends: Sequence[Any], order: Sequence[int], rng: random.Random) -> Any:
    """What a tree makes of addends in this order, and the most that ever waited.

    Its sums end in an order of their own.
    """
    shuffled = edges(len(addends))
    rng.shuffle(shuffled)
    made: Any = addend_tree(shuffled, [])  # Its keys are numbers here.
    sums: list[Any] = []
    waiting = [0]

    def put(spot: Any, value: Any) -> None:
        actual = made.put(spot, value)
        if actual is not None:
            above, group = actual
            assert 2 <= len(group) <= ADDENDS_MAX
            sums.append((above, left_fold(group)))

    for at in order:
        put((0, made.ranks[(at,), 0]), addends[at])
        while sums and rng.random() < 0.7:
            put(*sums.pop(rng.randrange(len(sums))))
        waiting.append(len(made.waiting()) + len(made.addends) + len(sums))
    while sums:
        put(*sums.pop(rng.randrange(len(sums))))
    assert made.waiting() == []
    few = [number for _, _, number in sorted(made.addends)]
    return left_fold(few) if few else None, max(waiting)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("empty", [0, 0.3, 0.9])
def test_whatever_arrives_first_the_sum_is_the_tree_of_places(count: int, empty: float):
    rng = random.Random(f"{count} {empty}")
    addends = numbers(count, rng, empty)
    expected: Any = tree_fold(addends)
    assert whole(addends) == expected
    for _ in range(5):
        order = rng.sample(range(count), count)
        assert arriving(addends, order, rng)[0] == expected


def test_up_to_eight_addends_are_a_plain_left_fold_and_ten_are_not():
    for count in range(1, 12):
        addends = [(1, str(at)) for at in range(count)]
        assert (whole(addends) == left_fold(addends)) == (count <= 9)


@pytest.mark.parametrize("step", [1, -1])
def test_of_addends_in_order_or_in_reverse_few_wait_at_each_level(step: int):
    rng = random.Random(step)
    addends = numbers(4096, rng, 0)
    _, most = arriving(addends, range(4096)[::step], rng)
    assert most <= 40  # Four levels, and the sums under way.
