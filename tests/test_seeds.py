"""Random programs repeat: one seed is one digest, in any process."""

import math
import os
import subprocess
import sys
from dataclasses import replace
from random import Random

import pytest

from tests.random_programs import Plan, draw
from tests.random_runs import Result, run, settings
from tests.random_source import source_of

PROGRAMS = 12


def plan_of(number: int) -> Plan:
    return draw(Random(number))


def disturbed(plan: Plan, seed: int) -> Result:
    return run(plan, source_of(plan), **settings(seed, plan.workers))


def digests() -> list[str]:
    return [disturbed(plan_of(n), seed=n).digest for n in range(PROGRAMS)]


@pytest.mark.second
@pytest.mark.parametrize("hash_seed", ["0", "4242"])
def test_another_process_under_another_hash_seed_has_the_same_digests(hash_seed: str):
    code = (
        "import jax; jax.config.update('jax_enable_x64', True);"
        "from tests.test_seeds import digests; print(*digests())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": hash_seed},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == digests(), done.stderr


def test_another_seed_is_another_digest_of_the_same_result():
    plan = plan_of(next(n for n in range(PROGRAMS) if len(plan_of(n).workers) > 2))
    results = [disturbed(plan, seed) for seed in range(10)]
    assert len({result.digest for result in results}) == 10
    assert all(result.bits == results[0].bits for result in results)


def test_one_bit_of_a_leaf_that_travels_changes_the_digest():
    for number in range(PROGRAMS):
        plan = plan_of(number)
        first = plan.leaves[0]
        if first.worker != plan.home:
            values = (math.nextafter(first.values[0], 2.0), *first.values[1:])
            leaf = replace(first, values=values)
            flipped = replace(plan, leaves=(leaf, *plan.leaves[1:]))
            calm = [run(p, source_of(p), seed=0).digest for p in (plan, flipped)]
            assert calm[0] != calm[1], number
