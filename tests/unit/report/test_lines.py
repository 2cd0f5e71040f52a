"""Pictures of sweeps: each line with its points, scales and names that can be read."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.image import imread

from jdag.report.lines import NAMES_MAX, draw_lines


@pytest.fixture
def drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    figures: list[Any] = []
    save: Any = FigureCanvasAgg.print_png

    def print_png(self: FigureCanvasAgg, *args: Any, **options: Any) -> None:
        figures.append(self.figure)
        save(self, *args, **options)

    def draw(lines: Any, x: str = "latency_ns", failed: Any = None) -> Any:
        path, names = tmp_path / "lines.png", {"y": "makespan_ns", "named": "schedule"}
        draw_lines(path, lines, failed or {}, title="t", x=x, **names)
        height, width, _ = imread(path).shape
        assert (width, height) == (1040, 585)
        return figures[0]

    monkeypatch.setattr(FigureCanvasAgg, "print_png", print_png)
    return draw


def texts(axis: Any) -> list[str]:
    return [label.get_text() for label in axis.get_ticklabels()]


def test_numbers_are_in_order_with_units_and_lines_are_named(drawn: Any):
    lines = {"gpipe": [(2_000, 33_000), (0, 0)], "a$b$": [(0, 2_000), (2_000, 9)]}
    figure = drawn(lines)
    (axes,) = figure.axes
    found = [line.get_xydata().tolist() for line in axes.lines]
    assert found == [[[0, 0], [2_000, 33_000]], [[0, 2_000], [2_000, 9]]]
    assert len({(line.get_color(), line.get_marker()) for line in axes.lines}) == 2
    assert "2 us" in texts(axes.xaxis) and "30 us" in texts(axes.yaxis)
    assert axes.get_ylim()[0] == 0
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("latency_ns", "makespan_ns")
    (legend,) = figure.legends
    assert legend.get_title().get_text() == "schedule"
    assert [text.get_text() for text in legend.get_texts()] == ["gpipe", "a$b$"]


def test_runs_that_failed_are_crosses_on_no_line_and_named_by_their_outcome(drawn: Any):
    failed = {"stuck": [(2, 0.1)], "failed": [(4, 9)]}
    figure = drawn({"": [(1, 3.0), (3, 5.0)]}, failed=failed)
    line, *crosses = figure.axes[0].lines
    assert line.get_xydata().tolist() == [[1, 3], [3, 5]]
    assert [one.get_xydata().tolist() for one in crosses] == [[[2, 0.1]], [[4, 9]]]
    assert [one.get_linestyle() for one in (line, *crosses)] == ["-", "None", "None"]
    names = [text.get_text() for text in figure.legends[0].get_texts()]
    assert names[-2:] == ["stuck", "failed"]


def test_names_stand_side_by_side_in_their_order(drawn: Any):
    lines = {"": [("zb_h1", 2.0), ("gpipe", 3.0)]}
    figure = drawn(lines, x="schedule")
    assert texts(figure.axes[0].xaxis) == ["zb_h1", "gpipe"]
    assert [*figure.axes[0].lines[0].get_ydata()] == [2.0, 3.0]
    assert figure.legends == []


def test_decades_are_logarithmic_and_too_many_lines_have_no_names(drawn: Any):
    lines = {str(n): [(1_000, 10 + n), (1_000_000, 90)] for n in range(NAMES_MAX + 1)}
    figure = drawn(lines)
    assert figure.axes[0].get_xscale() == "log"
    assert figure.axes[0].get_yscale() == "linear"
    assert "1 us" in texts(figure.axes[0].xaxis)
    assert figure.legends == []
