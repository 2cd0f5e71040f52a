"""Random programs as users write them have the oracle's gradients."""

import json
import os
from collections import Counter
from pathlib import Path

import pytest

from tests.tools import random_features, random_long, random_runs
from tests.tools.random_functions import HOOKS
from tests.tools.random_hooks import numbered
from tests.tools.random_programs import DEPTH_MAX, WORKERS_MAX
from tests.tools.tiers import sized

PROGRAMS = sized(20, 300)
SEEDS = sized(4, 20)
DRAWN = 300  # In either tier, to see how they spread.
CHUNKS = 10  # For tests to run side by side.


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_pass_that_finishes_is_the_oracles_and_no_seed_changes_a_bit(
    chunk: int,
):
    for number in range(chunk, PROGRAMS, CHUNKS):
        random_runs.hold(number, SEEDS)


def test_the_programs_have_in_them_what_they_are_meant_to():
    spread: Counter[str] = Counter()
    for number in range(DRAWN):
        spread += random_features.features(numbered(number))
    few = DRAWN // 20
    for what in (
        *(f"workers {count}" for count in range(1, WORKERS_MAX + 1)),
        *(f"passes {count}" for count in (1, 2, 3)),
        *(f"roots {count}" for count in (1, 2, 3)),
        *(f"depth {count}" for count in range(DEPTH_MAX + 1)),
        *(f"{wide} 08 to 12" for wide in ("fan-in", "fan-out", "outputs")),
        *(f"has {step}" for step in ("Move", "Fetch", "Branch", "Invoke")),
        *(f"calls of {name}" for name in ("gather", "scale", "both", "product")),
        *(f"hooks that {how}, by the top" for how in HOOKS),
        *("hooks on leaves", "hooks before the first pass"),
        *("constants", "stopped gradients", "one program called twice"),
        *("roots on several workers", "retain True", "retain False"),
    ):
        assert spread[what] >= few, (what, spread)
    for how in HOOKS:
        assert spread[f"hooks that {how}, in programs"] >= few // 2, (how, spread)


def test_a_program_that_goes_wrong_is_named(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "none")  # No process can compute.
    with pytest.raises(AssertionError, match=r"program 7: .*none"):
        random_long.many(7, 3, 1)


@pytest.mark.long
def test_as_many_programs_as_asked_for():
    count = int(os.environ.get("JDAG_PROGRAMS", "3000"))
    spread = random_long.many(PROGRAMS, count, SEEDS)
    report = Path("runs") / "random_programs.json"
    report.parent.mkdir(exist_ok=True)
    report.write_text(json.dumps(dict(sorted(spread.items())), indent=2) + "\n")
    print(f"{count} programs, {SEEDS} seeds each:\n{random_features.table(spread)}")
