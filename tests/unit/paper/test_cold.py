"""The figures of cold starts: what is committed has the rows that the script starts."""

import json

import pytest

from paper import cold
from paper.figures import RESULTS

COMMITTED = json.loads((RESULTS / "cold.json").read_text())


def test_what_is_committed_has_each_row_with_its_target_and_is_in_the_page():
    rows = COMMITTED["rows"]
    targets = {name: target for name, (_, target) in cold.ROWS.items()}
    assert {name: row["target_ms"] for name, row in rows.items()} == targets
    page = (RESULTS / "cold.md").read_text()
    assert page.endswith(f"\n\n{cold.table(rows, COMMITTED['imports_ms'])}\n")


def test_a_row_that_times_itself_has_the_times_that_it_prints():
    code = "print(0.5, 0.25)  # perf_counter"
    assert cold.started(("-c", code)) == (500, 250)
    wall_ms, cpu_ms = cold.started(("-c", "pass"))
    assert 0 < wall_ms != 250 and cpu_ms > 0


def test_the_modules_of_a_start_are_counted_by_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cold, "RUN", ("-c", "import graphlib"))
    monkeypatch.setattr(cold, "PACKAGES_MAX", 1000)
    assert {"encodings", "graphlib"} <= {*cold.imports()}
