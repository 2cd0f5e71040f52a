"""The comparison of predictions with real steps: its figures of given rows."""

from pathlib import Path
from typing import Any

import pytest

from paper import prediction
from paper.prediction import KINDS, Row, rank_correlation, summary, written_results


def row(kind: str, predicted: int, measured: int, **other: Any) -> Row:
    return {
        **{"workers": 2, "width": 8, "rows": 4, "kind": kind},
        "micro_batches": 6,
        "predicted_ns": predicted * 10**6,
        "measured_ns": measured * 10**6,
        "measured_quartiles_ns": [measured * 9 * 10**5, measured * 11 * 10**5],
        "measured_min_ns": measured,
        "predicted_by_measured": predicted / measured,
        "others": 0.0,
        **other,
    }


ROWS = [row("gpipe", 90, 100), row("1f1b", 110, 100), row("zb_h1", 80, 160)]


def test_errors_are_relative_to_what_was_measured():
    found = summary(ROWS)
    assert found["mean_error"] == pytest.approx((0.1 + 0.1 + 0.5) / 3)
    assert found["worst_error"] == pytest.approx(0.5)
    assert found["mean_quartile_range"] == pytest.approx(0.2)


def test_a_choice_is_right_if_the_predicted_best_is_the_measured_best():
    wrong = summary(ROWS)
    assert (wrong["choices"], wrong["right_choices"]) == (1, 0)
    assert wrong["mean_loss_by_choice"] == pytest.approx(0.6)
    other = [{**each, "micro_batches": 8} for each in ROWS]
    other[2] = row("zb_h1", 80, 70, micro_batches=8)
    both = summary([*ROWS, *other])
    assert (both["choices"], both["right_choices"]) == (2, 1)


def test_ranks_that_are_the_same_correlate_and_reversed_ones_do_not():
    assert rank_correlation([1, 5, 9], [2, 3, 400]) == pytest.approx(1)
    assert rank_correlation([1, 5, 9, 2], [8, 3, 1, 5]) == pytest.approx(-1)


def test_rows_that_were_not_quiet_are_told_apart_and_all_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(prediction, "RESULTS", tmp_path)
    more = [row(kind, 50, 40, workers=3, others=0.5) for kind in KINDS]
    written_results([*ROWS, *more], {"cores": 2})
    text = (tmp_path / "prediction.md").read_text()
    assert "A worker per core, quiet: 3 settings: mean error 23.3%" in text
    assert "More workers than cores: 3 settings: mean error 25.0%" in text
    assert "More workers than cores, quiet: none." in text
    assert "| 2 | 8 x 4 | 6 | zb_h1 | 80.0 ms | 160.0 ms |" in text
    assert (tmp_path / "prediction.png").stat().st_size > 10_000
