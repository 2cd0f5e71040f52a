"""Processes of a sweep: a death is told, and none is left behind."""

import os
from pathlib import Path

import pytest

from jdag.errors import ScenarioError
from jdag.lab.sweep import sweep
from tests.tools.error_texts import fails_with
from tests.tools.scenario_cases import scenario_of


@pytest.mark.second
def test_a_process_that_dies_is_told_with_its_run_and_none_is_left(tmp_path: Path):
    path, children = scenario_of(tmp_path, "dies"), Path("/proc/self/task")
    values = {"settings.code": [0, 3], "seed": [1, 2]}
    with fails_with(ScenarioError, "lab.ended_with_code_3_with"):
        sweep(path, values, jobs=2, out=tmp_path / "out")
    own = children / str(os.getpid()) / "children"
    assert not [
        child for child in own.read_text().split()
        if b"sweep_pool" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]  # fmt: skip
