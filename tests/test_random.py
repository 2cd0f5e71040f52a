"""Random programs as users write them: the oracle's gradients, or the sends owed."""

import json
import os
from collections import Counter
from pathlib import Path
from random import Random

import pytest

from tests import random_features, random_long, random_runs
from tests.random_functions import HOOKS, Hook
from tests.random_hooks import numbered
from tests.random_programs import DEPTH_MAX, WORKERS_MAX, Pass
from tests.random_source import source_of
from tests.reachability import Reachability
from tests.tiers import sized

PROGRAMS = sized(20, 300)
SEEDS = sized(4, 20)
DRAWN = 300  # In either tier, to see how they spread.
CHUNKS = 10  # For tests to run side by side.


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_a_pass_is_the_oracles_or_names_what_is_owed_and_no_seed_changes_a_bit(
    chunk: int,
):
    for number in range(chunk, PROGRAMS, CHUNKS):
        random_runs.hold(number, SEEDS)


def test_the_programs_have_in_them_what_they_are_meant_to():
    spread: Counter[str] = Counter()
    for number in range(DRAWN):
        plan = numbered(number)
        coin = Random(number)
        ways = [coin.random() < 0.5 for _ in range(100)]
        ended = Reachability(plan, source_of(plan).sites, ways, "fast").ended
        spread += random_features.features(plan, ended)
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
        *("passes that are stuck", "passes that are spent"),
    ):
        assert spread[what] >= few, (what, spread)
    for how in HOOKS:
        assert spread[f"hooks that {how}, in programs"] >= few // 2, (how, spread)
    assert spread["passes that are finished"] > DRAWN


def test_each_hook_is_called_as_often_as_passes_reach_it():
    """Of gradients: once for each pass that finishes and reaches the leaf."""
    called = 0
    for number in range(PROGRAMS // 5):
        plan = numbered(number)
        source = source_of(plan)
        result = random_runs.run(plan, source, seed=0)
        leaves = [leaf.variable for leaf in plan.leaves]
        decisions = result.record.decisions
        ended = Reachability(plan, source.sites, decisions, "smart").ended
        for place, step in enumerate(plan.steps):
            if not (isinstance(step, Hook) and step.how == "gradient"):
                continue
            if step.variable not in leaves:  # It names a leaf that came back.
                continue
            before = sum(isinstance(one, Pass) for one in plan.steps[:place])
            leaf = leaves.index(step.variable)
            for at, (seen, one) in enumerate(zip(result.seen, ended, strict=True)):
                if one.outcome != "finished":
                    break
                reached = at >= before and leaf in one.leaves
                assert (step.id in seen) == reached, (number, step, source.text)
                called += reached
    assert called >= PROGRAMS // 20


def test_a_program_that_goes_wrong_is_named_and_the_status_says_so(capfd, monkeypatch):
    monkeypatch.setenv("JAX_ENABLE_CHECKS", "not a bool")  # No process can start.
    assert random_long.main("7", "3", "1") == 1
    said = capfd.readouterr()
    assert "programs 7 to 9: wrong" in said.out and "JAX_ENABLE_CHECKS" in said.err


@pytest.mark.long
def test_as_many_programs_as_asked_for():
    count = int(os.environ.get("JDAG_PROGRAMS", "3000"))
    spread = random_long.many(PROGRAMS, count, SEEDS)
    report = Path("runs") / "random_programs.json"
    report.parent.mkdir(exist_ok=True)
    report.write_text(json.dumps(dict(sorted(spread.items())), indent=2) + "\n")
    print(f"{count} programs, {SEEDS} seeds each:\n{random_features.table(spread)}")
