"""The script that measures data parallelism, tried in a small size."""

from typing import Any

import jax
import pytest

from paper import data_parallel


@pytest.mark.second
def test_each_way_is_timed_beside_the_same_by_hand(monkeypatch):
    for name in ("ROUNDS_MIN", "ROUNDS_MAX"):
        monkeypatch.setattr(data_parallel, name, 1)
    monkeypatch.setattr(data_parallel, "TURN_S", 0.0)
    monkeypatch.setattr(data_parallel, "WORK_MIN_S", 1e9)  # No target of several.
    rows = [data_parallel.row_of(jax.devices()[:count], 8, 16) for count in (1, 2)]
    assert [list(row["step_s"]) for row in rows] == [
        ["one device", "jit"],
        ["equal", "uneven", "pmap by hand", "shard_map by hand"],
    ]
    found = {"rows": rows, "memory": [], "machine": {"cores": 2}, "device": "cpu"}
    assert data_parallel.page(found).count("| 8 x 16 |") == 2 + 4


def timed(devices: int, width: int, **seconds: float) -> dict[str, Any]:
    times = {name.replace("_", " "): [s] * 3 for name, s in seconds.items()}
    return {
        "devices": devices,
        "width": width,
        "rows": 4 * width,
        "forward_s": times,
        "step_s": times,
        "step_in_one_jit_s": [1.0],
    }


def test_a_target_is_met_or_missed_where_there_is_enough_work():
    rows = [
        timed(1, 8, one_device=2e-4, jit=1e-4),  # Twice: but of little work.
        timed(1, 16, one_device=1.04e-3, jit=1e-3),
        timed(2, 8, equal=9e-4, pmap_by_hand=3e-4),
        timed(2, 16, equal=4.4e-3, pmap_by_hand=4e-3),
        timed(2, 32, equal=4e-2, pmap_by_hand=4e-2),
    ]
    lines = [line for line in data_parallel.targets(rows) if "forward" in line]
    assert lines == [
        "| 1 | one device, forward | jit | 1.04 | 16 x 64 | met |",
        "| 2 | equal, forward | pmap by hand | 1.10 | 16 x 64 | missed |",
    ]


@pytest.mark.second
def test_each_way_holds_the_parameters_that_the_vjp_reads_once_a_replica():
    rows = data_parallel.memory_of(jax.devices()[:2], 64, 16)
    found = {row["way"]: row["others_bytes_max"] for row in rows}
    read = rows[0]["parameters_bytes"] * 3 // 4  # Those of the first layer it does not.
    for way in data_parallel.WAYS:
        assert read < found[way] <= read + found["pmap by hand"], found
