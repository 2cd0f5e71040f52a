"""The script that measures on a GPU, tried without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from paper import blocks, gpu
from tests import ROOT


def script(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run it where JAX finds the CPU alone."""
    return subprocess.run(
        [sys.executable, "-m", "paper.gpu", *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.second
def test_without_a_gpu_it_says_so_in_one_line_and_exits_with_2():
    done = script()
    assert done.returncode == 2
    assert done.stdout.count("\n") == 1 and "no GPU" in done.stdout
    assert not done.stderr


@pytest.mark.second
def test_a_dry_run_does_all_of_it_and_writes_where_it_was_told(tmp_path: Path):
    done = script("--cpu-dry-run", "--out", str(tmp_path), "--processes", "2")
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert parts["digits"]["answer"] == "met"
    assert " passed" in parts["conformance"]["said"]
    stack = parts["transformer"]
    assert stack["parameters"] == 4096
    assert stack["same_bits_in_one_process_and_two"]
    assert max(stack["gradient_difference"].values()) < 0.05
    assert set(stack["ratios"]) == {"one process", "two processes", blocks.PLAN}
    assert parts["bits"]["patterns"]["as it comes"] == {"one jit": 1, "one process": 1}
    table = (tmp_path / "gpu.md").read_text()
    assert "test accuracy" in table and "two processes" in table
    (line,) = [line for line in table.splitlines() if f"oat16: {blocks.PLAN}" in line]
    assert line.endswith("x, target 1.02x |")


def test_a_part_that_fails_is_in_the_table_with_what_it_said_last():
    with pytest.raises(gpu.Failed, match="exit code 3\nno such thing"):
        gpu.said_by(["-c", "import sys; print('no such thing'); sys.exit(3)"])
    found = {"device": "none", "parts": {"digits": {"failed": "exit code 3\nno such"}}}
    assert "| digits | failed: no such |" in gpu.table(found)


def test_the_full_stack_has_about_100_million_parameters_and_bfloat16_throughout():
    made = jax.eval_shape(lambda key: blocks.made(key, blocks.FULL), jax.random.key(0))
    leaves = jax.tree.leaves(made)
    assert 95e6 < sum(leaf.size for leaf in leaves) < 105e6
    shape = blocks.FULL
    x = jax.ShapeDtypeStruct((shape.rows, shape.length, shape.width), "bfloat16")
    out = jax.eval_shape(blocks.block, made[0], x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert {str(leaf.dtype) for leaf in leaves} == {"bfloat16"}
