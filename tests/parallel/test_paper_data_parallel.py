"""The script that measures data parallelism, tried in a small size."""

import jax
import pytest

from paper import data_parallel


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data_parallel, "REPEATS", 1)
    monkeypatch.setattr(data_parallel, "TURN_S", 0.0)


def test_each_way_has_a_row_against_each_by_hand(quick, monkeypatch):
    monkeypatch.setattr(data_parallel, "WAYS", ("each",))
    rows = [
        row
        for count in (1, 2)
        for row in data_parallel.rows_of(jax.devices()[:count], 8, 16)
    ]
    assert [(row["devices"], row["way"], row["by_hand"]) for row in rows] == [
        (1, "chosen", "jit"),
        (2, "each", "pmap"),
        (2, "each", "shard_map"),
    ]
    found = {"rows": rows, "memory": [], "machine": {"cores": 2}, "device": "cpu"}
    table = data_parallel.tables(found)
    assert table.count("| 8 x 16 |") == 3 and "fastest way of a step" in table


def test_each_way_holds_the_parameters_that_the_vjp_reads_once_a_replica():
    rows = data_parallel.memory_of(jax.devices()[:2], 64, 16)
    found = {row["way"]: row["others_bytes_max"] for row in rows}
    read = rows[0]["parameters_bytes"] * 3 // 4  # Those of the first layer it does not.
    for way in data_parallel.WAYS:
        assert read < found[way] <= read + found["pmap by hand"], found
