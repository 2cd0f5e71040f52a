"""Programs on several workers at once never change each other's bits."""

from random import Random

import pytest

from tests import random_issuers
from tests.random_issuers import Drawn, beside_each_other, together
from tests.random_runs import run, settings
from tests.tiers import sized

WORKERS = ("a", "b", "c", "d")


def drawn(number: int) -> Drawn:
    """Some programs over the same workers, each issued by another of these."""
    return random_issuers.drawn(Random(f"issuers {number}"), WORKERS, len(WORKERS))


@pytest.mark.parametrize("number", range(sized(5, 14)))
def test_the_bits_of_each_are_those_that_it_has_alone(number: int):
    programs = drawn(number)
    alone = {name: run(plan, source, seed=0).bits for name, plan, source in programs}
    assert together(programs, WORKERS, seed=0)[0] == alone
    for seed in range(2):
        assert together(programs, WORKERS, **settings(seed, WORKERS))[0] == alone, seed


def test_several_drivers_with_hooks_have_the_oracles_gradients_in_both_modes():
    ended = [beside_each_other(number) for number in range(12)]
    assert len(dict.fromkeys(ended)) == 4, ended


def digest(number: int) -> str:
    return together(drawn(number), WORKERS, **settings(number, WORKERS))[1]


def test_one_seed_is_one_digest():
    digests = [[digest(number) for number in (1, 2, 3)] for _ in range(2)]
    assert digests[0] == digests[1] and len(set(digests[0])) == 3
