"""Writes tables of sweeps as Parquet files. Needs pyarrow, the extra `jdag[sweep]`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jdag.errors import ScenarioError

try:
    import pyarrow
    from pyarrow import parquet
except ImportError:
    pyarrow = None


def need_pyarrow(feature: str) -> None:
    if pyarrow is None:
        raise ScenarioError(f"{feature} needs pyarrow: pip install 'jdag[sweep]'")


def write_parquet(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows to a file. Cells of a column of mixed types become strings."""
    columns = {}
    for name in dict.fromkeys([name for row in rows for name in row]):
        cells = [row.get(name) for row in rows]
        try:
            columns[name] = pyarrow.array(cells)
        except (pyarrow.ArrowException, OverflowError):
            texts = [None if cell is None else str(cell) for cell in cells]
            columns[name] = pyarrow.array(texts)
    parquet.write_table(pyarrow.table(columns), path)
