"""The table of a sweep as Parquet: what is read back is what was written."""

from pathlib import Path
from typing import Any

from pyarrow.parquet import read_table

from jdag.lab import parquet

ROWS: list[dict[str, Any]] = [
    {"schedule": "gpipe", "seed": 0, "bubble_min": 0.25, "same": True, "error": None},
    {"schedule": "zb_h1", "seed": 1, "bubble_min": 1, "same": None, "error": None},
    {"schedule": None, "seed": 2, "bubble_min": None, "same": False, "error": None},
]


def test_what_is_read_back_is_what_was_written(tmp_path: Path):
    parquet.write_parquet(tmp_path / "sweep.parquet", ROWS)
    found = read_table(tmp_path / "sweep.parquet")
    assert found.to_pylist() == ROWS
    assert found.column_names == list(ROWS[0])
    assert [str(field.type) for field in found.schema][:4] == [
        *("string", "int64", "double", "bool")
    ]


def test_a_column_of_several_types_or_of_huge_integers_is_one_of_texts(tmp_path: Path):
    rows: list[dict[str, Any]] = [
        {"workers": 2, "seed": 2**70},
        {"workers": '["a", "b"]'},
    ]
    parquet.write_parquet(tmp_path / "sweep.parquet", rows)
    assert read_table(tmp_path / "sweep.parquet").to_pylist() == [
        {"workers": "2", "seed": str(2**70)},
        {"workers": '["a", "b"]', "seed": None},
    ]
