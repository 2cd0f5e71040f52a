"""Programs on several workers at once never change each other's bits."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from jdag import Cluster, simulate
from tests.random_programs import Plan, draw
from tests.random_runs import Result, clean, passes, put, run, settings
from tests.random_source import Source, source_of

WORKERS = ("a", "b", "c", "d")
Drawn = Sequence[tuple[str, Plan, Source]]  # Each with the worker that issues it.


def drawn(number: int) -> Drawn:
    """Some programs over the same workers, each issued by another of these."""
    rng = Random(f"issuers {number}")
    plans = [draw(rng, WORKERS) for _ in range(rng.randint(2, len(WORKERS)))]
    issuers = rng.sample(WORKERS, len(plans))
    return [
        (name, replace(plan, home=name), source_of(plan))
        for name, plan in zip(issuers, plans, strict=True)
    ]


def playing(results: dict[str, Result], plan: Plan, source: Source) -> Any:
    """The whole of a program, leaves included, for `Cluster.run`."""

    def play(cluster: Cluster) -> None:
        results[cluster.here] = Result()
        leaves = put(cluster, plan)
        passes(cluster, source, leaves, result=results[cluster.here])
        cluster.drop(leaves)

    return play


def together(drawn: Drawn, **options: Any) -> tuple[dict[str, list[Any]], str]:
    """All these at once; for each all that no other may change, and the digest."""
    results: dict[str, Result] = {}
    with simulate(WORKERS, **options) as cluster:
        cluster.run(
            {name: playing(results, plan, source) for name, plan, source in drawn}
        )
        clean(cluster, [])
        bits = {name: result.bits for name, result in results.items()}
        return bits, cluster.trace.digest


@pytest.mark.parametrize("number", range(14))
def test_the_bits_of_each_are_those_that_it_has_alone(number: int):
    programs = drawn(number)
    alone = {name: run(plan, source, seed=0).bits for name, plan, source in programs}
    assert together(programs, seed=0)[0] == alone
    for seed in range(2):
        assert together(programs, **settings(seed, WORKERS))[0] == alone, seed


def digest(number: int) -> str:
    return together(drawn(number), **settings(number, WORKERS))[1]


def test_one_seed_is_one_digest():
    digests = [[digest(number) for number in (1, 2, 3)] for _ in range(2)]
    assert digests[0] == digests[1] and len(set(digests[0])) == 3


def test_another_process_under_another_hash_seed_has_the_same_digest():
    code = (
        "import sys, jax; jax.config.update('jax_enable_x64', True);"
        "from tests.test_issuers import digest; sys.exit(digest(2))"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "17"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr.strip() == digest(2)
