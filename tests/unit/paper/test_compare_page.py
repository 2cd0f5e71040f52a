"""What is made of the figures of a comparison: ratios, the page and the picture."""

import json
from typing import Any

import pytest

from paper.compare import costs, page, picture, rows, run
from paper.compare.bounds import bound
from tests.tools.compare_cases import in_full, made_up_costs, one_round


def test_the_ratio_is_the_median_of_those_of_the_rounds():
    rounds = [one_round(1e-3, 1e-4), one_round(2e-3, 1e-3), one_round(4e-3, 1.2e-3)]
    found = {row["row"]: row for row in run.summary(rounds)}
    assert list(found) == rows.of_both()
    row = found["chain of 100, forward"]
    judged = row[rows.JUDGED]
    assert (judged["ratio_min"], judged["ratio_max"]) == pytest.approx((0.1, 0.5))
    assert judged["ratio"] == pytest.approx(0.3)
    assert judged["met"] and not found[rows.RETAINED][rows.JUDGED]["met"]
    assert (row[rows.PEER], judged["median"]) == (2e-3, 1e-3)
    missed = page.misses(list(found.values()), made_up_costs())
    assert rows.RETAINED in missed and "chain of 100" not in missed
    lines = {
        line.split(" | ")[0]: line
        for line in page.table(list(found.values())).split("\n")
    }
    of_eager = "| 2 ms | 1 ms | **0.30** (0.10 to 0.50) ~ | 1.0 | yes | - | - | - | - |"
    assert of_eager in lines["| chain of 100, forward"]
    assert of_eager in lines["| chain of 100, forward, one core"]
    of_plan = "| 200 us | **0.06** (0.02 to 0.10) ~ | 0.3 | yes |"
    assert of_plan in lines["| chain of 100, both ways"]
    of_graph = "| - | - | - | - | 200 us | **0.03** (0.01 to 0.05) ~ | 0.5 | yes | - |"
    assert f"| 4 ms {of_graph}" in lines["| graph: chain of 10"]


@pytest.mark.parametrize(("last", "marked"), [(1.14e-3, False), (1.16e-3, True)])
def test_a_ratio_is_marked_if_its_rounds_spread_by_more_than_15_percent(
    last: float, marked: bool
):
    rounds = [one_round(1e-3, mine) for mine in (1e-3, 1e-3, last)]
    (add, *_) = run.summary(rounds)
    for name in (rows.JUDGED, rows.PLAN):
        assert add[name]["unsteady"] is marked
        assert add[name]["spread"] == pytest.approx(last / 1e-3 - 1)
    assert page.table([add]).count("~") == 2 * marked


def test_the_picture_has_a_bar_for_each_row_apart_of_eager_calls_and_of_plans():
    rounds = [one_round(1e-3, 1.5e-3), one_round(1e-3, 1e-3), one_round(1e-3, 2e-3)]
    written = {"rows": run.summary(rounds)}
    drawn = picture.picture(written)
    (axes,) = drawn.axes
    containers: Any = axes.containers
    bars = {bars.get_label(): bars.patches for bars in containers}
    assert [len(one) for one in bars.values()] == [24, 20]
    assert axes.get_xscale() == "log"
    ends = [bar.get_x() + bar.get_width() for bar in bars["eager calls, FAST"]]
    assert ends[0] == pytest.approx(1.5) and ends[18] == pytest.approx(2)
    assert all(bar.get_x() == 1 for one in bars.values() for bar in one)
    names = [label.get_text() for label in axes.get_yticklabels()]
    assert names[0] == "add 3x3, reply fetched  (1 ms)"
    assert len(names) == len(rows.TARGETS) and names[-1].startswith("graph: chain of")
    assert picture.draw(written).startswith(b"\x89PNG")
    assert "1.50~" in [text.get_text() for text in axes.texts]


def test_what_bounds_a_row_is_said_with_what_was_measured_of_it():
    found = made_up_costs()
    aims = [row for row in rows.of(rows.JUDGED) if rows.TARGETS[row][rows.JUDGED]]
    said = [bound(f"{row}{end}", found) for row in aims for end in ("", rows.ON_ONE)]
    assert all("1,234 calls of Python" in one for one in said)
    assert "engine 30%" in said[0] and "add: 1,234 us" in said[0] == said[1]
    assert "| add | 1,234 us |" in costs.table(found["rows"])
    assert bound("identity 16 MiB", {}).endswith(
        "its pages. Its costs were not measured."
    )


def test_nothing_is_missing_where_all_was_measured():
    made = run.Comparison({"machine": {}, "settings": {}}, 1)
    made.rounds.append({"load": 0.0, **{key: in_full(key) for key in rows.SYSTEMS}})
    made.costs = made_up_costs()
    written = made.record()
    assert written["missing"] == [] and "missing" not in page.page(written)
    assert json.loads(json.dumps(written))["rows"] == written["rows"]
