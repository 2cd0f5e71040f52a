"""Processes of a sweep: a death is told, and none is left behind."""

import os
from pathlib import Path

import pytest

from jdag.errors import ScenarioError
from jdag.lab.sweep import sweep
from tests.tools.scenario_cases import scenario_of


@pytest.mark.second
def test_a_process_that_dies_is_told_with_its_run_and_none_is_left(tmp_path: Path):
    path, children = scenario_of(tmp_path, "dies"), Path("/proc/self/task")
    values = {"settings.code": [0, 3], "seed": [1, 2]}
    with pytest.raises(
        ScenarioError, match=r"ended with code 3 \(with settings.code = 3"
    ):
        sweep(path, values, jobs=2, out=tmp_path / "out")
    own = children / str(os.getpid()) / "children"
    assert not [
        child for child in own.read_text().split()
        if b"sweep_pool" in Path(f"/proc/{child}/cmdline").read_bytes()
    ]  # fmt: skip
