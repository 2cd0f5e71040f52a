"""The script that measures on a GPU, tried without one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from paper import blocks, gpu, gpu_hop
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
    done = script("--dry-run", "--out", str(tmp_path), "--processes", "2")
    assert done.returncode == 0, done.stderr
    parts = json.loads((tmp_path / "gpu.json").read_text())["parts"]
    assert list(parts) == list(gpu.PARTS)
    for row, nbytes in zip(parts["hop"]["sizes"], gpu_hop.TINY_SIZES, strict=True):
        assert row["bytes"] == nbytes and not row["failed"]
        assert {*gpu_hop.PARTS, "whole hop", "sum of parts"} <= set(row["seconds"])
    assert set(parts["layers"]["ratios"]) == {f"a plan, workers: {n}" for n in (1, 2)}
    assert parts["digits"]["answer"] == "met"
    assert " passed" in parts["conformance"]["said"]
    stack = parts["transformer"]
    assert stack["parameters"] == 4096
    assert stack["same_bits_in_one_process_and_two"]
    assert max(stack["gradient_difference"].values()) < 0.05
    ways = {blocks.ONE, blocks.PLAN, blocks.TWO, blocks.TWO_PLAN}
    assert set(stack["ratios"]) == set(stack["losses"]) == ways
    assert max(stack["losses"].values()) - min(stack["losses"].values()) < 0.01
    assert parts["bits"]["patterns"]["as it comes"] == {"one jit": 1, "one process": 1}
    table = (tmp_path / "gpu.md").read_text()
    assert "test accuracy" in table and "two processes" in table
    (line,) = [line for line in table.splitlines() if f"oat16: {blocks.PLAN}" in line]
    assert line.endswith("x, target 1.05x |")


def test_a_part_that_fails_is_in_the_table_with_what_it_said_last():
    with pytest.raises(gpu.Failed, match="exit code 3\nno such thing"):
        gpu.said_by(["-c", "import sys; print('no such thing'); sys.exit(3)"])
    found = {"device": "none", "parts": {"digits": {"failed": "exit code 3\nno such"}}}
    assert "| digits | failed: no such |" in gpu.table(found)


def part_that(code: str, limit_s: float) -> dict[str, Any]:
    parts = gpu.Parts("cpu", is_tiny=True, processes=1)
    parts.hop = lambda: parts._measured(["-c", code])  # type: ignore[method-assign]
    return parts.run("hop", limit_s)


MEASURED = 'import sys, time; print(\'{"sizes": []}\\n{"half\', flush=True); '


@pytest.mark.parametrize(
    ("then", "limit_s", "why"),
    [
        ("sys.exit('no memory')", 60, "no memory"),
        ("time.sleep(60)", 4, "it took more than 4 s"),
    ],
)
def test_what_a_part_has_measured_is_kept_when_it_fails(
    then: str, limit_s: float, why: str
):
    found = part_that(MEASURED + then, limit_s)
    assert found["sizes"] == [] and why in found["failed"]
    assert gpu.failures(found)


def test_a_part_without_time_left_is_not_begun_and_all_end_within_eight_minutes():
    assert "no time was left" in part_that("1 / 0", -1.0)["failed"]
    assert gpu.LIMIT_S < 480


def test_a_way_that_fails_is_left_out_and_the_others_are_measured():
    array = jnp.ones(3)
    ways = {"one jit": lambda: array, "wrong": lambda: 1 / 0, "right": lambda: array}
    failed: dict[str, str] = {}
    *_, last = blocks.in_turn(ways, failed, 3)
    assert set(last["seconds"]) == {"one jit", "right"} and set(last["ratios"]) == {
        "right"
    }
    assert "division by zero" in failed["wrong"]
    sizes: dict[str, Any] = {"layers": 8, "width": 16}
    found = {"device": "none", "parts": {"layers": sizes | {"failed": failed} | last}}
    assert "| layers | failed: wrong: ZeroDivisionError" in gpu.table(found)


def test_every_time_is_of_arrays_that_are_ready(monkeypatch: pytest.MonkeyPatch):
    waited: list[Any] = []
    monkeypatch.setattr(jax, "block_until_ready", waited.append)
    for module in (blocks, gpu_hop):
        module.seconds(lambda: "the result")
    assert waited == ["the result"] * 2


def test_the_full_stack_has_about_100_million_parameters_and_bfloat16_throughout():
    made = jax.eval_shape(lambda key: blocks.made(key, blocks.FULL), jax.random.key(0))
    leaves = jax.tree.leaves(made)
    assert 95e6 < sum(leaf.size for leaf in leaves) < 105e6
    shape = blocks.FULL
    x = jax.ShapeDtypeStruct((shape.rows, shape.length, shape.width), "bfloat16")
    out = jax.eval_shape(blocks.block, made[0], x)
    assert (out.shape, out.dtype) == (x.shape, x.dtype)
    assert {str(leaf.dtype) for leaf in leaves} == {"bfloat16"}
