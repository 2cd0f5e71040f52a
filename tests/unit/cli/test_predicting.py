"""The commands `jdag calibrate` and `jdag predict`: what they print and refuse."""

from pathlib import Path
from typing import Any

import pytest

from jdag.lab import calibration, prediction
from jdag.lab.prediction import Prediction
from tests.tools.command_cases import command
from tests.tools.scenario_cases import written

FOUND: dict[str, dict[str, Any]] = {
    "measured": {"step_ns": [900, 1_000, 1_001]},
    "network": {"latency_ns": 1_500},
    "devices": {"job_ns": 20, "functions": {"shapes:scale": [1_000, 2_000]}},
}


def test_a_calibration_is_printed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(calibration, "calibrate", lambda *args, **settings: FOUND)
    code, out, _ = command("calibrate", written(tmp_path), "-o", tmp_path / "c.toml")
    assert code == 0
    for text in ("shapes:scale", "1 us", "2 us", "latency_ns: 1.5 us", "c.toml"):
        assert text in out
    assert "steps took 1 us (900 ns to 1.001 us)" in out


def test_a_prediction_is_printed_beside_real_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    found = Prediction(900, {"a": 0.5, "b": 0.25}, {"a": 2048, "b": 1}, (1_000, 1_001))
    monkeypatch.setattr(prediction, "predict", lambda *args, **settings: found)
    code, out, _ = command("predict", written(tmp_path), "--measure", 2)
    assert code == 0
    for text in ("50.00 %", "2 KiB", "predicted: 900 ns", "bubble: 62.50 %"):
        assert text in out
    assert "measured: 1 us (1 us to 1.001 us, 2 steps)" in out
    assert "predicted / measured: 0.900" in out


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["calibrate", "{}/none.toml"], "none.toml: No such file"),
        (["calibrate", "{}/mine.toml", "--device", "x"], "--device = 'x': expected"),
        (["calibrate", "{}/mine.toml", "-o", "{}/x/y.toml"], "out = "),
        (["predict", "{}/none.toml"], "none.toml: No such file"),
        (["predict", "{}/mine.toml", "--costs", "{}/x.toml"], "x.toml: No such file"),
        (["predict", "{}/mine.toml", "--device", "cpu"], "only with --measure"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, arguments: list[str], error: str):
    written(tmp_path)
    code, out, err = command(*[text.format(tmp_path) for text in arguments])
    assert (code, out) == (2, "")
    assert error in err
    assert err.count("\n") == 1
