"""Planted bugs and the campaign: what is committed, and a bug that is found again."""

import json

import pytest

from paper import campaign, exploration
from paper.figures import RESULTS
from paper.planted import BUGS
from paper.planted_programs import PROGRAMS
from tests import ROOT
from tests.tools.mutants import Mutant


def test_every_planted_bug_can_be_planted_and_is_in_the_table():
    for bug in BUGS:
        file = f"jdag/engine/{bug.file}"
        Mutant(0, bug.fact, file, bug.before, bug.after, []).mutated(ROOT)
        assert bug.program in PROGRAMS
    found = json.loads((RESULTS / "exploration.json").read_text())["bugs"]
    assert [bug.fact for bug in BUGS if bug.fact not in found] == []


def test_no_rate_that_is_committed_is_below_its_bound():
    found = json.loads((RESULTS / "exploration.json").read_text())["bugs"]
    for fact, of in found.items():
        depth = exploration.depth_of(of)
        assert depth is not None or of["random"]["wrong"], fact
        for d in range(depth or 4, 4):
            rate = of[f"pct:{d}"]
            wrong, runs = len(rate["wrong"]), rate["runs"]
            assert not exploration.below(wrong, runs, rate["bound"]), (fact, d)


def test_a_rate_is_below_its_bound_only_at_99_9_percent_confidence():
    assert exploration.below(0, 100, 12) and not exploration.below(2, 100, 12)
    assert not exploration.below(0, 100, 1_000)


def test_the_engine_as_it_is_has_no_wrong_run():
    found = exploration.rates("terms", 3)
    assert [found[name]["wrong"] for name in exploration.STRATEGIES] == [[]] * 4
    assert exploration.depth_of(found) is None


@pytest.mark.second
def test_the_campaign_goes_on_where_it_stopped_and_found_nothing_wrong(tmp_path):
    options = "--out", str(tmp_path), "--cpu-s", "0.001"
    assert [campaign.main(options) for _ in range(2)] == [0, 0]
    held = json.loads((tmp_path / "campaign.json").read_text())
    assert held["programs"] == 2 and held["runs"] == 2 * campaign.ORDERS
    committed = json.loads((RESULTS / "campaign.json").read_text())
    assert committed["wrong"] == [] and committed["runs"] > 0
