"""Random programs as users write them: the oracle's gradients, or the sends owed."""

import json
import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import random_features, random_long, random_runs
from tests.random_programs import DEPTH_MAX, WORKERS_MAX, draw
from tests.random_source import source_of
from tests.reachability import Reachability

PROGRAMS = 300
SEEDS = 20
CHUNKS = 10  # For tests to run side by side.


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_pass_is_the_oracles_or_names_what_is_owed_and_no_seed_changes_a_bit(
    chunk: int,
):
    for number in range(chunk, PROGRAMS, CHUNKS):
        random_runs.hold(number, SEEDS)


@settings(max_examples=50)
@given(st.randoms(use_true_random=False))
def test_what_hypothesis_draws_is_right_as_well(rng: Random):
    random_runs.held(draw(rng), 0, 2)


def test_the_programs_have_in_them_what_they_are_meant_to():
    spread: Counter[str] = Counter()
    for number in range(PROGRAMS):
        plan = draw(Random(number))
        coin = Random(number)
        ways = [coin.random() < 0.5 for _ in range(100)]
        ended = Reachability(plan, source_of(plan).sites, ways, "fast").ended
        spread += random_features.features(plan, ended)
    few = PROGRAMS // 20
    for what in (
        *(f"workers {count}" for count in range(1, WORKERS_MAX + 1)),
        *(f"passes {count}" for count in (1, 2, 3)),
        *(f"roots {count}" for count in (1, 2, 3)),
        *(f"depth {count}" for count in range(DEPTH_MAX + 1)),
        *(f"{wide} 08 to 12" for wide in ("fan-in", "fan-out", "outputs")),
        *(f"has {step}" for step in ("Move", "Fetch", "Branch", "Invoke")),
        *(f"calls of {name}" for name in ("gather", "scale", "both", "product")),
        *("constants", "stopped gradients", "one program called twice"),
        *("roots on several workers", "retain True", "retain False"),
        *("passes that are stuck", "passes that are spent"),
    ):
        assert spread[what] >= few, (what, spread)
    assert spread["passes that are finished"] > PROGRAMS


@pytest.mark.long
def test_as_many_programs_as_asked_for():
    count = int(os.environ.get("JDAG_PROGRAMS", "3000"))
    spread = random_long.many(PROGRAMS, count, SEEDS)
    report = Path("runs") / "random_programs.json"
    report.parent.mkdir(exist_ok=True)
    report.write_text(json.dumps(dict(sorted(spread.items())), indent=2) + "\n")
    print(f"{count} programs, {SEEDS} seeds each:\n{random_features.table(spread)}")
